"""Resharding in memory: copy the weights of a model to a model under another mapping of the same ranks.

Reinforcement learning samples with the weights that it trains. A checkpoint in between would write and read every byte.
Here a rank gets from other ranks only the boxes that it lacks, in the dtype of the target, with a bound on the memory
of a bucket. No tensor is gathered: no rank ever has more of an expert stack than its shards under the two mappings. See
docs/design/024-resharding-in-memory.md.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.comm.box_exchange import MAX_SCRATCH_BYTES, exchange_boxes
from moefold.comm.groups import World
from moefold.comm.reshard_plan import BoxTransfer, plan_reshard
from moefold.comm.sharded_tensor import full_tensor, local_slice, region_of
from moefold.cost.adapter_spec import adapted_weights, is_adapter
from moefold.cost.shard_boxes import Box, WeightSharding
from moefold.model.local_param import local_tensor, parameter_over
from moefold.model.lora import product_region
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class TransferStats:
    """Bytes and time of a transfer on this rank."""

    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    """Bytes copied within this rank, such as casts to the dtype of the target."""
    shared_bytes: int
    """Bytes of parameters that both models share."""
    scratch_bytes: int
    """Largest memory of the buffers of a bucket."""
    buckets: int
    seconds: float


class WeightTransfer:
    """Transfer of weights between two models whose mappings use the same ranks. The plan is made once.

    Where a rank has the same box of a parameter under both mappings, in the same dtype, an inference model shares the
    parameter of the training model instead of a copy. A training step then changes both. All other parameters and all
    buffers keep their values until the next `run`.

    Constructor and `run` are collective over all ranks.

    Args:
        target: the model that gets them: for inference, or for training under another mapping, without its optimizer
            state. It may lack the multi-token prediction layers of the source.
        max_scratch_bytes: largest memory of the buffers of one bucket on a rank.
        ranks_per_node: consecutive ranks that share a node, which are preferred as senders, or None if all do.

    Raises:
        ValueError: the mappings have different numbers of ranks, the models have different tensors, or
            `max_scratch_bytes` is less than two elements.
    """

    def __init__(
        self,
        source: ParallelModel,
        target: InferenceModel | ParallelModel,
        *,
        max_scratch_bytes: int = MAX_SCRATCH_BYTES,
        ranks_per_node: int | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._world = source.groups.world
        self._shares = isinstance(target, InferenceModel)
        source_sharding = weight_sharding(source)
        target_sharding = weight_sharding(target)
        rank = self._world.rank
        self._source_boxes = source_sharding.boxes(rank)
        self._target_boxes = target_sharding.boxes(rank)
        self._dtypes = gather_dtypes(weight_tensors(target), World(rank, self._world.size))
        itemsize = {name: dtype.itemsize for name, dtype in self._dtypes.items()}
        self.plan = plan_reshard(source_sharding, target_sharding, itemsize, max_scratch_bytes // 2, ranks_per_node)
        self._local = [transfer for transfer in self.plan.local if transfer.target == rank]
        check_boxes(weight_tensors(source), self._source_boxes)
        check_boxes(weight_tensors(target), self._target_boxes)

    @torch.no_grad()
    def run(self) -> TransferStats:
        """Update the weights of the target from the source. Call it between two training steps."""
        started_s = time.perf_counter()
        # A gathered parameter is not a shard.
        reshard_parameters(self._source.stages)
        if isinstance(self._target, ParallelModel):
            reshard_parameters(self._target.stages)
            return self._copy(started_s)
        with self._target.writing_weights():
            return self._copy(started_s)

    def _copy(self, started_s: float) -> TransferStats:
        source = merged_shards(self._source)
        shared = self._share_parameters(source) if self._shares else frozenset()
        target = {name: local_tensor(tensor) for name, tensor in weight_tensors(self._target).items()}

        def write(transfer: BoxTransfer, values: Tensor) -> None:
            target[transfer.name][transfer.box.index_in(self._target_boxes[transfer.name])].copy_(values)

        copied_bytes = 0
        for transfer in self._local:
            if transfer.name not in shared:
                view = target[transfer.name][transfer.box.index_in(self._target_boxes[transfer.name])]
                view.copy_(source[transfer.name][transfer.box.index_in(self._source_boxes[transfer.name])])
                copied_bytes += view.nbytes
        sent_bytes = received_bytes = scratch_bytes = 0
        for transfers in self.plan.buckets:
            sent, received = exchange_boxes(
                transfers,
                self._world,
                self._source.groups.device,
                self._dtypes,
                lambda t: source[t.name][t.box.index_in(self._source_boxes[t.name])],
                write,
            )
            sent_bytes += sent
            received_bytes += received
            scratch_bytes = max(scratch_bytes, sent + received)
        return TransferStats(
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            copied_bytes=copied_bytes,
            shared_bytes=sum(source[name].nbytes for name in shared),
            scratch_bytes=scratch_bytes,
            buckets=len(self.plan.buckets),
            seconds=time.perf_counter() - started_s,
        )

    def _share_parameters(self, source: Mapping[str, Tensor]) -> frozenset[str]:
        """Replace the parameters of the target that coincide with the source's, and return their names."""
        assert isinstance(self._target, InferenceModel)
        stage = self._target.stage
        shared = set()
        coinciding = self.plan.coinciding[self._world.rank]
        for name, parameter in list(stage.named_parameters()):
            values = source.get(name)
            if name not in coinciding or values is None or values.dtype != parameter.dtype:
                continue
            if name in self._target.shared_names:
                continue
            shared.add(name)
            # FSDP may move its shards when it is first used.
            if local_tensor(parameter).data_ptr() != values.data_ptr():
                module_name, _, leaf = name.rpartition(".")
                stage.get_submodule(module_name).register_parameter(leaf, parameter_over(parameter, values))
        return frozenset(shared)


