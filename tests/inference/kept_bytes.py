"""Bytes of weights and cache that generation keeps, measured and computed."""

from pathlib import Path
from typing import Any

import torch

from moefold.cost.kv_cache import cache_sizes
from moefold.model.layer_cache import CacheSize
from moefold.model.local_param import local_tensor
from moefold.parallel.paged_decoder import PagedDecoder, forward_chain
from moefold.validate.memory_need import inference_weight_memory
from tests.inference.example import opened, opened_config
from tests.model.paged_rows import pass_rows


def kept_bytes(folder: Path, mapping: dict[str, Any], kind: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return bytes of the keys and values that a rank keeps and of its weights, and the computed bytes of both."""
    model = opened(folder, "generate", mapping, 10, 3).model
    size = CacheSize(num_pages=3, page_positions=4, kind=kind)
    with forward_chain(model) as chain, PagedDecoder(chain, size) as decoder:
        decoder.forward(torch.zeros(4, dtype=torch.int64), pass_rows([range(4)], 1), torch.tensor([3]))
        cache_bytes = decoder.nbytes
    weights = sum(local_tensor(parameter).nbytes for parameter in model.named_parameters.values())
    cfg = opened_config(folder, "generate", mapping, 10, 3)
    computed = inference_weight_memory(cfg)[model.groups.pp.rank]["weights"]
    sizes = cache_sizes(cfg, "cpu")
    cached = sizes.kv_bytes(3 * 4, kind) + sizes.state_bytes
    return (cache_bytes, weights), (cached, computed)
