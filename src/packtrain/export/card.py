"""The model card: what was trained, from what, on what, and how to load it."""

from __future__ import annotations

from packtrain import __version__
from packtrain.metrics.events import Tail
from packtrain.metrics.reader import read_events
from packtrain.train.session import Session

_LOAD_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""

_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""


def model_card(session: Session) -> str:
    """The README.md of ``final/``."""
    recipe, lora = session.recipe, session.recipe.method.type == "lora"
    header = ["---", f"base_model: {recipe.model.path}", "library_name: " + ("peft" if lora else "transformers")]
    header += ["pipeline_tag: text-generation", "tags: [packtrain]", "---"]
    code = (_LOAD_ADAPTER if lora else _LOAD_MODEL).format(folder=f"{session.folder.name}/final")
    parts = ["\n".join(header), f"# {session.folder.name}", _what(session), f"```python\n{code}```", _results(session)]
    parts.append(f"Trained with Packtrain {__version__}; the run folder's recipe.yaml repeats it.")
    return "\n\n".join(parts) + "\n"


def _what(session: Session) -> str:
    recipe = session.recipe
    data = ", ".join(entry.path for entry in recipe.data.train)
    method: str = recipe.method.type
    if method == "lora":
        method = f"LoRA (rank {recipe.method.rank}, alpha {recipe.method.alpha:g})"
    return (
        f"`{recipe.model.path}`, fine-tuned by {method} on {data}: {len(session.data.train):,} rows, "
        f"{session.position.step:,} steps of {recipe.train.batch_size} sequences, {session.position.tokens:,} tokens, "
        f"learning rate {recipe.train.learning_rate:g} ({recipe.train.schedule}), {recipe.train.precision}, "
        f"seed {recipe.train.seed}."
    )


def _results(session: Session) -> str:
    events = read_events(session.folder / "events.jsonl")
    lines = ["| | loss |", "| --- | --: |"]
    steps, evals = Tail.latest(events, "step"), Tail.latest(events, "eval")
    lines += [f"| training, step {e['step']} | {float(e['loss']):.4f} |" for e in steps[:1] + steps[-1:]]
    lines += [f"| evaluation, step {e['step']} | {float(e['loss']):.4f} |" for e in evals[-1:]]
    return "\n".join(lines)
