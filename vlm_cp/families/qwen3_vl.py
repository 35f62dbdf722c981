"""Qwen3-VL (dense): deepstack, that is, further feature rows that are added to the first text layers' outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlm_cp.families.base import VisionRows


class Qwen3VL:
    def encode(self, model: Any, pixels: Tensor, grid_thw: Tensor) -> VisionRows:
        out = model.get_image_features(pixels, grid_thw, return_dict=True)
        return VisionRows(torch.cat(out.pooler_output), tuple(out.deepstack_features))

    def text_inputs(self, visual: Tensor, levels: tuple[Tensor, ...]) -> dict[str, Any]:
        return {"visual_pos_masks": visual, "deepstack_visual_embeds": list(levels)} if levels else {}

    def natural_order_layers(self, model: Any) -> list[nn.Module]:
        return []
