"""Rules on what leaves memory between the passes."""

from collections.abc import Iterator
from pathlib import Path

from moefold.config.checks_machine import probe_folder
from moefold.config.checks_recompute import PartListKey, containing_part, validate_parts
from moefold.config.schema import RECOMPUTE_PARTS, Config, TrainConfig
from moefold.errors import ConfigError

OFFLOAD_PARTS = tuple(part for part in RECOMPUTE_PARTS if part != "mla_up")
"""What of a layer may be offloaded; the heads that mla_up makes are kept by core_attention."""
OFFLOAD_KEY = PartListKey("train.offload", OFFLOAD_PARTS, "keeps nothing of its own", "includes it")


def validate_offload(cfg: Config) -> Iterator[str]:
    """Every part is one, stands there once, is in the model, and keeps something that no other part gives away."""
    yield from validate_parts(OFFLOAD_KEY, cfg.train.offload, cfg.model)
    for part in cfg.train.offload:
        if whole := containing_part(part, cfg.train.recompute):
            yield (
                f"train.offload has {part!r}, of which train.recompute=[{whole!r}] keeps nothing; leave it out, or "
                f"offload {whole!r}, whose input is kept"
            )


def ssd_offload_keys(train: TrainConfig) -> list[str]:
    """The keys by which something goes to `train.offload_dir`."""
    activations = ["train.offload_to"] if train.offload and train.offload_to == "ssd" else []
    return activations + (["train.offload_optimizer"] if train.offload_optimizer == "ssd" else [])


def validate_offload_dir(cfg: Config) -> Iterator[str]:
    """What goes to a disk has a folder there."""
    if not cfg.train.offload_dir:
        for key in ssd_offload_keys(cfg.train):
            yield f"{key}='ssd' needs train.offload_dir, a folder on a local disk, such as '/scratch/moefold'"


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


def check_offload_device(cfg: Config, device_type: str) -> None:
    """The memory of the host is another one than that of the device.

    Raises:
        ConfigError: it is the same.
    """
    train = cfg.train
    ways_out = {"train.offload_to": "train.offload=[]", "train.offload_optimizer": "'none'"}
    to_host = {"train.offload_to": train.offload and train.offload_to == "host"}
    to_host["train.offload_optimizer"] = train.offload_optimizer == "host"
    for key, way_out in ways_out.items():
        if to_host[key] and device_type == "cpu":
            raise ConfigError(
                f"{key}='host' needs CUDA GPUs, and the ranks would run on the CPU, whose memory is the host's: it "
                f"would save nothing; choose 'ssd' with train.offload_dir, or {way_out}"
            )


OFFLOAD_RULES = (validate_offload, validate_offload_dir)
