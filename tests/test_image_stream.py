"""Images and frames as one stream: row k of the tower belongs to the k-th placeholder, whatever the order of the media."""

from __future__ import annotations

import pytest
import torch

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.collate import pack_samples
from vlm_cp.spec import TowerSpec, VLMSpec

IMAGE, VIDEO, START, TEXT = 90, 91, 92, 7
SPEC = VLMSpec(
    family="qwen3_vl",
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    spatial_merge_size=2,
    position_scheme="frames",
    tokens_per_second=1,
    tower=TowerSpec(
        depth=1, hidden_size=4, num_heads=1, intermediate_size=4, patch_size=2, temporal_patch_size=1, out_hidden_size=4
    ),
    deepstack_levels=0,
)
SIZES = {"small": (2, 2), "wide": (2, 6), "tall": (4, 2), "long": (8, 8)}


def sample(*parts: str | tuple[str, int]) -> dict[str, torch.Tensor]:
    """Parts: "small", ... for an image, ("small", t) for a video of t frames, "text" for one text token between them.

    Every patch holds its own number, counted over this call's images and then its videos.
    """
    ids: list[int] = []
    grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    for part in parts:
        if part == "text":
            ids.append(TEXT)
            continue
        name, frames, token = (part, 1, IMAGE) if isinstance(part, str) else (*part, VIDEO)
        height, width = SIZES[name]
        ids += [START, *[token] * (height * width // 4), TEXT] * frames
        grids[token].append([frames, height, width])
    out = {"input_ids": torch.tensor(ids)}
    for token, pixels, grid in (
        (IMAGE, "pixel_values", "image_grid_thw"),
        (VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids[token]:
            out[grid] = torch.tensor(grids[token])
            count = int(out[grid].prod(1).sum())
            out[pixels] = torch.arange(count, dtype=torch.float32)[:, None].expand(count, 3) + 1000 * (token == VIDEO)
    return out


def pack(*samples: dict[str, torch.Tensor]) -> PackedBatch:
    return pack_samples(samples, alignment=Alignment(cp_size=2), spec=SPEC, pad_token_id=0)


def walked(*samples: dict[str, torch.Tensor]) -> tuple[list[list[int]], list[float]]:
    """The right answer by walking the ids: (grid of each frame, first channel of each patch), in placeholder order."""
    grids: list[list[int]] = []
    patches: list[float] = []
    for s in samples:
        left = {
            t: [list(g) for g in s.get(k, torch.empty(0, 3)).tolist()]
            for t, k in ((IMAGE, "image_grid_thw"), (VIDEO, "video_grid_thw"))
        }
        pixels = {
            t: s[k][:, 0].tolist() if k in s else []
            for t, k in ((IMAGE, "pixel_values"), (VIDEO, "pixel_values_videos"))
        }
        for before, token in zip(s["input_ids"].tolist(), s["input_ids"].tolist()[1:], strict=False):
            if before != START:
                continue
            grid = left[token][0]
            grids.append([1, grid[1], grid[2]])
            count = int(grid[1] * grid[2])
            patches += pixels[token][:count]
            del pixels[token][:count]
            grid[0] -= 1
            if not grid[0]:
                left[token].pop(0)
    return grids, patches


CASES = {
    "images": [sample("small", "text", "wide"), sample("text"), sample("long")],
    "video-then-image": [sample(("small", 3), "wide")],
    "image-between-frames-of-two-videos": [sample(("wide", 2), "small", ("tall", 3)), sample("small", ("long", 1))],
    "video-only": [sample("text", ("tall", 2))],
    "many": [
        sample("small", ("wide", 4), "tall", "text", ("small", 1), "long"),
        sample("text", "text"),
        sample(("tall", 2), "small"),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_frames_and_patches_follow_their_placeholders(name: str) -> None:
    samples = CASES[name]
    batch = pack(*samples)
    images = batch.image_stream()
    assert images is not None
    grids, patches = walked(*samples)
    assert images.grid_thw.tolist() == grids
    assert images.pixel_values[:, 0].tolist() == patches
    ids = batch.input_ids[0]
    assert images.placeholder_mask[0].tolist() == ((ids == IMAGE) | (ids == VIDEO)).tolist()


def test_patches_of_images_alone_are_not_copied() -> None:
    batch = pack(*CASES["images"])
    images = batch.image_stream()
    assert images is not None
    assert images.pixel_values is batch.pixel_values


def test_text_only_batch_has_no_stream() -> None:
    assert pack(sample("text", "text"), sample("text")).image_stream() is None


def test_a_sampled_image_id_takes_no_row() -> None:
    spoken = sample("small")
    ids = torch.cat([spoken["input_ids"], torch.tensor([IMAGE, TEXT])])
    stands = torch.cat([torch.ones(len(ids) - 2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)])
    images = pack({**spoken, "input_ids": ids, "placeholder_mask": stands}).image_stream()
    assert images is not None
    assert int(images.placeholder_mask.sum()) == 1
