import re

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from streams import END, IMAGE, START, VIDEO
from test_batch import SPEC as FRAMES

from vlm_cp import Alignment, MediaTable, SequencePlan

TIMED = FRAMES.__class__(
    **{**FRAMES.__dict__, "family": "qwen2_5_vl", "position_scheme": "time", "tokens_per_second": 2}
)


def table(samples, *, images=(), videos=(), cp=1, spec=FRAMES, mask=None):
    plan = SequencePlan.from_lengths([len(s) for s in samples], alignment=Alignment(cp_size=cp))
    ids = plan.pack([torch.tensor(s) for s in samples], 0)[None]
    if mask is not None:
        mask = plan.pack([torch.tensor(m) for m in mask], 0)[None].bool()
    grids = dict(
        image_grid_thw=torch.tensor(images) if images else None, video_grid_thw=torch.tensor(videos) if videos else None
    )
    return MediaTable.from_batch(ids, plan, placeholder_mask=mask, spec=spec, **grids), plan


def image(rows):
    return [START, *[IMAGE] * rows, END]


def video(rows):
    return [START, *[VIDEO] * rows, END]


def test_b35_b37_rows_go_to_their_own_placeholders():
    samples = [[1, *video(4), *image(2), 2], [3, 4], [*image(4), *video(2), *video(2)]]
    media, plan = table(samples, images=[[1, 2, 4], [1, 4, 4]], videos=[[1, 4, 4], [2, 2, 4]], cp=2)
    media.check()
    assert media.num_images == 2
    assert media.samples.tolist() == [0, 2, 0, 2]
    assert media.row_counts.tolist() == [2, 4, 4, 4]
    ids = plan.pack([torch.tensor(s) for s in samples], 0)
    assert ids[media.row_slots].tolist() == [IMAGE] * 6 + [VIDEO] * 8
    assert media.slot_rows()[ids == IMAGE].tolist() == [0, 1, 2, 3, 4, 5]
    assert media.slot_rows()[ids == VIDEO].tolist() == list(range(6, 14))
    assert bool((media.slot_rows()[(ids != IMAGE) & (ids != VIDEO)] == -1).all())
    assert [media.name(i) for i in range(4)] == ["image 0", "image 1", "video 0", "video 1"]


def test_padding_that_looks_like_an_image_is_not_one():
    plan = SequencePlan.from_lengths([3], alignment=Alignment(cp_size=4))
    ids = plan.pack([torch.tensor([1, 2, 3])], IMAGE)[None]
    for mask in (None, torch.ones_like(ids, dtype=torch.bool) & (ids == IMAGE)):
        media = MediaTable.from_batch(ids, plan, placeholder_mask=mask, spec=FRAMES)
        media.check()
        assert len(media.row_slots) == 0


