"""A tower in miniature, cut over gloo ranks: rows and every gradient equal one rank's, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # which a checkpoint loads, 3 s: here once instead of in every forked rank
import torch.distributed as dist
from ranks import run_ranks
from test_vision import SPEC, WINDOWED, squares
from torch import Tensor, nn

from vlm_cp.cut_attention import attend_frames, cut_attention
from vlm_cp.vision import VisionAssignment, assign_vision
from vlm_cp.vision_layout import VisionLayout

LAYERS, HEAD = 2, 4


class Tower(nn.Module):
    """Pixels -> two attention layers -> one row of features for every m * m patches, and a second level's after layer 0."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        width = heads * HEAD
        self.heads = heads
        self.embed = nn.Linear(5, width)
        self.place = nn.Linear(2, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.mergers = nn.ModuleList(nn.Linear(4 * width, 7) for _ in range(LAYERS))
        self.double()

    def forward(self, pixels: Tensor, layout: VisionLayout, group: dist.ProcessGroup | None) -> Tensor:
        x = self.embed(layout.take(pixels)) + self.place(layout.coordinates.double() / 8).sin()
        levels = []
        for qkv, out, merger in zip(self.qkv, self.out, self.mergers, strict=True):
            query, key, value = qkv(x).unflatten(1, (3, self.heads, HEAD)).unbind(1)
            seen = cut_attention(query, key, value, layout, group, own=attend_frames, shared=attend_frames)
            x = x + out(seen.flatten(1)).tanh()
            levels.append(merger(x.unflatten(0, (-1, 4)).flatten(1)))
        return layout.join(torch.cat(levels, 1), group)


def tower_of(heads: int) -> Tower:
    torch.manual_seed(0)
    return Tower(heads)


def assignment_of(grids: list[tuple[int, int, int]], cp: int, heads: int, **options: Any) -> VisionAssignment:
    return assign_vision(grids, cp_size=cp, heads_per_tp=heads, **{"spec": SPEC, "min_patches": 0, **options})


def pixels_of(assignment: VisionAssignment) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(int(assignment.frame_grids.prod(1).sum()), 5, dtype=torch.float64, generator=generator)


def weights_of(rows: Tensor, rank: int) -> Tensor:
    """What a rank makes of the rows: every rank uses some of them, ten times as much of it as the one before."""
    used = torch.arange(len(rows)) % dist.get_world_size() == rank
    return used[:, None] * 10.0**rank * torch.arange(1, rows.numel() + 1, dtype=torch.float64).view_as(rows).cos()


def _run(rank: int, grids: Any, heads: int, options: dict[str, Any]) -> dict[str, Any]:
    cp, group = dist.get_world_size(), dist.group.WORLD
    whole = assignment_of(grids, 1, heads)
    pixels = pixels_of(whole)
    reference = tower_of(heads)
    expected = reference(pixels, VisionLayout.of(whole, 0, "cpu"), None)
    sum((expected * weights_of(expected, r)).sum() for r in range(cp)).backward()

    tower = tower_of(heads)
    assignment = assignment_of(grids, cp, heads, **options)
    rows = tower(pixels, VisionLayout.of(assignment, rank, "cpu"), group)
    (rows * weights_of(rows, rank)).sum().backward()
    gradients = {name: p.grad for name, p in tower.named_parameters()}
    for gradient in gradients.values():
        assert gradient is not None
        dist.all_reduce(gradient)
    errors = [float((gradients[n] - p.grad).norm() / p.grad.norm()) for n, p in reference.named_parameters()]
    return {"rows": float((rows - expected).detach().abs().max()), "gradients": max(errors), "mode": assignment.mode}


CASES = {
    "whole": (squares(6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6), {}, "whole"),
    "6x6-beside-large": ([*squares(6, 16, 6), (2, 4, 6)], {}, "mixed"),
    "one-frame": (squares(10), {}, "mixed"),
    "fewer-rows-than-ranks": (squares(2), {}, "mixed"),
    "video": ([(5, 6, 6)], {}, "mixed"),
    "ranks-with-nothing": (squares(4, 4), {"spec": WINDOWED}, "whole"),
}


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        (name, how)
        for name, (*_, mode) in CASES.items()
        for how in ("heads", "keys")
        if (mode, how) != ("whole", "keys")
    ],
)
def test_rows_and_gradients_equal_one_rank(name: str, exchange: str, cp: int) -> None:
    grids, options, mode = CASES[name]
    heads = cp if exchange == "heads" else 1
    for found in run_ranks(cp, _run, grids, heads, options):
        assert found["mode"] == mode
        assert found["rows"] <= 1e-13
        assert found["gradients"] <= 1e-12


