"""`PackedSeqParams` of a plan: what Megatron's attention, rotary and delta-net layers read about a packed stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from vlm_cp import comm
from vlm_cp.attention import AttentionMethod, ContextParallelAttention
from vlm_cp.plan import SequencePlan


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """Megatron's parameters plus the plan they were made from.

    Transformer Engine is given the base class's fields only; `CoreAttention` reads the plan, so that no layer asks the
    device for lengths.
    """

    plan: SequencePlan = field(kw_only=True)

    def attention(self, group: dist.ProcessGroup | None, method: AttentionMethod) -> ContextParallelAttention:
        """The batch's attention over `group`, made once and shared by all layers."""
        key = (group, method)
        if key not in self._attentions:
            self._attentions[key] = ContextParallelAttention(
                plan=self.plan, group=group, cp_rank=comm.group_rank(group), method=method
            )
        return self._attentions[key]

    @cached_property
    def _attentions(self) -> dict[tuple[dist.ProcessGroup | None, AttentionMethod], ContextParallelAttention]:
        return {}


def packed_seq_params(plan: SequencePlan, *, mamba: bool = False) -> PlannedSeqParams:
    """The plan in Megatron's `thd` form, on the plan's device, without a host sync.

    Padding counts as tokens of its own sample: it stands after every real token, so causal attention never reads it. One
    tensor object serves all four offset fields, for Transformer Engine 2.18 and later take two objects as a sign of
    padding between samples and then rule flash attention out.
    mamba: also label every slot with its sample, which Mamba layers need (`total_tokens`, `seq_idx`).
    """
    offsets = plan.cu_seqlens_padded
    params = PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=plan.max_seqlen,
        max_seqlen_kv=plan.max_seqlen,
        pad_between_seqs=False,
        plan=plan,
    )
    if mamba:
        params.total_tokens = plan.total_tokens
        params.seq_idx = plan.sample_index.int()[None]
    return params
