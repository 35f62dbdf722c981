"""Attention of the tower over a stream of patches that is cut between ranks, inside frames too.

There is no causal mask, so a shared frame's attention needs no order: either the ranks trade patches for heads, each attends
over whole frames with its share of them, and they trade back; or, where heads do not divide by the ranks, every rank takes
all keys and values of the shared stream and attends with its own queries. Both are exact, in the backward too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from vlm_cp import comm
from vlm_cp.vision_layout import Runs, VisionLayout

# query [q, H, D], key and value [k, H, D], and which of them attend to each other -> [q, H, D]
Attend = Callable[[Tensor, Tensor, Tensor, Runs], Tensor]


def cut_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: VisionLayout,
    group: dist.ProcessGroup | None,
    *,
    own: Attend,
    shared: Attend,
) -> Tensor:
    """query, key, value [n, H, D] of the local stream -> [n, H, D].

    own: computes this rank's whole frames. shared: computes the shared ones, with H/c heads where heads are exchanged. All
    ranks of `group` must call it together wherever frames are shared.
    """
    if layout.assignment.mode != "mixed":
        assert layout.own is not None
        return own(query, key, value, layout.own)
    first = layout.own_patches
    pieces = [] if layout.own is None else [own(query[:first], key[:first], value[:first], layout.own)]
    exchange = _by_heads if layout.assignment.exchange == "heads" else _by_keys
    pieces.append(exchange(query[first:], key[first:], value[first:], layout, group, shared))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _by_heads(
    query: Tensor, key: Tensor, value: Tensor, layout: VisionLayout, group: dist.ProcessGroup | None, attend: Attend
) -> Tensor:
    size, patches = comm.group_size(group), len(query)
    assert layout.shared is not None
    by_rank = torch.stack([query, key, value], 1).unflatten(2, (size, -1)).movedim(2, 0)  # [c, n, 3, H/c, D]
    each = [patches] * size
    stream = comm.all_to_all_rows(by_rank.flatten(0, 1), sent=each, received=layout.slices, group=group)
    out = attend(stream[:, 0], stream[:, 1], stream[:, 2], layout.shared)
    back = comm.all_to_all_rows(out, sent=layout.slices, received=each, group=group)
    return back.unflatten(0, (size, patches)).movedim(0, 1).flatten(1, 2)


def _by_keys(
    query: Tensor, key: Tensor, value: Tensor, layout: VisionLayout, group: dist.ProcessGroup | None, attend: Attend
) -> Tensor:
    size, patches = comm.group_size(group), len(query)
    to_all = torch.stack([key, value], 1).expand(size, -1, -1, -1, -1).flatten(0, 1)
    stream = comm.all_to_all_rows(to_all, sent=[patches] * size, received=layout.slices, group=group)
    keys, values = stream[layout.keys.start : layout.keys.stop].unbind(1)
    if layout.shared is None:
        return query + keys[:0]  # no patch here, but this rank's part of the backward exchange
    return attend(query, keys, values, layout.shared)


def attend_frames(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> Tensor:
    """An `Attend` in plain torch: the flash kernel for half precision on CUDA, frame by frame elsewhere."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return cast(Tensor, varlen_attn(query, key, value, runs.cu_q, runs.cu_k, runs.max_q, runs.max_k))
    split = zip(query.split(runs.q_lengths), key.split(runs.k_lengths), value.split(runs.k_lengths), strict=True)
    return torch.cat([_attend_frame(q, k, v) for q, k, v in split])


def _attend_frame(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
