"""SparseMixer-v2: a router whose choices are sampled in training (arXiv:2409.12136), as in Phi-3.5-MoE.

A token chooses its experts one after another. Each choice has its own softmax, over the experts that are not chosen yet
and whose logits are close to the best of them. In evaluation the best expert is chosen. In training an expert is
sampled. The routing weight is the probability of the chosen expert in that softmax.
"""

import torch
from torch import Tensor

FULL_STEP_SHARE = 0.25
"""Share of the sampled choices, without choices of the best expert, with full weight (Heun's third-order method)."""
MIDPOINT_WEIGHT = 1 / 3
"""Factor of the reduced weights."""


def sample_experts(logits_TE: Tensor, top_k: int, jitter: float, noise_TN: Tensor | None) -> Tensor:
    """Choose the experts of each token, int64 [T, K], without a gradient.

    Args:
        logits_TE: float32 or float64.
        top_k: K.
        jitter: half the relative distance to the best logit up to which an expert takes part.
        noise_TN: uniform numbers in (0, 1), float64 [T, `noise_width`]. None: choose the best expert, or the lowest of
            several best experts.
    """
    logits_TE = logits_TE.detach()
    gumbel_KTE = None
    if noise_TN is not None:
        # The argmax of logits with Gumbel noise is a sample of their softmax.
        uniform_TKE = noise_TN.unflatten(1, (top_k, -1))[..., :-1]
        gumbel_KTE = uniform_TKE.log().neg_().log_().neg_().unbind(1)
    is_chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool)
    chosen_ids = []
    for k in range(top_k):
        candidates_TE = _close_to_best(logits_TE, is_chosen_TE, jitter)
        if gumbel_KTE is not None:
            candidates_TE = candidates_TE + gumbel_KTE[k]
        chosen_ids.append(candidates_TE.argmax(1, keepdim=True))
        is_chosen_TE = is_chosen_TE.scatter(1, chosen_ids[-1], True)
    return torch.cat(chosen_ids, 1)


def mixer_weights(logits_TE: Tensor, ids_TK: Tensor, jitter: float, noise_TN: Tensor | None) -> Tensor:
    """Compute the routing weights of chosen experts, [T, K].

    In training, a choice that is not the best has a third of its weight with probability 3/4. Its gradient stays the
    same. This is how Heun's third-order method estimates the gradient through the sampling.

    Args:
        logits_TE: float32 or float64.
        ids_TK: chosen experts, int64, in order.
        jitter: see `sample_experts`.
        noise_TN: the numbers that sampled the choices, or None in evaluation.
    """
    is_chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool)
    step_TK = None
    if noise_TN is not None:
        step_TK = noise_TN.unflatten(1, (ids_TK.shape[1], -1))[..., -1]
    weights = []
    for k, ids_T1 in enumerate(ids_TK.split(1, 1)):
        candidates_TE = _close_to_best(logits_TE, is_chosen_TE, jitter)
        weight_T1 = candidates_TE.softmax(1).gather(1, ids_T1)
        if step_TK is not None:
            is_best_T1 = candidates_TE.detach().argmax(1, keepdim=True) == ids_T1
            is_full_T1 = is_best_T1 | (step_TK[:, k : k + 1] > 1 - FULL_STEP_SHARE)
            reduced_T1 = weight_T1.detach() * (MIDPOINT_WEIGHT - 1)
            weight_T1 = weight_T1 + reduced_T1.masked_fill(is_full_T1, 0.0)
        weights.append(weight_T1)
        is_chosen_TE = is_chosen_TE.scatter(1, ids_T1, True)
    return torch.cat(weights, 1)


def _close_to_best(logits_TE: Tensor, is_chosen_TE: Tensor, jitter: float) -> Tensor:
    """Mask the experts that are already chosen, and experts too far below the best of the others.

    The distance is relative to the larger of the best logit and the magnitude of the expert's logit. If all logits are
    0, no expert is too far.
    """
    free_TE = logits_TE.masked_fill(is_chosen_TE, float("-inf"))
    best_T1 = free_TE.detach().amax(1, keepdim=True)
    scale_TE = torch.maximum(logits_TE.detach().abs(), best_T1)
    is_far_TE = (best_T1 - logits_TE.detach()) > 2 * jitter * scale_TE
    return free_TE.masked_fill(is_far_TE, float("-inf"))
