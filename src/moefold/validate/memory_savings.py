"""Rules on recomputation, offloading and the memory budget."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import AUTO_RECOMPUTE, TrainConfig
from moefold.cost.recompute_parts import COMMON_PARTS, containing_part, missing_reason, recompute_parts
from moefold.cost.saved_tensors import KERNEL_PROFILES
from moefold.errors import ConfigError
from moefold.message_text import Problem
from moefold.units import GIB


def validate_memory(cfg: Config) -> Iterator[Problem]:
    """Check that a choice of train.recompute "auto" fits, for a recipe that passed all other rules.

    Only for run.device "cpu". With other values `check_memory_device` checks when the device is known.
    """
    if cfg.run.device == "cpu":
        try:
            check_memory_device(cfg, "cpu")
        except ConfigError as error:
            yield from error.problems


def check_memory_device(cfg: Config, device_type: str) -> None:
    """Check that train.recompute "auto" has a budget and that a choice fits, before ranks start.

    A budget as a fraction of GPU memory is known only on the GPUs: see `parallel/recompute.py`.

    Raises:
        ConfigError: the budget of a CPU rank is missing, or no choice fits.
    """
    if AUTO_RECOMPUTE not in cfg.train.recompute:
        return
    if cfg.train.memory_budget_gib:
        # numpy takes a tenth of a second to import, and other recipes do not need it.
        from moefold.cost.auto_recompute import choose_recompute

        choose_recompute(cfg, round(cfg.train.memory_budget_gib * GIB), KERNEL_PROFILES[device_type])
    elif device_type == "cpu":
        raise ConfigError(
            f"train.recompute=['{AUTO_RECOMPUTE}'] needs train.memory_budget_gib, and the ranks would run on the CPU, "
            "whose memory they share; give what one rank may use"
        )


@dataclass(frozen=True)
class PartListKey:
    """Recipe key that lists parts of the layers, with its error messages."""

    key: str
    legal_parts: Callable[[], tuple[str, ...]]
    unknown_message: str
    """Error for an unknown part."""
    containment_message: str
    """Text of the error on a part and the parts inside it."""


RECOMPUTE_KEY = PartListKey(
    "train.recompute", lambda: (*recompute_parts(), AUTO_RECOMPUTE), "is not a part of a layer", "recomputes it anyway"
)


def validate_recompute(run: RunConfig, model: ModelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that recomputed parts are known, unique, in the model, and not inside another."""
    parts = train.recompute
    if AUTO_RECOMPUTE in parts:
        yield from _validate_auto_recompute(run, train)
        return
    if train.memory_budget_gib:
        rule = f"is only read with train.recompute=['{AUTO_RECOMPUTE}']"
        yield Problem("train.memory_budget_gib", train.memory_budget_gib, rule, "leave it out")
    yield from validate_parts(RECOMPUTE_KEY, parts, model)


def validate_parts(key: PartListKey, parts: Sequence[str], model: ModelConfig) -> Iterator[Problem]:
    """Yield the errors of a list of parts."""
    for part in dict.fromkeys(parts):
        if part not in key.legal_parts():
            way_out = f"choose from {', '.join(map(repr, key.legal_parts()))}"
            yield Problem(key.key, None, f"has {part!r}, which {key.unknown_message}", way_out)
        elif parts.count(part) > 1:
            yield Problem(key.key, None, f"names {part!r} {parts.count(part)} times", "name it once")
        elif reason := missing_reason(part, model):
            yield Problem(key.key, None, f"has {part!r}, and {reason}", "leave it out")
        elif container := containing_part(part, parts):
            rule = f"has {part!r} and {container!r}, which {key.containment_message}"
            yield Problem(key.key, None, rule, "leave one of them out")


def _validate_auto_recompute(run: RunConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that "auto" is the only value of the list, and has a budget on a CPU and no activation offload."""
    if len(train.recompute) > 1:
        rule = f"names parts with '{AUTO_RECOMPUTE}', which chooses them"
        yield Problem("train.recompute", list(train.recompute), rule, "leave one out")
    elif train.memory_budget_gib == 0 and run.device == "cpu":
        rule = "needs train.memory_budget_gib with run.device='cpu': ranks share the machine's memory"
        yield Problem("train.recompute", [AUTO_RECOMPUTE], rule, "give what one rank may use")
    if train.offload:
        rule = "uses formulas, and how much of train.offload is offloaded at the peak depends on the disk"
        yield Problem("train.recompute", [AUTO_RECOMPUTE], rule, "name parts, or leave train.offload out")


# core_attention saves the heads that parts of single attentions compute.
OFFLOAD_KEY = PartListKey("train.offload", lambda: COMMON_PARTS, "saves nothing of its own", "includes it")


def validate_offload(model: ModelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that offloaded parts are known, unique, in the model, and not recomputed or inside another."""
    yield from validate_parts(OFFLOAD_KEY, train.offload, model)
    for part in train.offload:
        if container := containing_part(part, train.recompute):
            rule = f"has {part!r}, of which train.recompute=[{container!r}] saves nothing"
            way_out = f"leave it out, or offload {container!r}, whose input is saved"
            yield Problem("train.offload", None, rule, way_out)


def ssd_offload_keys(train: TrainConfig) -> list[str]:
    """Return the keys that offload to `train.offload_dir`."""
    activations = ["train.offload_to"] if train.offload and train.offload_to == "ssd" else []
    return activations + (["train.offload_optimizer"] if train.offload_optimizer == "ssd" else [])


def validate_offload_dir(train: TrainConfig) -> Iterator[Problem]:
    """Check that SSD offload has a folder."""
    if not train.offload_dir:
        for key in ssd_offload_keys(train):
            rule = "needs train.offload_dir, a folder on a local disk, such as '/scratch/moefold'"
            yield Problem(key, "ssd", rule)


def check_offload_device(train: TrainConfig, device_type: str) -> None:
    """Check that host offload has a device with its own memory. Raise ConfigError if the ranks run on the CPU."""
    ways_out = {"train.offload_to": "train.offload=[]", "train.offload_optimizer": "'none'"}
    to_host = {"train.offload_to": train.offload and train.offload_to == "host"}
    to_host["train.offload_optimizer"] = train.offload_optimizer == "host"
    for key, way_out in ways_out.items():
        if to_host[key] and device_type == "cpu":
            rule = (
                "needs CUDA GPUs, and the ranks would run on the CPU, whose memory is the host's: it would save nothing"
            )
            raise ConfigError(Problem(key, "host", rule, f"choose 'ssd' with train.offload_dir, or {way_out}"))


OFFLOAD_RULES = (validate_offload, validate_offload_dir)
