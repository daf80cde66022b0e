"""Test the choice between whole layers and modules: by time, once for a kind of layer and a size of rows."""

from moefold.ops.decode import MAX_ROUNDS, DecodeChoice


class Work:
    """Two candidates on a clock that only they move."""

    def __init__(self, whole_s: float, modules_s: float) -> None:
        self.now = 0.0
        self.seconds = {"whole": whole_s, "modules": modules_s}
        self.runs: list[str] = []

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def run(self, name: str) -> None:
        """Take the time of a candidate."""
        self.runs.append(name)
        self.now += self.seconds[name]

    def picks(self, choice: DecodeChoice, num_rows: int, kind: str = "moe") -> bool:
        """Ask the choice."""
        return choice.chooses_fused(kind, num_rows, lambda: self.run("whole"), lambda: self.run("modules"))


def test_the_faster_way_is_measured_once_for_a_power_of_two_of_rows():
    work = Work(1e-3, 2e-3)
    choice = DecodeChoice(work.clock)
    assert work.picks(choice, 4)
    assert work.runs == ["whole", "modules"] * (1 + MAX_ROUNDS)
    work.seconds["modules"] = 1e-4
    assert work.picks(choice, 7)
    assert len(work.runs) == 2 * (1 + MAX_ROUNDS)
    assert not work.picks(choice, 8)
    assert not work.picks(choice, 4, kind="dense")


def test_equal_times_choose_the_kernel_and_long_runs_are_measured_once():
    work = Work(1.0, 1.0)
    assert work.picks(DecodeChoice(work.clock), 1)
    assert work.runs == ["whole", "modules"] * 2
