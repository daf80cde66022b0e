"""Local shards of the weights of a model in training with merged adapters, for the models that sample."""

import torch
from torch import Tensor

from moefold.comm.sharded_tensor import full_tensor, local_slice, region_of
from moefold.cost.adapter_spec import adapted_weights, is_adapter
from moefold.model.local_param import local_tensor
from moefold.model.lora import product_region
from moefold.parallel.parallel_model import ParallelModel


@torch.no_grad()
def merged_shards(model: ParallelModel) -> dict[str, Tensor]:
    """Return the local values of all weights and buffers, W + (alpha / r) B A of each matrix with an adapter.

    Collective over the ranks of a pipeline stage if there are adapters, which are gathered. The merged shards are new
    tensors, as large as this rank's shards of the matrices; all other values are the model's own.

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
