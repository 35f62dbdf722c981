"""Sets how attention layers exchange keys and values, by Transformer Engine's public call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from vlm_cp import comm
from vlm_cp.exchange import CommChoice, CommType, choose_comm_type
from vlm_cp.plan import SequencePlan


def text_attentions(model: Any) -> Iterator[Any]:
    """Core attentions of an (unwrapped) model's text layers that know context parallelism; gated delta nets have none."""
    text = getattr(model, "language_model", model)
    for layer in text.decoder.layers:
        attention = getattr(layer.self_attention, "core_attention", None)
        if hasattr(attention, "set_context_parallel_group"):
            yield attention


def set_comm_type(model: Any, comm_type: CommType) -> None:
    """Every text layer of an (unwrapped) model exchanges by `comm_type` from its next call on; nothing at cp_size 1.

    Call it between steps only: a layer that is recomputed in the backward must run what its forward ran.
    """
    group = model.pg_collection.cp
    if comm.group_size(group) == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    for attention in text_attentions(model):
        attention.set_context_parallel_group(group, ranks, attention.cp_stream, comm_type)


def choose(models: Sequence[Any], plans: Sequence[SequencePlan], allowed: Collection[CommType]) -> CommChoice:
    """Picks the type for a step of these micro-batches by (unwrapped) `models`' heads, and sets it on all of them."""
    config, ranks = models[0].config, comm.group_size(models[0].pg_collection.tp)
    choice = choose_comm_type(
        plans,
        heads=config.num_attention_heads // ranks,
        key_value_heads=max(config.num_query_groups // ranks, 1),
        head_dim=config.kv_channels,
        allowed=allowed,
    )
    for model in models:
        set_comm_type(model, choice.comm_type)
    return choice
