"""Whether a step fits into the memory that a recipe gives a rank.

Rules on what is made again in the backward pass.

Rules on what leaves memory between the passes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moefold.config.schema import RECOMPUTE_PARTS, Config, ModelConfig, TrainConfig
from moefold.cost.auto_recompute import GIB, choose_recompute
from moefold.cost.recompute_parts import AUTO, containing_part, missing_reason
from moefold.cost.saved_tensors import KERNEL_PROFILES
from moefold.errors import ConfigError


def validate_memory(cfg: Config) -> Iterator[str]:
    """With train.recompute "auto" some choice fits; for a recipe that all other rules passed.

    Asked where the recipe says that it runs on the CPU: `check_memory_device` asks once the device is known.
    """
    if cfg.run.device == "cpu":
        try:
            check_memory_device(cfg, "cpu")
        except ConfigError as error:
            yield str(error)


def check_memory_device(cfg: Config, device_type: str) -> None:
    """With train.recompute "auto" there is a budget, and some choice fits; cheap, and before there are ranks.

    A budget that is a part of the GPUs' memory is known to them alone: `parallel/recompute.py` asks them.

    Raises:
        ConfigError: nobody said how much memory a rank on the CPU may use, or nothing fits.
    """
    if AUTO not in cfg.train.recompute:
        return
    if cfg.train.memory_budget_gib:
        choose_recompute(cfg, round(cfg.train.memory_budget_gib * GIB), KERNEL_PROFILES[device_type])
    elif device_type == "cpu":
        raise ConfigError(
            f"train.recompute=['{AUTO}'] needs train.memory_budget_gib, and the ranks would run on the CPU, whose "
            "memory they share; give what one rank may use"
        )


@dataclass(frozen=True)
class PartListKey:
    """A key that lists parts of the layers, and what its errors say."""

    key: str
    legal_parts: tuple[str, ...]
    unknown_message: str
    """Of a word that is none of them."""
    containment_message: str
    """What a part does to those inside it."""


RECOMPUTE_KEY = PartListKey(
    "train.recompute", (*RECOMPUTE_PARTS, AUTO), "is no part of a layer", "makes it again anyway"
)


def validate_recompute(cfg: Config) -> Iterator[str]:
    """Every part is one, stands there once, is in the model, and is not inside another."""
    parts = cfg.train.recompute
    if AUTO in parts:
        yield from _validate_auto_recompute(cfg)
        return
    if cfg.train.memory_budget_gib:
        yield (
            f"train.memory_budget_gib={cfg.train.memory_budget_gib:g} is read with train.recompute=['{AUTO}'] alone; "
            "leave it out"
        )
    yield from validate_parts(RECOMPUTE_KEY, parts, cfg.model)


def validate_parts(key: PartListKey, parts: Sequence[str], model: ModelConfig) -> Iterator[str]:
    """What is wrong with a list of parts."""
    for part in dict.fromkeys(parts):
        if part not in key.legal_parts:
            yield f"{key.key} has {part!r}, which {key.unknown_message}; choose from {', '.join(map(repr, key.legal_parts))}"
        elif parts.count(part) > 1:
            yield f"{key.key} names {part!r} {parts.count(part)} times; name it once"
        elif lack := missing_reason(part, model):
            yield f"{key.key} has {part!r}, and {lack}; leave it out"
        elif whole := containing_part(part, parts):
            yield f"{key.key} has {part!r} and {whole!r}, which {key.containment_message}; leave one of them out"


def _validate_auto_recompute(cfg: Config) -> Iterator[str]:
    """It stands by itself; a CPU has no memory of its own to go by; and something fits."""
    train = cfg.train
    if len(train.recompute) > 1:
        yield f"train.recompute={list(train.recompute)!r} names parts beside '{AUTO}', which chooses; leave one out"
    elif train.memory_budget_gib == 0 and cfg.run.device == "cpu":
        yield (
            f"train.recompute=['{AUTO}'] needs train.memory_budget_gib with run.device='cpu': ranks share the "
            "machine's memory; give what one rank may use"
        )
    if train.offload:
        yield (
            f"train.recompute=['{AUTO}'] goes by formulas, and how much of train.offload is away at the fullest moment "
            "depends on the disk; name parts, or leave train.offload out"
        )


RECOMPUTE_RULES = (validate_recompute,)


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
