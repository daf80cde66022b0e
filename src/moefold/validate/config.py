"""Everything that can be wrong with a well-typed config, found before any rank starts and without torch.

`check_config` knows the settings alone; `check_machine` looks at the machine that will run them. Each rule is a small
function that yields one message for each fault: key, value, rule and the nearest legal settings. The rules are in
`checks_range` (one key by itself), `checks_model`, `checks_routing`, `checks_parallel`, `checks_train`,
`checks_recompute`, `checks_offload` and `checks_overlap` (keys against each other), `checks_data`, `checks_faults`
(what a run does when it goes wrong), `checks_memory` (whether a step fits), `checks_kernels` (who computes),
`checks_effect` (settings that nothing would read) and `checks_machine` (files and packages).
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
    """Refuse every setting and combination that cannot run, and return the folding of the ranks.

    Args:
        cfg: the settings.
        is_training: whether the model is to learn; one that only computes may do what no gradient goes through.

    Raises:
        ConfigError: one line for each fault. Rules between keys are tried only when every key is sound by itself and
            the degrees fold, because they compute with them.
    """
    raise_all(validate_ranges(cfg))
    p = cfg.parallel
    layout = fold(
        world_size=p.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order, moe_order=p.moe_order
    )
    raise_all(fault for rule in (*RULES, *(TRAINING_ONLY_RULES if is_training else ())) for fault in rule(cfg))
    raise_all(validate_collective_order(cfg))
    if is_training:
        raise_all(validate_memory(cfg))
    return layout


def check_model(model: ModelConfig) -> None:
    """Refuse a model that cannot be, whatever else a recipe says.

    Raises:
        ConfigError: one line for each fault.
    """
    cfg = Config(model=model)
    raise_all(validate_ranges(cfg))
    raise_all(fault for rule in MODEL_RULES for fault in rule(cfg))
