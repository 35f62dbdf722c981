"""transformers' vision towers with their work shared over the CP group: whole frames, and frames cut between ranks.

Whole frames go through the model's own tower. A cut stream goes through the same submodules of Qwen3-VL's and Qwen3.5's
tower in the same order, since their attention module takes whole frames only; nothing of the model is replaced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_bilinear_indices_and_weights

from vlm_cp import transfer
from vlm_cp.cut_attention import attend_frames, cut_attention
from vlm_cp.families import Family, VisionRows
from vlm_cp.vision_layout import VisionLayout


def encode_shared(
    model: Any, family: Family, pixels: Tensor, layout: VisionLayout, group: dist.ProcessGroup | None
) -> VisionRows:
    """Feature rows of all `pixels` [patches, channels], each encoded on one rank; the same on every rank of `group`."""
    local = layout.take(pixels)
    if layout.assignment.mode == "mixed":
        rows = _encode_cut(model.model.visual, local, layout, group)
    else:
        grids = torch.tensor([(1, *size) for size in layout.sizes])
        rows = family.encode(model, local, transfer.moved(grids, pixels.device))
    joined = layout.join(torch.cat([rows.main, *rows.levels], 1), group)
    main, *levels = joined.split([x.size(1) for x in (rows.main, *rows.levels)], 1)
    return VisionRows(main, tuple(levels))


def _encode_cut(visual: Any, pixels: Tensor, layout: VisionLayout, group: dist.ProcessGroup | None) -> VisionRows:
    hidden = visual.patch_embed(pixels.to(visual.dtype))
    hidden = hidden + _position_embeddings(visual, layout).to(hidden.dtype)
    angles = visual.rotary_pos_emb(layout.coordinates)
    angles = torch.cat([angles, angles], 1)
    rotary = angles.cos(), angles.sin()
    taps: list[int] = list(getattr(visual, "deepstack_visual_indexes", ()))  # Qwen3.5's tower has none
    levels: list[Tensor] = []
    for number, block in enumerate(visual.blocks):
        run = partial(_block, block, rotary=rotary, layout=layout, group=group)
        if block.gradient_checkpointing and block.training:
            run = partial(block._gradient_checkpointing_func, run)
        hidden = run(hidden)
        if number in taps:
            levels.append(visual.deepstack_merger_list[taps.index(number)](hidden))
    return VisionRows(visual.merger(hidden), tuple(levels))


def _block(
    block: Any,
    hidden: Tensor,
    *,
    rotary: tuple[Tensor, Tensor],
    layout: VisionLayout,
    group: dist.ProcessGroup | None,
) -> Tensor:
    attention = block.attn
    query, key, value = attention.qkv(block.norm1(hidden)).unflatten(1, (3, attention.num_heads, -1)).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *rotary)
    seen = cut_attention(query, key, value, layout, group, own=attend_frames, shared=attend_frames)
    hidden = hidden + attention.proj(seen.flatten(1))
    return hidden + block.mlp(block.norm2(hidden))


def _position_embeddings(visual: Any, layout: VisionLayout) -> Tensor:
    """[n, H]: transformers' own interpolation of every frame that this rank has a part of, at this rank's patches."""
    frames = torch.tensor([(1, *size) for size in layout.sizes])
    index, weight = get_vision_bilinear_indices_and_weights(
        frames, num_grid_per_side=visual.num_grid_per_side, spatial_merge_size=visual.spatial_merge_size
    )
    counts = frames.prod(1)
    starts, index, weight = transfer.moved_together([counts.cumsum(0) - counts, index, weight], layout.device)
    here = layout.offsets_from(starts)
    return (visual.pos_embed(index[:, here]) * weight[:, here, None]).sum(0)
