"""Norms of the residual stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from moefold.config.param_spec import ParamSpec
from moefold.config.part import FlatKey, Part


@dataclass(frozen=True, kw_only=True)
class NormPart(Part):
    """Norm of the residual stream."""

    group: ClassVar[str] = "norm"
    key: ClassVar[str] = "model.norm"
    is_of_layers: ClassVar[bool] = True
    saved_numbers: ClassVar[int] = 1
    """Numbers of a token that are saved for backward, without input and output."""
    eps: Annotated[float, FlatKey("model.norm_eps")]

    def params(self, name: str, width: int) -> Iterator[ParamSpec]:
        """Yield the parameters of the norm of this name."""
        yield ParamSpec(f"{name}.weight", (width,), "norms")

    def build(self, width: int) -> Any:
        """Return the module, on the meta device where that is the default."""
        raise NotImplementedError
