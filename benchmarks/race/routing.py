"""Facts of a router that several references ask for."""

from moefold.config.model import ModelConfig


def softmax_kind(model: ModelConfig) -> str:
    """Return the kind of the routing weights of a softmax router, or empty for other routers."""
    return getattr(getattr(model.ffn.moe.router, "softmax", None), "kind", "")
