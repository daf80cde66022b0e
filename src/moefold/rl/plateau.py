"""Plateaus of the held-out reward, after which the reference model is reset (ProRL, arXiv:2505.24864)."""

from dataclasses import dataclass, fields, replace
from typing import Self

from moefold.rl.rollout_table import TABLE_KEY


@dataclass(frozen=True, kw_only=True, slots=True)
class Plateau:
    """Held-out rewards so far, and the reference model. Its fields are JSON values, for a checkpoint."""

    best: float | None = None
    """Highest reward of an evaluation, or None before the first evaluation."""
    num_since_best: int = 0
    """Evaluations since the highest reward, or since the last reset."""
    num_resets: int = 0
    """Resets of the reference model."""
    reference: str = ""
    """Weights that the recipe names for the reference model, or "" for random weights, and without a KL penalty."""
    reference_folder: str = ""
    """Checkpoint or Hugging Face folder with these weights, recorded because a run may have newer checkpoints later."""
    reference_adapters: str = ""
    """Checkpoint with the initial adapters of the reference model (lora.init_from), or "" without any."""
    reference_digest: str = ""
    """Digest of everything that these weights are made from. "": unknown, of an earlier version."""
    lacks_evaluation: bool = False
    """True if a signal has prevented the evaluation after the last step."""

    def record(self, reward: float) -> Self:
        """Return the state after an evaluation."""
        if self.best is None or reward > self.best:
            return replace(self, best=reward, num_since_best=0)
        return replace(self, num_since_best=self.num_since_best + 1)

    @classmethod
    def from_json(cls, state: object) -> Self:
        """Return the state in a checkpoint. For None, the state of a new run. Raise TypeError for another value."""
        if state is None:
            return cls()
        if not isinstance(state, dict):
            raise TypeError(f"rl is {state!r}")
        # The same state also has the rollouts that are not trained on yet.
        state = {name: value for name, value in state.items() if name != TABLE_KEY}
        state = {"reference_adapters": "", "reference_digest": "", "lacks_evaluation": False} | state
        if state.keys() != {field.name for field in fields(cls)}:
            raise TypeError(f"rl is {state!r}")
        counts = [state["num_since_best"], state["num_resets"]]
        best = state["best"]
        texts = [value for name, value in state.items() if name.startswith("reference")]
        is_count = all(type(count) is int and count >= 0 for count in counts)
        is_count = is_count and type(state["lacks_evaluation"]) is bool
        if not is_count or type(best) not in (float, int, type(None)) or any(type(text) is not str for text in texts):
            raise TypeError(f"rl is {state!r}")
        return cls(**state)
