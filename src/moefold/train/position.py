"""Progress of a run: its steps, tokens and place in the data, and the steps after which it evaluates or saves."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moefold.config.sections.checkpoint import CheckpointConfig


@dataclass
class Position:
    """Progress of a run. Only its methods change it. Each field but `restarts_data` is saved and restored."""

    step: int = 0
    """Steps of the run that are done, skipped ones included."""
    samples: int = 0
    """Samples of the data read."""
    tokens: int = 0
    """Tokens trained on: input tokens of all ranks in the applied updates, without padding."""
    tokens_consumed: int = 0
    """The same count over all steps, including skipped updates."""
    skipped: list[tuple[int, int]] = field(default_factory=list)
    """Samples to skip, each as first and end."""
    restarts_data: bool = field(default=False, init=False)
    """True if the checkpoint to load counts samples of other data."""

    @property
    def skipped_ranges(self) -> tuple[range, ...]:
        """The samples of the run to skip."""
        return tuple(range(first, end) for first, end in self.skipped)

    def advance(self, samples: Sequence[int], num_tokens: int, *, is_updated: bool) -> None:
        """Count a finished step with its samples and tokens.

        Args:
            samples: the sample numbers of its batch, ascending.
            num_tokens: input tokens of its global batch, without padding.
        """
        self.step += 1
        self.samples = samples[-1] + 1
        self.tokens_consumed += num_tokens
        if is_updated:
            self.tokens += num_tokens

    def skip(self, first: int, end: int) -> None:
        """Skip samples `first` to `end` - 1 from now on."""
        self.skipped.append((first, end))

    def adopt(self, step: int) -> None:
        """Continue after a step of another site, with the samples and tokens of this one."""
        self.step = step

    def restart_data(self, *, is_other: bool) -> None:
        """Let the next state to load begin at sample 0 if the checkpoint was trained on other data."""
        self.restarts_data = is_other

    def state_dict(self) -> dict[str, Any]:
        """Return the fields that are saved."""
        return {name: value for name, value in asdict(self).items() if name != "restarts_data"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set all fields that a checkpoint has. The present samples to skip are kept: the checkpoint may lack them."""
        # Old checkpoints have only one count of tokens.
        found = {"tokens_consumed": state_dict["tokens"]} | state_dict
        if self.restarts_data:
            found |= {"samples": 0, "skipped": []}
        earlier = [(int(first), int(end)) for first, end in found["skipped"]]
        found["skipped"] = list(dict.fromkeys(earlier + self.skipped))
        vars(self).update({name: value for name, value in found.items() if name in self.state_dict()})


def is_due(every: int, step: int) -> bool:
    """Return whether an event with period `every` happens after a step. 0: never."""
    return every > 0 and step % every == 0


def is_evaluation_due(every: int, step: int, last_step: int) -> bool:
    """Return whether to evaluate after a step: every train.eval_every steps, and after the last one. 0: never."""
    return is_due(every, step) or (every > 0 and step == last_step)


def is_save_due(checkpoint: CheckpointConfig, step: int, *, is_last: bool, is_stopped: bool) -> bool:
    """Return whether to save after a step. A run that saves at all also saves when a signal stops it."""
    is_end = (is_last and checkpoint.at_end) or (is_stopped and checkpoint.saves)
    return is_end or is_due(checkpoint.every, step)
