"""Qwen3.5 (dense): three of four text layers are gated delta nets, whose convolution and state run along the sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlm_cp.families.base import VisionRows


class Qwen35:
    def encode(self, model: Any, pixels: Tensor, grid_thw: Tensor) -> VisionRows:
        return VisionRows(torch.cat(model.get_image_features(pixels, grid_thw, return_dict=True).pooler_output))

    def text_inputs(self, visual: Tensor, levels: tuple[Tensor, ...]) -> dict[str, Any]:
        return {}

    def natural_order_layers(self, model: Any) -> list[nn.Module]:
        layers = model.model.language_model.layers
        return [layer.linear_attn for layer in layers if layer.layer_type == "linear_attention"]
