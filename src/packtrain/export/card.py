"""The model card: what was trained, from what, on what, and how to load it."""

from __future__ import annotations

from packtrain import __version__
from packtrain.metrics.events import latest
from packtrain.metrics.reader import read_events
from packtrain.train.session import Session

_LOAD_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""

_METHODS: dict[str, str] = {
    "full": "training every weight",
    "freeze": "training a part of its weights",
    "lora": "LoRA (rank {rank}, alpha {alpha:g})",
    "qlora": "QLoRA (rank {rank}, alpha {alpha:g}, {quantize})",
    "llama_adapter": "LLaMA-Adapter ({virtual_tokens} prompts in the last {adapter_blocks} blocks)",
    "prefix": "prefix tuning ({virtual_tokens} virtual tokens)",
}
_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""


def model_card(session: Session) -> str:
    """The README.md of ``final/``."""
    recipe, adapter = session.recipe, session.recipe.method.is_adapter
    header = ["---", f"base_model: {recipe.model.path}", "library_name: " + ("peft" if adapter else "transformers")]
    header += ["pipeline_tag: text-generation", "tags: [packtrain]", "---"]
    code = (_LOAD_ADAPTER if adapter else _LOAD_MODEL).format(folder=f"{session.folder.name}/final")
    parts = [
        "\n".join(header), f"# {session.folder.name}", _what(session), f"```python\n{code}```", *_notes(session),
        _results(session), f"Trained with Packtrain {__version__}; the run folder's recipe.yaml repeats it.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _notes(session: Session) -> list[str]:
    """What someone who loads this should know."""
    method, added, name = session.recipe.method, session.recipe.model.add_tokens, session.folder.name
    notes = []
    if method.type == "qlora":
        notes.append(
            f"Trained on a base quantised to {method.quantize}; the code above loads an unquantised base. "
            f"For the model as it was trained, merge it: `packtrain export {name}`."
        )
        if method.quantize == "nf4" and method.start == "default":
            notes.append(
                'A base that `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")` makes is it too.'
            )
    if added:
        place = "the adapter's file" if method.is_lora else "`base/`" if method.is_adapter else "the model"
        notes.append(f"The tokenizer has {len(added)} new tokens; their rows are in {place}.")
    if method.is_adapter and not method.is_lora and (added or method.also_train):
        notes.append(
            "The base model was changed too and lies in `base/`, which adapter_config.json names by its absolute path: "
            "correct `base_model_name_or_path` there if you move the folder."
        )
    return notes


def _what(session: Session) -> str:
    recipe = session.recipe
    data = ", ".join(entry.path for entry in recipe.data.train)
    method = _METHODS[recipe.method.type].format(**recipe.method.model_dump())
    return (
        f"`{recipe.model.path}`, fine-tuned by {method}, on {data}: {len(session.data.train):,} rows, "
        f"{session.position.step:,} steps of {recipe.train.batch_size} sequences, {session.position.tokens:,} tokens, "
        f"learning rate {recipe.train.learning_rate:g} ({recipe.train.schedule}), {recipe.train.precision}, "
        f"seed {recipe.train.seed}."
    )


def _results(session: Session) -> str:
    events = read_events(session.folder / "events.jsonl")
    lines = ["| | loss |", "| --- | --: |"]
    steps, evals = latest(events, "step"), latest(events, "eval")
    lines += [f"| training, step {e['step']} | {float(e['loss']):.4f} |" for e in steps[:1] + steps[-1:]]
    lines += [f"| evaluation, step {e['step']} | {float(e['loss']):.4f} |" for e in evals[-1:]]
    return "\n".join(lines)
