"""What every stage of a mapping does with a micro-batch, piece by piece, as the cost model prices it. Torch-free."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from moefold.config.schema import Config
from moefold.parallel.stage_plan import plan_stages
from moefold.plan.layer_time import Work
from moefold.plan.mapping import Mapping
from moefold.plan.shape import ModelShape
from moefold.plan.simulate import Closing, Disturbance, Piece, Pieces, StageWork, simulate
from moefold.plan.slot import slot_rows
from moefold.plan.stage_split import Chunk, split_stages
from moefold.plan.step_time import PARTS, Pricer
from moefold.plan.timeline import COMMUNICATION, COMPUTE, Timeline


def simulate_mapping(
    pricer: Pricer,
    mapping: Mapping,
    disturbance: Disturbance | None = None,
    *,
    chunks: tuple[Chunk, ...] | None = None,
    schedule_csv: str = "",
) -> Timeline:
    """Play out one step of a mapping: its schedule, and the end of the step as the cost model prices it.

    Args:
        pricer: of the model, the device and the workload.
        mapping: one that fits them.
        disturbance: stragglers and jitter; None: an ideal machine.
        chunks: what the stages hold, in the order of the model; None: as the cost model cuts it.
        schedule_csv: path of the file of a schedule from one.

    Raises:
        ConfigError: the file is wrong, or the schedule cannot overlap as the mapping has it.
    """
    count = mapping.num_micro_batches(pricer.workload.global_batch_size)
    parts = pricer.step_time(mapping).parts
    return simulate(
        slot_rows(mapping.schedule, mapping.pp, mapping.vpp, count, path=schedule_csv, overlap=mapping.overlap),
        stage_works(pricer, mapping, chunks),
        overlap=mapping.overlap,
        disturbance=disturbance,
        closing=Closing(gradients_s=parts["dp_comm"], optimizer_s=parts["optimizer"]),
    )


def stages_of(cfg: Config, shape: ModelShape) -> tuple[Chunk, ...]:
    """What the stages of a recipe hold, by its `parallel.pipeline_layout`.

    Raises:
        ConfigError: the schedule is read from a file, which cannot be read.
    """
    found = []
    for stage in plan_stages(cfg).stages:
        counts = list(shape.counts(stage.parts.layers))
        # A layer of multi-token prediction is one like the last.
        counts[shape.layers[-1]] += stage.parts.num_further
        found.append(Chunk(tuple(counts), stage.parts.has_embedding, stage.parts.has_loss))
    return tuple(found)


def stage_works(pricer: Pricer, mapping: Mapping, chunks: tuple[Chunk, ...] | None = None) -> tuple[StageWork, ...]:
    """The work of every stage, in the order of the model, with no communication hidden yet.

    Where nothing overlaps, the layers of one kind are played as one long layer: the times are the same, and the events
    stay few.
    """
    plain = replace(mapping, overlap=False)
    layers = [_Layer(pricer, plain, kind) for kind in range(len(pricer.shape.kinds))]
    head = pricer.ends(mapping.tp, mapping.cp, mapping.mbs)
    if chunks is None:
        chunks = split_stages(pricer.shape, mapping.pp * mapping.vpp, pricer.workload.seq_len)
    # All stages hand on hidden states of one size.
    send_s = pricer.stage_times(plain)[0].p2p_s
    return tuple(_stage(chunk, layers, head, send_s, layers_apart=mapping.overlap) for chunk in chunks)


class _Layer:
    """The chains of one layer of a kind, with its launches and what it computes again."""

    def __init__(self, pricer: Pricer, mapping: Mapping, kind: int) -> None:
        m = mapping
        mixer = pricer.times.mixer(kind, m.tp, m.cp, m.mbs)
        feed_forward = pricer.times.feed_forward(kind, m.tp, m.cp, m.mbs, m.ep, m.etp, m.dispatcher)
        priced = pricer.layer(kind, m)
        parts = dict(zip(PARTS, priced.parts, strict=True))
        ahead, behind = mixer.forward + feed_forward.forward, feed_forward.backward + mixer.backward
        launches = priced.forward_s - sum(work.seconds for work in ahead)
        self.forward = (*map(_piece, ahead), Piece("launch", launches))
        again = Piece("recompute", parts["recompute"])
        late = Piece("launch", priced.backward_s - parts["recompute"] - sum(work.seconds for work in behind))
        self.backward = (again, *map(_piece, behind), late)
        computed = sum(work.seconds for work in behind if not work.link)
        early = 1.0 - priced.weight_s / computed if computed else 1.0
        self.inputs = (again, *(_scaled(_piece(work), 1.0 if work.link else early) for work in behind), late)
        self.weights = (Piece("weight_gradients", priced.weight_s),)


def _stage(
    chunk: Chunk, layers: Sequence[_Layer], head: tuple[float, float], send_s: float, *, layers_apart: bool
) -> StageWork:
    def chain(pieces_of: Callable[[_Layer], Pieces], *, backwards: bool) -> Pieces:
        order = list(zip(chunk.counts, layers, strict=True))
        pieces: list[Piece] = []
        for count, layer in reversed(order) if backwards else order:
            if layers_apart:
                pieces += pieces_of(layer) * count
            elif count:
                pieces += [_scaled(piece, count) for piece in pieces_of(layer)]
        return tuple(piece for piece in pieces if piece.seconds > 0)

    ends = [(Piece("head", seconds),) if chunk.has_loss else () for seconds in head]
    return StageWork(
        forward=chain(lambda layer: layer.forward, backwards=False) + ends[0],
        backward=ends[1] + chain(lambda layer: layer.backward, backwards=True),
        input_gradient=ends[1] + chain(lambda layer: layer.inputs, backwards=True),
        weight_gradient=chain(lambda layer: layer.weights, backwards=True),
        send_s=send_s,
    )


def _piece(work: Work) -> Piece:
    return Piece(work.part, work.seconds, COMMUNICATION if work.link else COMPUTE)


def _scaled(piece: Piece, times: float) -> Piece:
    return replace(piece, seconds=piece.seconds * times)
