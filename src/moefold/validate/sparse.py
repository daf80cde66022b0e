"""Rules on sparse attention."""

from collections.abc import Iterator

from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.model import ModelConfig
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig
from moefold.message_text import Problem, Setting
from moefold.topology.pipeline_layout import even_stages, parse_layout
from moefold.topology.selection_groups import selection_sources, shares_selections, stage_starts


def validate_sparse_attention(model: ModelConfig) -> Iterator[Problem]:
    """Check the sizes of the indexer, and refuse settings without a selection."""
    indexer = next((layer.attention.selector for layer in model.decoder_layers if layer.attention.selector), None)
    if indexer is None:
        return
    top_k = indexer.top_k
    rotated = model.rope_settings.rotary_dim
    if model.has_rope and indexer.head_dim < rotated:
        rule = f"must be at least {rotated}, the dims of a head that have RoPE"
        yield Problem("model.attention.indexer.head_dim", indexer.head_dim, rule, f"choose {rotated} or more")
    window = max(layer.window for layer in model.decoder_layers)
    if 0 < window <= top_k:
        rule = f"selects all keys of model.sliding_window={window}"
        way_out = f"choose less than {window}, or model.layers without 'window'"
        yield Problem("model.attention.indexer.top_k", top_k, rule, way_out)


def validate_shared_selections(model: ModelConfig) -> Iterator[Problem]:
    """Check that a layer with a shared selection follows a layer with an indexer and the same window."""
    name = Setting("model.layers", model.layers)
    softmax = [layer.attention for layer in model.decoder_layers if not layer.attention.is_recurrent]
    if any(words.selection == "shared" for words in model.layer_words) and not model.attention.selector:
        rule = "has layers 'shared', and model.attention.indexer=none selects no keys"
        yield name.problem(rule, "leave 'shared' out")
    if softmax and softmax[0].shares_selection:
        rule = "begins with a layer 'shared', which attends to the keys that a layer before it selects"
        yield name.problem(rule, "let the first layer of softmax attention have its own")
        return
    for number, source in enumerate(selection_sources(model)[: model.num_layers]):
        if model.decoder_layers[number].window != model.decoder_layers[source].window:
            rule = (
                f"lets layer {number} attend to the keys that layer {source} selects, and model.sliding_window "
                "holds for one of them"
            )
            yield name.problem(rule, f"let layer {number} have its own")
            return


def validate_selection_stages(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Check that layers with the same selection are on one pipeline stage."""
    return selection_stage_errors(model, parallel, parallel.pipeline_layout)


def selection_stage_errors(model: ModelConfig, parallel: ParallelConfig, pipeline_layout: str) -> Iterator[Problem]:
    """Yield the errors of `validate_selection_stages` for another layout."""
    is_shared = shares_selections(model)
    starts = stage_starts(model)
    try:
        stages = parse_layout(pipeline_layout) if pipeline_layout not in ("", "auto") else ()
    except ValueError:
        return
    if not is_shared:
        return
    num_stages = parallel.pp * parallel.virtual_stages
    if num_stages == 1:
        return
    num_groups = len(starts) - 1
    name = Setting("model.layers", model.layers)
    if num_stages > num_groups + 2:
        rule = (
            f"has {num_groups} groups of layers that share a selection of keys, each on one pipeline stage, and "
            f"{Setting('parallel.pp')}*parallel.virtual_stages={num_stages} stages are more than these, the "
            "embedding and the loss"
        )
        yield name.problem(rule, f"choose {num_groups + 2} or less")
        return
    if pipeline_layout == "auto":
        return
    for number, stage in enumerate(stages or even_stages(model.num_layers, model.mtp_layers, num_stages)):
        first = stage.layers.start
        if stage.layers and first not in starts:
            yield name.problem(
                f"lets layer {first} attend to the keys that layer {selection_sources(model)[first]} selects, and "
                f"pipeline stage {number} of {num_stages} begins with layer {first}",
                "choose parallel.pipeline_layout='auto', or stages that begin with one of the layers "
                f"{', '.join(map(str, starts[:-1]))}",
            )
            return


def validate_selection_length(model: ModelConfig, train: TrainConfig) -> Iterator[Problem]:
    """Check that a sample of training has at least the tokens that a query selects."""
    top_k = model.selected_keys
    if top_k > train.seq_len:
        rule = f"must be at most train.seq_len={train.seq_len}, as no token sees more keys"
        way_out = f"choose {train.seq_len} or less, or model.attention.indexer=none for dense attention"
        yield Problem("model.attention.indexer.top_k", top_k, rule, way_out)


def validate_indexer_warmup(
    model: ModelConfig, train: TrainConfig, align: AlignConfig, rl: RLConfig
) -> Iterator[Problem]:
    """Check that the warm-up stage has the loss of the indexers, and no other loss."""
    if not train.trains_indexers_only(model):
        return
    name = Setting("train.indexer_stage", "warmup")
    if not train.indexer_loss:
        yield name.problem("trains only the indexers, and train.indexer_loss=0.0 trains nothing", "choose 1.0")
    if not model.has_softmax_attention:
        rule = f"trains only the indexers, and linear attention, all layers of model.layers={model.layers!r}, has none"
        yield name.problem(rule, "name 'full' in it, or leave indexer_stage out")
    if rl.is_on or chosen_in(align, AlignmentPart).changes_training:
        trainer = f"rl.group_size={rl.group_size}" if rl.is_on else f"align.method='{align.method}'"
        rule = f"freezes the weights that {trainer} would train"
        yield name.problem(rule, f"choose 'sparse', or leave {trainer} out")


SPARSE_ATTENTION_RULES = (validate_sparse_attention, validate_shared_selections)
SPARSE_TRAINING_RULES = (validate_selection_length, validate_indexer_warmup)
"""Rules only for training, because inference may use longer and shorter texts."""
