"""Segments of every pipeline stage for a micro-batch, as the cost model prices them. Torch-free."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from moefold.config.schema import Config
from moefold.cost.stages import plan_stages
from moefold.planner.cost_model.layer import CostItem
from moefold.planner.cost_model.step import TIME_PARTS, CostModel
from moefold.planner.mapping import ParallelMapping
from moefold.planner.model_spec import ModelSpec
from moefold.planner.simulator.simulate import Noise, Segment, Segments, StageSegments, StepTail, simulate, slot_rows
from moefold.planner.simulator.timeline import COMMUNICATION, COMPUTE, Timeline
from moefold.planner.stages import ModelChunk, split_stages


def simulate_mapping(
    cost_model: CostModel,
    mapping: ParallelMapping,
    noise: Noise | None = None,
    *,
    chunks: tuple[ModelChunk, ...] | None = None,
    schedule_csv: str = "",
) -> Timeline:
    """Simulate one step of a mapping: its schedule, and the end of the step as the cost model prices it.

    Args:
        cost_model: cost model of the model, the device and the workload.
        mapping: a mapping that fits them.
        noise: stragglers and jitter; None: an ideal machine.
        chunks: layers of the stages, in model order; None: split as in the cost model.
        schedule_csv: path of the file of a CSV schedule.

    Raises:
        ConfigError: the file is invalid, or the schedule does not support the mapping's overlap.
    """
    count = mapping.num_micro_batches(cost_model.workload.global_batch_size)
    parts = cost_model.step_time(mapping).parts
    return simulate(
        slot_rows(mapping.schedule, mapping.pp, mapping.vpp, count, path=schedule_csv, overlap=mapping.overlap),
        stage_segments(cost_model, mapping, chunks),
        overlap=mapping.overlap,
        noise=noise,
        tail=StepTail(gradients_s=parts["dp_comm"], optimizer_s=parts["optimizer"]),
    )


def chunks_from_config(cfg: Config, model_spec: ModelSpec) -> tuple[ModelChunk, ...]:
    """Return the chunks of a recipe, by its `parallel.pipeline_layout`.

    Raises:
        ConfigError: the schedule's CSV file cannot be read.
    """
    found = []
    for stage in plan_stages(cfg).stages:
        counts = list(model_spec.count_kinds(stage.parts.layers))
        # An MTP layer is like the last layer.
        counts[model_spec.layers[-1]] += stage.parts.num_mtp_layers
        found.append(ModelChunk(tuple(counts), stage.parts.has_embedding, stage.parts.has_loss))
    return tuple(found)


def stage_segments(
    cost_model: CostModel, mapping: ParallelMapping, chunks: tuple[ModelChunk, ...] | None = None
) -> tuple[StageSegments, ...]:
    """Return the segments of every stage, in model order, with no communication hidden yet.

    Without overlap, the layers of one kind are merged into one long layer: the times are the same, with fewer events.
    """
    plain = replace(mapping, overlap=False)
    layers = [_LayerSegments(cost_model, plain, kind) for kind in range(len(cost_model.model_spec.kinds))]
    head = cost_model.head_and_loss_s(mapping.tp, mapping.cp, mapping.mbs)
    if chunks is None:
        chunks = split_stages(cost_model.model_spec, mapping.pp * mapping.vpp, cost_model.workload.seq_len)
    # All stages send hidden states of the same size.
    send_s = cost_model.stage_times(plain)[0].p2p_s
    return tuple(_combine_stage(chunk, layers, head, send_s, keeps_layers_apart=mapping.overlap) for chunk in chunks)


class _LayerSegments:
    """Segments of one layer of a kind, with its launches and recomputation."""

    def __init__(self, cost_model: CostModel, mapping: ParallelMapping, kind: int) -> None:
        m = mapping
        mixer = cost_model.layer_costs.mixer(kind, m.tp, m.cp, m.mbs)
        feed_forward = cost_model.layer_costs.feed_forward(kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher)
        priced = cost_model.layer_time(kind, m)
        parts = dict(zip(TIME_PARTS, priced.parts, strict=True))
        forward_items = mixer.forward + feed_forward.forward
        backward_items = feed_forward.backward + mixer.backward
        launches = priced.forward_s - sum(work.seconds for work in forward_items)
        self.forward = (*map(_segment, forward_items), Segment("launch", launches))
        recompute = Segment("recompute", parts["recompute"])
        late_launches = Segment(
            "launch", priced.backward_s - parts["recompute"] - sum(work.seconds for work in backward_items)
        )
        self.backward = (recompute, *map(_segment, backward_items), late_launches)
        computed = sum(work.seconds for work in backward_items if not work.comm_axis)
        input_fraction = 1.0 - priced.wgrad_s / computed if computed else 1.0
        self.input_gradient = (
            recompute,
            *(_scale_segment(_segment(work), 1.0 if work.comm_axis else input_fraction) for work in backward_items),
            late_launches,
        )
        self.weight_gradient = (Segment("weight_gradients", priced.wgrad_s),)


def _combine_stage(
    chunk: ModelChunk,
    layers: Sequence[_LayerSegments],
    head: tuple[float, float],
    p2p_s: float,
    *,
    keeps_layers_apart: bool,
) -> StageSegments:
    def chain(pieces_of: Callable[[_LayerSegments], Segments], *, backwards: bool) -> Segments:
        order = list(zip(chunk.kind_counts, layers, strict=True))
        pieces: list[Segment] = []
        for count, layer in reversed(order) if backwards else order:
            if keeps_layers_apart:
                pieces += pieces_of(layer) * count
            elif count:
                pieces += [_scale_segment(piece, count) for piece in pieces_of(layer)]
        return tuple(piece for piece in pieces if piece.seconds > 0)

    ends = [(Segment("head", seconds),) if chunk.has_loss else () for seconds in head]
    return StageSegments(
        forward=chain(lambda layer: layer.forward, backwards=False) + ends[0],
        backward=ends[1] + chain(lambda layer: layer.backward, backwards=True),
        input_gradient=ends[1] + chain(lambda layer: layer.input_gradient, backwards=True),
        weight_gradient=chain(lambda layer: layer.weight_gradient, backwards=True),
        p2p_s=p2p_s,
    )


def _segment(item: CostItem) -> Segment:
    return Segment(item.part, item.seconds, COMMUNICATION if item.comm_axis else COMPUTE)


def _scale_segment(segment: Segment, factor: float) -> Segment:
    return replace(segment, seconds=segment.seconds * factor)
