"""`SequencePlan`: where every token of a packed batch lies, in the full stream and on each context-parallel rank.

Pure index maths, no process group (only `gather` takes one). Axes, here and in every other file:

    B  samples            T    total = tokens of the padded full stream, the same on every CP rank
    S  row width          T/c  local = tokens that one of the c = cp_size ranks owns
    N  real tokens, the sum of `lengths`

Zigzag: a sample's padded length P is cut in 2c equal chunks and rank r owns chunks r and 2c-1-r, front then back, so
that causal attention costs every rank the same. It is Transformer Engine's `thd_get_partitioned_indices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import comm, rows, transfer
from vlm_cp.alignment import Alignment
from vlm_cp.comm import GatherBackward


@dataclass(frozen=True, kw_only=True, eq=False)
class SequencePlan:
    """A zigzag partition of padded, packed samples over `alignment.cp_size` ranks.

    Each sample is padded to `alignment.sequence_multiple`; what the stream needs beyond that (`stream_multiple`, a
    fixed `total_tokens`) is further padding of the last sample. Tensors lie on the CPU until `to`.

    >>> plan = SequencePlan.from_lengths([3, 8], alignment=Alignment(cp_size=2))
    >>> plan.local_index(0).tolist(), plan.local_index(1).tolist()
    ([0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9])
    >>> plan.unshard([plan.shard(torch.arange(12), rank) for rank in (0, 1)]).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    cu_seqlens: Tensor  # int32 [B+1], over real tokens
    cu_seqlens_padded: Tensor  # int32 [B+1], over the stream; its last entry is T
    alignment: Alignment

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor,
        *,
        alignment: Alignment | None = None,
        total_tokens: int | None = None,
    ) -> SequencePlan:
        """Plans samples of these lengths.

        lengths: B lengths of at least 1; a tensor on an accelerator costs the one transfer that there is.
        total_tokens: a fixed T, as pipelines without variable lengths need. It must be a multiple of
        `alignment.stream_multiple` and hold every padded sample; it is refused otherwise, never rounded.
        """
        alignment = alignment or Alignment()
        real = torch.as_tensor(lengths).cpu().numpy()  # a few numbers: numpy's calls cost a tenth of torch's
        if real.ndim != 1 or real.size == 0:
            raise ValueError(f"lengths must hold one entry a sample, got shape {real.shape}; there is nothing to plan")
        if real.dtype.kind not in "iu":
            raise ValueError(f"lengths must be integers, got {real.dtype}; a mask would plan one-token samples")
        real = real.astype(np.int64)
        if real.min() < 1:
            sample = int(real.argmin())
            raise ValueError(
                f"lengths[{sample}] must be at least 1, got {real[sample]}; "
                "an empty sample owns no chunk, and its neighbours' tokens would be taken for its own"
            )
        padded = -(-real // alignment.sequence_multiple) * alignment.sequence_multiple
        least = -(-int(padded.sum()) // alignment.stream_multiple) * alignment.stream_multiple
        total = least if total_tokens is None else total_tokens
        if total < least or total % alignment.stream_multiple:
            raise ValueError(
                f"total_tokens must be a multiple of {alignment.stream_multiple} and at least {least}, got {total}; "
                "samples would be cut, or ranks would hold unequal shards"
            )
        padded[-1] += total - padded.sum()
        bounds = np.zeros((2, len(real) + 1), np.int32)
        np.cumsum([real, padded], axis=1, out=bounds[:, 1:])
        cu_seqlens, cu_seqlens_padded = torch.from_numpy(bounds)
        return cls(
            lengths=tuple(real.tolist()),
            padded_lengths=tuple(padded.tolist()),
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=cu_seqlens_padded,
            alignment=alignment,
        )

    @cached_property
    def total_tokens(self) -> int:
        """T, the padded stream's length."""
        return sum(self.padded_lengths)

    @cached_property
    def max_seqlen(self) -> int:
        """The longest padded sample; an int, so that no attention call has to ask the device for it."""
        return max(self.padded_lengths)

    @property
    def local_tokens(self) -> int:
        """T / c, the tokens of one rank."""
        return self.total_tokens // self.cp_size

    @property
    def cp_size(self) -> int:
        return self.alignment.cp_size

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    def to(self, device: torch.device | str) -> SequencePlan:
        """The same plan on `device`: one asynchronous copy of the offsets; all indices are derived from them there."""
        return self.placed(*transfer.moved_together([self.cu_seqlens, self.cu_seqlens_padded], device))

    def placed(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> SequencePlan:
        """The same plan with its offsets where they lie now; the plan itself, with what it has derived, where they did not move."""
        if cu_seqlens.device == self.device:
            return self
        return replace(self, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)

    # Where tokens lie. Everything is derived from the two offset tensors, on their device, without a host sync.

    @cached_property
    def sample_index(self) -> Tensor:
        """int64 [T]: the sample of every slot; padding carries its sample."""
        samples = torch.arange(len(self.lengths), device=self.device)
        return rows.spread(samples, self.cu_seqlens_padded.diff(), self.total_tokens)

    @cached_property
    def token_index(self) -> Tensor:
        """int64 [T]: every slot's place inside its own padded sample, 0 at each sample's start."""
        offsets, total = self.cu_seqlens_padded.long(), self.total_tokens
        return torch.arange(total, device=self.device) - rows.spread(offsets[:-1], offsets.diff(), total)

    @cached_property
    def valid(self) -> Tensor:
        """bool [T]: slots that hold a real token."""
        real = self.cu_seqlens.diff()
        runs = torch.stack([real, self.cu_seqlens_padded.diff() - real], 1).flatten()  # tokens, then padding, in turn
        is_token = torch.arange(len(runs), device=self.device) % 2 == 0
        return rows.spread(is_token, runs, self.total_tokens)

    @cached_property
    def scored(self) -> Tensor:
        """bool [T]: slots whose next token exists and is real: `valid`, and not the sample's last."""
        return self.token_index + 1 < self.cu_seqlens.diff()[self.sample_index]

    @cached_property
    def real_index(self) -> Tensor:
        """int64 [N]: the stream slot of every real token, in order."""
        total = sum(self.lengths)
        padding_before = (self.cu_seqlens_padded - self.cu_seqlens)[:-1].long()
        return torch.arange(total, device=self.device) + rows.spread(padding_before, self.cu_seqlens.diff(), total)

    @cached_property
    def rank_order(self) -> Tensor:
        """int64 [T]: the stream slots of rank 0's shard, then rank 1's, and so on."""
        return torch.cat([self.local_index(rank) for rank in range(self.cp_size)])

    @cached_property
    def inverse_index(self) -> Tensor:
        """int64 [T]: `cat(all ranks' shards)[inverse_index]` is the full stream."""
        slots = torch.arange(self.total_tokens, device=self.device)
        return torch.empty_like(slots).scatter_(0, self.rank_order, slots)

    def local_index(self, rank: int) -> Tensor:
        """int64 [T/c]: the stream slots that `rank` owns, in their local order."""
        self.check_rank(rank)
        if rank not in self._local_indices:
            lengths, starts, _ = self._runs(rank)
            self._local_indices[rank] = rows.expand(starts, lengths, self.device)
        return self._local_indices[rank]

    @cached_property
    def _local_indices(self) -> dict[int, Tensor]:
        return {}

    def _runs(self, rank: int) -> np.ndarray:
        """int64 [3, runs]: length, first stream slot and sample of the pieces that `rank` owns, in their local order.

        A run is a chunk: two a sample, the whole sample at cp_size 1.
        """
        padded = np.array(self.padded_lengths)
        starts, samples = padded.cumsum() - padded, np.arange(len(padded))
        if self.cp_size == 1:
            return np.stack([padded, starts, samples])
        chunk = padded // (2 * self.cp_size)
        both = [starts + rank * chunk, starts + (2 * self.cp_size - 1 - rank) * chunk]
        return np.stack([chunk.repeat(2), np.stack(both, 1).ravel(), samples.repeat(2)])

    # Cutting and joining.

    def shard(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """Rank's tokens of a full-stream tensor; `x.size(dim)` must be T, so a shard is never cut again."""
        self._check(x, dim, self.total_tokens, "the full stream's T")
        index = self.local_index(rank)
        return x if self.cp_size == 1 else x.index_select(dim, index)

    def unshard(self, shards: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The full stream from all ranks' shards, in rank order; the inverse of `shard`."""
        if len(shards) != self.cp_size:
            raise ValueError(
                f"shards must hold one tensor a rank, {self.cp_size} in all, got {len(shards)}; tokens would be missing"
            )
        for x in shards:
            self._check(x, dim, self.local_tokens, "a shard's T / c")
        return shards[0] if self.cp_size == 1 else torch.cat(list(shards), dim).index_select(dim, self.inverse_index)

    def gather(
        self, x_local: Tensor, group: dist.ProcessGroup | None, dim: int = 0, *, backward: GatherBackward = "slice"
    ) -> Tensor:
        """The full stream from this rank's shard, differentiable.

        group: the CP group; None only at cp_size 1. backward: see `comm.all_gather`; "slice" is right when every CP
        rank goes on with the same value, "sum" is the true adjoint.
        """
        self.check_group(group)
        self._check(x_local, dim, self.local_tokens, "a shard's T / c")
        if self.cp_size == 1:
            return comm.all_gather(x_local, group, backward=backward)
        stream = comm.all_gather(x_local.movedim(dim, 0), group, backward=backward)
        return stream.index_select(0, self.inverse_index).movedim(0, dim)

    def pack(self, tensors: Sequence[Tensor], fill: float) -> Tensor:
        """[T, ...] from B tensors [L_i, ...]; padding slots hold `fill`."""
        found = tuple(map(len, tensors))
        if found != self.lengths:
            raise ValueError(
                f"tensors must have the plan's lengths {self.lengths}, got {found}; tokens would move to other samples"
            )
        real = torch.cat(list(tensors))
        self._check(real, 0, real.size(0), "N")
        return real.new_full((self.total_tokens, *real.shape[1:]), fill).index_copy(0, self.real_index, real)

    def pack_rows(self, x: Tensor, attention_mask: Tensor, fill: float) -> Tensor:
        """[T, ...] from rows [B, S, ...]: the cells where the mask is True, in order. `postprocess_packed_seqs` is its inverse."""
        cells = self.row_cells(attention_mask, x)
        return rows.put(x.flatten(0, 1).index_select(0, cells), self.real_index, self.total_tokens, fill)

    def shard_cells(self, x: Tensor, cells: Tensor, rank: int, fill: float) -> Tensor:
        """`shard(pack_rows(x, mask, fill), rank)` without building the stream: [T/c, ...]. cells: of the mask, from `row_cells`."""
        self.check_rank(rank)
        lengths, starts, samples = self._runs(rank)
        ends, padding = np.cumsum(self.lengths), np.subtract(self.padded_lengths, self.lengths)
        first = starts - (padding.cumsum() - padding)[samples]  # the token at the start of each run, if it holds one
        tokens = (ends[samples] - first).clip(0, lengths)
        index = rows.expand(first, lengths, self.device).clamp_(max=int(ends[-1]) - 1)
        local = x.flatten(0, 1).index_select(0, cells.index_select(0, index))
        padding_slots = rows.expand(lengths.cumsum() - lengths + tokens, lengths - tokens, self.device)
        return local.index_fill(0, padding_slots, fill)

    def row_cells(self, attention_mask: Tensor, x: Tensor | None = None) -> Tensor:
        """int64 [N]: the cells of [rows, S] where the mask is True, in the order of the plan's tokens.

        x: what will be read there, [rows, S, ...].
        """
        self.check_mask(attention_mask)
        if x is not None:
            self._check(x, 0, len(attention_mask), "the mask's rows")
        if x is not None and x.shape[:2] != attention_mask.shape:
            raise ValueError(
                f"x must start with the mask's shape {tuple(attention_mask.shape)}, got {tuple(x.shape)}; cells would be misread"
            )
        return rows.true_cells(attention_mask.bool(), sum(self.lengths))

    def check_mask(self, attention_mask: Tensor) -> None:
        """Refuses a mask [rows, S] that does not mark exactly the plan's tokens. On an accelerator it is an assertion there.

        A row may hold several samples, one after the other.
        """
        mask = rows.row_mask(attention_mask)
        self._check(mask, 0, len(mask), "rows")
        rows.check_counts(rows.counts_of(mask), self.cu_seqlens, self.lengths)

    def check_rank(self, rank: int) -> None:
        """Refuses what is not a rank of this plan."""
        if not isinstance(rank, int) or not 0 <= rank < self.cp_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"rank must lie in [0, {self.cp_size}), got {rank}; another rank's tokens would be taken")

    def check_group(self, group: dist.ProcessGroup | None) -> None:
        """Refuses a process group that is not this plan's CP group by size, and a missing one at cp_size > 1."""
        if group is None and self.cp_size > 1:
            raise ValueError(
                f"group must be the context-parallel group at cp_size {self.cp_size}, got None; "
                "the default group may span data-parallel ranks and would mix their samples"
            )
        if comm.group_size(group) != self.cp_size:
            raise ValueError(
                f"group must have the plan's cp_size {self.cp_size} ranks, got {comm.group_size(group)}; shards would be lost"
            )

    def _check(self, x: Tensor, dim: int, size: int, what: str) -> None:
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(
                f"x must have a dimension {dim} of {what} = {size}, got shape {tuple(x.shape)}; it has no tokens"
            )
        if x.size(dim) != size:
            hint = (
                "this is already a rank's shard" if x.size(dim) == self.local_tokens else "it belongs to another plan"
            )
            raise ValueError(
                f"x.size({dim}) must be {what} = {size}, got {x.size(dim)}; {hint}, and using it as it is would lose tokens"
            )
        if x.device != self.device:
            raise ValueError(
                f"x must be on the plan's device {self.device}, got {x.device}; "
                "move the plan once a batch with plan.to(device), a copy for every tensor would stall the step"
            )
