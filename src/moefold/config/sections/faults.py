"""The [faults] section: handling of failures, described in docs/failures.md."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.base.field import POSITIVE, Bound, MaxMagnitude, ReadIf, at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultsConfig:
    """Handling of failures during a run ([failures.md](failures.md), [silent-faults.md](silent-faults.md))."""

    timeout_s: Annotated[float, at_least(1), MaxMagnitude(10**8)] = 600.0
    """End the run and name the late rank when a rank makes no progress for this many seconds. Must exceed the longest
    single operation of a rank: joining, loading, the first step with its compilation, saving."""
    check_dispatch: bool = False
    """Before each dispatch and combine, compare step, layer, shape and row counts across the ranks, so that a mismatch
    is reported instead of hanging. This costs one all-gather each."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Handling of a NaN or infinite loss or gradient norm, which never reaches the weights. stop: end the run and
    report the location. skip: skip the step. rollback: load the newest checkpoint and continue without that batch."""
    spike: Literal["ignore", "log", "skip", "rollback", "stop"] = "log"
    """Handling of a loss or gradient norm far above the last steps' values, as in `nonfinite`. log: report it and
    continue."""
    spike_factor: Annotated[float, POSITIVE, ReadIf("faults.spike!=ignore")] = 10.0
    """Spike threshold: standard deviations above the median of the last steps. The deviation is estimated from the
    median absolute deviation (Hampel identifier), and is at least 1 % of the median."""
    spike_window: Annotated[int, at_least(3), MaxMagnitude(10**6), ReadIf("faults.spike!=ignore")] = 50
    """Number of last steps that a spike is compared with. Before there are as many, no spike is detected."""
    max_skips: Annotated[int, at_least(1), ReadIf("faults.nonfinite=skip faults.spike=skip")] = 10
    """Maximum number of consecutive skipped steps. The next one stops the run."""
    max_rollbacks: Annotated[int, at_least(1), ReadIf("faults.nonfinite=rollback faults.spike=rollback")] = 3
    """Maximum number of rollbacks of a run. The next one stops it."""
    straggler_factor: Annotated[
        float,
        Bound("must be above 1, or 0 (off)", lambda factor: factor > 1 or factor == 0),
        ReadIf("parallel.world_size"),
    ] = 1.3
    """Report a rank whose own work takes more than this factor times the median of its pipeline stage in 12 of 16
    steps. 0 turns off the report and the timing of ranks in metrics.jsonl."""
    replica_check_every: Annotated[int, at_least(0, "0: never"), ReadIf("parallel.world_size")] = 0
    """Compare replicas every this many steps: the bytes that should be equal on several ranks, and the distance between
    losses and gradients of data-parallel replicas. 0: never. The bytes are also compared before each save. A difference
    of bytes ends the run and names the rank."""
    on_loss: Literal["stop", "regroup"] = "stop"
    """Handling of a lost rank, whose process was killed or whose machine is gone. stop: end the job. The same command
    resumes. regroup: the other ranks continue in their processes, with fewer data-parallel replicas and the same global
    batch, from memory or the last checkpoint ([elastic.md](elastic.md#continuing-without-a-restart))."""
    min_ranks: Annotated[int, at_least(1), ReadIf("faults.on_loss=regroup")] = 1
    """Minimum number of ranks after a regroup. With fewer, the job ends."""

    @property
    def regroups(self) -> bool:
        """Return whether the job continues without a lost rank."""
        return self.on_loss == "regroup"

    @property
    def actions(self) -> tuple[str, str]:
        """Actions for non-finite values and for spikes."""
        return self.nonfinite, self.spike
