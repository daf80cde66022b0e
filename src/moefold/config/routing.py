"""Combined meaning of several settings of routing."""

from moefold.config.chosen import chosen_in
from moefold.config.groups.router import BalanceScopePart
from moefold.config.groups.router import ChoicePart
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig


def aux_coefficient(moe: MoEConfig) -> float:
    """Return the coefficient of the load-balancing loss: `aux_loss` if the scores decide, else 0."""
    return moe.aux_loss if chosen_in(moe, ChoicePart).scores_decide else 0.0


def depends_on_data_parallel_size(model: ModelConfig, moe: MoEConfig) -> bool:
    """Return whether the load-balancing loss depends on dp."""
    accumulates = chosen_in(moe, BalanceScopePart).accumulates
    return accumulates and aux_coefficient(moe) > 0 and model.has_moe_layers
<<<<<<< /tmp/im_o


def mapping_notes(
    model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, before: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a note on each setting whose results depend on the mapping, where a checkpoint has another one.

    Args:
        before: the section [parallel] of the checkpoint; it may lack keys.
    """
    if not {"world_size", "tp", "cp", "pp"} <= before.keys():
        return
    dp = before["world_size"] // (before["tp"] * before["cp"] * before["pp"])
    if depends_on_data_parallel_size(model, moe) and dp != parallel.dp:
        yield (
            f"moe.aux_kind='global_batch' depends on dp, which was {dp} and is {parallel.dp}: the loss continues with "
            "another grouping of micro-batches; 'last_global_batch' does not depend on it"
        )
    scope = chosen_in(moe, DropScopePart)
    context = str(parallel.context)
    was = _sample_split(before["tp"], before["cp"], before.get("context", context))
    now = _sample_split(parallel.tp, parallel.cp, context)
    if moe.capacity_factor > 0 and model.has_moe_layers and not scope.is_shared and was != now:
        yield (
            f"moe.drop_scope={scope.kind!r} depends on the ranks that share a sample, which were {was} and are {now}: "
            "other tokens may be dropped from here on; 'full_sequence' does not depend on them"
        )


def _sample_split(tp: int, cp: int, context: str) -> str:
    """Return the settings that say which tokens of a sample a rank has."""
    return f"tp={tp} cp={cp} context={context!r}" if cp > 1 else f"tp={tp} cp=1"
||||||| /tmp/im_b


def mapping_notes(
    model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, before: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a note on each setting whose results depend on a degree that differs from the mapping of a checkpoint.

    Args:
        before: the section [parallel] of the checkpoint; it may lack keys.
    """
    if not {"world_size", "tp", "cp", "pp"} <= before.keys():
        return
    shards = before["tp"] * before["cp"]
    dp = before["world_size"] // (shards * before["pp"])
    if depends_on_data_parallel_size(model, moe) and dp != parallel.dp:
        yield (
            f"moe.aux_kind='global_batch' depends on dp, which was {dp} and is {parallel.dp}: the loss continues with "
            "another grouping of micro-batches; 'last_global_batch' does not depend on it"
        )
    scope = chosen_in(moe, DropScopePart)
    now = parallel.tp * parallel.cp
    if moe.capacity_factor > 0 and model.has_moe_layers and not scope.is_shared and shards != now:
        yield (
            f"moe.drop_scope={scope.kind!r} depends on tp*cp, which was {shards} and is {now}: other tokens are "
            "dropped from here on; 'full_sequence' does not depend on it"
        )
=======
>>>>>>> /tmp/im_t
