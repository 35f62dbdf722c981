import importlib
import random
import re

import pytest
import torch
from streams import END, IMAGE, START, VIDEO, grids, random_sample

from vlm_cp import Alignment, SequencePlan, packed_position_ids
from vlm_cp.demo.models import tiny_config
from vlm_cp.demo.processor import build_tokenizer
from vlm_cp.spec import VLMSpec

FAMILIES = {"qwen2_5_vl": 0, "qwen3_vl": 1, "qwen3_5": 2}


def setting(family):
    """transformers' model of the family without weights, and our spec, both with the ids of `streams`."""
    import transformers as hf

    config = tiny_config(family, build_tokenizer())
    config.image_token_id, config.video_token_id, config.vision_start_token_id = IMAGE, VIDEO, START
    classes = {"qwen2_5_vl": hf.Qwen2_5_VLModel, "qwen3_vl": hf.Qwen3VLModel, "qwen3_5": hf.Qwen3_5Model}
    with torch.device("meta"):
        return classes[family](config), VLMSpec.from_hf_config(config)


def expected(model, family, piece):
    """transformers' positions [3, L] of one sample."""
    if not piece.images and not piece.videos:
        return torch.arange(len(piece.ids)).expand(3, -1)
    extra = {"second_per_grid_ts": torch.tensor(piece.seconds)} if family == "qwen2_5_vl" else {}
    positions, _ = model.get_rope_index(
        piece.ids[None],
        piece.types[None],
        image_grid_thw=grids([piece], "images"),
        video_grid_thw=grids([piece], "videos"),
        **extra,
    )
    return positions[:, 0]


def ours(pieces, spec, cp, **overrides):
    plan = SequencePlan.from_lengths([len(p.ids) for p in pieces], alignment=Alignment(cp_size=cp))
    fields = dict(
        image_grid_thw=grids(pieces, "images"),
        video_grid_thw=grids(pieces, "videos"),
        second_per_grid_ts=torch.tensor([s for p in pieces for s in p.seconds]),
    )
    return plan, packed_position_ids(
        plan.pack([p.ids for p in pieces], 0)[None], plan, spec=spec, **{**fields, **overrides}
    )


@pytest.mark.parametrize("kinds", ["tiv", "ti", "tv", "i", "v", "t"])
@pytest.mark.parametrize("family", FAMILIES)
def test_b42_equals_transformers_sample_by_sample(family, kinds):
    model, spec = setting(family)
    rng = random.Random(f"{family}{kinds}")
    for _ in range(180):
        pieces = [random_sample(rng, frames=family != "qwen2_5_vl", kinds=kinds) for _ in range(rng.randrange(1, 5))]
        plan, positions = ours(pieces, spec, cp=rng.choice([1, 2, 3]))
        assert positions.shape == (3, 1, plan.total_tokens)
        assert positions.dtype == torch.int64
        found = positions[:, 0, plan.real_index].split(list(plan.lengths), dim=1)
        for piece, own in zip(pieces, found, strict=True):
            assert torch.equal(own, expected(model, family, piece))


@pytest.mark.parametrize("kinds", ["tiv", "ti", "tv", "t"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_b42_equals_megatron_bridge_packed_as_it_comes(cp, kinds):
    """Bridge's own function on the packed stream, with the offsets that the engine passes."""
    importlib.import_module("bridge_on_cpu")  # skips where Bridge is not installed
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import get_rope_index

    from vlm_cp.engines.packed_params import packed_seq_params

    _, spec = setting("qwen3_vl")
    rng = random.Random(f"{cp}{kinds}")
    for _ in range(40):
        pieces = [random_sample(rng, frames=True, kinds=kinds, wrapped=True) for _ in range(rng.randrange(1, 6))]
        plan, positions = ours(pieces, spec, cp=cp)
        found, _ = get_rope_index(
            spec.spatial_merge_size,
            IMAGE,
            VIDEO,
            START,
            plan.pack([p.ids for p in pieces], 0)[None],
            image_grid_thw=grids(pieces, "images"),
            video_grid_thw=grids(pieces, "videos"),
            packed_seq_params=packed_seq_params(plan),
        )
        assert torch.equal(positions[:, 0, plan.valid], found[:, 0, plan.valid])


@pytest.mark.parametrize("family", FAMILIES)
def test_long_and_flat_images(family):
    model, spec = setting(family)
    rng = random.Random(3)
    for _ in range(20):
        pieces = [random_sample(rng, frames=family != "qwen2_5_vl", longest=40) for _ in range(3)]
        plan, positions = ours(pieces, spec, cp=2)
        found = positions[:, 0, plan.real_index].split(list(plan.lengths), dim=1)
        assert all(torch.equal(own, expected(model, family, piece)) for piece, own in zip(pieces, found, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_b43_padding_is_zero_and_samples_restart(family):
    _, spec = setting(family)
    rng = random.Random(5)
    pieces = [random_sample(rng, frames=family != "qwen2_5_vl") for _ in range(6)]
    plan, positions = ours(pieces, spec, cp=4)
    assert bool((positions[:, 0, ~plan.valid] == 0).all())
    assert bool((positions[:, 0, plan.cu_seqlens_padded[:-1].long()] == 0).all())


def test_a_single_run_of_frames_still_counts_frame_by_frame():
    """Qwen3's frames without text between them: each frame advances the counter as it does with text."""
    _, spec = setting("qwen3_vl")
    ids = torch.tensor([[1, *[VIDEO] * 8, 2]])
    positions = packed_position_ids(
        ids, SequencePlan.from_lengths([10]), video_grid_thw=torch.tensor([[2, 4, 4]]), spec=spec
    )
    assert positions[:, 0].tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 3, 3, 5],
        [0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
        [0, 1, 2, 1, 2, 3, 4, 3, 4, 5],
    ]


def test_b41_a_sampled_image_id_is_text():
    _, spec = setting("qwen3_vl")
    ids = torch.tensor([[START, *[IMAGE] * 4, END, 5, IMAGE, 6]])
    plan, grid = SequencePlan.from_lengths([9]), torch.tensor([[1, 4, 4]])
    stands = (torch.arange(9) < 6)[None]
    positions = packed_position_ids(ids, plan, image_grid_thw=grid, placeholder_mask=stands & (ids == IMAGE), spec=spec)
    assert positions[:, 0, 5:].tolist() == [[3, 4, 5, 6]] * 3


def test_seconds_of_another_number_of_videos():
    _, spec = setting("qwen2_5_vl")
    message = (
        "second_per_grid_ts must have one entry a video, 1 in all, got 2; a video would take another one's frame rate"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        packed_position_ids(
            torch.tensor([[VIDEO, VIDEO, 3]]),
            SequencePlan.from_lengths([3]),
            video_grid_thw=torch.tensor([[2, 2, 2]]),
            second_per_grid_ts=torch.tensor([1.0, 1.0]),
            spec=spec,
        )
