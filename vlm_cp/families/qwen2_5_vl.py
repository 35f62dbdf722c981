"""Qwen2.5-VL: a windowed tower, no deepstack, temporal positions in real time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlm_cp.families.base import VisionRows


class Qwen25VL:
    def encode(self, model: Any, pixels: Tensor, grid_thw: Tensor) -> VisionRows:
        return VisionRows(torch.cat(model.get_image_features(pixels, grid_thw, return_dict=True).pooler_output))

    def text_inputs(self, visual: Tensor, levels: tuple[Tensor, ...]) -> dict[str, Any]:
        return {}

    def natural_order_layers(self, model: Any) -> list[nn.Module]:
        return []