LOST = "rows would be placed into another image or sample"
CUT = f"{LOST} (a truncated prompt, or an id that the policy sampled as text: then pass placeholder_mask)"
FAULTS = {
    "image tokens without features": (
        dict(samples=[[1, 2], [1, *image(4)]]),
        f"sample 1 must hold one image placeholder for every feature row, got 4 placeholders and no image is left in image_grid_thw for it; {CUT}",
    ),
    "features without image tokens": (
        dict(samples=[image(4), [1, 2]], images=[[1, 4, 4], [1, 2, 2]]),
        "image_grid_thw must describe the 1 images that the ids hold, got 2: image 1 (1, 2, 2) has 1 feature rows and no placeholder; "
        "its features would be dropped",
    ),
    "truncated image": (
        dict(samples=[image(4), [1, START, IMAGE, IMAGE, IMAGE], image(1)], images=[[1, 4, 4], [1, 4, 4], [1, 2, 2]]),
        "sample 1 must hold one image placeholder for every feature row, got 3 placeholders and 4 feature rows in image_grid_thw, "
        f"image 1 (1, 4, 4) being cut or followed by more; {CUT}",
    ),
    "one placeholder too many": (
        dict(samples=[[*image(4), 5, IMAGE], image(4)], images=[[1, 4, 4], [1, 4, 4]]),
        "sample 0 must hold one image placeholder for every feature row, got 5 placeholders and 8 feature rows in image_grid_thw, "
        f"image 1 (1, 4, 4) being cut or followed by more; {CUT}",
    ),
    "video tokens without features": (
        dict(samples=[video(4)]),
        f"sample 0 must hold one video placeholder for every feature row, got 4 placeholders and no video is left in video_grid_thw for it; {CUT}",
    ),
    "grid not divisible": (
        dict(samples=[image(4)], images=[[1, 4, 5]]),
        "image 0 must have a grid of positive t, and h and w divisible by spatial_merge_size 2, got (1, 4, 5); "
        "the tower would merge patches of different rows",
    ),
    "empty grid": (
        dict(samples=[video(4)], videos=[[0, 4, 4]]),
        "video 0 must have a grid of positive t, and h and w divisible by spatial_merge_size 2, got (0, 4, 4); "
        "the tower would merge patches of different rows",
    ),
    "text inside an image": (
        dict(samples=[[START, IMAGE, IMAGE, 7, IMAGE, IMAGE, END]], images=[[1, 4, 4]]),
        "image 0 of sample 0 must have the 4 placeholders of a grid in one piece, got a gap before slot 4; "
        "the positions of everything after it would be wrong",
    ),
    "text inside a frame": (
        dict(samples=[[*video(4), START, VIDEO, 7, VIDEO, VIDEO, VIDEO, END]], videos=[[2, 4, 4]]),
        "video 0 of sample 0 must have the 4 placeholders of a frame in one piece, got a gap before slot 9; "
        "the positions of everything after it would be wrong",
    ),
    "text between frames of a timed video": (
        dict(samples=[[*video(4), *video(4)]], videos=[[2, 4, 4]], spec=TIMED),
        "video 0 of sample 0 must have the 8 placeholders of a grid in one piece, got a gap before slot 7; "
        "the positions of everything after it would be wrong",
    ),
    "mask on text": (
        dict(samples=[[1, 2, IMAGE]], images=[[1, 2, 2]], mask=[[0, 1, 1]]),
        f"placeholder_mask must mark image and video ids only, got id 2 at slot 1; {LOST}",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_b41_faults(name):
    inputs, message = FAULTS[name]
    media, _ = table(**inputs)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        media.check()


def test_an_image_may_not_run_into_the_next_sample():
    media, _ = table([[1, IMAGE, IMAGE], [IMAGE, IMAGE, 2]], images=[[1, 4, 4]])
    assert "sample 0 must hold one image placeholder for every feature row, got 2 placeholders" in media.fault


def _check(rank, healthy):
    fine = rank in healthy
    media, _ = table([image(4) if fine else image(3)], images=[[1, 4, 4]])
    try:
        media.check(dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return None


def test_every_rank_raises_the_same_sentence():
    found = run_ranks(3, _check, [0, 2])
    assert len(set(found)) == 1
    assert "got 3 placeholders" in found[0]
    assert found[0].endswith("(found on rank 1 of 3)")
    assert run_ranks(2, _check, [0, 1]) == [None, None]


def test_streams_of_the_wrong_shape_or_place():
    plan = SequencePlan.from_lengths([4])
    message = "input_ids must have the full stream's shape (1, 4), got (4,); media would be misplaced"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MediaTable.from_batch(torch.zeros(4), plan, spec=FRAMES)
    message = (
        "input_ids and plan must lie on the CPU, got meta and cpu; "
        "media are checked once a batch before it moves, and checking them on an accelerator stalls the step"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MediaTable.from_batch(torch.zeros(1, 4, device="meta"), plan, spec=FRAMES)
    message = f"grid_thw must have shape [*, 3], (t, h, w) in patches, got (3,); {LOST}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MediaTable.from_batch(
            torch.zeros(1, 4, dtype=torch.int64), plan, image_grid_thw=torch.tensor([1, 2, 2]), spec=FRAMES
        )
