"""Exact top-k of scores in Triton by guess, verify and refine, one program for each row.

Its definition is `moefold.ops.exact_topk.sorted_topk`. A threshold from the guess is verified by the number of scores
that reach it. These scores are collected in global memory, and a radix search finds the k-th of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Scores that a program has in registers at a time."""
INTERPRETER_BLOCK = 128
"""For the interpreter: small, so that small rows have several blocks."""
NUM_WARPS = 16
ROOM_FACTOR = 4
"""Survivors of a row, divided by k, before they are reduced to k."""
INFINITY_KEY = tl.constexpr(0x7F800000)
"""Key of +infinity. Keys beyond it and its negative are NaN."""
LOWEST_INT32 = tl.constexpr(-(2**31))
RADIX_BITS = tl.constexpr(8)
NUM_BINS = tl.constexpr(256)


@triton.jit
def _keys(scores):
    """Return int32 keys in the order of the scores. -0.0 and 0.0 have the same key."""
    bits = scores.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, LOWEST_INT32 - bits, bits)


@triton.jit
def _kth_largest(keys, count, k, BLOCK: tl.constexpr):
    """Return the k-th largest of the stored keys, and how many of the k largest are equal to it, by a radix search."""
    ties = k
    prefix = 0
    for step in tl.static_range(32 // RADIX_BITS):
        shift = 32 - RADIX_BITS * (step + 1)
        counts = tl.zeros([NUM_BINS], tl.int32)
        for first in range(0, count, BLOCK):
            place = first + tl.arange(0, BLOCK)
            # The order of unsigned integers, so that higher bits decide first.
            key = (tl.load(keys + place, mask=place < count, other=0) ^ LOWEST_INT32).to(tl.uint32, bitcast=True)
            digit = ((key >> shift) & (NUM_BINS - 1)).to(tl.int32)
            is_candidate = place < count
            if step > 0:
                is_candidate &= (key >> (shift + RADIX_BITS)).to(tl.int32) == prefix
            counts += tl.histogram(digit, NUM_BINS, mask=is_candidate)
        digits = tl.arange(0, NUM_BINS)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        chosen = tl.max(tl.where(at_least >= ties, digits, 0), 0)
        ties -= tl.sum(tl.where(digits > chosen, counts, 0), 0)
        prefix = (prefix << RADIX_BITS) | chosen
    return prefix ^ LOWEST_INT32, ties


@triton.jit
def _select(keys, positions, count, kth, ties, out, STORES_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the positions above the k-th key and the first `ties` equal to it in `out`, which may be `positions`.

    STORES_KEYS: move the keys to the same places of `keys`.
    """
    kept = 0
    ties_seen = 0
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=LOWEST_INT32)
        position = tl.load(positions + place, mask=place < count, other=-1)
        is_tie = ((key == kth) & (place < count)).to(tl.int32)
        is_kept = (key > kth) | ((is_tie > 0) & (ties_seen + tl.cumsum(is_tie, 0) <= ties))
        target = kept + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        # All loads of the block are before its stores.
        tl.debug_barrier()
        tl.store(out + target, position, mask=is_kept)
        if STORES_KEYS:
            tl.store(keys + target, key, mask=is_kept)
        kept += tl.sum(is_kept.to(tl.int32), 0)
        ties_seen += tl.sum(is_tie, 0)
    tl.debug_barrier()


@triton.jit
def _guess_threshold(scores, guess, num_guesses, start, stop, k, BLOCK: tl.constexpr):
    """Return the lowest key of the guessed positions, or the lowest possible key if less than k / 2 are legal."""
    lowest = INFINITY_KEY
    count = 0
    for first in range(0, num_guesses, BLOCK):
        place = first + tl.arange(0, BLOCK)
        position = tl.load(guess + place, mask=place < num_guesses, other=-1)
        is_legal = (position >= start) & (position < stop)
        key = _keys(tl.load(scores + position, mask=is_legal, other=float("inf")))
        lowest = tl.minimum(lowest, tl.min(key, 0))
        count += tl.sum(is_legal.to(tl.int32), 0)
    return tl.where(count * 2 < k, -INFINITY_KEY, lowest)


@triton.jit
def _topk_kernel(
    scores, starts, stops, guess, survivor_keys, survivor_positions, out, has_nan,
    row_stride, width, k, num_guesses, room, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the positions of one row's k largest scores in ascending order, -1 after the last, and whether it has NaN.

    starts, stops and guess may be None. A row has room for `room` survivors.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    survivor_keys += row * room
    survivor_positions += row * room
    out += row * k
    start = 0
    stop = width
    if starts is not None:
        start = tl.minimum(tl.maximum(tl.load(starts + row), 0), width)
    if stops is not None:
        stop = tl.minimum(tl.maximum(tl.load(stops + row), start), width)
    threshold = -INFINITY_KEY
    if guess is not None:
        threshold = _guess_threshold(scores, guess + row * num_guesses, num_guesses, start, stop, k, BLOCK)
    chosen = tl.minimum(stop - start, k)
    found_nan = 0
    count = 0
    attempt = 0
    while attempt < 2:
        count = 0
        for first in range(start, stop, BLOCK):
            position = first + tl.arange(0, BLOCK)
            # For no position: lower than every threshold, which NaN is not.
            key = _keys(tl.load(scores + position, mask=position < stop, other=float("-inf")))
            key = tl.where(position < stop, key, LOWEST_INT32)
            is_nan = (key > INFINITY_KEY) | ((key < -INFINITY_KEY) & (position < stop))
            found_nan |= tl.max(is_nan.to(tl.int32), 0)
            if tl.max(key, 0) >= threshold:
                if count + BLOCK > room:
                    kth, ties = _kth_largest(survivor_keys, count, k, BLOCK)
                    _select(survivor_keys, survivor_positions, count, kth, ties, survivor_positions, True, BLOCK)
                    count = k
                    threshold = kth + 1
                passes = (key >= threshold).to(tl.int32)
                target = count + tl.cumsum(passes, 0) - 1
                tl.store(survivor_keys + target, key, mask=passes > 0)
                tl.store(survivor_positions + target, position, mask=passes > 0)
                count += tl.sum(passes, 0)
                tl.debug_barrier()
        # The threshold is verified, or computed once more without a guess.
        attempt = tl.where(count >= chosen, 2, attempt + 1)
        threshold = -INFINITY_KEY
    for first in range(0, k, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(out + place, tl.full([BLOCK], -1, tl.int32), mask=(place >= chosen) & (place < k))
    kth, ties = _kth_largest(survivor_keys, count, chosen, BLOCK)
    _select(survivor_keys, survivor_positions, count, kth, ties, out, False, BLOCK)
    tl.store(has_nan + row, found_nan)


def triton_exact_topk(
    scores: Tensor, k: int, starts: Tensor | None, stops: Tensor | None, guess: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the positions, int32 [R, k], and the rows with a NaN, bool [R], whose positions are undefined.

    For the arguments see `moefold.ops.exact_topk.exact_topk`, with scores in float32 or bfloat16. The memory of the
    survivors is 8 bytes for each of R rows times the smaller of N and 4 k.
    """
    rows, width = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    starts, stops, guess = (None if t is None else t.contiguous() for t in (starts, stops, guess))
    block = BLOCK if scores.is_cuda else INTERPRETER_BLOCK
    room = min(width, ROOM_FACTOR * k) + block
    survivors = torch.empty(2, rows, room, dtype=torch.int32, device=scores.device)
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    has_nan_R = torch.empty(rows, dtype=torch.int32, device=scores.device)
    if rows:
        _topk_kernel[(rows,)](
            scores, starts, stops, guess, survivors[0], survivors[1], out, has_nan_R,
            scores.stride(0), width, k, 0 if guess is None else guess.shape[1], room, BLOCK=block,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out, has_nan_R > 0
