"""Folding against no folding: the best mapping of each space for some lengths of samples. Torch-free.

Without folding an expert is cut as attention is (etp = tp). Two such spaces are compared: in `coupled+cp` ep may take
ranks of cp, in `coupled` it lies within dp. A mapping with tp = etp = 1 is in the first of them, so folding gains
nothing there; it can only gain where attention is better cut than the experts, or the other way round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moefold.errors import ConfigError
from moefold.plan.device import Device
from moefold.plan.mapping import Mapping
from moefold.plan.planner import Planner, Question
from moefold.plan.restriction import COUPLED, METHODS, UNFOLDED, Restriction
from moefold.plan.search import Plan

MakePlanner = Callable[[Question], Planner]

LEAST_GAIN = 5e-4
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

AXES = {
    "attention": "tp", "tp_comm": "tp", "cp_comm": "cp", "experts": "etp", "etp_comm": "etp", "ep_comm": "ep",
    "pp_comm": "pp", "bubble": "pp", "permute": "ep", "dp_comm": "zero",
}  # fmt: skip
"""The axis whose degree explains a part best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The best mappings for one length of samples."""

    seq_len: int
    global_batch_size: int
    device: Device
    folded: Plan | None
    """Of all mappings; None where none fits."""
    coupled: Plan | None
    """Of those of method `coupled+cp`."""
    within_dp: Plan | None
    """Of those of method `coupled`."""
    why_none: str = ""
    """Why there is no folded mapping, in the words of the planner."""

    @property
    def is_same(self) -> bool:
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
        before, after = self.coupled.time.parts, self.folded.time.parts
        return {part: before[part] - after[part] for part in before}

    @property
    def reason(self) -> str:
        """Return in words what folding gains, or why it gains nothing."""
        if self.folded is None:
            return self.why_none
        if self.coupled is None:
            return "without folding nothing fits"
        if self.is_same:
            m = self.folded.mapping
            return f"the best mapping has tp={m.tp} etp={m.etp}: attention and experts are cut alike"
        if (self.gain or 0.0) < LEAST_GAIN:
            return "another mapping, as fast"
        part, seconds = max(self.saved_s.items(), key=lambda item: item[1])
        return f"{self._words(part)} ({seconds:.3g} s less)"

    def _words(self, part: str) -> str:
        assert self.folded is not None
        assert self.coupled is not None
        if part == "ep_comm" and self._leaves_node(self.coupled.mapping) and not self._leaves_node(self.folded.mapping):
            return "the EP all-to-all moves into the node"
        axis = AXES.get(part, "")
        degrees = [getattr(plan.mapping, axis) for plan in (self.coupled, self.folded)] if axis else []
        return REASONS[part] + (f", {axis} {degrees[0]} -> {degrees[1]}" if axis and degrees[0] != degrees[1] else "")

    def _leaves_node(self, m: Mapping) -> bool:
        return m.ep > 1 and m.ep * m.etp > self.device.domain


def compare(question: Question, lengths: Sequence[int], make: MakePlanner = Planner) -> tuple[Comparison, ...]:
    """Return the comparison for each length of samples, with as many tokens a step.

    Args:
        question: the model, the GPUs, and the batch at the question's own length; its method does not count.
        lengths: tokens of a sample.
        make: what answers a question.

    Raises:
        ConfigError: a length does not divide the tokens of a step, or nothing fits with any length.
    """
    found = tuple(_compare(asked, make) for asked in [_at(question, length) for length in lengths])
    if all(one.folded is None for one in found):
        raise ConfigError(found[0].why_none)
    return found


def _at(question: Question, seq_len: int) -> Question:
    """Return the question for another length, with the tokens of a step unchanged."""
    tokens = question.workload.seq_len * question.workload.global_batch_size
    if seq_len < 1 or tokens % seq_len:
        raise ConfigError(
            f"--compare-folding {seq_len} must divide the {tokens} tokens of a step (--seq-len x --global-batch-size), "
            "which stay the same for all lengths; choose another length or batch"
        )
    batch = tokens // seq_len
    train = replace(question.base.train, seq_len=seq_len, global_batch_size=batch)
    return replace(
        question,
        base=replace(question.base, train=train),
        workload=replace(question.workload, seq_len=seq_len, global_batch_size=batch),
    )


def _compare(question: Question, make: MakePlanner) -> Comparison:
    folded, why_none = _best(question, make)
    return Comparison(
        seq_len=question.workload.seq_len,
        global_batch_size=question.workload.global_batch_size,
        device=question.device,
        folded=folded,
        coupled=_best_of(UNFOLDED, folded, question, make),
        within_dp=_best_of(COUPLED, folded, question, make),
        why_none=why_none,
    )


def _best_of(method: str, folded: Plan | None, question: Question, make: MakePlanner) -> Plan | None:
    """Return the fastest mapping of a method."""
    if folded is None:
        return None
    # The best of all is the best of a part that it lies in, if it is priced alike there.
    is_alike = METHODS[method].folds_cp or folded.mapping.cp == 1
    if is_alike and METHODS[method].folds(folded.mapping):
        return folded
    planner = make(replace(question, restriction=Restriction(question.restriction.fixed, method)))
    # Not `best`: to find out what would fit takes longer than the search, and is not told here.
    plan = planner.first(1)[0] if planner.num_folds else None
    return plan if plan is not None and plan.memory.fits else None


def _gain(folded: Plan | None, other: Plan | None) -> float | None:
    if folded is None or other is None:
        return None
    return other.time.total_s / folded.time.total_s - 1


def _best(question: Question, make: MakePlanner) -> tuple[Plan | None, str]:
    """Return the fastest mapping that fits, or why there is none."""
    try:
        return make(question).best(), ""
    except ConfigError as error:
        return None, str(error)
