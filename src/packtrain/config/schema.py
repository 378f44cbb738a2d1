"""The recipe: one pydantic model per component, composed.

A field's description is the only text about it: ``--help``, the reference page and (later) the web form are
generated from here. ``auto`` is a value that Packtrain resolves before anything starts; see ``resolve.py``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
FormatName = Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text"]
PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
MIN_LENGTH = 8  # tokens of a row


class Section(BaseModel):
    """A part of the recipe: unknown keys are errors, values are checked on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class ModelSection(Section):
    path: str = Field(description="A folder with config.json and safetensors files, a hub id, or `demo`.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model. Leave off.")
    add_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Tokens that the tokenizer does not know yet: their rows of embedding and head are trained.",
    )


class Columns(Section):
    """Own column names, for files whose columns are called something else."""

    instruction: str | None = Field(None, description="alpaca: the task.")
    input: str | None = Field(None, description="alpaca: the task's input, may be empty.")
    output: str | None = Field(None, description="alpaca: the answer.")
    system: str | None = Field(None, description="alpaca and sharegpt: the system prompt.")
    messages: str | None = Field(None, description="messages: the list of {role, content}.")
    conversations: str | None = Field(None, description="sharegpt: the list of {from, value}.")
    prompt: str | None = Field(None, description="prompt_completion: what is given.")
    completion: str | None = Field(None, description="prompt_completion: what is to be learned.")
    text: str | None = Field(None, description="text: plain text, learned from its first to its last token.")


class Dataset(Section):
    """One source of rows."""

    path: str = Field(description="A registered name, a file, a hub id, or `file.py:function`.")
    split: str | None = Field(None, description="The split of a registered name, hub data set or function.")
    format: FormatName = Field("auto", description="How a row is read; `auto` looks at its columns.")
    columns: Columns = Field(default_factory=Columns, description="Own column names.")
    prompt: str | None = Field(
        None, description="A template such as `Summarise:\\n{dialogue}` that builds the user's turn from columns."
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0, description="Passes over these rows in one epoch: 0.5 takes a fresh half each epoch, 2 takes all twice."
    )


