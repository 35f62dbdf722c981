"""Local logits -> next-token log-probabilities. Logits are never gathered over the CP ranks; the scalars may be.

Targets are taken on the full stream and cut by the plan's index, so the target of a slot is the next token of its own
sample also where that token lies on another rank, and never the first token of the next sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlm_cp.plan import SequencePlan


def next_token_ids(input_ids: Tensor, plan: SequencePlan) -> Tensor:
    """int64 [T]: slot j holds the id after token j of its own sample; 0 where the slot is not scored.

    input_ids: [1, T], the full stream.
    """
    if tuple(input_ids.shape) != (1, plan.total_tokens):
        raise ValueError(
            f"input_ids must be the full stream [1, {plan.total_tokens}], got {tuple(input_ids.shape)}; "
            "targets rolled inside a shard are wrong at the end of every chunk"
        )
    return input_ids[0].roll(-1).where(plan.scored, 0)


def next_token_logprobs(
    logits_local: Tensor, input_ids: Tensor, plan: SequencePlan, *, cp_rank: int, temperature: float = 1.0
) -> Tensor:
    """float32 [T/c]: slot j holds log p(token j + 1 | tokens <= j), exactly 0 with zero gradient where not `plan.scored`.

    logits_local: [1, T/c, V], this rank's slots. input_ids: [1, T], the full stream on every rank.
    """
    targets = plan.shard(next_token_ids(input_ids, plan), cp_rank)
    logprobs = torch.log_softmax(logits_local[0].float() / temperature, -1)
    found = logprobs.gather(1, targets[:, None])[:, 0]
    return found.where(plan.shard(plan.scored, cp_rank), 0.0)
