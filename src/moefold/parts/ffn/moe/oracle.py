"""A mixture of experts in float64: each expert computes every token, and its routing weight is 0 for most."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from moefold.config.groups.ffn import Route
from moefold.parts.ffn.swiglu.oracle import swiglu


def output(
    part: Any, weights: Mapping[str, Tensor], x: Tensor, route: Route, round_dispatched: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output of the shared expert for x [B, S, H] (zeros without it), and of the routed experts.

    Args:
        weights: weights of the layer by name.
        route: chooses the experts.
        round_dispatched: rounds the input of the experts to its number format in the dispatch.
    """
    routing = route(x, weights["router.weight"], weights["router.bias"] if part.router.bias else None)
    return shared_expert(part, weights, x), routed_experts(part, weights, x, routing, round_dispatched)


def shared_expert(part: Any, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the output of the shared expert."""
    if not part.shared:
        return x.new_zeros(x.shape)
    y = swiglu(weights, x, "shared.")
    return y * (x @ weights["shared_gate"].T).sigmoid() if part.shared.gate else y


def routed_experts(
    part: Any, weights: Mapping[str, Tensor], x: Tensor, routing: Any, round_dispatched: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the output of the routed experts, and of the zero-computation experts, which return their input."""
    activate = part.activation.formula()
    tokens = round_dispatched(x @ weights["latent_down.weight"].T if part.latent_size else x)
    y = tokens.new_zeros(tokens.shape)
    for expert in range(part.num_experts):
        gate, up, down = (weights[f"experts.{name}"][expert] for name in ("w_gate", "w_up", "w_down"))
        weight = (routing.weights * (routing.experts == expert)).sum(-1, keepdim=True)
        expert_input = weight * tokens if part.probs_on_input else tokens
        gated, raised = expert_input @ gate, expert_input @ up
        if part.bias:
            gated = gated + weights["experts.b_gate"][expert]
            raised = raised + weights["experts.b_up"][expert]
        result = activate(gated, raised) @ down
        if part.bias:
            result = result + weights["experts.b_down"][expert]
        if part.probs_on_input:
            # An expert that a token has not chosen has input 0 and output 0, unless it has biases.
            weight = (weight != 0).to(weight)
        y = y + weight * result
    if part.latent_size:
        y = y @ weights["latent_up.weight"].T
    is_zero = routing.experts >= part.num_experts
    return y + (routing.weights * is_zero).sum(-1, keepdim=True) * x
