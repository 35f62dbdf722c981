"""Context parallelism for vision-language models: right by proof, on Megatron-Bridge or on transformers itself.

Importing this loads torch only. The engines are imported by name: `vlm_cp.engines.hf` loads transformers.
"""

from vlm_cp.alignment import Alignment
from vlm_cp.attention import ContextParallelAttention
from vlm_cp.batch import LocalBatch, PackedBatch, postprocess_packed_seqs, preprocess_packed_seqs, unpack
from vlm_cp.collate import SFTCollator, pack_samples
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.media import MediaTable
from vlm_cp.mrope import packed_position_ids
from vlm_cp.packing import bin_samples, restore_order
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import TextSpec, TowerSpec, VLMSpec

__all__ = [
    "Alignment",
    "ContextParallelAttention",
    "LocalBatch",
    "MediaTable",
    "PackedBatch",
    "SFTCollator",
    "SequencePlan",
    "TextSpec",
    "TowerSpec",
    "VLMSpec",
    "bin_samples",
    "next_token_logprobs",
    "pack_samples",
    "packed_position_ids",
    "postprocess_packed_seqs",
    "preprocess_packed_seqs",
    "restore_order",
    "unpack",
]