def _dataset(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _datasets(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


DatasetEntry = Annotated[Dataset, BeforeValidator(_dataset)]
DatasetList = Annotated[list[DatasetEntry], BeforeValidator(_datasets), Field(min_length=1)]


class DataSection(Section):
    train: DatasetList = Field(
        description="What to learn from: a registered name, a file, a hub id or file.py:function."
    )
    eval: Annotated[float, Field(ge=0.0, lt=1.0)] | DatasetList = Field(
        0.05, description="A share of the train rows held out (0: no evaluation), or data sets as in `train`."
    )
    format: FormatName = Field("auto", description="How rows are read where a data set does not say.")
    template: str = Field(
        "auto",
        description="Chat template: `auto` takes the tokenizer's own (`plain` where it has none), `plain`, `chatml`, "
        "or a .jinja file.",
    )
    max_length: Auto | Annotated[int, Field(ge=MIN_LENGTH)] = Field(
        "auto", description="Tokens of a row, or of a packed sequence. `auto`: 4096, or the model's own limit if lower."
    )
    overlong: Literal["drop", "truncate_prompt", "split", "error"] = Field(
        "truncate_prompt",
        description="A row longer than max_length: dropped, its prompt cut in the middle, split, or an error.",
    )
    packing: bool = Field(True, description="Join short rows into sequences of max_length that never see each other.")
    train_on: Literal["assistant", "last_assistant", "all"] = Field(
        "assistant", description="Which tokens are learned: every answer, the last answer, or every token."
    )
    workers: Auto | PositiveInt = Field("auto", description="Processes that tokenise.")
    cache: str = Field("auto", description="Folder of tokenised data; `auto` is the user's cache folder.")


MethodName = Literal["full", "freeze", "lora", "qlora", "llama_adapter", "prefix"]


class MethodSection(Section):
    type: MethodName = Field(
        "lora",
        description="full: every weight. freeze: a part of them. lora. qlora: lora on a quantised base. llama_adapter: "
        "gated prompts in the last blocks. prefix: learned keys and values before each block's own.",
    )
    rank: PositiveInt = Field(16, description="LoRA rank.")
    alpha: Annotated[float, Field(gt=0)] = Field(32.0, description="LoRA alpha; the update is scaled by alpha / rank.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="LoRA dropout.")
    targets: Literal["all_linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all_linear",
        description="`all_linear` (every linear module in the blocks) or names such as [q_proj, v_proj].",
    )
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) (rsLoRA).")
    dora: bool = Field(False, description="Weight-decomposed LoRA (DoRA).")
    lora_plus: Annotated[float, Field(ge=1)] = Field(1.0, description="LoRA+: learning rate of B over that of A.")
    start: Literal["default", "pissa"] = Field(
        "default", description="Start of A and B: random and zero, or the principal singular vectors (PiSSA)."
    )
    also_train: list[Literal["embedding", "norm", "head"]] = Field(
        default_factory=list, description="Parts of the model that are trained whole beside an adapter."
    )
    quantize: Literal["nf4", "int8"] = Field(
        "nf4", description="qlora: how the linears in the blocks are stored, in blocks of 64 along a row."
    )
    double_quant: bool = Field(
        False, description="qlora: store the blocks' scales in a byte each: 4.1 bits a weight in place of 4.5."
    )
    virtual_tokens: Auto | PositiveInt = Field(
        "auto", description="Length of a prefix (`auto`: 30) or of llama_adapter's prompts (`auto`: 10)."
    )
    adapter_blocks: Auto | PositiveInt = Field(
        "auto", description="llama_adapter: how many of the last blocks have a prompt. `auto`: 30, or all if fewer."
    )
    freeze_first: Annotated[int, Field(ge=0)] = Field(
        0, description="freeze: the embedding and the first N blocks stay as they are, the rest is trained."
    )
    trainable: list[str] = Field(
        default_factory=list,
        description="freeze: only these are trained: `blocks.28-31`, `blocks.5`, `embedding`, `norm`, `head`.",
    )

    @property
    def is_lora(self) -> bool:
        return self.type in ("lora", "qlora")

    @property
    def is_adapter(self) -> bool:
        """Whether what is saved is an adapter rather than the model."""
        return self.type not in ("full", "freeze")


class ParallelSection(Section):
    strategy: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = Field(
        "auto",
        description="single: one process. ddp: a copy per process. fsdp: the model is sharded (FSDP2). deepspeed: the "
        "same by ZeRO.",
    )
    zero_stage: Auto | Literal[0, 1, 2, 3] = Field(
        "auto",
        description="deepspeed: what is sharded. 0: nothing. 1: optimizer states. 2: gradients too. 3: parameters too.",
    )
    deepspeed_config: str | dict[str, Any] | None = Field(
        None,
        description="deepspeed: a DeepSpeed JSON, or what it holds. What this recipe can say is moved into it; the "
        "rest, buckets and the like, is handed on.",
    )
    shard_size: Auto | PositiveInt = Field(
        "auto", description="fsdp: processes that hold one copy of the model; fewer than all is HSDP. `auto`: all."
    )
    recompute: Literal["auto", "none", "selective", "full"] | Share = Field(
        "auto",
        description="Activation checkpointing: none, selective (keeps matrix products), full, or the share of blocks.",
    )
    offload: Literal["none", "optimizer", "params"] = Field(
        "none",
        description="fsdp and deepspeed: what lies in host memory. optimizer: its states and the fp32 weights it works "
        "on. params: the sharded parameters and gradients too; each block's are copied to the GPU when it runs.",
    )
    offload_dir: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="deepspeed, ZeRO-3: a folder on an NVMe disk for the offloaded optimizer states.",
    )
    offload_activations: bool = Field(
        False, description="Keep the inputs of recomputed blocks in host memory until the backward pass."
    )
    compile: Auto | bool = Field("auto", description="torch.compile each block. `auto`: on a GPU.")


class TrainSection(Section):
    epochs: Annotated[float, Field(gt=0)] = Field(
        3.0, description="Passes over the data; ignored where max_steps is given."
    )
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps.")
    batch_size: PositiveInt = Field(
        16,
        description="Rows (packed: sequences) of one optimizer step over all processes.",
    )
    micro_batch_size: Auto | PositiveInt = Field("auto", description="Rows of one forward pass on one process.")
    learning_rate: Annotated[float, Field(gt=0)] = Field(1e-4, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field("cosine", description="Learning-rate schedule.")
    warmup: Annotated[float, Field(ge=0)] = Field(
        0.03, description="Warm-up: a share of the steps below 1, a number of steps from 1 on."
    )
    decay: Share = Field(0.2, description="wsd: the share of the steps that decays at the end.")
    min_learning_rate: Share = Field(0.0, description="Where the schedule ends, as a share of the peak.")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(1.0, description="Gradient clipping; null: none.")
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit"] = Field(
        "adamw",
        description="AdamW with its two states in fp32, in bf16 or in 8 bits: 8, 4 or 2 bytes a trained weight.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="AdamW weight decay of matrices; never of norms and biases."
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW beta 1.")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="AdamW beta 2.")
    epsilon: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW epsilon.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="Arithmetic of the forward and backward pass. `auto`: bf16 where the processor has it, else fp32. "
        "fp16 needs the loss scaling of strategy deepspeed.",
    )
    master_weights: Literal["fp32", "bf16"] = Field(
        "fp32", description="Storage of trained weights. bf16 halves the memory; see `rounding`."
    )
    rounding: Literal["stochastic", "kahan", "nearest"] = Field(
        "stochastic",
        description="How a weight stored in bf16 takes its update. kahan keeps what rounding lost in two more bytes a "
        "weight. nearest loses updates below 1/256 of the weight.",
    )
    seed: Annotated[int, Field(ge=0)] = Field(42, description="Seed of the order, the adapters' start and dropout.")

    def micro_batches(self, processes: int) -> int:
        """Forward passes of a step, on each process."""
        assert isinstance(self.micro_batch_size, int), "resolve comes first"
        return math.ceil(math.ceil(self.batch_size / processes) / self.micro_batch_size)


def _every(value: Any) -> Any:
    if isinstance(value, str) and value not in ("epoch", "never"):
        return float(value)
    return value


Every = Annotated[Literal["epoch", "never"] | Annotated[float, Field(gt=0)], BeforeValidator(_every)]


Metric = Literal["loss", "perplexity", "rouge"]
_DEFAULT_METRICS: list[Metric] = ["loss", "perplexity"]


class EvaluateSection(Section):
    every: Every = Field(
        "epoch",
        description="A share of all steps below 1, steps from 1 on, `epoch`, or `never`; the end too, unless never.",
    )
    metrics: list[Metric] = Field(
        default_factory=_DEFAULT_METRICS.copy,
        description="loss and perplexity at each evaluation; rouge once, on the finished model.",
    )
    rouge_rows: PositiveInt = Field(50, description="Rows of the evaluation data that are generated for ROUGE.")


class CheckpointSection(Section):
    every: Every = Field(
        0.25,
        description="A share of all steps below 1, steps from 1 on, `epoch`, or `never`; the end too, unless never.",
    )
    keep: PositiveInt = Field(2, description="The newest checkpoints that stay on disk.")


class LogSection(Section):
    every: PositiveInt = Field(1, description="Steps between two lines of events.jsonl.")
    to: list[Literal["tensorboard", "wandb"]] = Field(
        default_factory=list, description="Sinks beside events.jsonl and the terminal."
    )
    project: str = Field("packtrain", description="Project name for wandb.")


Duration = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(s|m|h)$")]


class LaunchSection(Section):
    processes: Auto | PositiveInt = Field(
        "auto", description="Processes on this machine. `auto`: one per GPU, or one on the CPU."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: cuda where there is a GPU.")
    gpus: Auto | Annotated[int, Field(ge=0)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = (
        Field(
            "auto",
            description="The GPUs of this machine that a run takes: how many, or which, as [0, 2] in nvidia-smi's "
            "numbering; it waits until they are free. `auto`: all.",
        )
    )
    timeout: Duration = Field("10m", description="How long a process waits for the others: 30s, 10m, 1h.")
    heartbeat: Duration = Field(
        "20s",
        description="A process that shows no progress for so long, and for five times its longest pause so far, while "
        "the others wait for it, is taken for hung, and the run ends.",
    )

    @property
    def num_gpus(self) -> int | None:
        """How many GPUs are asked for; None: that is left to Packtrain."""
        if self.gpus == "auto":
            return None
        return len(self.gpus) if isinstance(self.gpus, list) else self.gpus


class OutputSection(Section):
    folder: str = Field("runs", description="Where run folders are made.")
    name: str = Field(
        "auto",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="The run's name; `auto` is the recipe's name and the time.",
    )


class Recipe(Section):
    """All of a run's configuration. Only ``model.path`` and ``data.train`` have no default."""

    model: ModelSection = Field(description="The model to start from.")
    data: DataSection = Field(description="What is learned.")
    method: MethodSection = Field(default_factory=MethodSection, description="What is trained.")
    parallel: ParallelSection = Field(default_factory=ParallelSection, description="How it is spread.")
    train: TrainSection = Field(default_factory=TrainSection, description="The optimisation.")
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection, description="Evaluation.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="Checkpoints.")
    log: LogSection = Field(default_factory=LogSection, description="Logging.")
    launch: LaunchSection = Field(default_factory=LaunchSection, description="Processes.")
    output: OutputSection = Field(default_factory=OutputSection, description="The run folder.")


def seconds(duration: str) -> float:
    """``30s``, ``10m`` or ``1h`` in seconds."""
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]