def weight_sharding(model: ParallelModel | InferenceModel) -> WeightSharding:
    """Return the sharding of a model's weights."""
    return WeightSharding(model.stages[0].config, model.groups.layout, model.stage_plan, model.shards_data_parallel)


def weight_tensors(model: ParallelModel | InferenceModel) -> dict[str, Tensor]:
    """Return the parameters and buffers of this rank by their names in the full model, without adapters."""
    parameters = {name: parameter for name, parameter in model.named_parameters.items() if not is_adapter(name)}
    return {**parameters, **model.named_buffers}


def gather_dtypes(tensors: Mapping[str, Tensor], world: World) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor of every rank. It is collective."""
    dtypes: dict[str, torch.dtype] = {}
    for rank_dtypes in world.all_gather_object({name: tensor.dtype for name, tensor in tensors.items()}):
        dtypes |= rank_dtypes
    return dtypes


def check_boxes(tensors: Mapping[str, Tensor], boxes: Mapping[str, Box]) -> None:
    """Assert that the shards of this rank are the boxes of the plan."""
    for name, box in boxes.items():
        values, start = local_slice(tensors[name])
        assert (start, tuple(values.shape)) == (box.start, box.size), (name, start, values.shape, box)


@torch.no_grad()
def merged_shards(model: ParallelModel) -> dict[str, Tensor]:
    """Return the local values of all weights and buffers, W + (alpha / r) B A of each matrix with an adapter.

    Collective over the ranks of a pipeline stage if there are adapters, which are gathered. The merged shards are new
    tensors, as large as this rank's shards of the matrices. All other values are the model's own.

    Args:
        model: the model in training, whose parameters are not gathered.
    """
    parameters = model.named_parameters
    shards = {name: local_tensor(p) for name, p in parameters.items() if not is_adapter(name)}
    shards |= {name: local_tensor(buffer) for name, buffer in model.named_buffers.items()}
    lora = model.stages[0].settings.lora
    if not lora.rank:
        return shards

    def read(name: str, region: tuple[slice, ...]) -> Tensor:
        return full_tensor(parameters[name].data)[region]

    for name in adapted_weights(model.stages[0].config, lora):
        if name in parameters:
            values, starts = local_slice(parameters[name].data)
            product = product_region(name, region_of(values, starts), read)
            shards[name] = (values.to(product.dtype) + lora.scale * product).to(values.dtype)
    return shards
