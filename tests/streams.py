"""Token streams with media for tests: ids, grids and the per-sample pieces they were made from, without a processor."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

IMAGE, VIDEO, START, END = 90, 91, 92, 93


@dataclass(frozen=True)
class Piece:
    """One sample: ids [L], token types [L] (0 text, 1 image, 2 video), its grids, and seconds a temporal patch."""

    ids: Tensor
    types: Tensor
    images: list[tuple[int, int, int]]
    videos: list[tuple[int, int, int]]
    seconds: list[float]


def random_sample(
    rng: random.Random, *, frames: bool, merge: int = 2, kinds: str = "tiv", longest: int = 6, wrapped: bool = False
) -> Piece:
    """Text, images and videos in random order; an image may be first or last. frames: each frame a run after its time.

    wrapped: START stands before every image and nowhere else, as Megatron-Bridge must have it.
    """
    ids: list[int] = []
    images: list[tuple[int, int, int]] = []
    videos: list[tuple[int, int, int]] = []

    def text(low: int = 0) -> None:
        ids.extend(rng.randrange(1, 80) for _ in range(rng.randrange(low, 5)))

    def side() -> int:
        return merge * rng.choice([1, 1, 2, 3, rng.randrange(1, longest + 1)])

    for _ in range(rng.randrange(0, 4)):
        kind = rng.choice(kinds)
        if kind == "t":
            text(1)
            continue
        # transformers reads two neighbouring spans of one kind as one, so text must stand between them.
        wrap = rng.random() < 0.8 or wrapped or bool(ids and ids[-1] in (IMAGE, VIDEO))
        grid = (1 if kind == "i" else rng.randrange(1, 4), side(), side())
        rows = grid[1] * grid[2] // merge**2
        if kind == "i":
            images.append(grid)
            ids += [START] * wrap + [IMAGE] * rows + [END] * wrap
        else:
            videos.append(grid)
            if not frames:
                ids += [START] * wrap + [VIDEO] * (rows * grid[0]) + [END] * wrap
            for _ in range(grid[0] if frames else 0):
                ids += [rng.randrange(1, 80), START] + [VIDEO] * rows + [END]
    if not ids or rng.random() < 0.8:
        text(1 if not ids else 0)
    if rng.random() < 0.1 and not wrapped:
        ids.append(START)  # a policy may stop right after it
    row = torch.tensor(ids)
    types = (row == IMAGE).long() + 2 * (row == VIDEO).long()
    return Piece(row, types, images, videos, [rng.choice([0.3, 0.5, 1.0, 2.0, 3.7]) for _ in videos])


def grids(pieces: list[Piece], kind: str) -> Tensor | None:
    """All pieces' grids of "images" or "videos", None when there are none."""
    found = [grid for piece in pieces for grid in getattr(piece, kind)]
    return torch.tensor(found) if found else None
