"""A clock that stands still until a test moves it."""

from moefold.host.running_clock import RunningClock


class MovedClock(RunningClock):
    """Clock of a process whose time passes by `move` only."""

    def __init__(self, now_s: float = 0.0) -> None:
        super().__init__()
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def move(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
