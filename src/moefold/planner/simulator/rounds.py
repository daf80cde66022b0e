"""Simulation of rounds of reinforcement learning: weights, sampling, rewards and training, in turn or at once."""

from dataclasses import dataclass

COPY = "copy of weights"
PREFILL = "prompts"
DECODE = "decoding"
REWARD = "rewards"
TRAIN = "training"
SAMPLING_PARTS = (COPY, PREFILL, DECODE, REWARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTimes:
    """Seconds of the parts of a round."""

    copy_s: float
    prefill_s: float
    decode_s: float
    reward_s: float = 0.0
    train_s: float
    """Of one optimizer step."""
    updates: int = 1
    """Optimizer steps of a round."""

    @property
    def sampling_s(self) -> float:
        """Seconds from the end of the training that made the weights to the rewards of a round."""
        return self.copy_s + self.prefill_s + self.decode_s + self.reward_s

    @property
    def training_s(self) -> float:
        """Seconds of all optimizer steps of a round."""
        return self.train_s * self.updates

    def step_s(self, rounds_ahead: int | None) -> float:
        """Return the mean seconds of an optimizer step after the first rounds.

        Args:
            rounds_ahead: rounds between the weights that sample and those that train, on ranks that only sample; None:
                the ranks that train sample in turn.
        """
        total = self.sampling_s + self.training_s
        if rounds_ahead is not None:
            total = max(self.sampling_s, self.training_s, total / (rounds_ahead + 1))
        return total / self.updates


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of a round on one set of ranks."""

    part: str
    """One of SAMPLING_PARTS, or TRAIN for one optimizer step."""
    round_number: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RoundTimeline:
    """Simulated rounds."""

    times: RoundTimes
    phases: tuple[Phase, ...]
    rounds_ahead: int | None
    """As in `RoundTimes.step_s`."""

    @property
    def step_s(self) -> float:
        """Mean seconds of an optimizer step after the first rounds."""
        return self.times.step_s(self.rounds_ahead)

    def idle_share(self, *, is_training: bool) -> float:
        """Return the idle fraction after the first rounds of the ranks that train, or of those that only sample."""
        work = self.times.training_s if is_training else self.times.sampling_s
        if self.rounds_ahead is None:
            return 0.0
        return 1.0 - work / (self.step_s * self.times.updates)


def simulate_rounds(times: RoundTimes, num_rounds: int, rounds_ahead: int | None) -> RoundTimeline:
    """Simulate the first rounds of a run.

    Round r is sampled by the weights after round r - 1 - rounds_ahead, or by the first ones of the run, on ranks that
    only sample; the next round begins there when its weights have arrived. Without such ranks, parts follow each other.

    Args:
        times: seconds of each part.
        num_rounds: rounds to simulate, at least 1.
        rounds_ahead: as in `RoundTimes.step_s`, at least 1 with ranks that only sample.
    """
    parts = (times.copy_s, times.prefill_s, times.decode_s, times.reward_s)
    phases: list[Phase] = []
    trained: list[float] = []
    sampler_free_s = 0.0
    for number in range(num_rounds):
        ahead = rounds_ahead or 0
        trained_before = number - ahead
        ready_s = trained[trained_before - 1] if trained_before > 0 else 0.0
        at = max(sampler_free_s, ready_s)
        # The rounds of the first weights follow one copy.
        has_new_weights = number == 0 or trained_before > 0
        for part, seconds in zip(SAMPLING_PARTS, parts, strict=True):
            if seconds > 0 and (part != COPY or has_new_weights):
                phases.append(Phase(part, number, at, at + seconds))
                at += seconds
        sampler_free_s = at
        at = max(at, trained[-1] if trained else 0.0)
        for _ in range(times.updates):
            phases.append(Phase(TRAIN, number, at, at + times.train_s))
            at += times.train_s
        trained.append(at)
        if rounds_ahead is None:
            sampler_free_s = at
    return RoundTimeline(times, tuple(phases), rounds_ahead)
