"""Logprobs on ranks, one body for gloo on the CPU and NCCL on GPUs, and the naive twin they are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.logprobs import (
    next_token_logprobs_and_entropy,
    next_token_logprobs_and_entropy_from_hidden,
)
from vlm_cp.plan import SequencePlan

LENGTHS = (1, 13, 2, 7)  # ragged; a sample without a scored slot, and one with a single one
VOCAB = 11


def make_plan(cp_size: int, lengths: tuple[int, ...] = LENGTHS, **options: int) -> SequencePlan:
    return SequencePlan.from_lengths(lengths, alignment=Alignment(cp_size=cp_size, **options))


def make_case(
    plan: SequencePlan, vocab: int = VOCAB, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Per sample logits [L, V] and ids [L]; the padded stream's logits [T, V], padding holding NaN, and ids [1, T]."""
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(n, vocab, generator=generator, dtype=torch.float64).to(dtype) for n in plan.lengths]
    ids = [torch.randint(vocab, (n,), generator=generator) for n in plan.lengths]
    return logits, ids, plan.pack(logits, torch.nan), plan.pack(ids, 3)[None]


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


def to_slots(plan: SequencePlan, per_sample: list[Tensor]) -> Tensor:
    """[T] from B tensors [L_i - 1]: the last slot of a sample holds 0."""
    return plan.pack([torch.cat([x, x.new_zeros(1)]) for x in per_sample], 0.0)


def check_grid(run_ranks: Callable[..., list[Any]], device: str, cp_size: int = 2, tp_size: int = 2) -> None:
    """`logprobs_on_grid` against one process: padded vocabulary, every way in; often the target is another TP rank's."""
    lengths, vocab, real, width = (1, 13, 2, 7), 12, 9, 6
    generator = torch.Generator().manual_seed(0)
    n = sum(lengths)
    hidden = torch.randn(n, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    ids = torch.randint(real, (n,), generator=generator)
    weights = 10.0 ** torch.randint(3, (2, n), generator=generator).double()
    job = (cp_size, tp_size, lengths, hidden, weight, ids, weights, real, device)
    per_rank = run_ranks(cp_size * tp_size, logprobs_on_grid, *job, **({} if device == "cpu" else {"device": device}))

    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (h @ w.T)[:, :real].split(list(lengths))
    logprobs, entropy = naive_logprobs(logits, ids.split(list(lengths)), 0.7)
    split_weights = [x[:, :-1] for x in weights.split(list(lengths), 1)]
    torch.cat(
        [(torch.stack([x, y]) * z).sum()[None] for x, y, z in zip(logprobs, entropy, split_weights, strict=True)]
    ).sum().backward()
    plan = SequencePlan.from_lengths(
        lengths, alignment=Alignment(cp_size=cp_size, tp_size=tp_size, sequence_parallel=True)
    )
    hidden_grad = plan.pack(h.grad.split(list(lengths)), 0.0)
    for rank, found in enumerate(per_rank):
        cp_rank, tp_rank = divmod(rank, tp_size)
        for case in ("logits", "hidden", "sequence_parallel"):
            for name, expected in (("logprobs", logprobs), ("entropy", entropy)):
                own = plan.shard(to_slots(plan, expected), cp_rank)
                torch.testing.assert_close(found[f"{case}.{name}"], own, rtol=0, atol=1e-13)
            own = plan.shard(hidden_grad, cp_rank)
            own = own.chunk(tp_size)[tp_rank] if case == "sequence_parallel" else own
            torch.testing.assert_close(found[f"{case}.rows"], own, rtol=1e-12, atol=1e-11)
    for tp_rank in range(tp_size):
        for case in ("logits", "hidden", "sequence_parallel"):
            joined = sum(per_rank[tp_size * c + tp_rank][f"{case}.columns"] for c in range(cp_size))
            torch.testing.assert_close(joined, w.grad.chunk(tp_size)[tp_rank], rtol=1e-12, atol=1e-11)


class GivesItsGradientAway(torch.autograd.Function):
    """`logits` as an output layer would return them, which takes their gradient without keeping a copy."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_zeros(1), None


def logprob_memory_on_gpu(rank: int, tokens: int, vocab: int, width: int, chunk_size: int) -> dict[str, int]:
    """Most bytes held above what was there before, by how logprobs and entropies are computed, from bfloat16."""
    plan = SequencePlan.from_lengths([tokens]).to("cuda")
    input_ids = torch.randint(vocab, (1, tokens), device="cuda")
    logits = torch.randn(1, tokens, vocab, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(1, tokens, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocab, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    options: dict[str, Any] = {"cp_rank": 0, "chunk_size": chunk_size}
    out: dict[str, int] = {}

    def measure(name: str, run: Callable[[], tuple[Tensor, Tensor]]) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprobs, entropies = run()
        if logprobs.requires_grad:
            (logprobs.sum() + entropies.sum()).backward()
        torch.cuda.synchronize()
        out[name] = torch.cuda.max_memory_allocated() - before

    def from_logits(**more: bool) -> tuple[Tensor, Tensor]:
        source = torch.zeros(1, device="cuda", requires_grad=bool(more))
        given = GivesItsGradientAway.apply(source, logits)
        assert isinstance(given, Tensor)
        return next_token_logprobs_and_entropy(given, input_ids, plan, **options, **more)

    measure("no_grad", from_logits)
    measure("backward", lambda: from_logits(inplace_backward=False))
    measure("inplace_backward", lambda: from_logits(inplace_backward=True))
    measure(
        "from_hidden", lambda: next_token_logprobs_and_entropy_from_hidden(hidden, weight, input_ids, plan, **options)
    )
    return out
