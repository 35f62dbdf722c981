"""SkyRL's packing call, against its definition written out with lists: every sample padded alone, cut in 2c chunks."""

from __future__ import annotations

from itertools import pairwise
from math import lcm
from typing import Any

import bridge_on_cpu  # noqa: F401  (imports Megatron quietly)
import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks
from torch import Tensor
from vlm_cp_hooks.skyrl import alignment_multiple, preprocess_packed_seqs

WIDTH = 40
# (rows of samples, how a row lies in its width); a row of several samples is SkyRL's packed collator's.
LAYOUTS: dict[str, tuple[list[list[int]], str]] = {
    "left-padded": ([[5], [40], [1], [23]], "left"),
    "right-padded": ([[5], [40], [1], [23]], "right"),
    "several-a-row": ([[5, 3], [17], [1, 1, 2]], "packed"),
}


def rows_of(layout: str, multiple: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """(ids [B, S], mask [B, S], lengths): ids count upwards from 100; what lies between is 9 and must not be read."""
    lengths, side = LAYOUTS[layout]
    width = max(WIDTH, max(sum(-(-n // multiple) * multiple for n in row) for row in lengths))
    ids = torch.full((len(lengths), width), 9)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    value = 100
    for r, row in enumerate(lengths):
        start = width - row[0] if side == "left" else 0
        for n in row:
            ids[r, start : start + n] = torch.arange(value, value + n)
            mask[r, start : start + n] = True
            value += n
            start += -(-n // multiple) * multiple
    return ids, mask, lengths


def defined(
    lengths: list[list[int]], multiple: int, cp_size: int, cp_rank: int
) -> tuple[list[int], list[int], list[int]]:
    """(offsets, the whole stream, this rank's part) by the definition."""
    offsets, stream, own, value = [0], [], [], 100
    for n in [n for row in lengths for n in row]:
        padded = -(-n // multiple) * multiple
        sample = [*range(value, value + n), *[0] * (padded - n)]
        value += n
        half = padded // (2 * cp_size)
        mirrored = 2 * cp_size - 1 - cp_rank
        own += (
            sample
            if cp_size == 1
            else sample[cp_rank * half : (cp_rank + 1) * half] + sample[mirrored * half : (mirrored + 1) * half]
        )
        stream += sample
        offsets.append(len(stream))
    return offsets, stream, own


def _pack(rank: int, tp: int, cp: int) -> list[tuple[str, bool, Any, Any]]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    cp_rank = parallel_state.get_context_parallel_rank()
    seen: list[tuple[str, bool, Any, Any]] = []
    for layout in LAYOUTS:
        for fp8 in (False, True):
            multiple = tp * (2 * cp if cp > 1 else 1)
            multiple = lcm(multiple, 16 * cp) if fp8 else multiple
            assert alignment_multiple(tp, cp, fp8) == multiple
            ids, mask, lengths = rows_of(layout, multiple)
            nested = lengths if layout == "several-a-row" else None
            offsets, stream, own = defined(lengths, multiple, cp, cp_rank)
            local, params = preprocess_packed_seqs(ids, mask, sub_seq_lengths=nested, fp8_enabled=fp8)
            whole, same = preprocess_packed_seqs(ids, mask, True, nested, fp8, shard_for_cp=False)
            rows, _ = preprocess_packed_seqs(ids, mask, pre_process=False, sub_seq_lengths=nested, fp8_enabled=fp8)
            found = (
                local.tolist(),
                whole.tolist(),
                params.cu_seqlens_q.tolist(),
                params.max_seqlen_q,
                params.total_tokens,
            )
            longest = max(b - a for a, b in pairwise(offsets))
            seen.append((layout, fp8, found, ([own], [stream], offsets, longest, len(stream))))
            assert rows is ids
            assert same.cu_seqlens_q_padded.dtype == torch.int32
            assert params.cu_seqlens_q is params.cu_seqlens_kv_padded
            assert params.seq_idx.tolist() == same.plan.sample_index[None].tolist()
    return seen


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_equals_the_definition(tp: int, cp: int) -> None:
    for rank in run_ranks(tp * cp, _pack, tp, cp):
        assert len(rank) == 2 * len(LAYOUTS)
        for layout, fp8, found, expected in rank:
            assert found == expected, (layout, fp8)
