"""Folding against no folding: the best mapping of each space for some lengths of samples. Torch-free.

Without folding an expert is cut as attention is (etp = tp). Two such spaces are compared: in `coupled+cp` ep may take
ranks of cp, in `coupled` it lies within dp. A mapping with tp = etp = 1 is in the first of them, so folding gains
nothing there; it can only gain where attention is better cut than the experts, or the other way round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moefold.cost.hardware import Device
from moefold.errors import ConfigError
from moefold.planner.mapping import ParallelMapping
from moefold.planner.planner import Planner, PlanRequest
from moefold.planner.search.constraints import COUPLED, COUPLED_WITH_CP, METHODS, Restriction
from moefold.planner.search.search import PlannedMapping

MakePlanner = Callable[[PlanRequest], Planner]

MIN_GAIN = 5e-4
"""Of a step; mappings that differ by less are called equally fast."""

REASONS = {
    "attention": "attention is cut less, so its products are larger",
    "dense_mlp": "dense layers are cut less, so their products are larger",
    "experts": "experts are cut less, so their products are larger",
    "shared_experts": "shared experts are cut less, so their products are larger",
    "router": "each rank routes fewer tokens",
    "permute": "fewer rows are sorted by expert",
    "head": "the output head is cut over more ranks",
    "recompute": "less is recomputed",
    "launch": "fewer kernels wait for their launch",
    "offload": "less is offloaded to the host",
    "tp_comm": "less tensor-parallel traffic",
    "cp_comm": "less context-parallel traffic",
    "etp_comm": "less tensor-parallel traffic of the experts",
    "ep_comm": "less EP all-to-all",
    "pp_comm": "less traffic between pipeline stages",
    "dp_comm": "less gathering and reducing over data parallelism",
    "bubble": "a shorter pipeline bubble",
    "optimizer": "a shorter optimizer update",
}
"""What it means that a part of a step shrinks, by the names of `step_time.PARTS`."""

AXIS_OF_PART = {
    "attention": "tp", "tp_comm": "tp", "cp_comm": "cp", "experts": "etp", "etp_comm": "etp", "ep_comm": "ep",
    "pp_comm": "pp", "bubble": "pp", "permute": "ep", "dp_comm": "zero",
}  # fmt: skip
"""The axis whose degree explains a part best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldingComparison:
    """The best mappings for one length of samples."""

    seq_len: int
    global_batch_size: int
    device: Device
    folded: PlannedMapping | None
    """Of all mappings; None where none fits."""
    coupled: PlannedMapping | None
    """Of those of method `coupled+cp`."""
    within_dp: PlannedMapping | None
    """Of those of method `coupled`."""
    infeasible_reason: str = ""
    """Why there is no folded mapping, in the words of the planner."""

    @property
    def is_same_mapping(self) -> bool:
        """Return True if the best mapping needs no folding."""
        return self.folded is not None and self.coupled is not None and self.folded.mapping == self.coupled.mapping

    @property
    def gain(self) -> float | None:
        """Return how many times as many tokens a second folding gives, less one; None without two mappings."""
        return _gain(self.folded, self.coupled)

    @property
    def gain_within_dp(self) -> float | None:
        """Return the same over a mapping whose ep lies within dp."""
        return _gain(self.folded, self.within_dp)

    @property
    def saved_s(self) -> dict[str, float]:
        """Return the seconds that folding takes off each part of a step; negative where it adds some."""
        if self.folded is None or self.coupled is None:
            return {}
        before = self.coupled.time.parts
        after = self.folded.time.parts
        return {part: before[part] - after[part] for part in before}

    @property
    def reason(self) -> str:
        """Return in words what folding gains, or why it gains nothing."""
        if self.folded is None:
            return self.infeasible_reason
        if self.coupled is None:
            return "without folding nothing fits"
        if self.is_same_mapping:
            m = self.folded.mapping
            return f"the best mapping has tp={m.tp} etp={m.etp}: attention and experts are cut alike"
        if (self.gain or 0.0) < MIN_GAIN:
            return "another mapping, as fast"
        part, seconds = max(self.saved_s.items(), key=lambda item: item[1])
        return f"{self._describe_part(part)} ({seconds:.3g} s less)"

    def _describe_part(self, part: str) -> str:
        assert self.folded is not None
        assert self.coupled is not None
        if (
            part == "ep_comm"
            and self._ep_crosses_nodes(self.coupled.mapping)
            and not self._ep_crosses_nodes(self.folded.mapping)
        ):
            return "the EP all-to-all moves into the node"
        axis = AXIS_OF_PART.get(part, "")
        degrees = [getattr(plan.mapping, axis) for plan in (self.coupled, self.folded)] if axis else []
        return REASONS[part] + (f", {axis} {degrees[0]} -> {degrees[1]}" if axis and degrees[0] != degrees[1] else "")

    def _ep_crosses_nodes(self, mapping: ParallelMapping) -> bool:
        return mapping.ep > 1 and mapping.ep * mapping.etp > self.device.nvlink_domain_size


