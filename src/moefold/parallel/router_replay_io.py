"""Router replay under any mapping: record and replay the expert choices of the global batch, independent of mapping."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.collectives import all_gather, gather_to_first
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.routing_trace import RoutingTrace, RoutingTraceWriter, TracedStep, trace_shape
from moefold.model.moe.router_replay import ReplayedRouting
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.tensor_parallel import local_positions

Array = np.ndarray[Any, np.dtype[Any]]


class RouterReplayBuffer:
    """Connects the routers of this rank to the routing trace of the whole global batch.

    The constructor and `save` are collective. Each rank holds the choices of its own tokens only. Rank 0 holds one
    layer of the global batch at a time.

    Args:
        moe: section with `trace_every` and `replay`.

    Raises:
        ConfigError: the trace to replay cannot be read.
    """

    def __init__(
        self, model: ParallelModel, sizes: ModelConfig, parallel: ParallelConfig, moe: MoEConfig, train: TrainConfig
    ) -> None:
        self._groups = model.groups
        self._shape = trace_shape(sizes, train)
        self._record_every = moe.trace_every
        self._num_samples = train.num_micro_batches(parallel.dp) * train.micro_batch_size
        self._trace = RoutingTrace(Path(moe.replay), "moe.replay") if moe.replay else None
        positions = local_positions(model.positions, model.groups.attn.tp)
        self._positions = positions.cpu().numpy()
        self._all_positions = all_gather(positions.unsqueeze(0), model.groups.attn.sequence).cpu()
        self._owner_ranks = model.stage_plan.rank_of_layers(sizes.num_layers)
        first = model.groups.attn.dp.rank * self._num_samples
        self._slots: Tensor | None = None
        self._layer_routing = {number: ReplayedRouting(first) for number in model.moe_layers()}
        for number, layer in model.moe_layers().items():
            layer.router.override = self._layer_routing[number]

    def is_due(self, step: int) -> bool:
        """Return whether a step is recorded."""
        return self._record_every > 0 and step % self._record_every == 0

    def begin_step(self, step: int, batch: Batch) -> None:
        """Prepare the routers for a step: load the choices to replay, allocate buffers for the choices to record.

        Raises:
            ConfigError: the trace lacks the step, or has expert ids out of range.
        """
        device = self._groups.device
        shape = self._shape
        replayed = None if self._trace is None else self._trace.step(step)
        size = (self._num_samples, len(self._positions), shape.top_k)
        self._slots = self._slots_of(batch)
        for number, choices in self._layer_routing.items():
            choices.recorded_NSK = None
            if self.is_due(step):
                choices.recorded_NSK = torch.zeros(size, dtype=torch_dtype(shape.dtype), device=device)
            if replayed is not None:
                local = self._own_choices(replayed, shape.layers.index(number), choices.first_sample)
                choices.replayed_NSK = torch.from_numpy(shape.check_expert_indices(local, step)).to(device)

    def _own_choices(self, step: TracedStep, layer: int, first_sample: int) -> Array:
        """Return the choices of this rank's tokens in a traced layer, [N, S/(cp*tp), K]."""
        if self._slots is None:
            return step.samples(layer, first_sample, self._num_samples)[:, self._positions]
        samples, positions = np.divmod(self._slots.cpu().numpy(), self._shape.seq_len)
        return step.samples(layer, 0, self._shape.global_batch_size)[samples, positions]

    def _slots_of(self, batch: Batch) -> Tensor | None:
        """Return sample * S + position of each token of this rank, [N, S/(cp*tp)]. None: samples in their places."""
        if "token_samples" not in batch.columns:
            return None
        numbers = batch.columns["token_samples"] * self._shape.seq_len + batch.columns["positions"]
        tp = self._groups.attn.tp
        return numbers.chunk(tp.size, 1)[tp.rank].contiguous()

    def save(self, step: int, writer: RoutingTraceWriter | None) -> None:
        """Gather the choices of a recorded step and write them. Every rank calls it, rank 0 with a writer."""
        layers = self._gather_layers()
        try:
            if writer is not None:
                writer.write(step, layers)
        finally:
            # The other ranks send the rest even if the file cannot be written.
            for _ in layers:
                pass

    def _gather_layers(self) -> Iterator[Array]:
        """Yield the choices of the global batch, [G, S, K], layer by layer, on rank 0, and empty arrays elsewhere."""
        shape = self._shape
        groups = self._groups
        for number in shape.layers:
            layer = self._gather_stage_layer(number) if number in self._layer_routing else None
            owner = self._owner_ranks[number]
            is_sender = groups.attn.sequence.rank == 0 and groups.attn.dp.rank == 0
            if owner and is_sender and groups.pp.rank == owner:
                assert layer is not None
                dist.send(layer, groups.pp.ranks[0], groups.pp.handle)
            if owner and groups.rank == 0:
                layer = torch.empty(
                    (*shape.file_shape[1:3], shape.top_k * shape.dtype.itemsize),
                    dtype=torch.uint8,
                    device=groups.device,
                )
                dist.recv(layer, groups.pp.ranks[owner], groups.pp.handle)
            is_receiver = groups.rank == 0 and layer is not None
            yield (
                layer.cpu().numpy().view(shape.dtype) if is_receiver and layer is not None else np.empty(0, shape.dtype)
            )

    def _gather_stage_layer(self, number: int) -> Tensor | None:
        """Gather one layer as bytes, [G, S, K * bytes], on the first rank of this stage, or None elsewhere."""
        recorded = self._layer_routing[number].recorded_NSK
        assert recorded is not None, "begin_step() of a recorded step precedes save()"
        if self._slots is not None:
            return self._gather_slots(recorded, self._slots)
        # As bytes, because gloo and NCCL do not support int16.
        shards = gather_to_first(recorded.view(torch.uint8), self._groups.attn.sequence)
        if shards is None:
            return None
        samples_NSB = recorded.new_empty((self._num_samples, self._shape.seq_len, shards.shape[-1]), dtype=torch.uint8)
        for positions, shard in zip(self._all_positions, shards, strict=True):
            samples_NSB[:, positions.to(samples_NSB.device)] = shard
        samples = gather_to_first(samples_NSB, self._groups.attn.dp)
        return None if samples is None else samples.flatten(0, 1)

    def _gather_slots(self, recorded: Tensor, slots: Tensor) -> Tensor | None:
        """Gather the choices of one layer where tokens are in slots. See `_gather_stage_layer`."""
        stage = self._groups.attn.stage
        numbers = gather_to_first(slots, stage)
        shards = gather_to_first(recorded.view(torch.uint8), stage)
        if numbers is None or shards is None:
            return None
        shape = self._shape
        all_slots = recorded.new_empty((shape.global_batch_size * shape.seq_len, shards.shape[-1]), dtype=torch.uint8)
        all_slots[numbers.flatten()] = shards.flatten(0, 2)
        return all_slots.unflatten(0, (-1, shape.seq_len))


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return the torch dtype of a dtype of `expert_index_dtype`."""
    return {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}[dtype.name]
