"""What a Qwen3 vision tower adds to its patches, made from tables of frame sizes instead of one list entry a patch.

The learned position embeddings of a side x side grid are stretched over a frame of h x w patches by linear interpolation
along each axis, that is by two small matrices: `R_h @ table @ R_w^T`, once for every distinct size. The backward is their
transposes: deterministic, and no scatter of four rows a patch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from vlm_cp import transfer
from vlm_cp.vision_layout import VisionLayout


@dataclass(frozen=True, eq=False)
class PositionTables:
    """Position embeddings of patches in the tower's order, merged patches together.

    side: the learned grid is side x side. merge: m. The interpolation matrices are kept, one a length that was seen.
    """

    side: int
    merge: int
    _matrices: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(
        default_factory=dict[tuple[int, torch.device, torch.dtype], Tensor], repr=False
    )

    def embeddings(self, table: Tensor, layout: VisionLayout) -> Tensor:
        """[n, C] of `layout`'s local patches, in the table's dtype; table: the learned grid [side * side, C]."""
        unit = self.merge**2
        grid = table.to(_at_least_float32(table.dtype)).unflatten(0, (self.side, self.side))
        frames = {size: self.frame(grid, size).to(table.dtype) for size in dict.fromkeys(layout.sizes)}
        pieces: list[Tensor] = []
        parts = zip(layout.sizes, layout.parts[:, 1:].tolist(), strict=True)
        for (size, (first, rows)), run in groupby(parts):
            piece = frames[size][first * unit : (first + rows) * unit]
            pieces.append(piece.expand(len(list(run)), -1, -1).flatten(0, 1))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def frame(self, grid: Tensor, size: tuple[int, int]) -> Tensor:
        """[h * w, C] of one frame from the learned grid [side, side, C]."""
        (height, width), m = size, self.merge
        rows = (self._matrix(height, grid) @ grid.flatten(1)).unflatten(1, grid.shape[1:])  # [h, side, C]
        every = self._matrix(width, grid) @ rows  # [h, w, C]
        return every.unflatten(0, (height // m, m)).unflatten(2, (width // m, m)).transpose(1, 2).flatten(0, 3)

    def _matrix(self, length: int, like: Tensor) -> Tensor:
        key = (length, like.device, like.dtype)
        if key not in self._matrices:
            self._matrices[key] = transfer.moved(interpolation(length, self.side).to(like.dtype), like.device)
        return self._matrices[key]


def interpolation(length: int, side: int) -> Tensor:
    """float64 [length, side]: row i weighs the learned positions for the i-th of `length` points spread from first to last."""
    place = torch.linspace(0, side - 1, length, dtype=torch.float64)
    low = place.floor().clamp(max=side - 1)
    weight = place - low
    matrix = torch.zeros(length, side, dtype=torch.float64)
    matrix.scatter_add_(1, low.long()[:, None], (1 - weight)[:, None])
    return matrix.scatter_add_(1, (low.long()[:, None] + 1).clamp(max=side - 1), weight[:, None])


def rotary_angles(frequencies: Tensor, layout: VisionLayout) -> Tensor:
    """[n, 4k]: the rotary angles of every local patch, (rows, columns) twice, as both halves of a head take them.

    frequencies: [positions, k], the angles of each row or column number; at least as many as the largest frame has.
    """
    angles = frequencies[layout.coordinates].flatten(1)
    return torch.cat([angles, angles], 1)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
