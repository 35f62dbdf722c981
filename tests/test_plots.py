import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from benchmarks.plots import PLOTS, bars, colours, number, write

ROWS = {
    "mrope": [{"tokens": 8, "media": 2, "arm": arm, "best_ms": ms} for arm, ms in (("vlm_cp", 1.0), ("bridge", 50.0))],
    "pack": [
        {"part": part, "samples": 8, "width": 16, "arm": arm, "best_ms": ms}
        for part in ("pack_and_shard", "unpack")
        for arm, ms in (("vlm_cp", 1.0), ("verl", 2.0))
    ],
    "logprobs": [{"part": "forward", "tokens": 8, "arm": "vlm_cp", "ms": 3.0}],
    "step": [
        {"case": "image", "tokens": 8, "arm": "cp2_vlm_cp", "ms": 1.0},
        {"case": "image", "tokens": 8, "arm": "cp1_stock", "ms": 3.0},
        {"case": "image", "tokens": 8, "arm": "cp2_stock_a2a", "ms": 2.0},
        {"case": "image", "tokens": 8, "arm": "cp1_vlm_cp", "refused": "out of memory"},
    ],
    "vision": [{"case": "image", "patches": 64, "arm": "stock", "forward": {"ms": 1}, "forward_backward": {"ms": 4}}],
    "tower": [
        {"part": "kernels", "arm": "stock", "total_ms": 1.0},
        {"part": "forward", "patches": 64, "arms": {"stock": {"ms": 2.0}, "hook": {"ms": 1.0}}},
        {"part": "size", "patches": 64, "arms": {"stock": {"ms": 9.0}}},
    ],
}


def test_every_kind_has_rows_here():
    assert ROWS.keys() == PLOTS.keys()


def test_bars_are_the_rows_that_were_timed_and_asked_for():
    assert bars(ROWS["mrope"], PLOTS["mrope"]) == {"": {"8 tokens\n2 media": {"vlm_cp": 1.0, "bridge": 50.0}}}
    assert list(bars(ROWS["pack"], PLOTS["pack"])) == ["pack_and_shard", "unpack"]
    assert bars(ROWS["step"], PLOTS["step"]) == {"image": {"8 tokens": {"cp2_vlm_cp": 1.0, "cp1_stock": 3.0}}}
    assert bars(ROWS["vision"], PLOTS["vision"]) == {"": {"image\n64 patches": {"stock": 4}}}
    assert bars(ROWS["tower"], PLOTS["tower"]) == {"forward": {"64\npatches": {"stock": 2.0, "hook": 1.0}}}


@pytest.mark.parametrize("kind", PLOTS)
def test_a_picture_beside_the_file(kind, tmp_path):
    file = tmp_path / f"{kind}_2xcpu_2026-12-01.json"
    file.write_text(json.dumps({"versions": {"python": "3.12", "torch": "2.11"}, "rows": ROWS[kind]}))
    picture = write(file)
    assert picture == file.with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_committed_pictures_stand_beside_their_files():
    for picture in (Path(__file__).parent.parent / "benchmarks" / "results").glob("*.png"):
        assert picture.with_suffix(".json").exists()


def test_numbers_and_colours():
    assert [number(x) for x in (0.0812, 2.1543, 17.04, 135.5, 1120.4)] == ["0.0812", "2.15", "17", "136", "1120"]
    paint = colours(["vlm_cp", "bridge", "transformers"])
    assert len(set(paint.values())) == 3
