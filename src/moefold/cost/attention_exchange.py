"""Bytes that planned attention sends in a layer (`parallel/planned_attention.py`)."""

from typing import NamedTuple

SUM_BYTES = 4
"""Bytes of a number in sums over ranks: float32, unless numbers are wider."""


class TokenWidths(NamedTuple):
    """Numbers of one token on one tp rank."""

    query: float
    """Query heads times head size, A * D; `output` likewise with the size of the values, A * Dv."""
    output: float
    keys_and_values: float
    """G * (D + Dv)."""


def exchange_bytes(query_rows: float, key_rows: float, widths: TokenWidths, value_bytes: int) -> tuple[float, float]:
    """Return the bytes that are sent forward and backward.

    Forward: queries to their hosts and outputs back, and keys and values. Backward: queries, outputs and gradients of
    the outputs to the hosts, the gradients of the queries back; keys and values again, and their gradients back, in the
    precision of sums.

    Args:
        query_rows: rows of queries that are sent, each to one host.
        key_rows: rows of keys and values that are sent, each once to each rank that needs it.
        widths: of a token.
        value_bytes: bytes of a number in the compute dtype.
    """
    keys_and_values = key_rows * widths.keys_and_values
    forward = (query_rows * (widths.query + widths.output) + keys_and_values) * value_bytes
    backward = query_rows * 2 * (widths.query + widths.output) * value_bytes
    return forward, backward + keys_and_values * (value_bytes + max(value_bytes, SUM_BYTES))
