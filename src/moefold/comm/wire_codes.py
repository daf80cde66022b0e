"""Codes of fewer bits for the differences that sites exchange: bfloat16, int8 and fp4 in blocks, and top-k.

A block of 256 elements has a float32 scale, its largest magnitude. Top-k sends the largest magnitudes of each 4096
elements. Decoded values are the same bits on every machine, and the code of a block does not depend on the others, as
each step is one rounded operation on each element. Non-finite values must not be decoded.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from moefold.cost.site_traffic import BLOCK, CHUNK, NUM_BINS, SCALE_BYTES, CodedSize, num_kept, wire_format

_INT8_MAX = 127.0
_FP4_MIN_EXPONENT = -6
"""Smallest magnitude of fp4, a power of two below the scale."""
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23
_MAGNITUDE_BITS = 0x7FFFFFFF
"""All bits of a float32 but the sign."""
_HALF_MANTISSA = 1 << _MANTISSA_BITS - 1
_HALF_FP4_MIN = _EXPONENT_BIAS + _FP4_MIN_EXPONENT - 1 << _MANTISSA_BITS
"""Bits of half of the smallest magnitude of fp4, as float32."""
_GROUPS = 512
"""Groups of a chunk whose maxima are compared first."""


class WireCode(ABC):
    """Code of a vector as bytes."""

    format: CodedSize
    """Size of the code."""

    @property
    def block(self) -> int:
        """Elements that are coded together; their code depends on no others."""
        return self.format.block

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Return the code of a vector on the host, uint8 [num_bytes]."""

    @abstractmethod
    def decode(self, code: Tensor, like: Tensor) -> Tensor:
        """Return the decoded vector, of the size and type of `like`."""


class PlainCode(WireCode):
    """The bytes of the vector itself.

    Args:
        dtype: type of the vector.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.format = CodedSize(8 * dtype.itemsize)

    def encode(self, x: Tensor) -> Tensor:
        """See base class."""
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, code: Tensor, like: Tensor) -> Tensor:
        """See base class."""
        return code.view(self.dtype).to(like.dtype)


class _BlockCode(WireCode):
    """Code with a scale for each block: the codes of the elements, then the scales."""

    def encode(self, x: Tensor) -> Tensor:
        """See base class."""
        padded = torch.zeros(-(-len(x) // BLOCK) * BLOCK)
        padded[: len(x)] = x
        blocks = padded.view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        # The ratio to a scale of 0 is never used: all elements of the block are 0.
        ratios = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        codes = self._encode(ratios.flatten()[: len(x)])
        return torch.cat([codes, scales.view(torch.uint8)])

    def decode(self, code: Tensor, like: Tensor) -> Tensor:
        """See base class."""
        num_scales = -(-len(like) // BLOCK)
        codes, scales = code.split([len(code) - SCALE_BYTES * num_scales, SCALE_BYTES * num_scales])
        padded = torch.zeros(num_scales * BLOCK)
        padded[: len(like)] = self._decode(codes, len(like))
        return (
            (padded.view(-1, BLOCK) * scales.clone().view(torch.float32)[:, None]).flatten()[: len(like)].to(like.dtype)
        )

    @abstractmethod
    def _encode(self, ratios: Tensor) -> Tensor:
        """Return the codes of values in [-1, 1], uint8."""

    @abstractmethod
    def _decode(self, codes: Tensor, numel: int) -> Tensor:
        """Return values in [-1, 1], float32 [numel]."""


class Int8Code(_BlockCode):
    """Integers of 8 bits, of a 127th of the scale each."""

    format = wire_format("int8", 4)

    def _encode(self, ratios: Tensor) -> Tensor:
        return (ratios * _INT8_MAX).round().to(torch.int8).view(torch.uint8)

    def _decode(self, codes: Tensor, numel: int) -> Tensor:
        return codes.view(torch.int8).float() / _INT8_MAX


class Fp4Code(_BlockCode):
    """Sign and three bits of exponent (E3M0): 0, and the scale times 2**-6 to 1, rounded to the nearest."""

    format = wire_format("fp4", 4)

    def _encode(self, ratios: Tensor) -> Tensor:
        padded = functional.pad(ratios, (0, len(ratios) % 2))
        bits = padded.view(torch.int32)
        magnitudes = bits & _MAGNITUDE_BITS
        # Half a mantissa carries into the exponent from 1.5 on, which is half-way between two powers of two.
        level = (magnitudes + _HALF_MANTISSA >> _MANTISSA_BITS) - (_EXPONENT_BIAS + _FP4_MIN_EXPONENT - 1)
        # Below the smallest power, half of it is half-way to 0.
        level = torch.maximum(level, (magnitudes >= _HALF_FP4_MIN).int())
        codes = (level | (bits < 0).int() << 3).to(torch.uint8)
        return codes[::2] | codes[1::2] << 4

    def _decode(self, codes: Tensor, numel: int) -> Tensor:
        both = torch.stack([codes & 15, codes >> 4], 1).flatten()[:numel].int()
        level = both & 7
        bits = level + (_EXPONENT_BIAS + _FP4_MIN_EXPONENT - 1) << _MANTISSA_BITS
        # A level of 0 is 0; the sign is the highest of 32 bits.
        bits = bits * (level > 0) | both >> 3 << 31
        return bits.view(torch.float32)


class SparseCode(WireCode):
    """The largest magnitudes of each chunk of 4096, with indices of 12 bits (SparseLoCo, arXiv:2508.15706).

    A chunk has its indices, two in three bytes, then the values, then their table. With 2 bits, a value is in one of
    four bins, by its sign and whether its magnitude is above the mean of the chunk's; it is decoded as the mean of its
    bin. An element that is not sent is decoded as 0.

    Args:
        density: share of a chunk that is sent.
        bits: bits of a value. 32: the value itself; 8: a 127th of the largest magnitude of the chunk each; 2: bins.
        dtype: type of the vector, and of values of 32 bits.
    """

    def __init__(self, density: float, bits: int, dtype: torch.dtype) -> None:
        self.format = wire_format("float32", dtype.itemsize, density=density, values=bits)
        self.num_kept = num_kept(density)
        """Elements of a chunk that are sent."""
        self._bits = bits
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


def make_wire_code(precision: str, dtype: torch.dtype, *, density: float = 1.0, values: int = 32) -> WireCode:
    """Return the code of `sites.precision`, `sites.density` and `sites.values` for vectors of a type.

    Args:
        precision: float32 (the vector itself), bfloat16, int8 or fp4.
        dtype: type of the vector.
        density: share of each 4096 elements that is sent, with `values` bits each; 1: all, in `precision`.
        values: 32, 8 or 2.
    """
    if density < 1:
        return SparseCode(density, values, dtype)
    match precision:
        case "bfloat16":
            return PlainCode(torch.bfloat16)
        case "int8":
            return Int8Code()
        case "fp4":
            return Fp4Code()
    return PlainCode(dtype)
