"""Targets of an exported folder of PEFT: modules, and weights that PEFT would take for experts' weights. Torch-free."""

from collections.abc import Collection

from moefold.convert.declared_keys import declared_keys
from moefold.convert.family import Family


def split_targets(
    modules: Collection[str], experts: Collection[str], others: Collection[str], family: Family
) -> tuple[list[str], list[str]]:
    """Return `target_modules` and `target_parameters` of adapter_config.json.

    For models that transformers 5 stacks the experts of, PEFT takes every target named like a matrix of an expert for
    the stacked parameters, in whatever part of the model it is (PEFT 0.21, `_convert_peft_config_moe`). Other modules
    of such a name are therefore targeted by their weights, which PEFT leaves alone. PEFT renames tensors like the
    tensors of a folder, but not targets: modules have both names, in a folder and in transformers' model.

    Args:
        modules: names of the modules with adapters, experts apart.
        experts: the same of single experts.
        others: names of the modules without adapters; of targets that have the last name of one, the whole is written.
        family: the model's family.
    """
    taken = declared_keys().stacked_by_peft.get(family.name, [])
    ambiguous = {_leaf(name) for name in others}
    weights = {name for name in modules if _leaf(name) in taken}
    named = {_leaf(name) for name in experts}
    for name in modules:
        if name not in weights:
            names = (name, family.name_in_transformers(name))
            named |= {*names} if _leaf(name) in ambiguous else {_leaf(each) for each in names}
    return sorted(named), sorted(f"{name}.weight" for name in weights)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
