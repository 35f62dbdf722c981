"""The Qwen3-VL vision tower in float64 and plain torch, from a Bridge tower's own weights: what both its forms are judged by."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm_cp.tower import PositionTables
from vlm_cp.vision import assign_vision
from vlm_cp.vision_layout import VisionLayout


def reference_rows(tower: Any, spec: Any, pixels: Tensor, grids: Tensor) -> list[Tensor]:
    """[main rows, deepstack levels...] in float64; for a tower that is not split over TP ranks, and few patches."""
    layout = VisionLayout.of(assign_vision(grids, cp_size=1, spec=spec), 0, pixels.device)
    projection = tower.patch_embed.proj
    x = F.linear(pixels.double(), _d(projection.weight).flatten(1), _d(projection.bias))
    x = x + PositionTables(tower.num_grid_per_side, spec.spatial_merge_size).embeddings(
        _d(tower.pos_embed.weight), layout
    )
    angles = _angles(layout.coordinates.double(), tower.rotary_pos_emb.dim)
    levels: list[Tensor] = []
    for number, layer in enumerate(tower.decoder.layers):
        x = _layer(layer, x, angles, layout)
        if number in tower.decoder.deepstack_visual_indexes:
            merger = tower.decoder.deepstack_merger_list[tower.decoder.deepstack_visual_indexes.index(number)]
            levels.append(_merger(merger, x))
    return [_merger(tower.merger, x), *levels]


def _d(x: Tensor) -> Tensor:
    return x.detach().double()


def _angles(coordinates: Tensor, dim: int) -> Tensor:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, device=coordinates.device).double() / dim)
    half = (coordinates[..., None] * frequencies).flatten(1)
    return torch.cat([half, half], 1)[:, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [n, H, D] by angles [n, 1, D], in their dtype."""
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


def _layer(layer: Any, x: Tensor, angles: Tensor, layout: VisionLayout) -> Tensor:
    attention, mlp = layer.self_attention, layer.mlp
    heads = attention.config.num_attention_heads
    qkv = F.linear(_norm(attention.linear_qkv, x), _d(attention.linear_qkv.weight), _d(attention.linear_qkv.bias))
    q, k, v = qkv.unflatten(1, (heads, 3, -1)).unbind(2)
    q, k = rotate(q, angles), rotate(k, angles)
    frames = zip(*(y.split(layout.own.q_lengths) for y in (q, k, v)), strict=True)
    seen = torch.cat([_softmax_attention(*frame) for frame in frames]).flatten(1)
    x = x + F.linear(seen, _d(attention.linear_proj.weight), _d(attention.linear_proj.bias))
    inner = F.linear(_norm(mlp.linear_fc1, x), _d(mlp.linear_fc1.weight), _d(mlp.linear_fc1.bias))
    return x + F.linear(F.gelu(inner, approximate="tanh"), _d(mlp.linear_fc2.weight), _d(mlp.linear_fc2.bias))


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) * q.size(-1) ** -0.5
    return (scores.softmax(-1) @ v).transpose(0, 1)


def _norm(linear: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], _d(linear.layer_norm_weight), _d(linear.layer_norm_bias), 1e-6)


def _merger(merger: Any, x: Tensor) -> Tensor:
    if merger.use_postshuffle_norm:
        x = x.reshape(-1, merger.hidden_size)
    norm = merger.patch_norm
    x = F.layer_norm(x, x.shape[-1:], _d(norm.weight), _d(norm.bias), 1e-6).reshape(-1, merger.hidden_size)
    x = F.linear(x, _d(merger.linear_fc1.weight), _d(merger.linear_fc1.bias))
    x = F.gelu(x, approximate="tanh")
    return F.linear(x, _d(merger.linear_fc2.weight), _d(merger.linear_fc2.bias))
