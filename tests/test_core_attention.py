"""`CoreAttention` as Megatron builds and calls it, and the parameters of a plan; its parity is in test_bridge_parity.py."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import bridge_on_cpu  # noqa: F401  (imports Megatron quietly)
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from ranks import run_ranks

from vlm_cp.alignment import Alignment
from vlm_cp.engines.core_attention import CoreAttention
from vlm_cp.engines.megatron import packed_seq_params
from vlm_cp.plan import SequencePlan


def config(**changes: Any) -> Any:
    plain = {
        "attention_dropout": 0.0,
        "window_size": None,
        "softmax_type": "vanilla",
        "apply_query_key_layer_scaling": False,
        "qk_clip": False,
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**{**plain, **changes})


def build(settings: dict[str, Any] | None = None, group: Any = None, **changes: Any) -> CoreAttention:
    arguments: dict[str, Any] = {
        "config": config(**(settings or {})),
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "cp_comm_type": "p2p",
        "pg_collection": SimpleNamespace(cp=group),
    }
    return CoreAttention(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("settings", "changes", "text"),
    [
        ({}, {"attn_mask_type": AttnMaskType.no_mask}, "attn_mask_type must be causal for CoreAttention, got no_mask"),
        ({}, {"attention_type": "cross"}, 'attention_type must be "self" for CoreAttention, got cross'),
        (
            {"attention_dropout": 0.1},
            {},
            "attention_dropout must be 0 for CoreAttention, got 0.1",
        ),
        ({"window_size": (4, 0)}, {}, "window_size must be None for CoreAttention, got (4, 0)"),
        ({"softmax_type": "learnable"}, {}, 'softmax_type must be "vanilla" for CoreAttention, got learnable'),
        (
            {"apply_query_key_layer_scaling": True},
            {},
            "apply_query_key_layer_scaling must be off for CoreAttention, got True",
        ),
        ({"qk_clip": True}, {}, "qk_clip must be off for CoreAttention, got True"),
        ({}, {"cp_comm_type": "a2a+p2p"}, "cp_comm_type must be p2p, all_gather or a2a for CoreAttention, got a2a+p2p"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_refuses_what_it_cannot_compute(settings: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}; the layer would compute something else$"):
        build(settings, **changes)


def test_refuses_parameters_that_name_no_plan() -> None:
    query = torch.zeros(4, 2, 8)
    text = (
        "packed_seq_params must be vlm_cp.engines.megatron.packed_seq_params(plan), got PackedSeqParams; "
        "which tokens this rank holds would have to be guessed"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        build()(query, query, query, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))


def test_megatrons_names_of_the_exchange() -> None:
    methods = {name: build(cp_comm_type=name).method for name in (None, "p2p", "all_gather", "a2a")}
    assert methods == {None: "all_gather", "p2p": "all_gather", "all_gather": "all_gather", "a2a": "all_to_all"}


def test_has_no_parameters_and_no_state() -> None:
    attention = build()
    assert list(attention.parameters()) == []
    assert list(attention.state_dict()) == []


def _attend(rank: int, method: str) -> torch.Tensor:
    group = torch.distributed.group.WORLD
    plan = SequencePlan.from_lengths([5, 16, 3], alignment=Alignment(cp_size=2))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(plan.total_tokens, n, 8, generator=generator) for n in (4, 2, 2))
    attention = build({"context_parallel_size": 2}, group, cp_comm_type=method, softmax_scale=0.5)
    shards = [plan.shard(x, rank) for x in (query, key, value)]
    return attention(*shards, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed_seq_params(plan))


@pytest.mark.parametrize("method", ["p2p", "all_gather", "a2a"])
def test_two_ranks_equal_one(method: str) -> None:
    plan = SequencePlan.from_lengths([5, 16, 3], alignment=Alignment(cp_size=2))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(plan.total_tokens, n, 8, generator=generator) for n in (4, 2, 2))
    expected: list[torch.Tensor] = []
    for start, end in zip(plan.cu_seqlens_padded[:-1].tolist(), plan.cu_seqlens_padded[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
        expected.append(out[0].transpose(0, 1).flatten(1))
    found = plan.unshard(run_ranks(2, _attend, method))
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=2e-6)


def test_b5_padding_counts_as_tokens_and_one_tensor_serves_all_four_offset_fields() -> None:
    plan = SequencePlan.from_lengths([5, 16, 3], alignment=Alignment(cp_size=2))
    params = packed_seq_params(plan)
    offsets = (params.cu_seqlens_q, params.cu_seqlens_kv, params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded)
    assert all(x is plan.cu_seqlens_padded for x in offsets)
    assert (params.qkv_format, params.pad_between_seqs, params.max_seqlen_q, params.max_seqlen_kv) == (
        "thd",
        False,
        16,
        16,
    )
    assert type(params.max_seqlen_q) is int
    assert params.total_tokens is None
    assert params.seq_idx is None


def test_mamba_labels_equal_megatrons_own() -> None:
    plan = SequencePlan.from_lengths([5, 16, 3], alignment=Alignment(cp_size=2))
    ours = packed_seq_params(plan, mamba=True)
    theirs = PackedSeqParams(cu_seqlens_q_padded=plan.cu_seqlens_padded, total_tokens=plan.total_tokens)
    assert ours.total_tokens == theirs.total_tokens
    assert ours.seq_idx.dtype == theirs.seq_idx.dtype
    assert torch.equal(ours.seq_idx, theirs.seq_idx)


def test_layers_share_one_attention_a_batch() -> None:
    params = packed_seq_params(SequencePlan.from_lengths([5]))
    assert params.attention(None, "all_gather") is params.attention(None, "all_gather")
    assert params.attention(None, "all_gather") is not params.attention(None, "all_to_all")
