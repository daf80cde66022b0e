"""The [run] section: duration, device, compute type and output folder."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.base.field import SAME_RUN, Bound, MaxMagnitude, VerifyAs, at_least
from moefold.config.base.limits import MAX_STEPS
from moefold.config.base.path_rules import NO_TILDE

SECTIONS_OF_USE = ("model", "moe", "run")
"""Sections of a run that are read to use its model without training. Only their parts are needed."""
SETTINGS_FILE = "config.json"
"""File of a run folder with every key of the run, also next to checkpoints in a remote folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Duration, device, compute type and output folder of a run."""

    dir: Annotated[str, Bound("must name a folder", bool), NO_TILDE, VerifyAs.FILES, SAME_RUN] = "runs/run"
    """Run folder: config.json, metrics.jsonl, checkpoints/, loss.png. If it already holds another run, that run is kept
    and this one is written to DIR-2, DIR-3, ... ([checkpoints.md](checkpoints.md))."""
    seed: Annotated[
        int,
        Bound("must be at least 0 and below 2**63", lambda seed: 0 <= seed < 2**63),
        MaxMagnitude(2**63 - 1),
        VerifyAs.START,
    ] = 0
    """Seed of the initial weights and of the data order."""
    steps: Annotated[int, at_least(1), MaxMagnitude(MAX_STEPS), SAME_RUN] = 100
    """Total optimizer steps, including those before a resume."""
    epochs: Annotated[float, at_least(0, "0: run.steps"), VerifyAs.FILES, SAME_RUN] = 0.0
    """Length in passes over the training data, instead of run.steps: the steps follow from its samples and
    train.global_batch_size, rounded up, and are logged. For data of known length. 0: run.steps."""
    device: Annotated[Literal["auto", "cpu", "cuda"], VerifyAs.FORMAT] = "auto"
    """auto: cuda if a GPU is visible, else cpu."""
    dtype: Annotated[Literal["bfloat16", "float32", "float64"], VerifyAs.FORMAT] = "bfloat16"
    """Compute type. Master weights, gradients and optimizer moments are float32 (float64 with float64)."""
    deterministic: Annotated[bool, VerifyAs.SPEED] = False
    """Bitwise reproducible runs: refuse every kernel without a deterministic implementation."""
    check_memory: Annotated[bool, VerifyAs.SPEED] = True
    """Before any rank starts, refuse a step whose estimated peak memory exceeds the memory of this machine or its GPUs
    ([memory.md](memory.md#what-is-refused-before-it-starts)). false: start it anyway."""
    kernels: Annotated[Literal["auto", "plain", "triton", "c"], VerifyAs.SPEED] = "auto"
    """Kernels of experts and routing ([kernels.md](kernels.md)). plain: torch operations. triton: fused kernels. c: CPU
    kernels for GEMMs, norms, RoPE, expert activations and causal attention, built by the machine's C compiler. auto:
    triton on CUDA in bfloat16 if the package is installed, c on a CPU with a compiler, else plain. The log names the
    choice."""
    compile: Annotated[Literal["none", "blocks"], VerifyAs.SPEED] = "none"
    """blocks: fuse element-wise parts of the layers by torch.compile in training: QK norm with RoPE, and the SwiGLU of
    dense layers and shared experts ([kernels.md](kernels.md#torchcompile)). The compiled parts replace the kernels of
    run.kernels."""
    cuda_graphs: Annotated[Literal["none", "attention", "attention_router", "full"], VerifyAs.SPEED] = "none"
    """Replay passes from CUDA graphs, without the host's launches ([kernels.md](kernels.md#cuda-graphs)). attention: a
    graph for each attention. attention_router: for each attention and each router. full: for a whole micro-batch, on
    one GPU. For CUDA, without tensor and context parallelism in a graph."""

    @property
    def uses_cuda_graphs(self) -> bool:
        """Return whether passes are replayed from CUDA graphs."""
        return self.cuda_graphs != "none"
