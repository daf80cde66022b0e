"""The top-k router: which experts see a token, and with which weight."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moefold.model.parameter import local


@dataclass(frozen=True)
class Routing:
    """What the router decided for the T tokens of this rank. All weights are float32, or float64 for float64 tokens."""

    ids_TK: Tensor
    """Chosen experts, best first, int64 [T, K]; the K of one token differ."""
    probs_TK: Tensor
    """Weight of each choice, [T, K]."""
    scores_TE: Tensor
    """Softmax over all experts, [T, E]; what the load-balancing loss is about."""
    logits_TE: Tensor
    """[T, E]."""


class Router(nn.Module):
    """Softmax top-k routing (arXiv:1701.06538 without noise). Its maths never runs below float32.

    Args:
        num_experts: E.
        hidden_size: H.
        top_k: K.
        softmax: "pre" weighs by the softmax over all experts; "post" by the softmax over the chosen, which sums to 1.
    """

    def __init__(self, num_experts: int, hidden_size: int, top_k: int, softmax: Literal["pre", "post"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.top_k = top_k
        self.softmax = softmax

    def forward(self, x_TH: Tensor) -> Routing:
        """Route [T, H]; local."""
        dtype = torch.promote_types(x_TH.dtype, torch.float32)
        logits_TE = x_TH.to(dtype) @ local(self.weight, dtype).t()
        scores_TE = logits_TE.softmax(-1)
        ids_TK = choose_experts(logits_TE.detach(), self.top_k)
        if self.softmax == "pre":
            probs_TK = scores_TE.gather(1, ids_TK)
        else:
            probs_TK = logits_TE.gather(1, ids_TK).softmax(-1)
        return Routing(ids_TK, probs_TK, scores_TE, logits_TE)


def choose_experts(logits_TE: Tensor, top_k: int) -> Tensor:
    """The K largest logits of each token, largest first; of equal ones the lower expert. int64 [T, K].

    torch.topk leaves the order of equal values open, which would make routing depend on the shape of the shard; argmax
    names the first one, and K passes are faster than a stable sort.
    """
    # The clamp tells a logit of -inf, which may still be chosen, from a chosen one.
    open_TE = logits_TE.clamp(min=torch.finfo(logits_TE.dtype).min)
    chosen = []
    for _ in range(top_k):
        best_T1 = open_TE.argmax(1, keepdim=True)
        open_TE.scatter_(1, best_T1, float("-inf"))
        chosen.append(best_T1)
    return torch.cat(chosen, 1)
