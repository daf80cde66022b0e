"""Rotary position embedding (RoPE, arXiv:2104.09864), partial and scaled, half-split or interleaved."""

import torch
from torch import Tensor

from moefold.config.base.part import describe_part
from moefold.config.groups.rope_scaling import RopeSettings
from moefold.errors import ConfigError
from moefold.ops.rope import NoRope, Rope, RopeKernel

MIN_TABLE_POSITIONS = 256
"""Fewest positions of a `RopeTable` that is not empty."""


def build_rope(
    settings: RopeSettings,
    positions: Tensor,
    dtype: torch.dtype,
    kernel: RopeKernel | None = None,
    frequencies: Tensor | None = None,
    seq_len: int = 0,
) -> Rope:
    """Build the RoPE of tokens at the given positions.

    Args:
        positions: int64 [S], counted from the start of the sample, or [S, B], each from the start of its document.
        dtype: dtype of the result. Angles are computed in float64.
        frequencies: `rope_frequencies` on the device of the positions, so that the host need not wait for their copy.
            None: computed and copied.
    """
    if frequencies is None:
        frequencies = rope_frequencies(settings, seq_len).to(positions.device)
    positions_SB = positions.unsqueeze(1) if positions.dim() == 1 else positions
    angles = positions_SB.to(torch.float64)[:, :, None, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    scale = settings.scaling.rotated_factor(seq_len)
    cos = (scale * angles.cos()).to(dtype)
    sin = (scale * angles.sin()).to(dtype)
    return Rope(cos, sin, settings.interleaved, kernel, _no_rope(settings, positions_SB, dtype))


class RopeTable:
    """RoPE of all positions up to the last requested position. Decoding looks rows up in it, with the same bits."""

    def __init__(
        self, settings: RopeSettings, dtype: torch.dtype, kernel: RopeKernel | None, frequencies: Tensor, seq_len: int
    ) -> None:
        self._settings = settings
        self._options = dtype, kernel, frequencies, seq_len
        self._angles_2L11R = torch.zeros(2, 0)

    def rope(self, positions_R: Tensor, last: int) -> Rope:
        """Return the RoPE of some rows.

        Args:
            positions_R: int64 [R].
            last: the largest of them, or more. The host does not read it from the device.
        """
        dtype, kernel, frequencies, _ = self._options
        if last >= self._angles_2L11R.shape[1]:
            # The length doubles each time, so that all computations together take a few times as long as the last.
            length = max(MIN_TABLE_POSITIONS, 1 << last.bit_length())
            table = build_rope(self._settings, torch.arange(length, device=frequencies.device), *self._options)
            self._angles_2L11R = torch.stack((table.cos, table.sin))
        cos, sin = self._angles_2L11R.index_select(1, positions_R).unbind(0)
        no_rope = _no_rope(self._settings, positions_R.unsqueeze(1), dtype)
        return Rope(cos, sin, self._settings.interleaved, kernel, no_rope)


def _no_rope(settings: RopeSettings, positions_SB: Tensor, dtype: torch.dtype) -> NoRope:
    """Return the positions of layers without RoPE, with their attention temperature (arXiv:2501.19399, Llama 4)."""
    if not settings.temperature_scale:
        return NoRope(positions_SB, None)
    steps_SB = (positions_SB + 1) // settings.temperature_tokens
    scale_SB = 1 + settings.temperature_scale * steps_SB.to(torch.float64).log1p()
    return NoRope(positions_SB, scale_SB[:, :, None, None].to(torch.promote_types(dtype, torch.float32)))


def rope_frequencies(settings: RopeSettings, seq_len: int = 0) -> Tensor:
    """Return the angle per position of each rotated pair, float64 [rotated dims / 2], after scaling.

    Args:
        seq_len: tokens of the longest sequence, see `RopeScalingPart`.

    Raises:
        ConfigError: a scaling of another package returns a wrong number of frequencies.
    """
    scaling = settings.scaling
    frequencies = scaling.frequencies(settings.theta, settings.rotary_dim, seq_len)
    pairs = -(-settings.rotary_dim // 2)
    if len(frequencies) != pairs:
        raise ConfigError(f"{describe_part(scaling)} has {len(frequencies)} frequencies for {pairs} pairs of dims")
    return frequencies
