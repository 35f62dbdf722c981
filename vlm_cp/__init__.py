"""Context parallelism for vision-language models: right by proof, on Megatron-Bridge or on transformers itself.

Importing this loads torch only. The engines are imported by name: `vlm_cp.engines.hf` loads transformers.
"""

from vlm_cp.alignment import Alignment
from vlm_cp.attention import ContextParallelAttention
from vlm_cp.batch import LocalBatch, PackedBatch, postprocess_packed_seqs, preprocess_packed_seqs, unpack
from vlm_cp.collate import SFTCollator, pack_samples
from vlm_cp.logprobs import (
    next_token_entropy,
    next_token_logprobs,
    next_token_logprobs_and_entropy,
    next_token_logprobs_from_hidden,
)
from vlm_cp.loss_contract import check_loss_contract
from vlm_cp.losses import TokenLoss, emit_default, emit_mean, emit_per_token, sequence_sum
from vlm_cp.media import MediaTable
from vlm_cp.metrics import Metric, merge_metrics, reduce_metrics
from vlm_cp.mrope import packed_position_ids
from vlm_cp.packing import bin_samples, restore_order
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import TextSpec, TowerSpec, VLMSpec
from vlm_cp.values import shifted_values

__all__ = [
    "Alignment",
    "ContextParallelAttention",
    "LocalBatch",
    "MediaTable",
    "Metric",
    "PackedBatch",
    "SFTCollator",
    "SequencePlan",
    "TextSpec",
    "TokenLoss",
    "TowerSpec",
    "VLMSpec",
    "bin_samples",
    "check_loss_contract",
    "emit_default",
    "emit_mean",
    "emit_per_token",
    "merge_metrics",
    "next_token_entropy",
    "next_token_logprobs",
    "next_token_logprobs_and_entropy",
    "next_token_logprobs_from_hidden",
    "pack_samples",
    "packed_position_ids",
    "postprocess_packed_seqs",
    "preprocess_packed_seqs",
    "reduce_metrics",
    "restore_order",
    "sequence_sum",
    "shifted_values",
    "unpack",
]
