"""Position embeddings and rotary angles from tables, against the installed Bridge tower's own code."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import bridge_on_cpu  # noqa: F401  imports Bridge without Transformer Engine
import pytest
import torch
import torch.nn.functional as F
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import Qwen3VLVisionRotaryEmbedding
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
from test_vision import SPEC, squares
from torch import Tensor

from vlm_cp.tower import PositionTables, interpolation, rotary_angles
from vlm_cp.vision import assign_vision
from vlm_cp.vision_layout import VisionLayout

SIDE, CHANNELS = 48, 6
GRIDS = [*squares(6, 6, 64), (3, 10, 4), *squares(2), (1, 128, 32), (1, 96, 48)]


@pytest.fixture
def float64() -> Iterator[None]:
    """Bridge's `linspace` takes the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Learned:
    """The tower's embedding of a given table, to which the gradient goes."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


def stock_embeddings(table: Tensor, grids: Any) -> Tensor:
    tower: Any = SimpleNamespace(
        num_grid_per_side=SIDE, pos_embed=Learned(table), config=SimpleNamespace(spatial_merge_size=2)
    )
    return Qwen3VLVisionModel.fast_pos_embed_interpolate(tower, torch.tensor(grids))


def layout_of(grids: Any, cp: int = 1, rank: int = 0) -> VisionLayout:
    return VisionLayout.of(assign_vision(grids, cp_size=cp, spec=SPEC, min_patches=0), rank, "cpu")


def table(dtype: torch.dtype) -> Tensor:
    return torch.randn(SIDE**2, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.usefixtures("float64")
def test_embeddings_and_their_gradient() -> None:
    tables = [table(torch.float64).requires_grad_() for _ in range(2)]
    expected = stock_embeddings(tables[0], GRIDS)
    found = PositionTables(SIDE, 2).embeddings(tables[1], layout_of(GRIDS))
    assert float((found - expected).detach().abs().max()) <= 4e-15
    weight = torch.randn_like(found)
    ((found * weight).sum() + (expected * weight).sum()).backward()
    assert float((tables[0].grad - tables[1].grad).abs().max()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_further_from_the_truth_than_stock(dtype: torch.dtype) -> None:
    rounded = table(dtype)
    torch.set_default_dtype(torch.float64)
    try:
        truth = stock_embeddings(rounded.double(), GRIDS)
    finally:
        torch.set_default_dtype(torch.float32)
    found = PositionTables(SIDE, 2).embeddings(rounded, layout_of(GRIDS))
    assert found.dtype == dtype
    ours, stock = ((x - truth).norm() for x in (found, stock_embeddings(rounded, GRIDS)))
    assert float(ours) <= float(stock)


@pytest.mark.parametrize("cp", [2, 3])
def test_a_rank_makes_its_own_part(cp: int) -> None:
    rounded = table(torch.float32)
    whole = PositionTables(SIDE, 2).embeddings(rounded, layout_of(GRIDS))
    for rank in range(cp):
        layout = layout_of(GRIDS, cp, rank)
        assert torch.equal(PositionTables(SIDE, 2).embeddings(rounded, layout), layout.take(whole))


def test_interpolation_by_hand() -> None:
    assert interpolation(3, 2).tolist() == [[1, 0], [0.5, 0.5], [0, 1]]
    assert interpolation(2, 5).tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]


def test_angles_equal_stock_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    module = Qwen3VLVisionRotaryEmbedding(8)
    tower: Any = SimpleNamespace(spatial_merge_size=2, rotary_pos_emb=module)
    stock = Qwen3VLVisionModel.rot_pos_emb(tower, torch.tensor(GRIDS)).repeat(1, 2)
    assert torch.equal(rotary_angles(module(128), layout_of(GRIDS)), stock)
    assert torch.equal(rotary_angles(module(500), layout_of(GRIDS, 2, 1)), layout_of(GRIDS, 2, 1).take(stock))
