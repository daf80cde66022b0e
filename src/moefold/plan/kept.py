"""Bytes of activations by what is counted of them (`moments.Columns`), by the runtime's formula. Torch-free."""

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import Config, TrainConfig
from moefold.metrics.activation_memory import ActivationFormula
from moefold.metrics.expert_memory import ExpertMemory
from moefold.metrics.kept_parts import CPU, CUDA, MEGATRON, Kernels, Parts
from moefold.metrics.pass_memory import moments_of_layer, pauses_again
from moefold.metrics.pass_turns import MOMENTS, WITH_SPLITS
from moefold.plan.columns import Columns
from moefold.plan.held_states import letter_of
from moefold.plan.mapping import Mapping
from moefold.plan.shape import BYTES, FeedForward, ModelShape
from moefold.plan.workload import Workload

KEPT_PARTS = ("activations", "dispatch", "logits", "pipeline")
GROUP_OF = {"dispatch buffers": "dispatch", "logits": "logits", "pipeline": "pipeline"}
"""Parts of the ledger that are shown by themselves; the others are activations."""

FOREIGN = "foreign"
"""What a layer keeps that the runtime does not know."""

RUNS_IN_TRANSIT = 2
"""Runs of an offloaded part that are in memory at most: one on its way out or back, and the next (docs/memory.md)."""

AWAY = {
    "norms": ("norms", "residual stream"),
    "core_attention": ("core attention", "attention"),
    "dense_mlp": ("dense MLP",),
    "expert_activation": ("experts", "dispatch buffers"),
    "shared_experts": ("shared experts",),
    "moe": ("router", "dispatch buffers", "experts", "shared experts"),
}
"""What of a layer leaves memory with each part of train.offload, in the ledger's parts; `layer`: everything."""

LABELS = (*dict.fromkeys(label for labels in AWAY.values() for label in labels), FOREIGN)

PARTS_OF_OTHERS = {"D": frozenset({"moe", "expert_activation", "shared_experts"}), "M": frozenset({"dense_mlp"})}
"""Parts that may run again and that a layer of a kind has not."""

Prices = NDArray[np.float64]
Saver = tuple[tuple[str, ...], tuple[str, ...]]
"""Parts that run again, and parts whose activations leave memory."""


