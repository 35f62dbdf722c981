"""Whether the ranks that share a batch were given the same one: a data loader that deals by global rank gives them different ones."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from vlm_cp import comm
from vlm_cp.batch import PackedBatch


def check_same_batch(batch: PackedBatch, **groups: dist.ProcessGroup | None) -> None:
    """Refuses batches that differ over the ranks of a group, on all of them; a small object gather each and one device sync.

    groups: by what errors call them: `context=cp_group`.
    """
    if all(comm.group_size(group) == 1 for group in groups.values()):
        return
    plan = batch.plan
    weights = plan.token_index % 8191 + plan.sample_index + 1
    digest = (plan.lengths, plan.padded_lengths, int((batch.input_ids[0] * weights).sum()))
    for name, group in groups.items():
        if comm.group_size(group) == 1:
            continue
        found: list[Any] = [None] * comm.group_size(group)
        dist.all_gather_object(found, digest, group=group)
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            raise ValueError(
                f"batch must be the same on all {name}-parallel ranks, got lengths {found[0][0]} on rank 0 and {found[other][0]} "
                f"on rank {other}, or other ids; ranks would attend to another batch's tokens"
            )
