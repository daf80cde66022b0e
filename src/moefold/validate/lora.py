"""Rules on low-rank adapters."""

from collections.abc import Iterator

from moefold.config.base.aliases import our_names
from moefold.config.chosen import chosen_in
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import adaptable_names, adapted_weights
from moefold.message_text import Problem, Setting


def validate_targets(model: ModelConfig, lora: LoraConfig) -> Iterator[Problem]:
    """Check that each target names matrices of the model, and that the rank is below their sizes."""
    if not lora.rank:
        return
    names = adaptable_names(model)
    if len(names) == 1:
        rule = f"has no matrix to adapt: all layers of model.layers={model.layers!r} are linear attention"
        yield Problem("lora.rank", lora.rank, rule, "choose lora.rank=0")
        return
    if not lora.targets:
        yield Problem("lora.targets", [], "adapts nothing", f"name {_listed(names)}, or set lora.rank=0")
    for target in lora.targets:
        if target not in names:
            matrix = our_names("matrices").get(target.rpartition(".")[2].lower(), "")
            rule = "names no matrix of this model that can be adapted"
            way_out = f"{f'moefold calls it {matrix}; ' if matrix else ''}choose {_listed(names)}"
            yield Problem("lora.targets", target, rule, way_out)
    if len(set(lora.targets)) < len(lora.targets):
        yield Problem("lora.targets", list(lora.targets), "names a target twice", "name another, or leave it out once")
    for name, weight in adapted_weights(model, lora).items():
        limit = min(weight.shape[-2:])
        if lora.rank > limit:
            rule = f"must be at most {limit}, the smaller side of {name} {list(weight.shape[-2:])}"
            yield Problem("lora.rank", lora.rank, rule, "choose a lower rank, or lora.targets without it")
            return


def _listed(names: dict[str, None]) -> str:
    """Return the legal names of targets, without matrices of single parts."""
    return ", ".join(name for name in names if "." not in name)


def _adapts_experts(model: ModelConfig, lora: LoraConfig) -> bool:
    return bool(lora.rank) and any(weight.is_expert for weight in adapted_weights(model, lora).values())


OTHER_TARGETS = "choose lora.targets without experts"


def validate_adapted_dispatch(model: ModelConfig, parallel: ParallelConfig, lora: LoraConfig) -> Iterator[Problem]:
    """Refuse dispatchers that send the weights of experts."""
    dispatcher = chosen_in(parallel, DispatcherPart)
    if dispatcher.moves_experts and _adapts_experts(model, lora):
        rule = "moves the weights of experts between ranks, and not their adapters"
        way_out = f"{OTHER_TARGETS}, or parallel.dispatcher='alltoall'"
        yield Problem("parallel.dispatcher", dispatcher.kind, rule, way_out)


def validate_adapter_training(
    run: RunConfig, model: ModelConfig, train: TrainConfig, lora: LoraConfig
) -> Iterator[Problem]:
    """Refuse settings that are incompatible with adapters."""
    if not lora.rank:
        return
    name = Setting("lora.rank", lora.rank)
    if train.quantizes_gemms and _adapts_experts(model, lora):
        rule = "has no kernels for experts with adapters"
        yield Problem("train.precision", train.precision, rule, f"{OTHER_TARGETS}, or train.precision='dtype'")
    if run.uses_cuda_graphs:
        yield Problem("run.cuda_graphs", run.cuda_graphs, "does not record adapters", "set run.cuda_graphs='none'")
    if model.trains_indexers_only(train):
        rule = f"trains only the indexers, and {name} only adapters"
        yield Problem("train.indexer_stage", "warmup", rule, "choose one of them")


LORA_RULES = (validate_targets, validate_adapted_dispatch, validate_adapter_training)
