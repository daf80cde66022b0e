"""Code of the largest magnitudes of each 4096 differences (SparseLoCo, arXiv:2508.15706).

Decoded values are the same bits on every machine, and the code of a chunk does not depend on the others, as each step
is one rounded operation on each element. Non-finite values must not be decoded.
"""

import torch
from torch import Tensor
from torch.nn import functional

from moefold.comm.wire_codes import WireCode
from moefold.cost.site_traffic import SCALE_BYTES
from moefold_experiments.sparseloco.part import CHUNK, NUM_BINS, SparseLoCo

_INT8_MAX = 127.0
_GROUPS = 512
"""Groups of a chunk whose maxima are compared first."""


class SparseCode(WireCode):
    """The largest magnitudes of each chunk of 4096, with indices of 12 bits.

    A chunk has its indices, two in three bytes, then the values, then their table. With 2 bits, a value is in one of
    four bins, by its sign and whether its magnitude is above the mean of the chunk's; it is decoded as the mean of its
    bin. An element that is not sent is decoded as 0.

    Args:
        method: with density, the share of a chunk that is sent, and bits of a value. 32: the value itself; 8: a 127th
            of the largest magnitude of the chunk each; 2: bins.
        dtype: type of the vector, and of values of 32 bits.
    """

    def __init__(self, method: SparseLoCo, dtype: torch.dtype) -> None:
        self.format = method.wire_format(dtype.itemsize)
        self.num_kept = method.num_kept
        """Elements of a chunk that are sent."""
        self._bits = method.bits
        self._dtype = dtype
        self._index_bytes = 3 * -(-self.num_kept // 2)

    def encode(self, x: Tensor) -> Tensor:
        """See base class."""
        num_chunks = -(-len(x) // CHUNK)
        chunks = x.new_zeros(num_chunks * CHUNK, dtype=self._dtype)
        chunks[: len(x)] = x
        chunks = chunks.view(num_chunks, CHUNK)
        indices = _largest(chunks.abs(), self.num_kept)
        values = chunks.gather(1, indices)
        if self._bits == 32:
            parts = [values.view(torch.uint8)]
        elif self._bits == 8:
            values = values.float()
            scale = values.abs().amax(1, keepdim=True)
            codes = (values / torch.where(scale > 0, scale, 1.0) * _INT8_MAX).round().to(torch.int8)
            parts = [codes.view(torch.uint8), scale.view(torch.uint8)]
        else:
            indices, codes, means = _to_bins(indices, values.float())
            parts = [_join_fields(codes, 2), means.view(torch.uint8)]
        return torch.cat([_pack_indices(indices), *parts], 1).flatten()

    def decode(self, code: Tensor, like: Tensor) -> Tensor:
        """See base class."""
        num_chunks = -(-len(like) // CHUNK)
        rows = code.view(num_chunks, self.format.scale_bytes)
        indices = _unpack_indices(rows[:, : self._index_bytes], self.num_kept)
        content = rows[:, self._index_bytes :]
        if self._bits == 32:
            values = _as_numbers(content, self._dtype)
        elif self._bits == 8:
            codes, scale = content.split([self.num_kept, SCALE_BYTES], 1)
            values = _as_numbers(codes, torch.int8).float() / _INT8_MAX * _as_numbers(scale, torch.float32)
        else:
            codes, means = content.split([content.shape[1] - SCALE_BYTES * NUM_BINS, SCALE_BYTES * NUM_BINS], 1)
            bins = _split_fields(codes, 2)[:, : self.num_kept].long()
            values = _as_numbers(means, torch.float32).gather(1, bins)
        chunks = like.new_zeros(num_chunks, CHUNK)
        return chunks.scatter_(1, indices, values.to(like.dtype)).flatten()[: len(like)]


def _as_numbers(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of bytes in the columns of rows, which need not be aligned."""
    return content.clone(memory_format=torch.contiguous_format).view(dtype)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Return the indices of the largest elements of each row of 4096, int64 [rows, count], in no order.

    For few of them, the groups with the largest maxima are found first: they contain the largest elements. This takes
    0.6 of the time of a single top-k for 64 of 4096.
    """
    num_rows = len(magnitudes)
    if 4 * count > _GROUPS or not num_rows:
        return magnitudes.topk(count, 1, sorted=False).indices
    groups = magnitudes.view(num_rows, CHUNK // _GROUPS, _GROUPS)
    chosen = groups.amax(1).topk(count, 1, sorted=False).indices
    candidates = groups.gather(2, chosen[:, None].expand(-1, CHUNK // _GROUPS, -1)).flatten(1)
    found = candidates.topk(count, 1, sorted=False).indices
    return chosen.gather(1, found % count) + found // count * _GROUPS


def _to_bins(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices [C, k], bins [C, k] and means of the bins [C, 4] of the values of each chunk.

    A zero is sent as a second copy of the largest element, which changes nothing, as its bin has no zero.
    """
    is_sent = values != 0
    magnitudes = values.abs()
    mean = _row_sum(magnitudes) / _row_sum(is_sent.float()).clamp(min=1)
    bins = (magnitudes > mean[:, None]).int() + 2 * (values < 0)
    means = []
    for number in range(NUM_BINS):
        is_in = is_sent & (bins == number)
        means.append(_row_sum(torch.where(is_in, values, 0.0)) / _row_sum(is_in.float()).clamp(min=1))
    largest = magnitudes.argmax(1, keepdim=True)
    indices = torch.where(is_sent, indices, indices.gather(1, largest))
    bins = torch.where(is_sent, bins, bins.gather(1, largest))
    return indices, bins, torch.stack(means, 1)


def _row_sum(x: Tensor) -> Tensor:
    """Return the sum of each row, by halves: its bits depend neither on the other rows nor on the machine."""
    width = x.shape[1]
    while width > 1:
        half = -(-width // 2)
        x = torch.cat([x[:, : width - half] + x[:, half:], x[:, width - half : half]], 1)
        width = half
    return x[:, 0]


def _pack_indices(indices: Tensor) -> Tensor:
    """Pack two indices of 12 bits in three bytes, [C, k] to [C, 3 * ceil(k / 2)]."""
    pairs = functional.pad(indices.int(), (0, indices.shape[1] % 2))
    first, second = pairs[:, ::2], pairs[:, 1::2]
    return torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2).flatten(1).to(torch.uint8)


def _unpack_indices(packed: Tensor, count: int) -> Tensor:
    triples = packed.long().unflatten(1, (-1, 3))
    low, middle, high = triples.unbind(2)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 2).flatten(1)[:, :count]


def _join_fields(fields: Tensor, bits: int) -> Tensor:
    """Pack fields of a row in bytes, the first field in the lowest bits."""
    per_byte = 8 // bits
    padded = functional.pad(fields.int(), (0, -fields.shape[1] % per_byte)).unflatten(1, (-1, per_byte))
    shifts = bits * torch.arange(per_byte, dtype=torch.int32)
    return (padded << shifts).sum(2).to(torch.uint8)


def _split_fields(packed: Tensor, bits: int) -> Tensor:
    shifts = bits * torch.arange(8 // bits, dtype=torch.int32)
    return (packed.int()[:, :, None] >> shifts & 2**bits - 1).flatten(1)