class Savers(tuple[Saver, ...]):
    """Thousands of savers that a search asks for again and again: what they share is found once, their hash too."""

    @cached_property
    def recomputes(self) -> tuple[tuple[str, ...], ...]:
        """The sets of parts that run again, each once: far fewer than savers."""
        return tuple(dict.fromkeys(recompute for recompute, _ in self))

    @cached_property
    def which_recompute(self) -> NDArray[np.intp]:
        """Number of each one's set among `recomputes`, [savers]."""
        number = {recompute: i for i, recompute in enumerate(self.recomputes)}
        return np.array([number[recompute] for recompute, _ in self], dtype=np.intp)

    @cached_property
    def pauses(self) -> NDArray[np.intp]:
        """1 for each one with which exchanges of experts run again, else 0, [savers]."""
        return np.array([pauses_again(recompute) for recompute in self.recomputes])[self.which_recompute].astype(
            np.intp
        )

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class KeptActivations:
    """What the layers of one model keep, under any mapping.

    Args:
        shape: the model.
        workload: the batch and the routing, whose imbalance the dispatch buffers follow.
        cfg: the recipe; of its mapping nothing counts.
        columns: for the kinds of the model.
        on_cpu: whether the kernels are those of a CPU.
    """

    def __init__(
        self, shape: ModelShape, workload: Workload, cfg: Config, columns: Columns, *, on_cpu: bool = False
    ) -> None:
        self.shape, self.workload, self.columns = shape, workload, columns
        moe = replace(cfg.moe, capacity_factor=workload.capacity_factor)
        self.cfg = replace(cfg, moe=moe, train=replace(cfg.train, seq_len=workload.seq_len))
        self.kernels = MEGATRON if workload.is_megatron else CPU if on_cpu else CUDA
        self._bases: dict[tuple[Any, ...], _Base] = {}
        self._layers: dict[tuple[Any, ...], tuple[Parts, dict[int, Prices]]] = {}
        self._matrices: dict[tuple[Any, ...], tuple[Prices, Prices]] = {}
        self._gathers_for_less: dict[tuple[Any, ...], bool] = {}

    def prices(self, m: Mapping) -> Prices:
        """Bytes of one of each column under a mapping, [parts, columns]."""
        recompute, offload = saver_of(m)
        base, scale = self._base(m, recompute), m.mbs / m.cp
        table = base.table * scale
        if offload:
            away = _mask((offload,)) @ base.labels.T
            for kind, leaving in enumerate(away[0] * scale):
                column = table[:, self.columns.kept + kind]
                column *= 1 - leaving / column.sum() if leaving else 1.0
            table[0, self.columns.end("in_transit")] = RUNS_IN_TRANSIT * away.max() * scale
        return self._with_head(table, m, axis=1)

    def totals(self, m: Mapping, savers: Savers) -> Prices:
        """The same without parts, for every saver, [savers, columns]."""
        totals = self._matrix(m, savers)[0] * (m.mbs / m.cp)
        return self._with_head(totals, m, axis=-1)

    def away_bytes(self, m: Mapping, savers: Savers) -> Prices:
        """Bytes of one micro-batch that leave memory of one layer of each kind, [savers, kinds]."""
        # It is what rests, whatever runs beside it.
        away: Prices = self._matrix(replace(m, overlap=False), savers)[1] * (m.mbs / m.cp)
        return away

    def _matrix(self, m: Mapping, savers: Savers) -> tuple[Prices, Prices]:
        """Totals and what leaves, of micro-batches of one sample without cp: all of them are linear in the tokens."""
        key = (self.key(m), savers)
        if key not in self._matrices:
            columns = self.columns
            bases, which = [self._base(m, recompute) for recompute in savers.recomputes], savers.which_recompute
            totals = np.array([base.totals for base in bases])[which]
            masks = _mask(tuple(offload for _, offload in savers))
            away = np.einsum("sl,skl->sk", masks, np.array([base.labels for base in bases])[which])
            totals[:, columns.kept : columns.kept + columns.kinds] -= away
            totals[:, columns.end("in_transit")] = RUNS_IN_TRANSIT * away.max(axis=1, initial=0.0)
            self._matrices[key] = totals, away
        return self._matrices[key]

    def key(self, m: Mapping) -> tuple[Any, ...]:
        """What all of it depends on, beside the tokens of a micro-batch."""
        gathers = m.dispatcher == "allgather"
        # Else ep counts as rows travel over it or not, and by how many of them it can pile up on one rank.
        ep = m.ep if gathers or not self.kernels.grouped_experts else min(m.ep, 2)
        return (m.tp, m.etp, ep, min(self.workload.load, m.ep), gathers, m.overlap)

    def gathers_for_less(self, m: Mapping) -> bool:
        """Whether tokens that are gathered may need less memory at some moment than rows that are sent."""
        if self.shape.config is None:
            return False
        key = (m.tp, m.ep, m.etp, m.overlap)
        if key not in self._gathers_for_less:
            gathered, sent = (
                _formula(self.cfg, replace(m, cp=1, mbs=1, dispatcher=name), (), self.kernels, self.workload.load)
                for name in ("allgather", "alltoall")
            )
            sizes = [ExpertMemory.results, ExpertMemory.summing]
            sizes += [ExpertMemory.rows_to_experts, ExpertMemory.rows_from_experts] if m.overlap else []
            self._gathers_for_less[key] = any(
                size(gathered.experts).total() < size(sent.experts).total() for size in sizes
            )
        return self._gathers_for_less[key]

    def _base(self, m: Mapping, recompute: tuple[str, ...]) -> "_Base":
        key = (*self.key(m), recompute)
        if key not in self._bases:
            self._bases[key] = _Base(*self._computed(replace(m, cp=1, mbs=1), recompute))
        return self._bases[key]

    def _with_head(self, table: Prices, m: Mapping, axis: int) -> Prices:
        """The columns of the head for these tokens: chunks of the loss have a size of their own."""
        if self.cfg.train.loss_chunk == 0 or self.shape.config is None:
            return table
        formula = _formula(self.cfg, m, (), self.kernels, self.workload.load)
        for name, parts in self._ends(formula).items():
            if name in ("head", "further", "logits", "postponed_head"):
                found = grouped(parts)
                table[:, self.columns.end(name)] = found if axis == 1 else found.sum()
        return table

    def _computed(self, m: Mapping, recompute: tuple[str, ...]) -> tuple[dict[int, Parts], Prices]:
        columns = self.columns
        table = np.zeros((len(KEPT_PARTS), columns.size))
        if self.shape.config is None:
            return self._foreign(m, recompute, table)
        formula = _formula(self.cfg, m, recompute, self.kernels, self.workload.load)
        kept: dict[int, Parts] = {}
        for kind in range(columns.kinds):
            kept[kind], found = self._layer(formula, letter_of(self.shape, kind), m)
            for first, sizes in found.items():
                table[:, first + kind] = sizes
        for name, parts in self._ends(formula).items():
            table[:, columns.end(name)] = grouped(parts)
        return kept, table

    def _layer(self, formula: ActivationFormula, letter: str, m: Mapping) -> tuple[Parts, dict[int, Prices]]:
        """What a layer of kind "D" or "M" keeps, and its bytes by the first of their columns.

        Many mappings and sets of parts that run again differ in nothing that this kind has.
        """
        degrees = self.key(m) if letter == "M" else (m.tp,)
        key = (letter, *degrees, formula.recompute - PARTS_OF_OTHERS[letter])
        if key not in self._layers:
            columns, kept = self.columns, formula.layer(letter)
            found = {columns.at(moment): grouped(parts) for moment, parts in moments_of_layer(formula, letter).items()}
            found[columns.kept] = grouped(kept)
            found[columns.passing] = grouped(formula.passing[letter])
            found[columns.again] = grouped(formula.again[letter])
            found[columns.postponed] = grouped(formula.postponed_layer(letter))
            self._layers[key] = kept, found
        return self._layers[key]

    def _ends(self, formula: ActivationFormula) -> dict[str, Parts]:
        return {
            "embedding": formula.embedding(),
            "head": formula.head(),
            "further": formula.further() if self.shape.mtp_layers else Parts(),
            "logits": Parts(logits=formula.transient_logits),
            "postponed_head": Parts(logits=formula.postponed_head),
            "postponed_further": formula.postponed_further() if self.shape.mtp_layers else Parts(),
            "hidden": Parts(pipeline=formula.hidden),
        }

    def _foreign(self, m: Mapping, recompute: tuple[str, ...], table: Prices) -> tuple[dict[int, Parts], Prices]:
        """Layers that the runtime does not know: widths of what their mixers and experts keep, in the same columns."""
        tokens, columns = m.mbs * self.workload.seq_len / m.cp, self.columns
        kept = {}
        for kind in range(columns.kinds):
            size = _foreign_layer_bytes(self.shape, kind, m, self.workload, recompute) * tokens
            kept[kind] = Parts({FOREIGN: round(size)})
            table[0, columns.kept + kind] = kept[kind].total()
        copies = max(copies_of(kind.feed_forward, self.workload) for kind in self.shape.kinds)
        dispatch = 2 * tokens / m.tp * copies * self.shape.hidden_size * BYTES
        for kind in range(columns.kinds):
            table[1, columns.passing + kind] = dispatch
            for moment in MOMENTS:
                if moment not in WITH_SPLITS:
                    table[0, columns.at(moment) + kind] = table[0, columns.kept + kind]
                    table[1, columns.at(moment) + kind] = dispatch
        table[2, columns.end("head")] = tokens * self.shape.vocab_size / m.tp * 4
        table[3, columns.end("hidden")] = tokens / m.tp * self.shape.hidden_size * BYTES
        return kept, table


