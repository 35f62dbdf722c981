"""Small models of every family: the real architecture, a few hundred thousand random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

_MODELS: dict[str, tuple[Any, Any]] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
}

# Larger than the models' own 0.02: positions and rows that are off by one then move logits by 0.1 and more.
INITIALIZER_RANGE = 0.2

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_VISION: dict[str, Any] = {"patch_size": 16, "num_position_embeddings": 64}
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"num_hidden_layers": 3, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}, "bos_token_id": None},
        {"depth": 3, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        {**_QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": (
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                **_ROPE,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        {**_QWEN3_VISION, "depth": 2},
    ),
}


def tiny_config(
    family: str, tokenizer: PreTrainedTokenizerFast, *, vision: Mapping[str, Any] | None = None, **text_overrides: Any
) -> Any:
    """A transformers config of `family` for this tokenizer; vision and `text_overrides` replace entries of its two halves."""
    text, tower = _SIZES[family]
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    common = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": INITIALIZER_RANGE,
    }
    text_config = {**_TEXT, **common, **text, **text_overrides}
    own = {"out_hidden_size": text_config["hidden_size"], "initializer_range": INITIALIZER_RANGE}
    return _MODELS[family][0](
        text_config=text_config,
        vision_config={**_VISION, **tower, **own, **(vision or {})},
        tie_word_embeddings=False,
        **ids,
    )


def tiny_model(
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    vision: Mapping[str, Any] | None = None,
    **text_overrides: Any,
) -> Any:
    """A model with the same random weights on every call and rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(family, tokenizer, vision=vision, **text_overrides)
        return _MODELS[family][1]._from_config(config, dtype=dtype, attn_implementation="sdpa")
