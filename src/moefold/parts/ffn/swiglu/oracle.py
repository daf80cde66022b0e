"""SwiGLU in float64."""

from collections.abc import Mapping

from torch import Tensor


def swiglu(weights: Mapping[str, Tensor], x: Tensor, module: str = "") -> Tensor:
    """Return the output for x [..., H].

    Args:
        weights: weights of the network by name.
        x: its input.
        module: start of the names of the weights.
    """
    gate, up, down = (weights[f"{module}{name}"] for name in ("w_gate", "w_up", "w_down"))
    gated = x @ gate.T
    return (gated * gated.sigmoid() * (x @ up.T)) @ down.T
