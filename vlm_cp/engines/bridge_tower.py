"""Megatron-Bridge's Qwen3 vision tower, its work shared over the CP group and its host time and unfused kernels removed.

Instances become subclasses of their own classes: the tower takes its part of the patches and joins all rows afterwards, its
core attention rotates queries and keys itself and exchanges those of shared frames. Parameters and their names stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vlm_cp import comm
from vlm_cp.cut_attention import cut_attention
from vlm_cp.engines.rotary import mix_in, rotated
from vlm_cp.spec import VLMSpec
from vlm_cp.tower import PositionTables, rotary_angles
from vlm_cp.vision import MIN_PATCHES, assign_vision
from vlm_cp.vision_layout import Runs, VisionLayout

_KEPT_LAYOUTS = 16


@dataclass(frozen=True, kw_only=True)
class TowerOptions:
    """What is changed in a tower.

    share: deal the work over the CP ranks, from min_patches patches in a batch (`vlm_cp.vision.assign_vision`).
    fuse: Transformer Engine's rotary kernel (`vlm_cp.engines.rotary`), and Megatron's fused bias + GELU and bias + residual.
    """

    share: bool = True
    min_patches: int = MIN_PATCHES
    fuse: bool = True


class FeatureCache:
    """Feature rows of frozen towers by batch: kept while the batch's pixel tensor lives, and dropped with it.

    One cache may serve several models whose frozen towers have the same weights (a policy and its reference).
    """

    def __init__(self) -> None:
        self._rows: Any = WeakTensorKeyDictionary()

    def rows(self, pixels: Tensor, key: object, encode: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`encode()`, or what it returned for the same pixels and `key` before."""
        found = self._rows.get(pixels)
        if found is None or found[0] != (key, pixels._version):
            found = (key, pixels._version), encode()
            self._rows[pixels] = found
        return found[1]

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(eq=False)
class TowerWork:
    """What a tower knows about its work: shapes, the CP group, and what it has computed for batches it has seen."""

    spec: VLMSpec
    group: dist.ProcessGroup
    heads_per_tp: int
    options: TowerOptions
    cache: FeatureCache
    tables: PositionTables
    narrow_attention: Any  # core attention of H/c heads; None where these do not divide
    _layouts: OrderedDict[tuple[Any, ...], VisionLayout] = field(
        default_factory=OrderedDict[tuple[Any, ...], VisionLayout]
    )

    def layout(self, grids: Tensor, device: torch.device) -> VisionLayout:
        """This rank's layout for grids [M, 3] on the CPU (elsewhere they cost a host sync); kept for the next passes."""
        key = (device, *map(tuple, grids.tolist()))
        if key not in self._layouts:
            assignment = assign_vision(
                grids,
                cp_size=comm.group_size(self.group) if self.options.share else 1,
                spec=self.spec,
                heads_per_tp=self.heads_per_tp,
                min_patches=self.options.min_patches,
            )
            rank = comm.group_rank(self.group) if self.options.share else 0
            self._layouts[key] = VisionLayout.of(assignment, rank, device)
            if len(self._layouts) > _KEPT_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def forget_layouts(self) -> None:
        """As if no batch had been seen yet, for measurements that repeat one."""
        self._layouts.clear()


@dataclass
class VisionSeqParams(PackedSeqParams):
    """What the tower's core attention reads: the layout, and the angles to rotate by where rotation is fused into it."""

    layout: VisionLayout = field(kw_only=True)
    work: TowerWork = field(kw_only=True)
    angles: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.qkv_format = "thd"
        runs = self.layout.own or self.layout.shared
        if runs is not None:  # Bridge's rotary code asks only whether there are any
            self.cu_seqlens_q, self.cu_seqlens_kv = runs.cu_q, runs.cu_k

    @cached_property
    def runs(self) -> dict[int, PackedSeqParams]:
        """By the id of the layout's runs: their parameters, made once for all layers."""
        return {id(x): _seq_params(x) for x in (self.layout.own, self.layout.shared) if x is not None}


def _seq_params(runs: Runs) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=runs.cu_q,
        cu_seqlens_kv=runs.cu_k,
        max_seqlen_q=runs.max_q,
        max_seqlen_kv=runs.max_k,
        pad_between_seqs=False,
    )


