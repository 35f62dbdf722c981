"""Model shapes and batches that are measured. Random weights and pixels: neither changes how long a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLConfig

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.collate import pack_samples
from vlm_cp.spec import VLMSpec

TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """text, vision: transformers configs. tokens: ids of image, video, start and end. scale: what sides of images divide by."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tokens: Mapping[str, int]
    scale: int = 1


_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
_TOWER = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
SHAPES = {
    "2b": Shape(
        text={
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 6144,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "rope_parameters": {**_ROPE, "mrope_section": [24, 20, 20]},
        },
        vision={
            **_TOWER,
            "depth": 24,
            "hidden_size": 1024,
            "num_heads": 16,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        tokens=TOKENS,
    ),
    # To try the programs on a CPU: images of 1/8 of the sides, samples of 1/64 of the tokens.
    "tiny": Shape(
        text={
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "vocab_size": 512,
            "max_position_embeddings": 4096,
            "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]},
        },
        vision={
            **_TOWER,
            "depth": 4,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        tokens={
            "image_token_id": 500,
            "video_token_id": 501,
            "vision_start_token_id": 502,
            "vision_end_token_id": 503,
        },
        scale=8,
    ),
}


def hf_config(shape: Shape) -> Qwen3VLConfig:
    """The shape as a transformers config."""
    config = Qwen3VLConfig(
        text_config=dict(shape.text), vision_config=dict(shape.vision), **shape.tokens, tie_word_embeddings=False
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def square(side: int, frames: int = 1) -> Grid:
    return frames, side, side


# name -> tokens of the batch -> (tokens, images and videos) of each sample.
Sample = tuple[int, list[Grid]]


def text(tokens: int) -> list[Sample]:
    """Samples of 4096 tokens."""
    return [(4096, [])] * (tokens // 4096)


def long(tokens: int) -> list[Sample]:
    """One sample."""
    return [(tokens, [])]


def image(tokens: int) -> list[Sample]:
    """Samples of 4096 tokens with three images of 64 x 64 patches, three of four tokens being features."""
    return [(4096, [square(64)] * 3)] * (tokens // 4096)


def skewed(tokens: int) -> list[Sample]:
    """Half of the tokens in one sample with images of 128 x 128 patches, the rest in samples with one of 32 x 32."""
    large = max(tokens // 2 // 4096 - 1, 1) if tokens < 65536 else 6
    return [(tokens // 2, [square(128)] * large)] + [(4096, [square(32)])] * (tokens // 2 // 4096)


def video(tokens: int) -> list[Sample]:
    """Samples of 8192 tokens with one video of 12 frames of 48 x 48 patches."""
    return [(8192, [square(48, frames=12)])] * (tokens // 8192)


CASES = {"text": text, "long": long, "image": image, "skewed": skewed, "video": video}


def make_batch(case: str, tokens: int, shape: Shape, alignment: Alignment, spec: VLMSpec) -> PackedBatch:
    """The case's samples, packed, on the CPU; the same for every arm."""
    return pack(CASES[case](tokens), shape, alignment, spec)


def pack(
    samples: list[Sample], shape: Shape, alignment: Alignment, spec: VLMSpec, *, pixels: bool = True
) -> PackedBatch:
    """Samples of these tokens and media, packed, on the CPU. pixels: False leaves a stand-in of one channel."""
    generator = torch.Generator().manual_seed(3)
    made = [_sample(length, grids, shape, generator, 1536 if pixels else 1) for length, grids in samples]
    return pack_samples(made, alignment=alignment, spec=spec, pad_token_id=0)


def _sample(
    length: int, grids: list[Grid], shape: Shape, generator: torch.Generator, channels: int
) -> dict[str, Tensor]:
    tokens, scale = shape.tokens, shape.scale
    kinds = {"image": [], "video": []}
    ids: list[int] = []
    for frames, height, width in grids:
        kind = "image" if frames == 1 else "video"
        grid = (frames, height // scale, width // scale)
        kinds[kind].append(grid)
        for frame in range(frames):
            ids += [5 + frame, tokens["vision_start_token_id"]]
            ids += [tokens[f"{kind}_token_id"]] * (grid[1] * grid[2] // 4)
            ids.append(tokens["vision_end_token_id"])
    words = max(length // scale**2 - len(ids), 2)
    ids += torch.randint(5, min(tokens.values()), (words,), generator=generator).tolist()
    sample = {"input_ids": torch.tensor(ids)}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if kinds[kind]:
            grid_thw = torch.tensor(kinds[kind])
            patches = int(grid_thw.prod(1).sum())
            sample[f"{kind}_grid_thw"] = grid_thw
            sample[pixels] = torch.randn(patches, channels, generator=generator).bfloat16()
    return sample
