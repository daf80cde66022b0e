"""Fused router in Triton: scores, group limit, top-k, probabilities, counts and loss sums in one pass over logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.config.groups.router import SCORE_SUM_EPS

TOKENS_PER_PROGRAM = 4
"""Tokens of a program."""


@dataclass(frozen=True)
class RouterOptions:
    """Options of scores, top-k and probabilities."""

    top_k: int
    is_softmax: bool
    """True: softmax scores. False: sigmoid scores."""
    is_post_softmax: bool
    """Probabilities are a softmax over the chosen logits."""
    normalizes_probs: bool
    """Probabilities are divided by their sum (sigmoid)."""
    scaling_factor: float
    """Factor of the probabilities."""
    num_groups: int = 1
    top_groups: int = 1


@triton.jit
def _first_argmax(values, index, not_found: tl.constexpr):
    """Return the index of the largest value of each row, of equal values the first."""
    best = tl.max(values, 1)
    return tl.min(tl.where(values == best[:, None], index[None, :], not_found), 1)


@triton.jit
def _mask_to_top_groups(values, expert, num_experts, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
                 SUMS_TOP_TWO: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Set the values of experts outside the top groups to -inf."""
    group_of = expert // (num_experts // NUM_GROUPS)
    groups = tl.arange(0, BLOCK_G)
    worth = tl.full((values.shape[0], BLOCK_G), float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        group_values = tl.where((group_of == group)[None, :], values, float("-inf"))
        best = tl.max(group_values, 1)
        if SUMS_TOP_TWO:
            first = _first_argmax(group_values, expert, BLOCK_E - 1)
            best += tl.max(tl.where(expert[None, :] == first[:, None], float("-inf"), group_values), 1)
        worth = tl.where((groups == group)[None, :], best[:, None], worth)
    is_open = tl.zeros(values.shape, tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        chosen = _first_argmax(worth, groups, NUM_GROUPS - 1)
        worth = tl.where(groups[None, :] == chosen[:, None], float("-inf"), worth)
        is_open = tl.where(group_of[None, :] == chosen[:, None], 1, is_open)
    return tl.where(is_open == 1, values, float("-inf"))


@triton.jit
def _scores_and_lse(logits, is_expert, IS_SOFTMAX: tl.constexpr):
    """Return (raw scores, log-sum-exp of the logits). Scores are 0 after the last expert."""
    top = tl.max(logits, 1)
    exps = tl.exp(logits - top[:, None])
    total = tl.sum(exps, 1)
    if IS_SOFTMAX:
        raw = exps / total[:, None]
    else:
        raw = tl.where(is_expert[None, :], tl.sigmoid(logits), 0.0)
    return raw, top + tl.log(total)


@triton.jit
def _forward_kernel(
    logits, bias, ids, probs, scores, tokens_per_expert, sums, num_tokens, num_experts, factor, eps,
    TOP_K: tl.constexpr, IS_SOFTMAX: tl.constexpr, IS_POST_SOFTMAX: tl.constexpr, NORMALIZES: tl.constexpr,
    HAS_BIAS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)
    is_token = token < num_tokens
    is_expert = expert < num_experts
    is_cell = is_token[:, None] & is_expert[None, :]
    cell = token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    # Tokens after the last are computed from zeros, and not stored.
    z = tl.where(is_expert[None, :], tl.load(logits + cell, mask=is_cell, other=0.0), float("-inf"))
    raw, lse = _scores_and_lse(z, is_expert, IS_SOFTMAX)
    values = z if IS_SOFTMAX else raw
    if HAS_BIAS:
        values = raw + tl.load(bias + expert, mask=is_expert, other=0.0)[None, :]
    if NUM_GROUPS > 1:
        values = tl.where(is_expert[None, :], values, float("-inf"))
        values = _mask_to_top_groups(
            values, expert, num_experts, NUM_GROUPS, TOP_GROUPS, not IS_SOFTMAX, BLOCK_G, BLOCK_E
        )  # fmt: skip
    # An expert of value -inf may still be chosen; chosen experts and padding may not.
    values = tl.where(is_expert[None, :], tl.maximum(values, -3.4028234e38), float("-inf"))
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((ROWS, BLOCK_K), tl.int32)
    weight = tl.full((ROWS, BLOCK_K), float("-inf"), tl.float32)
    picked = tl.zeros((ROWS, BLOCK_E), tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.minimum(_first_argmax(values, expert, BLOCK_E), num_experts - 1)
        is_best = expert[None, :] == best[:, None]
        worth = tl.sum(tl.where(is_best, z if IS_POST_SOFTMAX else raw, 0.0), 1)
        values = tl.where(is_best, float("-inf"), values)
        picked += tl.where(is_best & is_token[:, None], 1, 0)
        chosen = tl.where((place == k)[None, :], best[:, None], chosen)
        weight = tl.where((place == k)[None, :], worth[:, None], weight)
    if IS_POST_SOFTMAX:
        weight = tl.exp(weight - tl.max(weight, 1)[:, None])
        weight = weight / tl.sum(weight, 1)[:, None]
    else:
        weight = tl.where((place < TOP_K)[None, :], weight, 0.0)
        if NORMALIZES:
            weight = weight / (tl.sum(weight, 1) + eps)[:, None]
    is_choice = is_token[:, None] & (place < TOP_K)[None, :]
    choice = token.to(tl.int64)[:, None] * TOP_K + place[None, :]
    tl.store(ids + choice, chosen.to(tl.int64), mask=is_choice)
    tl.store(probs + choice, weight * factor, mask=is_choice)
    score = raw if IS_SOFTMAX else raw / (tl.sum(raw, 1) + eps)[:, None]
    tl.store(scores + cell, score, mask=is_cell)
    tl.atomic_add(tokens_per_expert + expert, tl.sum(picked, 0).to(tl.int64), mask=is_expert, sem="relaxed")
    score = tl.where(is_cell, score, 0.0)
    # A row of sums: scores of each expert, squared log-sum-exps, entropies.
    sums += tl.program_id(0) * (num_experts + 2)
    tl.store(sums + expert, tl.sum(score, 0), mask=is_expert)
    tl.store(sums + num_experts, tl.sum(tl.where(is_token, lse * lse, 0.0), 0))
    entropy = tl.where(score > 0, -score * tl.log(tl.where(score > 0, score, 1.0)), 0.0)
    tl.store(sums + num_experts + 1, tl.sum(tl.sum(entropy, 1), 0))


@triton.jit
def _backward_kernel(
    logits, ids, grad_probs, grad_scores, grad_sums, grad_z, grad_logits, num_tokens, num_experts, factor, eps,
    TOP_K: tl.constexpr, IS_SOFTMAX: tl.constexpr, IS_POST_SOFTMAX: tl.constexpr, NORMALIZES: tl.constexpr,
    HAS_GRAD_PROBS: tl.constexpr, HAS_GRAD_SCORES: tl.constexpr, HAS_GRAD_SUMS: tl.constexpr,
    HAS_GRAD_Z: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)
    is_token = token < num_tokens
    is_expert = expert < num_experts
    is_cell = is_token[:, None] & is_expert[None, :]
    cell = token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    z = tl.where(is_expert[None, :], tl.load(logits + cell, mask=is_cell, other=0.0), float("-inf"))
    raw, lse = _scores_and_lse(z, is_expert, IS_SOFTMAX)
    grad = tl.zeros((ROWS, BLOCK_E), tl.float32)
    if HAS_GRAD_SCORES:
        grad += tl.load(grad_scores + cell, mask=is_cell, other=0.0)
    if HAS_GRAD_SUMS:
        grad += tl.load(grad_sums + expert, mask=is_expert, other=0.0)[None, :]
    # Scatter the gradients of the probabilities to their experts, and mark these experts.
    grad_choice = tl.zeros((ROWS, BLOCK_E), tl.float32)
    is_chosen = tl.zeros((ROWS, BLOCK_E), tl.int32)
    for k in tl.static_range(TOP_K):
        place = token.to(tl.int64) * TOP_K + k
        best = tl.load(ids + place, mask=is_token, other=0).to(tl.int32)
        value = tl.zeros((ROWS,), tl.float32)
        if HAS_GRAD_PROBS:
            value += tl.load(grad_probs + place, mask=is_token, other=0.0) * factor
        is_best = expert[None, :] == best[:, None]
        grad_choice = tl.where(is_best, value[:, None], grad_choice)
        is_chosen = tl.where(is_best, 1, is_chosen)
    if IS_SOFTMAX:
        if IS_POST_SOFTMAX:
            open_z = tl.where(is_chosen == 1, z, float("-inf"))
            weight = tl.exp(open_z - tl.max(open_z, 1)[:, None])
            weight = weight / tl.sum(weight, 1)[:, None]
            direct = weight * (grad_choice - tl.sum(grad_choice * weight, 1)[:, None])
        else:
            grad += grad_choice
            direct = tl.zeros((ROWS, BLOCK_E), tl.float32)
        result = raw * (grad - tl.sum(grad * raw, 1)[:, None]) + direct
    else:
        total = tl.sum(raw, 1) + eps
        share = raw / total[:, None]
        grad_raw = (grad - tl.sum(grad * share, 1)[:, None]) / total[:, None]
        if NORMALIZES:
            chosen = tl.where(is_chosen == 1, raw, 0.0)
            total = tl.sum(chosen, 1) + eps
            weight = chosen / total[:, None]
            grad_choice = (grad_choice - tl.sum(grad_choice * weight, 1)[:, None]) / total[:, None]
        grad_raw += tl.where(is_chosen == 1, grad_choice, 0.0)
        result = grad_raw * raw * (1.0 - raw)
    if HAS_GRAD_Z:
        result += tl.load(grad_z) * 2.0 * lse[:, None] * tl.exp(z - lse[:, None])
    tl.store(grad_logits + cell, result, mask=is_cell)


@dataclass(frozen=True)
class RouterOutput:
    """Outputs of the forward kernel."""

    ids_TK: Tensor
    probs_TK: Tensor
    scores_TE: Tensor
    tokens_per_expert_E: Tensor
    score_sums_E: Tensor
    z_sum: Tensor
    entropy: Tensor


def route_forward(logits_TE: Tensor, bias_E: Tensor | None, options: RouterOptions) -> RouterOutput:
    """Choose experts. See `moefold.model.moe.router` for the outputs.

    Args:
        logits_TE: float32, contiguous.
        bias_E: added to the scores for the top-k only.
        options: scores, top-k and probabilities.
    """
    num_tokens, num_experts = logits_TE.shape
    programs = triton.cdiv(num_tokens, TOKENS_PER_PROGRAM)
    empty = logits_TE.new_empty
    ids_TK = torch.empty(num_tokens, options.top_k, dtype=torch.int64, device=logits_TE.device)
    probs_TK = empty(num_tokens, options.top_k)
    scores_TE = torch.empty_like(logits_TE)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=logits_TE.device)
    sums_PX = empty(programs, num_experts + 2)
    if programs:
        _forward_kernel[(programs,)](
            logits_TE, logits_TE if bias_E is None else bias_E, ids_TK, probs_TK, scores_TE, counts_E, sums_PX,
            num_tokens, num_experts, options.scaling_factor, SCORE_SUM_EPS, TOP_K=options.top_k,
            IS_SOFTMAX=options.is_softmax, IS_POST_SOFTMAX=options.is_post_softmax,
            NORMALIZES=options.normalizes_probs, HAS_BIAS=bias_E is not None,
            NUM_GROUPS=options.num_groups, TOP_GROUPS=options.top_groups,
            BLOCK_G=triton.next_power_of_2(options.num_groups), BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(options.top_k), ROWS=TOKENS_PER_PROGRAM,
        )  # fmt: skip
    # Programs write partial sums, which are added in a fixed order; integers may be added in any order.
    score_sums_E, z_sum, entropy = sums_PX.sum(0).split((num_experts, 1, 1))
    return RouterOutput(ids_TK, probs_TK, scores_TE, counts_E, score_sums_E, z_sum.squeeze(0), entropy.squeeze(0))


def route_backward(logits_TE: Tensor, ids_TK: Tensor, grads: Sequence[Tensor | None], options: RouterOptions) -> Tensor:
    """Compute the gradient of the logits.

    Args:
        logits_TE: as in the forward pass.
        ids_TK: the choices.
        grads: gradients of the probabilities [T, K], the scores [T, E], their sums [E], and the sum of squared
            log-sum-exps, or None for zero.
        options: as in the forward pass.
    """
    num_tokens, num_experts = logits_TE.shape
    grad_TE = torch.empty_like(logits_TE)
    names = ("HAS_GRAD_PROBS", "HAS_GRAD_SCORES", "HAS_GRAD_SUMS", "HAS_GRAD_Z")
    has_grad = {name: grad is not None for name, grad in zip(names, grads, strict=True)}
    if num_tokens:
        _backward_kernel[(triton.cdiv(num_tokens, TOKENS_PER_PROGRAM),)](
            logits_TE, ids_TK, *(logits_TE if grad is None else grad.contiguous() for grad in grads), grad_TE,
            num_tokens, num_experts,
            options.scaling_factor, SCORE_SUM_EPS, TOP_K=options.top_k,
            IS_SOFTMAX=options.is_softmax, IS_POST_SOFTMAX=options.is_post_softmax,
            NORMALIZES=options.normalizes_probs, **has_grad,
            BLOCK_E=triton.next_power_of_2(num_experts), ROWS=TOKENS_PER_PROGRAM,
        )  # fmt: skip
    return grad_TE
