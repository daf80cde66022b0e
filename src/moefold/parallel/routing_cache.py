"""Expert choices of sampling, recorded in the pages of the KV cache, for routing replay (R3, arXiv:2510.11370).

A choice is stored where the keys of its token are, and pages are copied with the keys. So a prompt that samples share,
a page that is copied before a sample writes to it, and a sample that is computed again have the right choices without
special code.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.groups import Group
from moefold.model.layer_cache import CurrentPass
from moefold.parallel.router_replay_io import torch_dtype


class RoutingCache:
    """Expert choices of one MoE layer for all cached tokens, the `override` of its router while rollouts are sampled.

    Args:
        num_slots: positions of the cache, of all pages together.
        dtype: dtype of an expert id, as `expert_index_dtype`.
        tp: the ranks that share the rows of a pass. Each records its own rows, and a choice of 0 for all other rows.
    """

    in_evaluation = True
    only_records = True

    def __init__(self, current_pass: CurrentPass, num_slots: int, dtype: "np.dtype[np.generic]", tp: Group) -> None:
        self._pass = current_pass
        self._num_slots = num_slots
        self._dtype = torch_dtype(dtype)
        self._tp = tp
        self._ids_PK: Tensor | None = None
        self.num_recorded = 0
        """Rows that this rank has recorded since it was last reset."""

    def apply(self, ids_TK: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Record the choices of this rank's rows of the pass, and return them unchanged."""
        slots_R = self._pass.current.slots_R
        self.num_recorded += len(ids_TK)
        if self._ids_PK is None:
            self._ids_PK = torch.zeros(self._num_slots, ids_TK.shape[1], dtype=self._dtype, device=ids_TK.device)
        # Rows are split as by `SequenceParallel.split_unevenly`: the first ranks have one more row.
        base, extra = divmod(len(slots_R), self._tp.size)
        first = self._tp.rank * base + min(self._tp.rank, extra)
        rows_RK = self._ids_PK.new_zeros(len(slots_R), ids_TK.shape[1])
        rows_RK[first : first + len(ids_TK)] = ids_TK.to(self._dtype)
        self._ids_PK[slots_R] = rows_RK
        return ids_TK

    def copy_pages(self, source: Tensor, target: Tensor, page_positions: int) -> None:
        """Copy the choices of pages, int64 [n] each. A page may be source and target, as in the caches of keys."""
        if self._ids_PK is not None:
            pages = self._ids_PK.unflatten(0, (-1, page_positions))
            pages[target] = pages[source]

    def read(self, slots_N: Tensor) -> Tensor:
        """Return the choices at some slots, [N, K]."""
        assert self._ids_PK is not None, "no pass has run"
        return self._ids_PK[slots_N]


def merge_over_tp(choices: list[NDArray[np.integer]], tp: Group, device: torch.device) -> list[NDArray[np.integer]]:
    """Combine the choices that each tensor-parallel rank recorded for its rows. It is collective over tp.

    Args:
        choices: choices of each completion on this rank, [MoE layers of this rank, tokens, K], 0 for rows of other
            ranks. The ranks of tp have equal shapes.
    """
    if tp.size == 1 or not choices:
        return choices
    flat = torch.from_numpy(np.concatenate([ids.ravel() for ids in choices]))
    # Neither gloo nor NCCL supports int16.
    wide = flat.int() if flat.dtype == torch.int16 else flat
    merged = all_reduce_sum(wide.to(device), tp).cpu().numpy().astype(choices[0].dtype)
    ends = np.cumsum([ids.size for ids in choices])[:-1]
    return [chunk.reshape(ids.shape) for chunk, ids in zip(np.split(merged, ends), choices, strict=True)]
