"""Arithmetic that takes numbers or arrays."""

from typing import Any

import numpy as np


def elementwise_max(left: Any, right: Any) -> Any:
    """Return the larger of two numbers, or the element-wise maximum of two arrays."""
    return (
        np.maximum(left, right) if isinstance(left, np.ndarray) or isinstance(right, np.ndarray) else max(left, right)
    )
