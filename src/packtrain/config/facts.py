"""What a recipe is resolved against: the machine and the model, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """A matrix of a block: its name within the block, and its shape (out_features, in_features)."""

    name: str
    outputs: int
    inputs: int

    @property
    def numel(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True)
class ModelFacts:
    """Read off config.json and the headers of the weight files.

    Attributes:
        linears: of one block, all alike; empty: not looked at, Llama's are assumed.
        kv_width: key (or value) heads x head size; 0: not looked at, a quarter of ``hidden``.
        head_size: of one attention head; 0: not looked at, 128.
        tied: whether the head is the embedding. qk_norm: whether queries and keys are normalised.
        max_length: positions the model was made for; None where it does not say.
        type: the architecture's name in transformers.
        sliding_window: tokens that a query sees at most; None: all before it.
        even_heads: hidden size = attention heads x head size.
        num_experts: of a mixture of experts; 0: a dense model.
    """

    num_parameters: int
    num_blocks: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_length: int | None
    type: str = "llama"
    sliding_window: int | None = None
    even_heads: bool = True
    num_experts: int = 0
    linears: tuple[Linear, ...] = ()
    kv_width: int = 0
    head_size: int = 0
    tied: bool = False
    qk_norm: bool = False


@dataclass(frozen=True)
class Rates:
    """How fast the parts of one GPU and of its machine are.

    Attributes:
        matmul: FLOP/s of the blocks' matrix products. attention: FLOP/s of causal attention, forward and backward.
        memory: bytes/s of the GPU's memory. link: bytes/s that a GPU sends to others of its node; network: of others.
        host: bytes/s between GPU and host memory. host_memory: of the host's in the optimizer's step, for each process.
        disk: bytes/s that a file is written with; 0: not known.
        source: where the figures are from, for the user to read.
    """

    matmul: float
    attention: float
    memory: float
    link: float
    network: float
    host: float
    host_memory: float
    source: str
    disk: float = 0


@dataclass(frozen=True)
class Host:
    """What lies under torch on this machine, as far as it can stop a run; by default nothing does. Versions are empty
    where there is none, or where it is not known.

    Attributes:
        gpus: that the driver shows and CUDA_VISIBLE_DEVICES leaves. driver: its version.
        driver_cuda: the newest CUDA that the driver runs. torch_cuda: the one that torch was built for.
        nccl: the one that torch has loaded. torch_nccl: the one that it came with.
        c_compiler, cxx_compiler: whether there is one. python_headers: what they need besides to build for Python.
        shared_memory: bytes of /dev/shm.
        bitsandbytes: whether the package is installed.
        resolves: whether the host's own name has an address, or an interface is named for gloo.
    """

    gpus: int = 0
    driver: str = ""
    driver_cuda: str = ""
    torch_cuda: str = ""
    nccl: str = ""
    torch_nccl: str = ""
    c_compiler: bool = True
    cxx_compiler: bool = True
    python_headers: bool = True
    shared_memory: int = 2**36
    bitsandbytes: bool = True
    resolves: bool = True

    @property
    def builds_kernels(self) -> bool:
        """Whether Triton has what it needs to compile for a GPU."""
        return self.c_compiler and self.python_headers


@dataclass(frozen=True)
class Facts:
    """The processes a run gets, and this machine.

    Attributes:
        processes: over all nodes. local_processes: those that share this node's visible GPUs.
        device: ``cpu`` or ``cuda``.
        memory: bytes of one GPU, or of the host on the CPU.
        bf16: whether the processor computes in bf16 natively.
        deepspeed: whether the package is installed.
        gpu: the driver's name for the GPU. host_memory: bytes of one node; 0: not looked at.
        rates: measured on this machine, or published; None: not known, no speed is predicted.
        host: None: not looked at, as in a plan.
    """

    processes: int
    local_processes: int
    device: str
    num_gpus: int
    memory: int
    bf16: bool
    num_cores: int
    model: ModelFacts
    deepspeed: bool = True
    gpu: str = ""
    host_memory: int = 0
    rates: Rates | None = None
    host: Host | None = None