def _without_rows(rank: int, exchange: str) -> float:
    """A rank whose slice of the shared frame is empty: its own frames bring it above everybody's level."""
    grids, heads = squares(10, 12), 2 if exchange == "heads" else 1
    assignment = assignment_of(grids, 2, heads)
    uneven = VisionAssignment(
        frame_grids=assignment.frame_grids,
        merge=2,
        mode="mixed",
        exchange=assignment.exchange,
        owned=((1,), ()),
        shared_frames=(0,),
        cuts=(0, 0, 25),
        costs=(0.0, 0.0),
    )
    pixels, towers = pixels_of(assignment), [tower_of(heads), tower_of(heads)]
    expected = towers[0](pixels, VisionLayout.of(assignment_of(grids, 1, heads), 0, "cpu"), None)
    rows = towers[1](pixels, VisionLayout.of(uneven, rank, "cpu"), dist.group.WORLD)
    sum((expected * weights_of(expected, r)).sum() for r in range(2)).backward()
    (rows * weights_of(rows, rank)).sum().backward()
    for p in towers[1].parameters():
        dist.all_reduce(p.grad)
    pairs = zip(towers[0].parameters(), towers[1].parameters(), strict=True)
    return max(
        [float((rows - expected).detach().abs().max()), *(float((a.grad - b.grad).abs().max()) for a, b in pairs)]
    )


@pytest.mark.parametrize("exchange", ["heads", "keys"])
def test_an_empty_slice(exchange: str) -> None:
    assert max(run_ranks(2, _without_rows, exchange)) <= 1e-11


def _frozen(rank: int, exchange: str) -> bool:
    grids, heads = squares(6, 16), 2 if exchange == "heads" else 1
    tower = tower_of(heads).requires_grad_(False)
    assignment = assignment_of(grids, 2, heads)
    return tower(pixels_of(assignment), VisionLayout.of(assignment, rank, "cpu"), dist.group.WORLD).requires_grad


@pytest.mark.parametrize("exchange", ["heads", "keys"])
def test_a_frozen_tower_has_no_backward(exchange: str) -> None:
    assert run_ranks(2, _frozen, exchange) == [False, False]


def _recomputed(rank: int) -> float:
    """Recomputation runs every exchange again in the backward, in the same order on all ranks."""
    grids = [*squares(6, 16, 6), (2, 4, 6)]
    assignment = assignment_of(grids, 2, 2)
    gradients = []
    for recompute in (False, True):
        tower = tower_of(2)
        layout = VisionLayout.of(assignment, rank, "cpu")

        def encode(x: Tensor, tower: Tower = tower, layout: VisionLayout = layout) -> Tensor:
            return tower(x, layout, dist.group.WORLD)

        pixels = pixels_of(assignment)
        run = torch.utils.checkpoint.checkpoint if recompute else lambda f, x, use_reentrant: f(x)
        rows = run(encode, pixels, use_reentrant=False)
        (rows * weights_of(rows, rank)).sum().backward()
        gradients.append([p.grad for p in tower.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


def test_recomputation() -> None:
    assert run_ranks(2, _recomputed) == [0.0, 0.0]
