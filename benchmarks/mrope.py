"""Case c, three-axis positions of a packed stream: this package's function against Megatron-Bridge's and transformers'.

    python -m benchmarks.run --case mrope [--device cuda] [--rounds 9]

One thread. This package computes positions on the CPU, once a batch; its time includes finding and checking the media, and
with --device cuda the copy there. Bridge and transformers run what they run in every forward pass, Bridge on every rank,
from ids on that device. All three must agree before they are timed.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import SHAPES, Grid, hf_config, pack, square
from benchmarks.results_file import KEYS, ResultsFile
from benchmarks.timing import beside, measure
from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.engines.packed_params import packed_seq_params
from vlm_cp.mrope import packed_position_ids
from vlm_cp.spec import VLMSpec
from vlm_cp.transfer import moved

# tokens -> (samples, images of 16 x 16 patches a sample, videos a sample)
CASES: dict[int, tuple[int, list[Grid]]] = {
    10240: (8, [square(16)]),
    16384: (16, [square(16)] * 8),
    20480: (64, [square(16)]),
    32768: (8, [square(32, frames=12)]),
    33024: (1, [square(16)] * 256),
    131072: (32, [square(32)] * 12),
}


def bridge(batch: PackedBatch) -> Callable[[], Tensor]:
    importlib.import_module("benchmarks.models")  # without a GPU it puts in place what Bridge's import needs
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import get_rope_index

    tokens = SHAPES["2b"].tokens
    params = packed_seq_params(batch.plan)
    numbers = 2, tokens["image_token_id"], tokens["video_token_id"], tokens["vision_start_token_id"]
    grids = {"image_grid_thw": batch.image_grid_thw, "video_grid_thw": batch.video_grid_thw}
    return lambda: get_rope_index(*numbers, batch.input_ids, **grids, packed_seq_params=params)[0]


def transformers(batch: PackedBatch) -> Callable[[], Tensor]:
    """Its batches are rows; these samples are of one length, so the rows are the stream."""
    from transformers import Qwen3VLModel

    shape = SHAPES["tiny"]
    with torch.device("meta"):
        model = Qwen3VLModel(hf_config(replace(shape, tokens=SHAPES["2b"].tokens)))
    rows = batch.input_ids.view(len(batch.plan.lengths), -1)
    tokens = SHAPES["2b"].tokens
    types = (rows == tokens["image_token_id"]).int() + 2 * (rows == tokens["video_token_id"]).int()
    grids = {"image_grid_thw": batch.image_grid_thw, "video_grid_thw": batch.video_grid_thw}
    return lambda: model.get_rope_index(rows, types, **grids, attention_mask=torch.ones_like(rows))[0].flatten(1)[
        :, None
    ]


def vlm_cp(batch: PackedBatch, spec: VLMSpec, device: str) -> Callable[[], Tensor]:
    """As for a new batch on the CPU: nothing is left from a former call."""
    grids = {"image_grid_thw": batch.image_grid_thw, "video_grid_thw": batch.video_grid_thw}
    return lambda: moved(packed_position_ids(batch.input_ids, replace(batch.plan), **grids, spec=spec), device)


def case(tokens: int, samples: int, grids: list[Grid], *, device: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of one case: samples of the same length, `tokens` in all, each with these grids."""
    spec = VLMSpec.from_hf_config(hf_config(SHAPES["2b"]))
    batch = pack([(tokens // samples, grids)] * samples, SHAPES["2b"], Alignment(), spec, pixels=False)
    there = batch.to(device)
    arms = {"vlm_cp": vlm_cp(batch, spec, device), "bridge": bridge(there), "transformers": transformers(there)}
    media = samples * sum(frames for frames, _, _ in grids)
    row = {"tokens": tokens, "samples": samples, "media": media, "device": device}
    truth = arms["vlm_cp"]()
    for name, run in arms.items():
        if not torch.equal(run(), truth):
            return [{**row, "arm": name, "refused": "positions differ from vlm_cp's"}]
    found = measure(arms, rounds=rounds, warmup=1)
    return [{**row, **x} for x in beside(found, device)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run --case mrope", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default=",".join(map(str, CASES)))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="results file; the one of today without it")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    file = ResultsFile("mrope", args.json, keys=KEYS["mrope"])
    for tokens in map(int, args.tokens.split(",")):
        file.add(case(tokens, *CASES[tokens], device=args.device, rounds=args.rounds))
    return 0 if not any("refused" in row for row in file.rows) else 1