def compare_by_seq_len(
    request: PlanRequest, lengths: Sequence[int], make_planner: MakePlanner = Planner
) -> tuple[FoldingComparison, ...]:
    """Return the comparison for each length of samples, with as many tokens a step.

    Args:
        request: the model, the GPUs, and the batch at the question's own length; its method does not count.
        lengths: tokens of a sample.
        make_planner: what answers a question.

    Raises:
        ConfigError: a length does not divide the tokens of a step, or nothing fits with any length.
    """
    found = tuple(
        _compare_methods(asked, make_planner) for asked in [_with_seq_len(request, length) for length in lengths]
    )
    if all(one.folded is None for one in found):
        raise ConfigError(found[0].infeasible_reason)
    return found


def _with_seq_len(request: PlanRequest, seq_len: int) -> PlanRequest:
    """Return the question for another length, with the tokens of a step unchanged."""
    tokens = request.workload.seq_len * request.workload.global_batch_size
    if seq_len < 1 or tokens % seq_len:
        raise ConfigError(
            f"--compare-folding {seq_len} must divide the {tokens} tokens of a step (--seq-len x --global-batch-size), "
            "which stay the same for all lengths; choose another length or batch"
        )
    batch = tokens // seq_len
    train = replace(request.base_config.train, seq_len=seq_len, global_batch_size=batch)
    return replace(
        request,
        base_config=replace(request.base_config, train=train),
        workload=replace(request.workload, seq_len=seq_len, global_batch_size=batch),
    )


def _compare_methods(request: PlanRequest, make_planner: MakePlanner) -> FoldingComparison:
    folded, why_none = _best_or_reason(request, make_planner)
    return FoldingComparison(
        seq_len=request.workload.seq_len,
        global_batch_size=request.workload.global_batch_size,
        device=request.device,
        folded=folded,
        coupled=_best_of_method(COUPLED_WITH_CP, folded, request, make_planner),
        within_dp=_best_of_method(COUPLED, folded, request, make_planner),
        infeasible_reason=why_none,
    )


def _best_of_method(
    method: str, folded: PlannedMapping | None, request: PlanRequest, make_planner: MakePlanner
) -> PlannedMapping | None:
    """Return the fastest mapping of a method."""
    if folded is None:
        return None
    # The best of all is the best of a part that it lies in, if it is priced alike there.
    is_alike = METHODS[method].ep_may_span_cp or folded.mapping.cp == 1
    if is_alike and METHODS[method].accepts(folded.mapping):
        return folded
    planner = make_planner(replace(request, restriction=Restriction(request.restriction.fixed, method)))
    # Not `best`: to find out what would fit takes longer than the search, and is not told here.
    plan = planner.top_plans(1)[0] if planner.num_folds else None
    return plan if plan is not None and plan.memory.fits else None


def _gain(folded: PlannedMapping | None, unfolded: PlannedMapping | None) -> float | None:
    if folded is None or unfolded is None:
        return None
    return unfolded.time.total_s / folded.time.total_s - 1


def _best_or_reason(request: PlanRequest, make_planner: MakePlanner) -> tuple[PlannedMapping | None, str]:
    """Return the fastest mapping that fits, or why there is none."""
    try:
        return make_planner(request).best(), ""
    except ConfigError as error:
        return None, str(error)