class _Base:
    """What layers keep with some parts that run again, and nothing offloaded."""

    def __init__(self, kept: dict[int, Parts], table: Prices) -> None:
        self.table, self.totals = table, table.sum(axis=0)
        self.labels = np.array([[kept[kind].get(label, 0) for label in LABELS] for kind in sorted(kept)], dtype=float)


@lru_cache(maxsize=256)
def _mask(offloads: tuple[tuple[str, ...], ...]) -> Prices:
    """Which of LABELS leave with each set of parts, [sets, labels]."""
    found = [
        [float("layer" in parts or any(label in AWAY[part] for part in parts)) for label in LABELS]
        for parts in offloads
    ]
    return np.array(found)


def saver_of(m: Mapping) -> Saver:
    """What a mapping does to save activations."""
    return m.recompute, tuple(part for part in m.offload if part != "optimizer")


def recipe_of(shape: ModelShape, workload: Workload) -> Config:
    """A recipe that says nothing but the model and the length of its samples."""
    cfg = Config(train=TrainConfig(seq_len=workload.seq_len))
    return replace(cfg, model=shape.config) if shape.config is not None else cfg


def grouped(parts: Parts) -> Prices:
    """Bytes by `KEPT_PARTS`."""
    found = np.zeros(len(KEPT_PARTS))
    for part, size in parts.items():
        found[KEPT_PARTS.index(GROUP_OF.get(part, "activations"))] += size
    return found


