"""Default learning rates by method of training, with their sources.

A rate for random weights damages a trained model: 3e-4 is usual in pretraining, 300 times the rate of preference
optimisation.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from moefold.config.base.part_registry import built_in_kinds, class_of, find_part, kinds
from moefold.config.groups.optimizer import MethodRates
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig

LR_KEY = "train.lr"
METHOD_KEYS = ("data.kind", "align.method", "rl.group_size", "lora.rank", "train.optimizer")
"""Keys that determine the method of training."""

PRETRAINING = MethodRates(
    "pretraining", 3e-4, 2e-4, "LLaMA 7B (arXiv:2302.13971); adapters: QLoRA 7B and 13B (arXiv:2305.14314)"
)
FINE_TUNING = MethodRates("supervised fine-tuning", 2e-5, 2e-4, "SFTConfig and the LoRA example of TRL 1.16")
PREFERENCES = MethodRates(
    "preference optimisation",
    1e-6,
    1e-5,
    "DPOConfig, KTOConfig and CPOConfig of TRL 1.16; adapters: ten times as much, as in its examples of DPO",
)
REINFORCEMENT = MethodRates(
    "reinforcement learning", 1e-6, 1e-5, "GRPOConfig of TRL 1.16, the actor of verl 0.9; adapters: ten times as much"
)


@cache
def all_methods() -> tuple[MethodRates, ...]:
    """Return the methods of training, then the built-in optimizers that need their own rates."""
    optional = (find_part("optimizer", kind).rates for kind in built_in_kinds("optimizer"))
    return PRETRAINING, FINE_TUNING, PREFERENCES, REINFORCEMENT, *(rates for rates in optional if rates is not None)


def method_of(settings: Mapping[str, Any]) -> MethodRates:
    """Return the method of training of a run.

    Args:
        settings: the values of METHOD_KEYS, by key.
    """
    rates: MethodRates | None = _rates_of_optimizer(settings["train.optimizer"])
    if rates is not None:
        return rates
    if settings["rl.group_size"]:
        return REINFORCEMENT
    if "preference" in (settings["data.kind"], class_of("alignment", settings["align.method"]).data_kind):
        return PREFERENCES
    return FINE_TUNING if settings["data.kind"] == "sft" else PRETRAINING


def _rates_of_optimizer(optimizer: Any) -> Any:
    """Return the rates that an optimizer needs in every method, or None if it has none, or is not installed."""
    if isinstance(optimizer, str):
        return find_part("optimizer", optimizer).rates if optimizer in kinds("optimizer") else None
    return getattr(optimizer, "rates", None)


def method_settings(
    train: TrainConfig, data: DataConfig, align: AlignConfig, lora: LoraConfig, rl: RLConfig
) -> dict[str, Any]:
    """Return the values of METHOD_KEYS of a recipe, by key."""
    values = (data.kind, align.method, rl.group_size, lora.rank, train.optimizer)
    return dict(zip(METHOD_KEYS, values, strict=True))


def describe_method(settings: Mapping[str, Any]) -> str:
    """Return the name of the method of training of a run, with its adapters."""
    return f"{method_of(settings).method}{' of adapters' if settings['lora.rank'] else ''}"


def default_learning_rate(settings: Mapping[str, Any]) -> float:
    """Return the learning rate of a recipe without train.lr, from its `method_settings`."""
    rates = method_of(settings)
    return rates.adapters if settings["lora.rank"] else rates.all_weights


def rates_text() -> str:
    """Return the defaults of all methods in one sentence."""
    words = [f"{rates.method} {rates.all_weights:g} (adapters {rates.adapters:g})" for rates in all_methods()]
    return f"Left out, it follows from the method: {', '.join(words)}."
