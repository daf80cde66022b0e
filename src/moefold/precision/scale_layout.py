"""How matrix units of Blackwell read the scales of blocks: in tiles of 128 rows and 4 columns.

As cuBLAS documents it for blocks of 16 and 32 values ("1D block scaling factors layout"): tiles lie one behind the
other, along the columns first; within one the scale at (row, column) is element (row % 32) * 16 + (row // 32) * 4 +
column. torch calls it SWIZZLE_32_4_4.
"""

from torch import Tensor

SCALE_TILE_ROWS, SCALE_TILE_COLUMNS = 128, 4
SCALE_TILE_LANES = 32
"""Rows of a tile that are neighbours in it only after as many bytes as a row group has."""


def swizzle_scales(scales_MC: Tensor) -> Tensor:
    """The scales of a matrix as they are to lie in memory, [M * C].

    Args:
        scales_MC: of M rows and C blocks in each, multiples of 128 and 4.
    """
    groups = SCALE_TILE_ROWS // SCALE_TILE_LANES
    tiles = scales_MC.unflatten(1, (-1, SCALE_TILE_COLUMNS)).unflatten(0, (-1, groups, SCALE_TILE_LANES))
    # [row tile, row group, lane, column tile, column] -> [row tile, column tile, lane, row group, column]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
