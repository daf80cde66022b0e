"""Step guard: decides from globally reduced metrics whether a step may change the weights, without side effects."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from moefold.config.sections.faults import FaultsConfig

FaultAction = Literal["update", "log", "skip", "rollback", "stop"]

MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution over its median distance from the median: 1 / Phi^-1(3/4)."""
MIN_RELATIVE_SPREAD = 0.01
"""Lower bound of the spread relative to the median, as equal values have no spread."""
GRAD_NORM = "gradient norm"
SPIKE_METRICS = ("loss", GRAD_NORM)
"""The metrics that are checked for spikes. The policy-gradient loss is near 0 and has no typical value."""


@dataclass(frozen=True)
class Mismatch:
    """Mean difference between the log-probabilities of sampler and training, in nats, and its limit."""

    mean: float
    limit: float

    def describe(self) -> str:
        """Describe a mismatch beyond the limit, or empty within the limit."""
        # NaN is beyond any limit.
        if self.mean <= self.limit:
            return ""
        return (
            f"the log-probabilities of sampler and training differ by {self.mean:.3g} nats a token, and "
            f"rl.mismatch_limit allows {self.limit:g}"
        )


@dataclass(frozen=True)
class StepDecision:
    """Decision to apply, skip or roll back a step or to end the run, with the fault that led to it."""

    action: FaultAction
    reason: Literal["", "nonfinite", "mismatch", "spike"] = ""
    description: str = ""
    """Description of the fault, or empty if there is none."""

    @property
    def updates(self) -> bool:
        """True if the step is applied to the weights."""
        return self.action in ("update", "log")


class StepGuard:
    """Decides about the steps of a run, one after another, and keeps the history that later decisions need.

    A spike is a value above median + factor * 1.4826 * MAD of the last `spike_window` values, where MAD is their median
    distance from the median. This is the Hampel identifier (L. Davies, U. Gather: The identification of multiple
    outliers, JASA 88, 1993), which is robust against a few spikes in the window. Only steps that change the weights
    enter the window.

    Its state is everything that a resumed run needs for the same decisions.
    """

    def __init__(self, cfg: FaultsConfig, spike_metrics: Sequence[str] = SPIKE_METRICS) -> None:
        self._cfg = cfg
        self._spike_metrics = spike_metrics
        self._recent_values = {name: deque[float](maxlen=cfg.spike_window) for name in SPIKE_METRICS}
        self._consecutive_skips = 0
        self._rollbacks = 0
        self.num_skipped = 0
        """Number of steps since the start of the run that were not applied."""

    def decide(self, metrics: Mapping[str, float], mismatch: Mismatch | None = None) -> StepDecision:
        """Decide whether a step is applied, from metrics that are the same on every rank.

        Args:
            metrics: metrics of the whole global batch, the same on every rank, by their names in a message: the metrics
                in `SPIKE_METRICS` and all others that must be finite.
            mismatch: mismatch of a step on rollouts of its own weights, or None for other steps.
        """
        decision = self._apply_limits(self._initial_decision(metrics, mismatch))
        if decision.updates:
            self._consecutive_skips = 0
            for name, values in self._recent_values.items():
                values.append(metrics[name])
        elif decision.action == "skip":
            self._consecutive_skips += 1
            self.num_skipped += 1
        elif decision.action == "rollback":
            self._rollbacks += 1
        return decision

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        return {
            "last": {name: list(values) for name, values in self._recent_values.items()},
            "skips_in_row": self._consecutive_skips,
            "num_skipped": self.num_skipped,
            "rollbacks": self._rollbacks,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a history. {} stands for the history of a run without faults.

        Rollbacks of this object are kept, as a state saved before a rollback lacks them.
        """
        state = state_dict or StepGuard(self._cfg).state_dict()
        last = {name: [float(value) for value in state["last"][name]] for name in SPIKE_METRICS}
        counts = [int(state[name]) for name in ("skips_in_row", "num_skipped", "rollbacks")]
        for name, values in last.items():
            self._recent_values[name].clear()
            self._recent_values[name].extend(values)
        self._consecutive_skips, self.num_skipped, rollbacks = counts
        self._rollbacks = max(self._rollbacks, rollbacks)

    def _initial_decision(self, metrics: Mapping[str, float], mismatch: Mismatch | None) -> StepDecision:
        """Return the decision about this step by itself, without the limits on skips and rollbacks."""
        cfg = self._cfg
        if wrong := [f"the {name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]:
            return StepDecision(cfg.nonfinite, "nonfinite", " and ".join(wrong))
        if mismatch is not None and (excess := mismatch.describe()):
            return StepDecision("stop", "mismatch", excess)
        if cfg.spike == "ignore":
            return StepDecision("update")
        high = [spike for name in self._spike_metrics if (spike := self._describe_spike(name, metrics[name]))]
        return StepDecision(cfg.spike, "spike", " and ".join(high)) if high else StepDecision("update")

    def _describe_spike(self, name: str, value: float) -> str:
        """Describe a spike by its distance from the recent values, or empty if the value is not a spike."""
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
        """Return the decision, or "stop" if the limit on skips or rollbacks is reached."""
        cfg = self._cfg
        if decision.action == "skip" and self._consecutive_skips == cfg.max_skips:
            after = f"after {cfg.max_skips} skipped steps in a row (faults.max_skips)"
        elif decision.action == "rollback" and self._rollbacks == cfg.max_rollbacks:
            after = f"after {cfg.max_rollbacks} rollbacks (faults.max_rollbacks)"
        else:
            return decision
        return StepDecision("stop", decision.reason, f"{decision.description}, {after}")
