"""Checks of a config against the machine: folders, data, checkpoints and optional packages."""

import tempfile
from pathlib import Path

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.validate.memory import ssd_offload_keys
from moefold.validate.moe import check_dispatch_package
from moefold.validate.pipeline import check_schedule_file


def check_writable(cfg: Config) -> None:
    """Check that the folders the run writes to exist or can be created, and that files can be created in them.

    Raises:
        ConfigError: a folder is a file, or cannot be written to.
    """
    probe_folder("run.dir", cfg.run.dir)
    if cfg.checkpoint.dir and cfg.checkpoint.saves:
        probe_folder("checkpoint.dir", cfg.checkpoint.dir)


def check_packages(cfg: Config) -> None:
    """Check that the packages of the chosen trackers and dispatcher are installed.

    Raises:
        ConfigError: a package is missing.
    """
    from moefold.metrics.tracker import check_trackers

    check_trackers(cfg.metrics)
    check_dispatch_package(cfg)


def check_data_source(cfg: Config) -> None:
    """Check that the data can be read, holds enough tokens and fits the vocabulary.

    Raises:
        ConfigError: a file is missing or empty, or the vocabulary is smaller than the tokenizer's.
    """
    # Lazy import: rejecting a wrong key must not need numpy and the tokenizer.
    from moefold.data import check_data

    check_data(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size)


def check_resume(cfg: Config) -> None:
    """Check that the checkpoint named in the recipe exists, and is a single checkpoint.

    Raises:
        ConfigError: it does not exist, is a file, or is a folder of several checkpoints.
    """
    if cfg.checkpoint.resume in ("auto", "never"):
        return
    path = Path(cfg.checkpoint.resume)
    name = f"checkpoint.resume={cfg.checkpoint.resume!r}"
    if path.is_dir():
        if inner := _list_checkpoints(path):
            raise ConfigError(f"{name} is a folder of checkpoints; name one, such as {str(inner[-1])!r}")
        return
    if path.exists():
        raise ConfigError(f"{name} is a file; a checkpoint is a folder, such as RUN_DIR/checkpoints/step-000100")
    siblings = [str(found) for found in _list_checkpoints(path.parent)[-5:]]
    hint = f"the checkpoints there are {', '.join(siblings)}" if siblings else "set 'auto' for the newest one, if any"
    raise ConfigError(f"{name} does not exist; {hint}")


def check_initial_weights(cfg: Config) -> None:
    """Check that the initial weights exist and fit the recipe's model, or can be upcycled to it.

    Raises:
        ConfigError: they cannot be used.
    """
    initial_weights = {"checkpoint.init_from": cfg.checkpoint.init_from, "model.upcycle_from": cfg.model.upcycle_from}
    for key, path in initial_weights.items():
        if path:
            from moefold.convert.init_from_check import init_from_unsupported_reason

            if reason := init_from_unsupported_reason(cfg, Path(path)):
                raise ConfigError(f"{key}={path!r}: {reason}")


def check_replay(cfg: Config) -> None:
    """Check that the trace to replay exists, fits model, batch and steps, and is not the trace to be written.

    Raises:
        ConfigError: it cannot be replayed.
    """
    if not cfg.moe.replay:
        return
    # Lazy import: rejecting a wrong key must not need numpy.
    from moefold.data.routing_trace import TRACE_FOLDER, RoutingTrace, trace_shape

    trace = RoutingTrace(Path(cfg.moe.replay), "moe.replay")
    if trace.folder.resolve() == (Path(cfg.run.dir) / TRACE_FOLDER).resolve():
        raise ConfigError(
            f"moe.replay={cfg.moe.replay!r} is the trace of this very run, which a new start removes; "
            "choose another run.dir"
        )
    trace.check_replay(trace_shape(cfg), cfg.run.steps)


def check_replay_content(cfg: Config) -> None:
    """Check every expert choice of the trace to replay; reads the whole trace, so call it on one process per host.

    The trace must have passed `check_replay`.

    Raises:
        ConfigError: an expert id is out of range, or a token has an expert twice.
    """
    if not cfg.moe.replay:
        return
    from moefold.data.routing_trace import RoutingTrace

    RoutingTrace(Path(cfg.moe.replay), "moe.replay").check_content(cfg.run.steps)


def _list_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def probe_folder(key: str, path: str) -> None:
    """Try to create a temporary file in a folder, or in its closest existing parent; leaves nothing there.

    Raises:
        ConfigError: it cannot be created.
    """
    folder = Path(path)
    name = f"{key}={path!r}"
    existing = folder.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            where = "is" if existing == folder.absolute() else f"lies below {str(existing)!r}, which is"
            raise ConfigError(f"{name} {where} a file; choose a folder")
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror} in {str(existing)!r}; choose another") from None


MACHINE_RULES = (
    check_writable,
    check_schedule_file,
    check_resume,
    check_initial_weights,
    check_packages,
    check_replay,
    check_data_source,
)


def check_machine(cfg: Config) -> None:
    """Check folders, data, checkpoints and packages on the machine that will run the config; creates nothing.

    The config must have passed `check_config`.

    Raises:
        ConfigError: the first fault found.
    """
    for rule in (*MACHINE_RULES, check_offload_folder):
        rule(cfg)


def check_offload_folder(cfg: Config) -> None:
    """Check that files can be created in the offload folder, whose parent must exist.

    Run folders may be created anywhere, but a mistyped offload folder would fill another disk.

    Raises:
        ConfigError: they cannot be created.
    """
    if not ssd_offload_keys(cfg.train):
        return
    probe_folder("train.offload_dir", cfg.train.offload_dir)
    above = Path(cfg.train.offload_dir).absolute().parent
    if not above.exists():
        raise ConfigError(
            f"train.offload_dir={cfg.train.offload_dir!r} lies in {str(above)!r}, which does not exist; name a folder "
            f"of a local disk, or make {str(above)!r} if it is meant"
        )
