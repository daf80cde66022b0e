"""Targets of an exported folder of PEFT: modules, and weights that PEFT would take for those of experts. Torch-free."""

from collections.abc import Mapping, Sequence

from moefold.config.lora import LoraConfig
from moefold.config.model import ModelConfig
from moefold.convert.declared_keys import declared_keys
from moefold.cost.adapter_spec import adapted_weights
from moefold.cost.param_spec import ParamSpec


def split_targets(modules: Sequence[str], experts: Sequence[str], family: str) -> tuple[list[str], list[str]]:
    """Return `target_modules` and `target_parameters` of adapter_config.json.

    For models that transformers 5 stacks the experts of, PEFT takes every target named like a matrix of an expert for
    the stacked parameters, in whatever part of the model it is (PEFT 0.21, `_convert_peft_config_moe`). Other modules
    of such a name are therefore targeted by their weights, which PEFT leaves alone.

    Args:
        modules: names of the modules with adapters, experts apart.
        experts: the same of single experts.
        family: the model's family.
    """
    taken = declared_keys().stacked_by_peft.get(family, [])
    leaf = {name: name.rpartition(".")[2] for name in (*modules, *experts)}
    weights = sorted(f"{name}.weight" for name in modules if leaf[name] in taken)
    return sorted({leaf[name] for name in (*modules, *experts) if f"{name}.weight" not in weights}), weights


def peft_note(model: ModelConfig, lora: LoraConfig, family: str) -> str:
    """Return why PEFT would not load exported adapters of experts; empty if it would."""
    adapted = adapted_weights(model, lora)
    matrices = _matrices_of_experts(adapted)
    if not matrices:
        return ""
    way_out = (
        'export with --merge for such programs, or train lora.targets without experts, such as ["attention"]; moefold '
        "reads the folder"
    )
    if family not in declared_keys().stacked_by_peft:
        return f"PEFT has no place for adapters of single experts of {family} and would leave them out: {way_out}"
    if len(matrices & {"w_gate", "w_up"}) == 1:
        return (
            f"PEFT refuses adapters of {'w_gate' if 'w_gate' in matrices else 'w_up'} of experts without those of the "
            f"other matrix, as transformers stacks both: {way_out}"
        )
    return ""


def _matrices_of_experts(adapted: Mapping[str, ParamSpec]) -> set[str]:
    return {name.rpartition(".")[2] for name, weight in adapted.items() if weight.is_expert}