class HostGridTower:
    """Mixed into Bridge's `Qwen3VLVisionModel`: its grids are best given on the CPU, where they are read."""

    def forward(self: Any, hidden_states: Tensor, grid_thw: Tensor, *_: Any, **__: Any) -> tuple[Tensor, list[Tensor]]:
        """pixels [patches, channels] of all images and frames, grids [M, 3] -> (rows [R, H], each deepstack level's rows)."""
        work: TowerWork = self.vision_work
        layout = work.layout(grid_thw, hidden_states.device)
        if any(p.requires_grad for p in self.parameters()):
            rows = self.encode(hidden_states, layout)
        else:
            weights = tuple(p._version for p in self.parameters())
            key = (layout.assignment.mode, tuple(map(tuple, grid_thw.tolist())), weights)
            with torch.no_grad():
                rows = work.cache.rows(hidden_states, key, lambda: self.encode(hidden_states, layout))
        return rows[0], list(rows[1:])

    def encode(self: Any, pixels: Tensor, layout: VisionLayout) -> tuple[Tensor, ...]:
        """(rows [R, H], deepstack levels...) of all frames; this rank encodes its part."""
        work: TowerWork = self.vision_work
        projection = self.patch_embed.proj
        local = layout.take(pixels).to(projection.weight.dtype)
        hidden = F.linear(local, projection.weight.flatten(1), projection.bias)
        hidden = hidden + work.tables.embeddings(self.pos_embed.weight, layout)
        angles = rotary_angles(self.rotary_pos_emb(max(map(max, layout.sizes))), layout)[:, None, None]
        fused = work.options.fuse
        params = VisionSeqParams(layout=layout, work=work, angles=angles if fused else None)
        hidden, levels = self.decoder(
            hidden_states=hidden[:, None],
            attention_mask=None,
            rotary_pos_emb=None if fused else angles,
            packed_seq_params=params,
        )
        rows = [self.merger(hidden), *levels]
        joined = layout.join(torch.cat(rows, 1) if len(rows) > 1 else rows[0], work.group)
        return joined.split([x.size(1) for x in rows], 1)


class FrameAttention:
    """Mixed into the tower's core attention: whole frames, and frames that are shared between ranks."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """query, key, value [n, H, D] of the local stream -> [n, H * D]."""
        stock = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        params = packed_seq_params
        if not isinstance(params, VisionSeqParams):
            return stock(query, key, value, attention_mask, *args, packed_seq_params=params, **kwargs)
        if params.angles is not None:
            query, key = (rotated(x, params.angles) for x in (query, key))
        layout, narrow = params.layout, params.work.narrow_attention

        def frames(q: Tensor, k: Tensor, v: Tensor, runs: Runs, attend: Any = stock) -> Tensor:
            out = attend(q, k, v, attention_mask, *args, packed_seq_params=params.runs[id(runs)], **kwargs)
            return out.unflatten(1, (q.size(1), -1))

        def shared(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
            return frames(q, k, v, runs, narrow if layout.assignment.exchange == "heads" else stock)

        return cut_attention(query, key, value, layout, params.work.group, own=frames, shared=shared).flatten(1)


def prepare_tower(model: Any, options: TowerOptions, cache: FeatureCache) -> bool:
    """Changes a built (unwrapped) Qwen3VLModel's tower in place, once; False where it has none or is prepared already."""
    tower = getattr(model, "vision_model", None)
    if tower is None or isinstance(tower, HostGridTower):
        return False
    config, spec, group = tower.config, VLMSpec.from_bridge(model.config), model.pg_collection.cp
    heads = config.num_attention_heads // comm.group_size(model.pg_collection.tp)
    attentions = [layer.self_attention.core_attention for layer in tower.decoder.layers]
    divides = heads % comm.group_size(group) == 0
    tower.vision_work = TowerWork(
        spec=spec,
        group=group,
        heads_per_tp=heads,
        options=options,
        cache=cache,
        tables=PositionTables(tower.num_grid_per_side, tower.spatial_merge_size),
        narrow_attention=_narrow(attentions[0], config, comm.group_size(group), tower) if divides else None,
    )
    if options.fuse:
        config.bias_activation_fusion = config.bias_dropout_fusion = True
        for layer in tower.decoder.layers:
            layer.mlp.activation_func = F.gelu  # by which Megatron picks its fused kernel; that one is the tanh form
    for attention in attentions:
        mix_in(attention, FrameAttention)
    mix_in(tower, HostGridTower)
    return True


def _narrow(attention: Any, config: Any, size: int, tower: Any) -> Any:
    """A core attention of 1/size of the heads. It has no parameters and is no submodule, so no state is added."""
    narrow = copy(config)
    narrow.num_attention_heads = narrow.num_query_groups = config.num_attention_heads // size
    return type(attention)(
        config=narrow,
        layer_number=1,
        attn_mask_type=AttnMaskType.no_mask,
        attention_type="self",
        pg_collection=tower.pg_collection,
    )
