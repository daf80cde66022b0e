"""Validation of a config before any rank starts, without torch.

`check_config` uses the settings only; `train/preflight.py` checks the machine that will run them. Each rule is a
function that yields one message per violation: key, value, rule and the nearest legal settings. Rules on one key are in
`ranges.py`, rules between keys in `model.py`, `moe.py`, `parallel.py`, `pipeline.py`, `train.py` and `memory.py`,
settings without effect in `unused.py`, and the memory of a step in `memory_need.py`.
"""

from moefold.config.schema import Config, ModelConfig
from moefold.errors import raise_all
from moefold.topology.layout import Layout, fold
from moefold.validate.memory import OFFLOAD_RULES, RECOMPUTE_RULES, validate_memory
from moefold.validate.model import MODEL_RULES
from moefold.validate.moe import ROUTING_RULES, TRAINING_ONLY_RULES
from moefold.validate.parallel import OVERLAP_RULES, PARALLEL_RULES, validate_collective_order
from moefold.validate.ranges import validate_ranges
from moefold.validate.train import DATA_RULES, FAULT_RULES, KERNEL_RULES, TRAIN_RULES

RULES = (
    *MODEL_RULES,
    *ROUTING_RULES,
    *PARALLEL_RULES,
    *TRAIN_RULES,
    *RECOMPUTE_RULES,
    *OFFLOAD_RULES,
    *OVERLAP_RULES,
    *DATA_RULES,
    *FAULT_RULES,
    *KERNEL_RULES,
)


def check_config(cfg: Config, *, is_training: bool = True) -> Layout:
    """Check every setting and combination, and return the rank layout.

    Args:
        cfg: the settings.
        is_training: whether the model is trained; inference also allows settings without a gradient.

    Raises:
        ConfigError: one line for each violation. Rules between keys run only if every key is in its range and the
            degrees fold.
    """
    raise_all(validate_ranges(cfg))
    p = cfg.parallel
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    raise_all(message for rule in (*RULES, *(TRAINING_ONLY_RULES if is_training else ())) for message in rule(cfg))
    raise_all(validate_collective_order(cfg))
    if is_training:
        raise_all(validate_memory(cfg))
    return layout


def check_model(model: ModelConfig) -> None:
    """Check the [model] section alone.

    Raises:
        ConfigError: one line for each violation.
    """
    cfg = Config(model=model)
    raise_all(validate_ranges(cfg))
    raise_all(message for rule in MODEL_RULES for message in rule(cfg))
