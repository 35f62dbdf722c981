"""Causal attention over packed samples under context parallelism, in plain torch, over any process group.

Two methods, both exact and differentiable:

all_gather: every rank gathers keys and values and attends with its own queries. Each of a sample's two local chunks sees
    the sample's tokens up to its own end. Works for any number of heads.
all_to_all: ranks trade tokens for heads, attend over whole samples with Hq/c heads, and trade back (Ulysses). Moves less
    when c is large; query and key/value heads must divide by c.

Half precision on CUDA runs torch's variable-length flash kernel; everything else runs `scaled_dot_product_attention` in
query blocks, recomputed in the backward, so that no [T, T] mask or score ever exists, not even in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from vlm_cp import comm, rows, transfer
from vlm_cp.plan import SequencePlan

AttentionMethod = Literal["all_gather", "all_to_all"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextParallelAttention:
    """Causal attention of one batch on one CP rank; made once a batch and called by every layer.

    plan: on the device of the queries. group: the CP group, None only at cp_size 1. cp_rank: the rank inside it.
    block_size: queries a block where no flash kernel takes over; it bounds memory at block_size * longest sample.
    """

    plan: SequencePlan
    group: dist.ProcessGroup | None
    cp_rank: int
    method: AttentionMethod = "all_gather"
    block_size: int = 512

    def __post_init__(self) -> None:
        self.plan.check_group(self.group)
        if self.cp_rank != comm.group_rank(self.group):
            raise ValueError(
                f"cp_rank must be the rank inside the group, {comm.group_rank(self.group)}, got {self.cp_rank}; "
                "queries would attend as if they stood elsewhere in their sample"
            )
        if self.method not in get_args(AttentionMethod):
            raise ValueError(
                f"method must be one of {', '.join(get_args(AttentionMethod))}, got {self.method!r}; nothing would be exchanged"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}; no query would ever be computed")

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None = None) -> Tensor:
        """query [T/c, Hq, D], key and value [T/c, Hkv, D] in local order -> [T/c, Hq, D]; Hq a multiple of Hkv (GQA).

        scaling: factor on the scores, D ** -0.5 by default.
        """
        n = self.plan.local_tokens
        shapes = [tuple(x.shape) for x in (query, key, value)]
        if any(len(shape) != 3 or shape[0] != n for shape in shapes) or shapes[1] != shapes[2]:
            raise ValueError(
                f"query, key and value must have shapes [{n}, Hq, D], [{n}, Hkv, D] and key's own, one row a slot of this rank, "
                f"got {shapes[0]}, {shapes[1]} and {shapes[2]}; queries would see other tokens, or none"
            )
        if self.plan.cp_size > 1 and self.method == "all_to_all":
            return self._all_to_all(query, key, value, scaling)
        keys, values = self.plan.gather(torch.stack([key, value], 1), self.group, backward="sum").unbind(1)
        return self._attend(query, keys, values, self._own_segments, scaling)

    def _all_to_all(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        size = self.plan.cp_size
        if query.size(1) % size or key.size(1) % size:
            raise ValueError(
                f"query and key/value heads must be divisible by cp_size {size} for all_to_all, got {query.size(1)} and "
                f'{key.size(1)}; ranks would hold different heads. Use attention="all_gather"'
            )
        grouped = [x.unflatten(1, (size, -1)) for x in (query, key, value)]
        exchanged = comm.all_to_all(torch.cat(grouped, 2).movedim(1, 0), self.group)  # [c, T/c, (Hq + 2 Hkv)/c, D]
        stream = exchanged.flatten(0, 1).index_select(0, self.plan.inverse_index)
        own_query, keys, values = stream.split([x.size(2) for x in grouped], 1)
        out = self._attend(own_query, keys, values, self._whole_segments, scaling)
        by_rank = out.index_select(0, self.plan.rank_order).unflatten(0, (size, -1))
        return comm.all_to_all(by_rank, self.group).movedim(0, 1).flatten(1, 2)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, segments: _Segments, scaling: float | None
    ) -> Tensor:
        """query: the segments' tokens in their order; keys, values [T, ...] in stream order."""
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            cu_q, cu_k, index = segments.tables
            if index is not None:
                keys, values = keys.index_select(0, index), values.index_select(0, index)
            lengths = cu_q, cu_k, segments.max_q, segments.max_k
            return cast(Tensor, varlen_attn(query, keys, values, *lengths, scale=scaling, window_size=(-1, 0)))
        blocks: list[Tensor] = []
        for q_rows, k_rows in segments.blocks(self.block_size):
            inputs = query[q_rows], keys[k_rows], values[k_rows], scaling
            block = checkpoint(_causal_block, *inputs, use_reentrant=False, preserve_rng_state=False)
            blocks.append(cast(Tensor, block))
        return torch.cat(blocks)

    @cached_property
    def _whole_segments(self) -> _Segments:
        lengths = self.plan.padded_lengths
        return _Segments(lengths, lengths, self._starts, self.plan.device)

    @cached_property
    def _own_segments(self) -> _Segments:
        """The rank's two chunks of every sample; each sees the sample's tokens up to its own end."""
        size, rank = self.plan.cp_size, self.cp_rank
        if size == 1:
            return self._whole_segments
        halves = [length // (2 * size) for length in self.plan.padded_lengths]
        return _Segments(
            tuple(half for half in halves for _ in range(2)),
            tuple(half * chunks for half in halves for chunks in (rank + 1, 2 * size - rank)),
            tuple(start for start in self._starts for _ in range(2)),
            self.plan.device,
        )

    @property
    def _starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.plan.padded_lengths[:-1]))


@dataclass(frozen=True)
class _Segments:
    """Query runs and the keys that each sees: `keys[start : start + k_length]`, the last query seeing them all."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    k_starts: tuple[int, ...]
    device: torch.device

    @property
    def max_q(self) -> int:
        return max(self.q_lengths)

    @property
    def max_k(self) -> int:
        return max(self.k_lengths)

    def blocks(self, block_size: int) -> Iterator[tuple[slice, slice]]:
        """(query rows, key rows) in query order; a block's keys end where its last query stands."""
        first = 0
        for q_length, k_length, start in zip(self.q_lengths, self.k_lengths, self.k_starts, strict=True):
            for offset in range(0, q_length, block_size):
                end = min(offset + block_size, q_length)
                yield slice(first + offset, first + end), slice(start, start + k_length - q_length + end)
            first += q_length

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """int32 offsets of queries and of keys, and the index that copies the keys together (None: as they lie)."""
        lengths = torch.tensor([self.q_lengths, self.k_lengths, self.k_starts])
        bounds = torch.zeros(2, lengths.size(1) + 1, dtype=torch.int32)
        torch.cumsum(lengths[:2], 1, out=bounds[:, 1:])
        total, shifts = int(bounds[1, -1]), lengths[2] - bounds[1, :-1]
        (cu_q, cu_k), shifts = transfer.moved_together([bounds, shifts], self.device)
        if self.q_lengths == self.k_lengths:
            return cu_q, cu_k, None
        return cu_q, cu_k, torch.arange(total, device=self.device) + rows.spread(shifts, cu_k.diff(), total)


def _causal_block(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """query [q, Hq, D] are the last q tokens of keys [k, Hkv, D]."""
    q_length, k_length = len(query), len(keys)
    mask = None
    if q_length != k_length:
        order = torch.arange(k_length, device=query.device)
        mask = order <= order[k_length - q_length :, None]
    out = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, keys, values)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
