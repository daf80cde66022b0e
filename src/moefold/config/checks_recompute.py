"""Rules on what is made again in the backward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moefold.config.checks_model import has_dense_layers, has_moe_layers
from moefold.config.schema import RECOMPUTE_PARTS, Config, ModelConfig

AUTO = "auto"
IMPLIED_BY = {
    "moe": ("expert_activation", "shared_experts"),
    "layer": tuple(p for p in RECOMPUTE_PARTS if p != "layer"),
}
"""What runs again with a part anyway."""


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


def containing_part(part: str, parts: Sequence[str]) -> str | None:
    """The one of `parts` that another one is inside of."""
    return next((whole for whole in parts if part in IMPLIED_BY.get(whole, ())), None)


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


def missing_reason(part: str, model: ModelConfig) -> str:
    """Why a model has no such part; empty if it has."""
    if part == "mla_up" and model.attention != "mla":
        return "model.attention is not 'mla'"
    if part == "dense_mlp" and not has_dense_layers(model):
        return "no layer of model.layer_pattern is D"
    if part in ("moe", "expert_activation", "shared_experts") and not has_moe_layers(model):
        return "no layer of model.layer_pattern is M"
    if part == "shared_experts" and model.shared_expert_ffn_hidden_size == 0:
        return "model.shared_expert_ffn_hidden_size=0 means none"
    return ""


RECOMPUTE_RULES = (validate_recompute,)
