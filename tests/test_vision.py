"""Who encodes what: every feature row once, balanced, and the fewest frames cut."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_position_ids

from vlm_cp.cost import Rates
from vlm_cp.spec import TowerSpec, VLMSpec
from vlm_cp.vision import VisionAssignment, assign_vision
from vlm_cp.vision_layout import VisionLayout

TOWER = TowerSpec(
    depth=24,
    hidden_size=1024,
    num_heads=16,
    intermediate_size=4096,
    patch_size=16,
    temporal_patch_size=2,
    out_hidden_size=2048,
)
SPEC = VLMSpec(
    family="qwen3_vl",
    image_token_id=90,
    video_token_id=91,
    vision_start_token_id=92,
    spatial_merge_size=2,
    position_scheme="frames",
    tokens_per_second=1,
    tower=TOWER,
    deepstack_levels=3,
)
WINDOWED = replace(SPEC, tower=replace(TOWER, window_size=112, patch_size=14, full_attention_layers=(7, 15)))


def squares(*sides: int) -> list[tuple[int, int, int]]:
    return [(1, side, side) for side in sides]


def assign(grids: Any, cp: int, **options: Any) -> VisionAssignment:
    return assign_vision(torch.tensor(grids), cp_size=cp, **{"spec": SPEC, "min_patches": 0, **options})


def imbalance(assignment: VisionAssignment) -> float:
    costs = [assignment.cost_of(rank) for rank in range(assignment.cp_size)]
    return max(costs) * len(costs) / sum(costs)


CASES = {
    "uniform-cp2": (squares(*[64] * 24), 2, "whole", 0),
    "uniform-cp3": (squares(*[64] * 24), 3, "whole", 0),
    "skewed-cp2": (squares(128, 128, 128, 32, 32, 32, 32), 2, "mixed", 1),
    "skewed-cp3": (squares(128, 128, 128, 32, 32, 32, 32), 3, "whole", 0),
    "skewed-cp4": (squares(128, 128, 128, 32, 32, 32, 32), 4, "mixed", 3),
    "huge-cp2": (squares(256), 2, "mixed", 1),
    "huge-cp3": (squares(256), 3, "mixed", 1),
    "one-large-among-6x6-cp2": (squares(6, 6, 128, 6), 2, "mixed", 1),
    "video-cp4": ([(8, 32, 32)], 4, "whole", 0),
    "video-cp3": ([(8, 32, 32)], 3, "mixed", 2),
    "fewer-frames-than-ranks-cp4": (squares(64, 64), 4, "mixed", 2),
    "a-small-one-beside-the-cut-one-cp4": (squares(64, 24), 4, "mixed", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_fewest_frames_are_shared(name: str) -> None:
    grids, cp, mode, shared = CASES[name]
    found = assign(grids, cp)
    assert (found.mode, len(found.shared_frames)) == (mode, shared)
    assert imbalance(found) <= 1.03


GRIDS = st.lists(st.tuples(st.integers(1, 4), *[st.integers(1, 40).map(lambda x: 2 * x)] * 2), min_size=1, max_size=12)


@given(grids=GRIDS, cp=st.integers(2, 5), heads=st.sampled_from([16, 12, 1]))
@settings(max_examples=80, deadline=None)
def test_every_row_once_and_balanced(grids: list[tuple[int, int, int]], cp: int, heads: int) -> None:
    found = assign(grids, cp, heads_per_tp=heads)
    assert found.exchange == ("heads" if heads % cp == 0 else "keys")
    assert list(found.cuts) == sorted(found.cuts)
    encoded = [
        (int(frame), int(first) + row)
        for rank in range(cp)
        for frame, first, rows in found.parts(rank)
        for row in range(rows)
    ]
    assert sorted(encoded) == [(f, r) for f, rows in enumerate(found.row_counts.tolist()) for r in range(rows)]
    one_row = assign([(1, 2, 2)], 1).cost_of(0)
    whole = assign(grids, 1)
    assert sum(found.costs) == pytest.approx(whole.cost_of(0))
    largest_frame = max(assign([grid], 1).cost_of(0) / grid[0] for grid in grids)
    rows_of_the_largest = max(found.row_counts.tolist())
    cut_to_rows = largest_frame / rows_of_the_largest + one_row  # a cut lies at a feature row
    assert max(found.costs) <= 1.03 * whole.cost_of(0) / cp + cut_to_rows


def test_a_slice_is_smaller_where_a_rank_has_more_of_its_own() -> None:
    found = assign(squares(128, 128, 112), 2)
    assert found.shared_frames == (0,)
    assert found.owned == ((1,), (2,))
    first, second = (len(found.shared_rows(rank)) for rank in range(2))
    assert second > 1.5 * first
    assert imbalance(found) < 1.03


def test_costs_by_hand() -> None:
    """Heads exchanged: attention of a shared frame is split evenly, whatever the slices are."""
    found = assign(squares(128, 128, 112), 2)
    small, large = (assign(squares(side), 1).cost_of(0) for side in (112, 128))
    pairs = 24 * 128**4
    attention = 4 * 1024 * pairs / 415e12
    rows = len(found.shared_rows(0)) / 4096
    assert found.cost_of(0) == pytest.approx(large + (large - attention) * rows + attention / 2)
    assert found.cost_of(1) == pytest.approx(small + (large - attention) * (1 - rows) + attention / 2)


def test_a_frame_costs_its_matrix_products_and_its_attention() -> None:
    """Qwen3-VL-2B's tower, 64 x 64 patches: 24 layers, patch embedding, main merger and three deepstack mergers."""
    patches, rows = 64 * 64, 32 * 32
    layer = 4 * 1024**2 + 2 * 1024 * 4096
    merger = 4096 * 4096 + 4096 * 2048
    dense = 2 * (patches * (24 * layer + 1536 * 1024) + rows * 4 * merger)
    attention = 4 * 1024 * 24 * patches**2
    rates = Rates()
    expected = dense / rates.vision + attention / rates.vision_attention
    assert assign(squares(64), 1).cost_of(0) == pytest.approx(expected, rel=1e-12)


