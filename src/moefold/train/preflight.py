"""Rules on what a config needs of the machine: folders, data, checkpoints and optional packages."""

import tempfile
from pathlib import Path

from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.validate.memory import ssd_offload_keys
from moefold.validate.moe import check_dispatch_package
from moefold.validate.pipeline import check_schedule_file


def check_writable(cfg: Config) -> None:
    """The folders that the run writes to exist or can be made, and files can be made in them.

    Raises:
        ConfigError: a folder is a file, or cannot be written to.
    """
    probe_folder("run.dir", cfg.run.dir)
    if cfg.checkpoint.dir and cfg.checkpoint.saves:
        probe_folder("checkpoint.dir", cfg.checkpoint.dir)


def check_packages(cfg: Config) -> None:
    """The trackers and the dispatcher that were asked for are installed.

    Raises:
        ConfigError: a package is missing.
    """
    from moefold.metrics.tracker import check_trackers

    check_trackers(cfg.metrics)
    check_dispatch_package(cfg)


def check_data_source(cfg: Config) -> None:
    """The data can be read, holds enough tokens and fits the vocabulary.

    Raises:
        ConfigError: a file is missing or empty, or the vocabulary is smaller than the tokenizer's.
    """
    # numpy and the tokenizer are not needed to refuse a wrong key.
    from moefold.data import check_data

    check_data(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size)


def check_resume(cfg: Config) -> None:
    """A checkpoint that is named exists, and is one checkpoint.

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
    beside = [str(found) for found in _list_checkpoints(path.parent)[-5:]]
    hint = f"the checkpoints there are {', '.join(beside)}" if beside else "set 'auto' for the newest one, if any"
    raise ConfigError(f"{name} does not exist; {hint}")


def check_initial_weights(cfg: Config) -> None:
    """The weights that a new run starts with exist, and are of the recipe's model, or of one to upcycle to it.

    Raises:
        ConfigError: they cannot be used.
    """
    starts = {"checkpoint.init_from": cfg.checkpoint.init_from, "model.upcycle_from": cfg.model.upcycle_from}
    for key, path in starts.items():
        if path:
            from moefold.convert.init_from_check import init_from_unsupported_reason

            if fault := init_from_unsupported_reason(cfg, Path(path)):
                raise ConfigError(f"{key}={path!r}: {fault}")


def check_replay(cfg: Config) -> None:
    """The trace to replay exists, is of this model and batch, holds all steps, and is not the one being written.

    Raises:
        ConfigError: it cannot be replayed.
    """
    if not cfg.moe.replay:
        return
    # numpy is not needed to refuse a wrong key.
    from moefold.data.routing_trace import TRACE_FOLDER, RoutingTrace, trace_shape

    trace = RoutingTrace(Path(cfg.moe.replay), "moe.replay")
    if trace.folder.resolve() == (Path(cfg.run.dir) / TRACE_FOLDER).resolve():
        raise ConfigError(
            f"moe.replay={cfg.moe.replay!r} is the trace of this very run, which a new start removes; "
            "choose another run.dir"
        )
    trace.check_replay(trace_shape(cfg), cfg.run.steps)


def check_replay_content(cfg: Config) -> None:
    """Every choice of the trace to replay can be one; reads all of it, so one process of a machine does.

    For a trace that passed `check_replay`.

    Raises:
        ConfigError: a choice is no expert, or a token has an expert twice.
    """
    if not cfg.moe.replay:
        return
    from moefold.data.routing_trace import RoutingTrace

    RoutingTrace(Path(cfg.moe.replay), "moe.replay").check_content(cfg.run.steps)


def _list_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def probe_folder(key: str, path: str) -> None:
    """Try to make a file where a folder is or would be made; only a trial tells for sure, and it leaves nothing.

    Raises:
        ConfigError: it cannot be made.
    """
    folder = Path(path)
    name = f"{key}={path!r}"
    standing = folder.absolute()
    try:
        while not standing.exists():
            standing = standing.parent
        if not standing.is_dir():
            where = "is" if standing == folder.absolute() else f"lies below {str(standing)!r}, which is"
            raise ConfigError(f"{name} {where} a file; choose a folder")
        with tempfile.TemporaryFile(dir=standing):
            return
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror} in {str(standing)!r}; choose another") from None


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
    """Refuse folders that cannot be written, data that cannot be read, absent checkpoints and missing packages.

    For a config that passed `check_config`, on the machine that will run it; creates nothing.

    Raises:
        ConfigError: the first fault found.
    """
    for rule in (*MACHINE_RULES, check_offload_folder):
        rule(cfg)


def check_offload_folder(cfg: Config) -> None:
    """A file can be made in the folder for what is offloaded, which is made on its disk, if need be, but not above it.

    A folder of results may lie anywhere; one that names a disk and is mistyped would fill another disk.

    Raises:
        ConfigError: it cannot.
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
