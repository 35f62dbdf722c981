"""Bodies of multi-rank RL tests, one a function: gloo on the CPU, NCCL on GPUs; and the naive twins they are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.logprobs import next_token_logprobs_and_entropy, next_token_logprobs_and_entropy_from_hidden
from vlm_cp.plan import SequencePlan


def naive_logprobs(
    logits: Sequence[Tensor], ids: Sequence[Tensor], temperature: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Per sample, in natural order: log p(next token) and entropy of every slot but the last, from [L_i, V] logits."""
    tables = [torch.log_softmax(x / temperature, -1)[:-1] for x in logits]
    found = [x.gather(1, i[1:, None])[:, 0] for x, i in zip(tables, ids, strict=True)]
    return found, [-(x.exp() * x).sum(1) for x in tables]


def make_grid(rank: int, cp_size: int, tp_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(CP group, TP group) of this rank of cp_size * tp_size; TP ranks are neighbours, as Megatron lays them out."""
    cp_group = tp_group = None
    for t in range(tp_size):
        ranks = [c * tp_size + t for c in range(cp_size)]
        group = dist.new_group(ranks)
        cp_group = group if rank in ranks else cp_group
    for c in range(cp_size):
        ranks = [c * tp_size + t for t in range(tp_size)]
        group = dist.new_group(ranks)
        tp_group = group if rank in ranks else tp_group
    assert cp_group is not None
    assert tp_group is not None
    return cp_group, tp_group


def logprobs_on_grid(
    rank: int,
    cp_size: int,
    tp_size: int,
    lengths: Sequence[int],
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    weights: Tensor,
    vocab_size: int,
    device: str,
) -> dict[str, Tensor]:
    """Logprobs and entropies of real tokens' logits, from the logits and from the hidden states, with their gradients.

    hidden [N, H], weight [V, H], ids [N], weights [2, N] of the summed logprobs and entropies. Gradients of hidden come
    back for this CP rank's rows, of weight for this TP rank's columns.
    """
    _, tp_group = make_grid(rank, cp_size, tp_size)
    cp_rank, tp_rank = divmod(rank, tp_size)
    alignment = Alignment(cp_size=cp_size, tp_size=tp_size, sequence_parallel=True)
    plan = SequencePlan.from_lengths(lengths, alignment=alignment).to(device)

    def local(x: Tensor, fill: float) -> Tensor:
        return plan.shard(plan.pack(x.to(device).split(list(lengths)), fill), cp_rank)

    input_ids = plan.pack(ids.to(device).split(list(lengths)), 0)[None]
    own_weights = local(weights.movedim(0, 1), 0.0)
    options = {"cp_rank": cp_rank, "tp_group": tp_group, "vocab_size": vocab_size, "chunk_size": 5, "temperature": 0.7}
    out: dict[str, Tensor] = {}
    for case in ("logits", "hidden", "sequence_parallel"):
        rows = local(hidden, 0.0)
        columns = weight.to(device).chunk(tp_size)[tp_rank].clone().requires_grad_()
        if case == "sequence_parallel":
            rows = rows.chunk(tp_size)[tp_rank].clone().requires_grad_()
            found = next_token_logprobs_and_entropy_from_hidden(
                rows[None], columns, input_ids, plan, sequence_parallel=True, **options
            )
        elif case == "hidden":
            rows.requires_grad_()
            found = next_token_logprobs_and_entropy_from_hidden(rows[None], columns, input_ids, plan, **options)
        else:
            rows.requires_grad_()
            found = next_token_logprobs_and_entropy((rows @ columns.T)[None], input_ids, plan, **options)
        (torch.stack(found, 1) * own_weights).sum().backward()
        assert rows.grad is not None
        assert columns.grad is not None
        if case == "logits":  # the plain product leaves the sum over TP ranks to its caller
            dist.all_reduce(rows.grad, group=tp_group)
        out[f"{case}.logprobs"], out[f"{case}.entropy"] = (x.detach().cpu() for x in found)
        out[f"{case}.rows"], out[f"{case}.columns"] = rows.grad.cpu(), columns.grad.cpu()
    return out
