"""Choice of the checkpoint that a run resumes from, and the checks that the run can continue from it."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, read_meta
from moefold.checkpoint.find_checkpoint import (
    checkpoint_folder,
    checkpoint_folder_key,
    named_checkpoints,
    step_of,
    wrong_name_reason,
)
from moefold.checkpoint.integrity import gather_errors, quick_validate, validate_files
from moefold.checkpoint.sample_order import SampleOrder, data_order_change, sample_order
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.run import RunConfig
from moefold.errors import ConfigError
from moefold.message_text import format_list, nearest_numbers
from moefold.remote_path import to_path
from moefold.topology.layout import divisors

if TYPE_CHECKING:
    from moefold.comm.groups import World


RESUME_HINT = "name another one with checkpoint.resume, or move it away"


def find_resume(cfg: Config) -> Path | None:
    """Return the checkpoint that a run resumes from, or None for a new run. It checks file sizes, not hashes.

    Raises:
        ConfigError: see `check_compatible`.
    """
    find = newest_intact_checkpoint if cfg.checkpoint.resume == "auto" else resume_candidate
    path = find(cfg.run, cfg.checkpoint)
    check_compatible(path, cfg)
    return path


@dataclass(frozen=True)
class Resume:
    """Checkpoint to resume from."""

    path: Path | None
    """The checkpoint, or None for a new run."""
    skipped: tuple[str, ...] = ()
    """Damaged newer checkpoints, each with the reason."""


def resolve_resume(cfg: Config, world: "World", fingerprints: Mapping[str, str] | None = None) -> Resume:
    """Return the newest intact checkpoint of the run, or the checkpoint that the recipe names, equal on every rank.

    It is collective over all ranks. Each rank verifies the hashes of a part of the files.

    Raises:
        ConfigError: the checks of `check_compatible` fail (first rank only), the named checkpoint is damaged, or all
            checkpoints are.
    """
    skipped: dict[str, str] = {}
    while True:
        # A network file system may differ between machines: use the first rank's listing.
        found = resume_candidate(cfg.run, cfg.checkpoint, skipped) if world.is_rank0 else None
        path: Path | None = world.broadcast_object(found)
        if path is None and skipped:
            folder = str(checkpoint_folder(cfg.run, cfg.checkpoint))
            raise ConfigError(
                f"no checkpoint in {folder!r} can be used: {'; '.join(skipped.values())}; "
                f"move them away to start a new run, or set another {checkpoint_folder_key(cfg.checkpoint)}"
            )
        if path is None:
            check_compatible(None, cfg)
            return Resume(None)
        if cfg.checkpoint.resume != "auto":
            read_meta(path)  # raises a specific error if the folder is not a checkpoint
        faults = gather_errors(validate_files(path, world, checks_hashes=cfg.checkpoint.verify), world)
        if not faults:
            if world.is_rank0:
                check_compatible(path, cfg, fingerprints)
            return Resume(path, tuple(skipped.values()))
        if cfg.checkpoint.resume != "auto":
            raise ConfigError(f"checkpoint {str(path)!r} is damaged: {format_list(faults)}; {RESUME_HINT}")
        skipped[str(path)] = f"{path.name}: {format_list(faults)}"


def newest_intact_checkpoint(run: RunConfig, checkpoint: CheckpointConfig) -> Path | None:
    """Return the newest checkpoint of the run whose file sizes are right."""
    damaged: list[str] = []
    while (path := resume_candidate(run, checkpoint, damaged)) is not None and quick_validate(path):
        damaged.append(str(path))
    return path


def resume_candidate(run: RunConfig, checkpoint: CheckpointConfig, ignored: Container[str] = ()) -> Path | None:
    """Return the checkpoint that the recipe names, or with "auto" the newest that is not ignored."""
    if checkpoint.resume == "never":
        return None
    if checkpoint.resume != "auto":
        return to_path(checkpoint.resume)
    checkpoints = named_checkpoints(checkpoint_folder(run, checkpoint))
    return next((path for path in reversed(checkpoints) if str(path) not in ignored), None)


def check_compatible(path: Path | None, cfg: Config, fingerprints: Mapping[str, str] | None = None) -> None:
    """Check that a run can continue from a checkpoint (None: start from scratch).

    Raises:
        ConfigError: it is of another model, of another step than its name, or ends no round of rl.updates. Or "auto"
            found one of other data, or a named one is of data that has lost files, and could continue without them. Or
            the folder already has checkpoints of later steps, which a later "auto" would take for checkpoints of this
            run.
    """
    wish = cfg.checkpoint.resume
    meta = None if path is None else read_meta(path)
    if path is not None and meta is not None:
        if meta.origin:
            raise ConfigError(
                f"checkpoint {str(path)!r} holds only weights ({meta.origin}), no run to resume; "
                f"set checkpoint.init_from={str(path)!r} and checkpoint.resume='auto'"
            )
        if reason := wrong_name_reason(path, meta.step):
            raise ConfigError(f"checkpoint {str(path)!r} {reason}")
        from moefold.checkpoint.model_differences import model_differences

        if change := model_differences(meta.model, cfg.model):
            raise ConfigError(
                f"checkpoint {str(path)!r} is of another model: {change}; give the recipe its sizes, or set another "
                "run.dir"
            )
        if meta.lora or cfg.lora.rank:
            from moefold.checkpoint.adapter_settings import adapters_unsupported_reason

            if reason := adapters_unsupported_reason(meta.lora, cfg.lora, str(path)):
                raise ConfigError(f"checkpoint {str(path)!r} {reason}")
        samples = _DataComparison(meta, cfg.data, sample_order(cfg), fingerprints)
        if wish == "auto" or samples.can_skip_corrupt:
            samples.check(path)
        _check_whole_rounds(path, meta, cfg.rl)
    if wish != "auto" and cfg.checkpoint.saves:
        step = meta.step if meta else 0
        checkpoints = named_checkpoints(checkpoint_folder(cfg.run, cfg.checkpoint))
        if later := [checkpoint for checkpoint in checkpoints if step_of(checkpoint) > step]:
            raise ConfigError(
                f"checkpoint.resume={wish!r} starts after step {step}, but there are checkpoints of later steps, such "
                f"as {str(later[-1])!r}, which would count as this run's; move them away, or set another "
                f"{checkpoint_folder_key(cfg.checkpoint)}"
            )


def _check_whole_rounds(path: Path, meta: CheckpointMeta, rl: RLConfig) -> None:
    """Check that rounds of rollouts, which start at multiples of rl.updates, end at the saved steps."""
    updates = rl.updates
    if rl.is_on and meta.step % updates:
        raise ConfigError(
            f"rl.updates={updates} must divide step {meta.step} of checkpoint {str(path)!r}: saves would come within "
            f"rounds of rollouts; choose updates {nearest_numbers(updates, divisors(meta.step))}, or start a new run "
            f"with checkpoint.init_from={str(path)!r} in another run.dir"
        )


@dataclass(frozen=True)
class _DataComparison:
    """Comparison of the samples of a checkpoint's run with the samples of a recipe."""

    meta: CheckpointMeta
    data: DataConfig
    order: SampleOrder
    fingerprints: Mapping[str, str] | None
    """Current fingerprints of the data files. None means compare only the settings."""

    def check(self, path: Path) -> None:
        """Raise ConfigError if the samples differ."""
        if change := self._change(drops_files=self.data.drops_files):
            way_out = (
                "set data.corrupt='skip' to continue without the broken or missing files, restore them, or start the "
                f"data from the beginning in another run.dir with checkpoint.init_from={str(path)!r}"
                if self.can_skip_corrupt
                else f"{self._remedy()}, set checkpoint.resume={str(path)!r} to continue with the new data "
                "from its start, or set another run.dir"
            )
            raise ConfigError(f"checkpoint {str(path)!r} took its samples from other data: {change}; {way_out}")

    @property
    def can_skip_corrupt(self) -> bool:
        """Return whether data.corrupt="skip" would remove all differences of the data."""
        return self.data.corrupt != "skip" and bool(self._change()) and not self._change(drops_files=True)

    def _change(self, *, drops_files: bool = False) -> str:
        return data_order_change(self.meta, self.order, self.fingerprints, drops_files=drops_files)

    def _remedy(self) -> str:
        """Return advice on how to restore the run's own samples."""
        if data_order_change(self.meta, self.order):
            return "give the recipe its settings"
        kind = self.data.kind
        rule = "" if kind == "tokens" else f" (with data.kind={kind!r} none can be left out later)"
        return f"restore the files as they were{rule}"