def test_small_batches_and_one_rank_stay_replicated() -> None:
    grids = squares(32, 32, 32)
    for found in (assign(grids, 2, min_patches=4096), assign(grids, 1)):
        assert found.mode == "replicated"
        assert all(found.frames_of(rank) == (0, 1, 2) for rank in range(found.cp_size))
        assert all(len(found.shared_rows(rank)) == 0 for rank in range(found.cp_size))
    assert assign(grids, 2, min_patches=3072).mode == "mixed"
    assert assign_vision(torch.empty(0, 3), cp_size=2, spec=SPEC, min_patches=0).mode == "replicated"


def test_windowed_towers_keep_frames_whole() -> None:
    found = assign(squares(128, 32, 32, 32), 2, spec=WINDOWED)
    assert (found.mode, found.owned, found.shared_frames) == ("whole", ((0,), (1, 2, 3)), ())
    assert imbalance(found) > 1.03
    assert assign(squares(128), 2, spec=WINDOWED).mode == "replicated"


def test_bad_grids() -> None:
    with pytest.raises(
        ValueError,
        match="^"
        + re.escape(
            "grids[1] must be (t, h, w) with positive t, and h and w divisible by spatial_merge_size 2, got (1, 5, 4); "
            "a rank's slice would end inside a feature row"
        ),
    ):
        assign([(1, 4, 4), (1, 5, 4)], 2)


LAYOUTS = {
    "mixed": ([*squares(6, 6, 24), (3, 4, 6)], {}),
    "all-cut": (squares(8), {}),
    "whole": (squares(6, 6, 6, 6, 6, 6), {}),
    "idle-ranks": (squares(4, 6), {"spec": WINDOWED}),
    "replicated": (squares(6, 8), {"min_patches": 4096}),
}


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("heads", [12, 1], ids=["heads", "keys"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str, heads: int, cp: int) -> None:
    """Patches and their coordinates, and which queries and keys belong together, against the whole stream."""
    grids, options = LAYOUTS[name]
    assignment = assign(grids, cp, heads_per_tp=heads, **options)
    coordinates = get_vision_position_ids(torch.tensor(grids), 2)
    frame = torch.arange(len(assignment.frame_grids)).repeat_interleave(assignment.frame_grids.prod(1))
    stream = torch.cat([frame[:, None], coordinates], 1)
    taken = []
    for rank in range(cp):
        layout = VisionLayout.of(assignment, rank, "cpu")
        local = layout.take(stream)
        assert len(local) == layout.num_patches
        assert torch.equal(local[:, 1:], torch.zeros_like(layout.coordinates) if layout.idle else layout.coordinates)
        if layout.own is not None:
            frames_of_runs = [x.unique().tolist() for x in local[: layout.own_patches, 0].split(layout.own.q_lengths)]
            assert all(len(x) == 1 for x in frames_of_runs)
            assert layout.own.cu_q.tolist() == [0, *np.cumsum(layout.own.q_lengths).tolist()]
        if layout.shared is not None:
            shared = stream[torch.isin(stream[:, 0], torch.tensor(assignment.shared_frames))]
            queries = shared if assignment.exchange == "heads" else local[layout.own_patches :]
            keys = shared[layout.keys.start : layout.keys.stop]
            pairs = zip(queries.split(layout.shared.q_lengths), keys.split(layout.shared.k_lengths), strict=True)
            for query, key in pairs:
                assert query[:, 0].unique().tolist() == key[:, 0].unique().tolist()
                assert len(key) == int((stream[:, 0] == key[0, 0]).sum())
        if not layout.idle:
            taken.append(local)
    every = torch.cat(taken)
    copies = cp if assignment.mode == "replicated" else 1
    assert len(every) == copies * len(stream)
    assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, stream.tolist() * copies))
