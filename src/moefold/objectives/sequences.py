"""Sums over the sequences that a row packs: rollouts, or the completions of preference data."""

import torch
from torch import Tensor

from moefold.model.tp_interface import ContextParallel


class Sequences:
    """Sequences of the rows of a micro-batch, whose tokens may be sharded over cp.

    Args:
        ids: index of the sequence of each token within its row, -1 for none, int64 [B, S/cp].
    """

    def __init__(self, ids: Tensor, context_parallel: ContextParallel) -> None:
        self._context_parallel = context_parallel
        # A row has at most one sequence per token. The last slot is for tokens without a sequence. The number does not
        # depend on the ids, which the host could not read on a GPU without waiting.
        num_slots = ids.shape[1] * context_parallel.size + 1
        first_slot_B = torch.arange(len(ids), device=ids.device).unsqueeze(1) * num_slots
        self._slot_N = (ids.where(ids >= 0, num_slots - 1) + first_slot_B).flatten()
        self._shape = (len(ids), num_slots)
        self.has_sequence = ids >= 0
        """Bool [B, S/cp]: False for tokens without a sequence."""

    def sums(self, values: Tensor) -> Tensor:
        """Sum values over the tokens of each sequence, all-reduced over cp: [n, B, S/cp] -> [n, B, slots]."""
        values_nN = values.where(self.has_sequence, 0.0).flatten(1)
        sums = values.new_zeros(len(values), self._shape[0] * self._shape[1])
        sums = sums.index_add(1, self._slot_N, values_nN)
        return self._context_parallel.sum_over_context(sums).view(-1, *self._shape)

    def of_tokens(self, slot_values: Tensor) -> Tensor:
        """Return the value of each token's sequence (without one, of the last slot): [B, slots] -> [B, S/cp]."""
        return slot_values.flatten().index_select(0, self._slot_N).view(self.has_sequence.shape)
