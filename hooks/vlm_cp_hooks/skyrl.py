"""SkyRL's packing with SkyRL's own signature, plus `shard_for_cp`: what its Megatron worker needs for VLMs under CP.

    from vlm_cp_hooks.skyrl import preprocess_packed_seqs
    ids, params = preprocess_packed_seqs(sequences, attention_mask, shard_for_cp=not is_vlm)

Sizes and ranks come from Megatron's parallel state, as in SkyRL. Lengths, offsets and ids equal SkyRL's, so everything
SkyRL does afterwards (targets, the gather of log-probabilities, routed-expert replay) stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from megatron.core import parallel_state
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.batch import preprocess_packed_seqs as pack
from vlm_cp.engines.packed_params import PlannedSeqParams, packed_seq_params


def alignment_multiple(tp_size: int, cp_size: int, fp8_enabled: bool = False) -> int:
    """The multiple SkyRL pads every sample to: tp * 2c at cp_size > 1, tp at 1; with FP8 also 16c."""
    multiple = tp_size * (2 * cp_size if cp_size > 1 else 1)
    return lcm(multiple, 16 * cp_size) if fp8_enabled else multiple


def preprocess_packed_seqs(
    input_ids: Tensor,
    attention_mask: Tensor,
    pre_process: bool = True,
    sub_seq_lengths: Sequence[Sequence[int]] | None = None,
    fp8_enabled: bool = False,
    shard_for_cp: bool = True,
) -> tuple[Tensor, PlannedSeqParams]:
    """Rows [B, S] and their mask -> (ids, parameters); the plan is `parameters.plan`.

    ids are this rank's [1, T/c], or the whole stream [1, T] with shard_for_cp=False: a VLM places its features and
    positions on the full stream and cuts afterwards. pre_process=False (a stage that reads no ids) returns the rows.
    sub_seq_lengths: the lengths in each row where rows hold several samples, each starting at a multiple of the alignment.
    """
    cp_size = parallel_state.get_context_parallel_world_size()
    multiple = alignment_multiple(parallel_state.get_tensor_model_parallel_world_size(), cp_size, fp8_enabled)
    ids, plan = pack(
        input_ids,
        attention_mask,
        alignment=Alignment(cp_size=cp_size, sample_multiple=multiple),
        cp_rank=parallel_state.get_context_parallel_rank(),
        shard_for_cp=shard_for_cp,
        sub_seq_lengths=sub_seq_lengths,
    )
    # SkyRL labels every token with its sample, which its Mamba models read.
    return (ids if pre_process else input_ids), packed_seq_params(plan, mamba=True)
