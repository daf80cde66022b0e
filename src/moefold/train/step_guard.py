"""Whether a step may change the weights: judged by numbers that all ranks know alike. Pure and torch-free."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from moefold.config.schema import FaultsConfig
from moefold.errors import ConfigError

FaultAction = Literal["update", "log", "skip", "rollback", "stop"]

MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution over its median distance from the median: 1 / Phi^-1(3/4)."""
MIN_RELATIVE_SPREAD = 0.01
"""A row of equal values has no spread; it counts as so much of the median at least."""
SPIKE_METRICS = ("loss", "gradient norm")
"""The numbers whose spikes are looked for."""


@dataclass(frozen=True)
class StepDecision:
    """What becomes of a step."""

    action: FaultAction
    reason: Literal["", "nonfinite", "spike"] = ""
    description: str = ""
    """What was seen, in words; empty if nothing was."""

    @property
    def updates(self) -> bool:
        """Whether the weights take the step."""
        return self.action in ("update", "log")


class StepGuard:
    """Judges the steps of a run, one after another, and remembers what it needs for the next ones.

    A spike is a value above median + factor * 1.4826 * MAD of the last `spike_window` values, MAD their median distance
    from the median: the Hampel identifier (L. Davies, U. Gather: The identification of multiple outliers, JASA 88,
    1993), which a few spikes in the window do not move. Only steps that change the weights enter the window.

    All that a resumed run needs to decide alike is in `state`.
    """

    def __init__(self, cfg: FaultsConfig) -> None:
        self._cfg = cfg
        self._recent_values = {name: deque[float](maxlen=cfg.spike_window) for name in SPIKE_METRICS}
        self._consecutive_skips = 0
        self._rollbacks = 0
        self._skipped_ranges: list[tuple[int, int]] = []
        self.num_skipped = 0
        """Steps since the start of the run that changed nothing."""

    def decide(self, metrics: Mapping[str, float]) -> StepDecision:
        """Decide about a step.

        Args:
            metrics: of the whole global batch, the same on every rank, by their names in a message: those of `SPIKE_METRICS`
                and whatever else must be finite.
        """
        verdict = self._apply_limits(self._initial_decision(metrics))
        if verdict.updates:
            self._consecutive_skips = 0
            for name, values in self._recent_values.items():
                values.append(metrics[name])
        elif verdict.action == "skip":
            self._consecutive_skips += 1
            self.num_skipped += 1
        elif verdict.action == "rollback":
            self._rollbacks += 1
        return verdict

    def skip_samples(self, first: int, end: int) -> None:
        """Remember that samples first .. end - 1 of the run are not to be taken again."""
        self._skipped_ranges.append((first, end))

    @property
    def skipped_ranges(self) -> tuple[range, ...]:
        """The samples of the run that are not to be taken."""
        return tuple(range(start, end) for start, end in self._skipped_ranges)

    def state(self) -> dict[str, Any]:
        """All that is remembered, as JSON keeps it."""
        return {
            "last": {name: list(values) for name, values in self._recent_values.items()},
            "skips_in_row": self._consecutive_skips,
            "num_skipped": self.num_skipped,
            "rollbacks": self._rollbacks,
            "left_out": [list(part) for part in self._skipped_ranges],
        }

    def restore(self, state: Any) -> None:
        """Go on from a state that `state` gave; None is that of a run without faults.

        What this object has rolled back stays counted and left out: a state from before does not know of it yet.

        Raises:
            ConfigError: it is no such state.
        """
        state = StepGuard(self._cfg).state() if state is None else state
        try:
            last = {name: [float(value) for value in state["last"][name]] for name in SPIKE_METRICS}
            counts = [int(state[name]) for name in ("skips_in_row", "num_skipped", "rollbacks")]
            left_out = [(int(start), int(end)) for start, end in state["left_out"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the checkpoint's memory of faults is broken: {error!r}") from None
        for name, values in last.items():
            self._recent_values[name].clear()
            self._recent_values[name].extend(values)
        self._consecutive_skips, self.num_skipped, rollbacks = counts
        self._rollbacks = max(self._rollbacks, rollbacks)
        self._skipped_ranges = list(dict.fromkeys(left_out + self._skipped_ranges))

    def _initial_decision(self, metrics: Mapping[str, float]) -> StepDecision:
        """What the recipe wants of this step, whatever came before."""
        cfg = self._cfg
        if wrong := [f"the {name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]:
            return StepDecision(cfg.nonfinite, "nonfinite", " and ".join(wrong))
        if cfg.spike == "ignore":
            return StepDecision("update")
        high = [words for name in SPIKE_METRICS if (words := self._describe_spike(name, metrics[name]))]
        return StepDecision(cfg.spike, "spike", " and ".join(high)) if high else StepDecision("update")

    def _describe_spike(self, name: str, value: float) -> str:
        """How far a value is above the last ones, in words; empty if it is none to speak of."""
        values = self._recent_values[name]
        if len(values) < self._cfg.spike_window:
            return ""
        middle = median(values)
        spread = max(MAD_TO_STD * median(abs(x - middle) for x in values), MIN_RELATIVE_SPREAD * abs(middle))
        if value <= middle + self._cfg.spike_factor * spread:
            return ""
        above = f", {(value - middle) / spread:.3g} deviations above," if spread else ""
        return f"the {name} is {value:.6g}{above} after a median of {middle:.6g} over {len(values)} steps"

    def _apply_limits(self, decision: StepDecision) -> StepDecision:
        """The verdict, or that to stop if the recipe's patience is at its end."""
        cfg = self._cfg
        if decision.action == "skip" and self._consecutive_skips == cfg.max_skips:
            after = f"after {cfg.max_skips} skipped steps in a row (faults.max_skips)"
        elif decision.action == "rollback" and self._rollbacks == cfg.max_rollbacks:
            after = f"after {cfg.max_rollbacks} rollbacks (faults.max_rollbacks)"
        else:
            return decision
        return StepDecision("stop", decision.reason, f"{decision.description}, {after}")
