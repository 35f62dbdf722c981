"""`CoreAttention`: `vlm_cp.attention` as Megatron's core attention, for layer specs without Transformer Engine.

megatron-core's own `DotProductAttention` knows neither context parallelism nor packed samples. Put this class where a
layer spec names its core attention and the layer works at any cp_size, on gloo (CPU) as on NCCL:

    spec = get_gpt_layer_local_spec(...)
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlm_cp.attention import AttentionMethod
from vlm_cp.engines.packed_params import PlannedSeqParams

# Megatron's cp_comm_type -> method. Ring exchange ("p2p") moves the same keys and values as one gather.
_METHODS: dict[str | None, AttentionMethod] = {
    None: "all_gather",
    "p2p": "all_gather",
    "all_gather": "all_gather",
    "a2a": "all_to_all",
}
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class CoreAttention(MegatronModule):
    """Causal attention of packed samples (`thd`) under context parallelism; no parameters.

    Built by Megatron with a layer's own arguments. The CP group is `pg_collection.cp`; cp_comm_type "p2p" and
    "all_gather" gather keys and values, "a2a" trades tokens for heads. What it cannot compute is refused at build.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse_unless(attn_mask_type in _CAUSAL, "attn_mask_type", "be causal", attn_mask_type.name)
        _refuse_unless(attention_type == "self", "attention_type", 'be "self"', attention_type)
        _refuse_unless(dropout == 0, "attention_dropout", "be 0", dropout)
        _refuse_unless(config.window_size is None, "window_size", "be None", config.window_size)
        _refuse_unless(config.softmax_type == "vanilla", "softmax_type", 'be "vanilla"', config.softmax_type)
        _refuse_unless(not config.apply_query_key_layer_scaling, "apply_query_key_layer_scaling", "be off", True)
        _refuse_unless(not config.qk_clip, "qk_clip", "be off", config.qk_clip)
        _refuse_unless(cp_comm_type in _METHODS, "cp_comm_type", "be p2p, all_gather or a2a", cp_comm_type)
        self.method: AttentionMethod = _METHODS[cp_comm_type]
        self.softmax_scale = softmax_scale
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group: dist.ProcessGroup | None = groups.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query [T/c, Hq, D], key and value [T/c, Hkv, D] -> [T/c, Hq * D]; the mask follows from the plan."""
        if not isinstance(packed_seq_params, PlannedSeqParams):
            raise ValueError(
                "packed_seq_params must be vlm_cp.engines.megatron.packed_seq_params(plan), got "
                f"{type(packed_seq_params).__name__}; which tokens this rank holds would have to be guessed"
            )
        _refuse_unless(attention_bias is None, "attention_bias", "be None", "a tensor")
        attention = packed_seq_params.attention(self.cp_group, self.method)
        return attention(query, key, value, scaling=self.softmax_scale).flatten(1)


def _refuse_unless(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} must {rule} for CoreAttention, got {value}; the layer would compute something else")


def use_torch_attention(chunks: list[Any]) -> list[Any]:
    """A pre-wrap hook: `CoreAttention` in every text layer that has full attention, in Transformer Engine's place."""
    for chunk in chunks:
        text = getattr(chunk, "language_model", chunk)
        for layer in text.decoder.layers:
            if hasattr(layer.self_attention, "core_attention"):
                layer.self_attention.core_attention = CoreAttention(
                    config=layer.config,
                    layer_number=layer.layer_number,
                    attn_mask_type=AttnMaskType.causal,
                    attention_type="self",
                    cp_comm_type=layer.config.cp_comm_type,
                    softmax_scale=layer.config.softmax_scale,
                    pg_collection=chunk.pg_collection,
                )
    return chunks
