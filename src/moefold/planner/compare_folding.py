"""Comparison of folding with no folding: the best mapping of each space for some sequence lengths.

Without folding, experts are sharded like attention (etp = tp). Two such spaces are compared: in `coupled+cp` ep may
span cp ranks, in `coupled` it lies within dp. A mapping with tp = etp = 1 is in the first of them, so folding gains
nothing there. It gains only where attention and experts are best sharded by different degrees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moefold.cost.hardware import Device
from moefold.errors import ConfigError
from moefold.planner.planner import Planner, PlanRequest
from moefold.planner.search.constraints import COUPLED, COUPLED_WITH_CP, METHODS, Restriction
from moefold.planner.search.search import PlannedMapping

MIN_GAIN = 5e-4
"""Fraction of a step. Mappings that differ by less are called equally fast."""

REASONS = {
    "attention": "attention is sharded less, so its GEMMs are larger",
    "dense_mlp": "dense layers are sharded less, so their GEMMs are larger",
    "experts": "experts are sharded less, so their GEMMs are larger",
    "shared_experts": "shared experts are sharded less, so their GEMMs are larger",
    "router": "each rank routes fewer tokens",
    "permute": "fewer routed tokens are sorted by expert",
    "head": "the output head is sharded over more ranks",
    "recompute": "less is recomputed",
    "launch": "fewer kernels wait for their launch",
    "offload": "less is offloaded to the host",
    "tp_comm": "less tensor-parallel traffic",
    "cp_comm": "less context-parallel traffic",
    "etp_comm": "less tensor-parallel traffic of the experts",
    "ep_comm": "less EP all-to-all",
    "pp_comm": "less traffic between pipeline stages",
    "dp_comm": "less data-parallel traffic",
    "bubble": "a shorter pipeline bubble",
    "optimizer": "a shorter optimizer update",
}
"""Explanation of a shorter part of a step, by `TIME_CATEGORIES`."""

AXIS_OF_PART = {
    "attention": "tp", "tp_comm": "tp", "cp_comm": "cp", "experts": "etp", "etp_comm": "etp", "ep_comm": "ep",
    "pp_comm": "pp", "bubble": "pp", "permute": "ep", "dp_comm": "zero",
}  # fmt: skip
"""The axis whose degree explains a part best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldingComparison:
    """The best mappings for one sequence length."""

    seq_len: int
    global_batch_size: int
    device: Device
    folded: PlannedMapping | None
    """The best of all mappings, or None if none fits."""
    coupled: PlannedMapping | None
    """The best mapping of method `coupled+cp`."""
    within_dp: PlannedMapping | None
    """The best mapping of method `coupled`."""
    infeasible_reason: str = ""
    """The planner's error if there is no folded mapping."""

    @property
    def is_same_mapping(self) -> bool:
        """True if the best mapping needs no folding."""
        return self.folded is not None and self.coupled is not None and self.folded.mapping == self.coupled.mapping

    @property
    def gain(self) -> float | None:
        """Throughput gain of folding over `coupled`, or None without both mappings."""
        return _gain(self.folded, self.coupled)

    @property
    def gain_within_dp(self) -> float | None:
        """Throughput gain of folding over `within_dp`, or None without both mappings."""
        return _gain(self.folded, self.within_dp)

    @property
    def saved_s(self) -> dict[str, float]:
        """Seconds that folding saves in each part of a step, negative where it adds some."""
        if self.folded is None or self.coupled is None:
            return {}
        before = self.coupled.time.parts
        after = self.folded.time.parts
        return {part: before[part] - after[part] for part in before}

    @property
    def reason(self) -> str:
        """Explanation of what folding gains, or why it gains nothing."""
        if self.folded is None:
            return self.infeasible_reason
        if self.coupled is None:
            return "nothing fits without folding"
        if self.is_same_mapping:
            m = self.folded.mapping
            return f"the best mapping has tp={m.tp} etp={m.etp}: attention and experts are sharded alike"
        if (self.gain or 0.0) < MIN_GAIN:
            return "another mapping, equally fast"
        part, seconds = max(self.saved_s.items(), key=lambda item: item[1])
        mappings = self.coupled.mapping, self.folded.mapping
        crosses = [m.ep > 1 and m.ep * m.etp > self.device.links[0].gpus for m in mappings]
        words = REASONS[part]
        if part == "ep_comm" and crosses == [True, False]:
            words = "the EP all-to-all moves into the node"
        elif axis := AXIS_OF_PART.get(part, ""):
            before, after = (getattr(m, axis) for m in mappings)
            words += f", {axis} {before} -> {after}" if before != after else ""
        return f"{words} ({seconds:.3g} s less)"


def compare_by_seq_len(request: PlanRequest, lengths: Sequence[int]) -> tuple[FoldingComparison, ...]:
    """Return the comparison for each sequence length, with the same number of tokens in a step.

    Args:
        request: the model, the GPUs, and the batch at the request's own length. Its method does not count.

    Raises:
        ConfigError: a length does not divide the tokens of a step, or nothing fits with any length.
    """
    # All lengths are checked before the first search.
    found = tuple(map(_compare_methods, [_with_seq_len(request, length) for length in lengths]))
    if all(one.folded is None for one in found):
        raise ConfigError(found[0].infeasible_reason)
    return found


def _with_seq_len(request: PlanRequest, seq_len: int) -> PlanRequest:
    """Return the request for another sequence length, with the same number of tokens in a step."""
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


def _compare_methods(request: PlanRequest) -> FoldingComparison:
    folded = None
    reason = ""
    try:
        folded = Planner(request).best()
    except ConfigError as error:
        reason = str(error)
    return FoldingComparison(
        seq_len=request.workload.seq_len,
        global_batch_size=request.workload.global_batch_size,
        device=request.device,
        folded=folded,
        coupled=_best_of_method(COUPLED_WITH_CP, folded, request),
        within_dp=_best_of_method(COUPLED, folded, request),
        infeasible_reason=reason,
    )


def _best_of_method(method: str, folded: PlannedMapping | None, request: PlanRequest) -> PlannedMapping | None:
    if folded is None:
        return None
    # The best of all mappings is also the best of a method that accepts it, if that method prices it equally.
    is_alike = METHODS[method].ep_may_span_cp or folded.mapping.cp == 1
    if is_alike and METHODS[method].accepts(folded.fold):
        return folded
    planner = Planner(replace(request, restriction=Restriction(request.restriction.fixed, method)))
    # Not `best`: its error message computes what would fit, which takes longer than the search and is not used here.
    plan = planner.top_plans(1)[0] if planner.num_folds else None
    return plan if plan is not None and plan.memory.fits else None


def _gain(folded: PlannedMapping | None, unfolded: PlannedMapping | None) -> float | None:
    if folded is None or unfolded is None:
        return None
    return unfolded.time.total_s / folded.time.total_s - 1