@lru_cache(maxsize=4096)
def _formula(
    cfg: Config, m: Mapping, recompute: tuple[str, ...], kernels: Kernels, imbalance: float
) -> ActivationFormula:
    parallel = replace(
        cfg.parallel,
        world_size=m.tp * m.cp * m.ep * m.etp,
        tp=m.tp,
        cp=m.cp,
        pp=1,
        ep=m.ep,
        etp=m.etp,
        # What is moved where and when does not change how much of it stays.
        dispatcher="allgather" if m.dispatcher == "allgather" else "alltoall",
    )
    train = replace(cfg.train, micro_batch_size=m.mbs)
    return ActivationFormula(replace(cfg, parallel=parallel, train=train), recompute, kernels, imbalance)


def _foreign_layer_bytes(
    shape: ModelShape, kind: int, m: Mapping, workload: Workload, recompute: tuple[str, ...]
) -> float:
    """Bytes for each token of the rank's tp group."""
    layer, h = shape.kinds[kind], shape.hidden_size
    if "layer" in recompute:
        return h * BYTES / m.tp
    kept = 0.0
    norm = 0 if "norms" in recompute else h * BYTES
    if layer.mixer:
        core = 0 if "core_attention" in recompute else layer.mixer.output_width
        kept += (h * BYTES + norm) / m.tp + (layer.mixer.sharded_width + core) * BYTES / m.tp
    if layer.feed_forward:
        kept += (h * BYTES + norm) / m.tp
        kept += _foreign_experts_bytes(layer.feed_forward, h, m, workload, recompute)
    return kept


def _foreign_experts_bytes(
    layer: FeedForward, h: int, m: Mapping, workload: Workload, recompute: tuple[str, ...]
) -> float:
    if layer.kind == "dense":
        return 0.0 if "dense_mlp" in recompute else layer.matrices * layer.width * BYTES / m.tp
    shared = 0 if "shared_experts" in recompute else layer.matrices * layer.shared_width
    if "moe" in recompute:
        return shared * BYTES / m.tp
    rows = copies_of(layer, workload) * m.etp
    inner = (layer.matrices - ("expert_activation" in recompute)) * layer.width / m.etp
    return (shared + rows * (inner + (layer.expert_input or h))) * BYTES / m.tp


def copies_of(layer: FeedForward | None, workload: Workload) -> float:
    """Copies for each token of a rank that its experts receive."""
    if layer is None or layer.kind != "moe":
        return 0.0
    factor = workload.capacity_factor
    return layer.top_k * workload.load * (min(1.0, factor) if factor else 1.0)
