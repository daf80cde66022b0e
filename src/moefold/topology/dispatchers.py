"""The dispatchers by name: the facts that rules, memory formulas, the deadlock check and the planner ask. Torch-free.

The classes that run are in `model/moe/dispatch/`, and `model/moe/dispatch/registry.py` has a builder for each name. To
add a dispatcher see docs/extending.md.
"""

from dataclasses import dataclass

from moefold.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class DispatcherSpec:
    """One way to bring tokens to their experts. The defaults describe an all-to-all over ep, then over etp."""

    name: str
    """As in `parallel.dispatcher`."""

    # Where it may be used.
    runs: bool = True
    """Whether the runtime has it; else only the planner prices it, in published runs."""
    spreads_experts: bool = True
    """Whether experts may be on other ranks: ep*etp of 2 or more."""
    needs_spread_experts: bool = False
    """Whether ep*etp=1 is rejected, instead of taking the local dispatcher."""
    needs_whole_experts: bool = False
    """Whether etp of 2 or more, and padding to capacity, are rejected; with a kernel package, its own rules say so."""
    is_searched: bool = True
    """Whether the planner may choose it where the request does not name it."""
    for_inference: bool = False
    """Whether `moefold generate` and `moefold eval` may use it."""
    needs_equal_token_counts: bool = False
    """Whether all ranks must hold equally many tokens."""
    kernel_package: str = ""
    """The Python package of its kernels, for Hopper GPUs or newer; empty: it runs anywhere."""
    package_source: str = ""
    """Where that package is built from."""
    needs_buffer: bool = False
    """Whether it communicates through buffers of DeepEP that are opened before the model is built."""
    has_receive_buffer: bool = False
    """Whether a rank receives into symmetric memory of a fixed number of rows: it reads parallel.receive_factor."""

    # What it communicates and keeps.
    gathers_tokens: bool = False
    """Whether each rank gathers all tokens over ep*etp, in one collective, and sums its experts' results itself."""
    moves_experts: bool = False
    """Whether ranks take over routed tokens of busy experts with a copy of the weights: it reads moe.llep_*."""
    keeps_sum_order: bool = False
    """Whether the rank of a token sums the outputs of its experts in the order of its choices, with which sampling and
    training have the same bits."""
    deduplicates: bool = False
    """Whether a token that chose several experts of a rank is sent to that rank once."""

    # What stands for it elsewhere.
    prefers: str = ""
    """Of a name that is resolved at the start of a run: the dispatcher that is taken where it can run."""
    falls_back_to: str = ""
    """Of a name that is resolved at the start of a run: the dispatcher that is taken elsewhere, and assumed before."""
    priced_as: str = ""
    """The dispatcher whose price is also the price of this one; empty: it has a price of its own."""
    written_as: str = ""
    """The name in recipes that the planner writes; empty: its own."""

    def collectives(self, ep: int, etp: int) -> tuple[str, ...]:
        """Return the collectives of a forward pass of one layer, in order."""
        axes = ["ep x etp"] if self.gathers_tokens else [axis for axis, size in (("ep", ep), ("etp", etp)) if size > 1]
        return *(f"dispatch over {axis}" for axis in axes), *(f"combine over {axis}" for axis in reversed(axes))


ALL_TO_ALL = DispatcherSpec(name="alltoall", keeps_sum_order=True, for_inference=True)
ALL_GATHER = DispatcherSpec(
    name="allgather",
    gathers_tokens=True,
    needs_spread_experts=True,
    needs_equal_token_counts=True,
    for_inference=True,
)

DISPATCHERS: dict[str, DispatcherSpec] = {
    spec.name: spec
    for spec in (
        DispatcherSpec(name="auto", keeps_sum_order=True, prefers="deepep", falls_back_to="alltoall"),
        ALL_TO_ALL,
        DispatcherSpec(
            name="dedup_alltoall",
            needs_spread_experts=True,
            needs_whole_experts=True,
            deduplicates=True,
            is_searched=False,
        ),
        ALL_GATHER,
        DispatcherSpec(name="leastloaded", moves_experts=True, priced_as="alltoall"),
        DispatcherSpec(
            name="deepep",
            needs_spread_experts=True,
            kernel_package="deep_ep",
            package_source="github.com/deepseek-ai/DeepEP",
            needs_buffer=True,
            deduplicates=True,
            # Whether the package is installed is known where the recipe runs.
            written_as="auto",
        ),
        DispatcherSpec(
            name="symm_mem",
            needs_spread_experts=True,
            kernel_package="nvidia.nvshmem",
            package_source="the CUDA build of torch, which installs nvidia-nvshmem",
            has_receive_buffer=True,
            priced_as="alltoall",
        ),
        DispatcherSpec(name="hybridep", runs=False, deduplicates=True, written_as="auto"),
        DispatcherSpec(name="local", spreads_experts=False, for_inference=True),
    )
}
"""Every dispatcher by its name in a recipe."""


def dispatcher_spec(name: str) -> DispatcherSpec:
    """Return the facts about a dispatcher.

    Args:
        name: as in `parallel.dispatcher`, or of a published run.
    """
    return DISPATCHERS[name]


def dispatcher_of(cfg: Config) -> DispatcherSpec:
    """Return the facts about the dispatcher of a recipe."""
    return DISPATCHERS[cfg.parallel.dispatcher]


def inference_dispatchers() -> tuple[str, ...]:
    """Return the names of the dispatchers that inference may use."""
    return tuple(name for name, spec in DISPATCHERS.items() if spec.for_inference)
