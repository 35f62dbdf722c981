"""Random transformers checkpoints, saved once for all parallel layouts, and batches for them. No processor, no hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.collate import pack_samples
from vlm_cp.spec import VLMSpec

ROPE = {"rope_type": "default", "rope_theta": 5e6}
TINY: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rope_parameters": {**ROPE, "mrope_section": [12, 10, 10], "mrope_interleaved": True},
}
TINY_TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 128,
    "num_heads": 2,
    "intermediate_size": 256,
    "out_hidden_size": 256,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 256,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DELTA_NET: dict[str, Any] = {
    **TINY,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
}
SHAPE_2B: dict[str, Any] = {
    **TINY,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {**ROPE, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
TOWER_2B: dict[str, Any] = {
    **TINY_TOWER,
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
DEEPSTACK = {
    **TINY_TOWER,
    "deepstack_visual_indexes": [0, 2],
}  # two levels, for PP=2 has two text layers on its first stage

# family -> (config class, model class, text config, vision config or None)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any] | None]] = {
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, TINY, DEEPSTACK),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, {**TINY, **EXPERTS}, DEEPSTACK),
    "qwen3_vl_2b": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, SHAPE_2B, TOWER_2B),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, DELTA_NET, TINY_TOWER),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**TINY, "rope_parameters": ROPE}, None),
}
TOKENS = {"image_token_id": 4000, "video_token_id": 4001, "vision_start_token_id": 4002, "vision_end_token_id": 4003}
WORDS = 3900  # ordinary text ids lie below


def save_checkpoint(family: str, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Random weights with a fixed seed; the width of the distribution is the models' own 0.02."""
    config_class, model_class, text, vision = FAMILIES[family]
    config = (
        config_class(**text)
        if vision is None
        else config_class(text_config=dict(text), vision_config=dict(vision), **TOKENS)
    )
    config.tie_word_embeddings = False
    config.architectures = [model_class.__name__]
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class._from_config(config, dtype=dtype)
    model.save_pretrained(folder)


# A sample is a list of parts: a number of text tokens, an image (h, w), or a video (t, h, w), sizes in patches.
Part = int | tuple[int, int] | tuple[int, int, int]
RAGGED: list[list[Part]] = [
    [31, (16, 24), 40, (8, 8), 330],  # 519 tokens: an odd length
    [256],
    [5, (32, 24), 500, (2, 12, 16), 20],
]
CASES: dict[str, list[list[list[Part]]]] = {  # case -> micro-batches -> samples
    "ragged": [RAGGED],
    "text-only": [[[300], [41]]],
    "image-on-one-rank": [[[(16, 16), 446]]],  # 64 of 512 tokens, all inside rank 0's first chunk
    "video": [[[17, (4, 12, 16), 100, (12, 12), 60, (2, 8, 8), 9]]],
    "mixed": [RAGGED, [[300], [41]], [[17, (3, 12, 16), 100]], [[(16, 16), 446]]],
    "long": [[[2000, (32, 48), 1200], [40, (64, 64), 900], [3000]]],
    "few": [[[31, (16, 24), 330], [150]]],  # one shape for kernels that are tuned at every new one
}


def case_batches(
    case: str,
    family: str,
    spec: VLMSpec,
    alignment: Alignment,
    *,
    total_tokens: int | None = None,
    reverse: bool = False,
) -> list[PackedBatch]:
    """The micro-batches of a case, the same for every layout; `reverse` packs each one's samples in the other order."""
    batches: list[PackedBatch] = []
    for number, parts in enumerate(CASES[case]):
        generator = torch.Generator().manual_seed(1000 + number)
        samples = [_sample(p, family, spec, generator) for p in parts]
        batches.append(
            pack_samples(
                samples[::-1] if reverse else samples,
                alignment=alignment,
                spec=spec,
                pad_token_id=0,
                total_tokens=total_tokens,
            )
        )
    return batches


def _sample(parts: Sequence[Part], family: str, spec: VLMSpec, generator: torch.Generator) -> Mapping[str, Tensor]:
    ids: list[int] = []
    grids: dict[int, list[list[int]]] = {spec.image_token_id: [], spec.video_token_id: []}
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(5, WORDS, (part,), generator=generator).tolist()
        elif family == "qwen3":  # a text model reads text in the media's place
            ids += torch.randint(5, WORDS, (part[-1] * part[-2] // 4,), generator=generator).tolist()
        else:
            token = spec.image_token_id if len(part) == 2 else spec.video_token_id
            frames, height, width = (1, *part) if len(part) == 2 else part
            grids[token].append([frames, height, width])
            for frame in range(frames):
                rows = [token] * (height * width // spec.spatial_merge_size**2)
                ids += [5 + frame, spec.vision_start_token_id, *rows, TOKENS["vision_end_token_id"]]
    sample = {"input_ids": torch.tensor(ids)}
    for token, pixels, grid in (
        (spec.image_token_id, "pixel_values", "image_grid_thw"),
        (spec.video_token_id, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids[token]:
            sample[grid] = torch.tensor(grids[token])
            sample[pixels] = torch.randn(int(sample[grid].prod(1).sum()), 3 * 2 * 16 * 16, generator=generator)
    return sample
