"""Everything that can be wrong with a well-typed config, found before any rank starts and without torch.

`check_config` knows the settings alone; `check_machine` looks at the machine that will run them. Each rule is a small
function that yields one message for each fault: key, value, rule and the nearest legal settings. The rules are in
`checks_range` (one key by itself), `checks_model`, `checks_routing`, `checks_parallel`, `checks_train`,
`checks_recompute`, `checks_offload` and `checks_overlap` (keys against each other), `checks_data`, `checks_faults`
(what a run does when it goes wrong), `checks_memory` (whether a step fits), `checks_kernels` (who computes),
`checks_effect` (settings that nothing would read) and `checks_machine` (files and packages).
"""

from moefold.config.checks_data import DATA_RULES
from moefold.config.checks_faults import FAULT_RULES
from moefold.config.checks_kernels import KERNEL_RULES
from moefold.config.checks_machine import MACHINE_RULES
from moefold.config.checks_memory import validate_memory
from moefold.config.checks_model import MODEL_RULES
from moefold.config.checks_offload import OFFLOAD_RULES, check_offload_folder
from moefold.config.checks_overlap import OVERLAP_RULES, validate_collective_order
from moefold.config.checks_parallel import PARALLEL_RULES
from moefold.config.checks_range import validate_ranges
from moefold.config.checks_recompute import RECOMPUTE_RULES
from moefold.config.checks_routing import ROUTING_RULES, TRAINING_ONLY_RULES
from moefold.config.checks_train import TRAIN_RULES
from moefold.config.faults import raise_all
from moefold.config.schema import Config, ModelConfig
from moefold.parallel.layout import Layout, fold

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


def check_machine(cfg: Config) -> None:
    """Refuse folders that cannot be written, data that cannot be read, absent checkpoints and missing packages.

    For a config that passed `check_config`, on the machine that will run it; creates nothing.

    Raises:
        ConfigError: the first fault found.
    """
    for rule in (*MACHINE_RULES, check_offload_folder):
        rule(cfg)
