"""Cached states of linear attention: for each sample of a rank, its recurrent state and the last tokens before it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.model.layer_cache import CurrentPass, LayerCache


@dataclass(frozen=True)
class CachedStates:
    """Samples of one pass that continue from cached states, each with the same number of tokens."""

    rows_R: Tensor
    """Rows of the pass: the tokens of the first sample, of the second and so on, int64 [n*S]."""
    slots_n: Tensor
    """Slots of the samples in the cache, int64 [n]."""
    previous_KnC: Tensor
    """Tokens before the tokens of the pass, [K-1, n, C]."""
    state: Tensor
    """[n, A, D, Dv]."""
    num_previous_n: Tensor
    """Earlier tokens of each sample, int64 [n]."""


@dataclass(frozen=True)
class StateShapes:
    """Shapes of the cached tensors of one sample."""

    num_previous: int
    """Number of tokens before the next token that the convolutions read, K-1."""
    width: int
    """Channels of the convolutions, C. 0: none."""
    state: tuple[int, int, int]
    """Value heads, width of a key and width of a value: [A, D, Dv], or zeros without a recurrence."""


class _Slots(NamedTuple):
    """Tensors of one layer, by slot."""

    previous_NKC: Tensor
    state_NADV: Tensor


class RecurrentStates(LayerCache):
    """States of one layer by slot. They grow with the number of slots in use.

    A sample's first token starts from zeros, for any old content of its slot.
    """

    def __init__(self, current_pass: CurrentPass) -> None:
        self._pass = current_pass
        self._slots: _Slots | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the states, or 0 before the first pass."""
        return 0 if self._slots is None else sum(tensor.nbytes for tensor in self._slots)

    def copy_states(self, source: Tensor, target: Tensor, num_slots: int) -> None:
        """Copy states between slots. If a slot is both source and target, its old state is copied. See base class."""
        if self._slots is not None:
            self._grow(num_slots, self._slots)
            for tensor in self._slots:
                tensor[target] = tensor[source]

    def read(self, shapes: StateShapes, like: Tensor) -> Iterator[CachedStates]:
        """Yield the samples of the pass: all samples of one token together, then each longer sample.

        Args:
            like: a tensor of the type and device of the tokens.
        """
        rows = self._pass.current
        if not rows.counts:
            return
        slots_N = rows.state_slots_N
        assert slots_N is not None, "the pass has no slots"
        if self._slots is None:
            previous = like.new_zeros(0, shapes.num_previous, shapes.width)
            state_dtype = torch.promote_types(like.dtype, torch.float32)
            self._slots = _Slots(previous, like.new_zeros(0, *shapes.state, dtype=state_dtype))
        self._grow(rows.num_state_slots, self._slots)
        if rows.single_rows:
            yield self._samples(rows.rows_of_singles, slots_N[rows.segments_of_singles], 1)
        for i, span in rows.chunks:
            rows_R = torch.arange(span.start, span.stop, device=like.device)
            yield self._samples(rows_R, slots_N[i : i + 1], len(rows_R))

    def write(self, samples: CachedStates, last_KnC: Tensor, state: Tensor) -> None:
        """Store the last tokens and states after the tokens of the pass."""
        assert self._slots is not None
        self._slots.previous_NKC[samples.slots_n] = last_KnC.transpose(0, 1)
        self._slots.state_NADV[samples.slots_n] = state

    def _samples(self, rows_R: Tensor, slots_n: Tensor, num_tokens: int) -> CachedStates:
        assert self._slots is not None
        num_previous_n = self._pass.current.positions_R[rows_R[::num_tokens]]
        is_continued = num_previous_n > 0
        previous, state = (
            tensor[slots_n].where(is_continued.view(-1, *[1] * (tensor.dim() - 1)), 0.0) for tensor in self._slots
        )
        return CachedStates(rows_R, slots_n, previous.transpose(0, 1), state, num_previous_n)

    def _grow(self, num_slots: int, old: _Slots) -> None:
        """Allocate twice as many slots as before if a slot is beyond them."""
        if num_slots <= len(old.state_NADV):
            return
        num_new = max(num_slots, 2 * len(old.state_NADV)) - len(old.state_NADV)
        grown = (torch.cat((tensor, tensor.new_zeros(num_new, *tensor.shape[1:]))) for tensor in old)
        self._slots = _Slots(*grown)
