"""Bodies of multi-rank RL tests, one a function: gloo on the CPU, NCCL on GPUs; and the naive twins they are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_import import import_megatron
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.comm import GatherBackward
from vlm_cp.logprobs import (
    next_token_logprobs,
    next_token_logprobs_and_entropy,
    next_token_logprobs_and_entropy_from_hidden,
)
from vlm_cp.losses import (
    TokenLoss,
    emit_default,
    emit_mean,
    emit_per_token,
    global_count,
    replicated_loss,
    sequence_loss,
    sequence_ratio,
    sequence_sum,
    token_loss,
)
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


# Losses over a grid of data- and context-parallel ranks. The model is an embedding and an output layer, so that everything
# between the ranks comes from the loss.

BETA, CLIP = 0.1, 0.2


@dataclass(frozen=True)
class LossData:
    """Samples of a step, pairs (2i, 2i + 1) for DPO. masks: of slots, the last of a sample never set."""

    ids: list[Tensor]
    masks: list[Tensor]
    advantages: list[Tensor]
    old: list[Tensor]
    parameters: tuple[Tensor, Tensor]  # embedding and output layer, [V, H] each


def make_loss_data(pairs: int = 12, vocab: int = 7, width: int = 3) -> LossData:
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + (5 * i) % 9 for i in range(2 * pairs)]  # 1 to 9: single tokens, and shorter than a chunk
    ids = [torch.randint(vocab, (n,), generator=generator) for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    for mask in masks:
        mask[-1] = False
    masks[4] = torch.zeros_like(masks[4])
    masks[6], masks[7] = (
        torch.zeros_like(masks[6]),
        torch.zeros_like(masks[7]),
    )  # a micro-batch of their own when M is large
    advantages = [
        10.0 ** (i % 3) * torch.randn(n, generator=generator, dtype=torch.float64) for i, n in enumerate(lengths)
    ]
    old = [-2 + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    parameters = tuple(torch.randn(vocab, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return LossData(ids, masks, advantages, old, parameters)  # pyright: ignore[reportArgumentType]


def ppo_terms(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def dpo_terms(sums: Tensor) -> Tensor:
    return -F.logsigmoid(BETA * (sums[0::2] - sums[1::2]))


def naive_losses(data: LossData) -> dict[str, Tensor]:
    """Every loss of the whole step, sample by sample in plain torch."""
    embedding, output = data.parameters
    logprobs = [
        torch.cat([torch.log_softmax(embedding[i] @ output.T, -1)[:-1].gather(1, i[1:, None])[:, 0], torch.zeros(1)])
        for i in data.ids
    ]
    ppo = [ppo_terms(*x)[m] for *x, m in zip(logprobs, data.old, data.advantages, data.masks, strict=True)]
    differences = [(x - y)[m] for x, y, m in zip(logprobs, data.old, data.masks, strict=True)]
    scored = [m.any() for m in data.masks]
    tokens, samples = sum(m.sum() for m in data.masks), sum(scored)
    ratios = [(d.mean() if s else d.sum()).exp() for d, s in zip(differences, scored, strict=True)]
    gspo = [ppo_terms(r.log(), r.new_zeros(()), a[0]) for r, a in zip(ratios, data.advantages, strict=True)]
    return {
        "token_mean": sum(x.sum() for x in ppo) / tokens,
        "sequence_mean_token_mean": sum(x.mean() for x in ppo if len(x)) / samples,
        "sequence_mean_token_sum": sum(x.sum() for x in ppo) / samples,
        "gspo": sum(x for x, s in zip(gspo, scored, strict=True) if s) / samples,
        "dpo": dpo_terms(torch.stack([d.sum() for d in differences])).mean(),
    }


@dataclass(frozen=True)
class Shard:
    """One micro-batch on one CP rank, packed."""

    plan: SequencePlan
    group: dist.ProcessGroup
    input_ids: Tensor
    mask: Tensor
    old: Tensor
    advantages: Tensor
    firsts: Tensor  # [B]

    @classmethod
    def of(cls, data: LossData, samples: Sequence[int], group: dist.ProcessGroup) -> Shard:
        def packed(tensors: list[Tensor]) -> Tensor:
            return plan.pack([tensors[i] for i in samples], 0)

        alignment = Alignment(cp_size=dist.get_world_size(group))
        plan = SequencePlan.from_lengths([len(data.ids[i]) for i in samples], alignment=alignment)
        firsts = torch.stack([data.advantages[i][0] for i in samples])
        return cls(
            plan,
            group,
            packed(data.ids)[None],
            packed(data.masks)[None],
            packed(data.old),
            packed(data.advantages),
            firsts,
        )

    @property
    def cp_rank(self) -> int:
        return dist.get_rank(self.group)

    def local(self, x: Tensor) -> Tensor:
        return self.plan.shard(x, self.cp_rank)

    def logprobs(self, parameters: Sequence[Tensor]) -> Tensor:
        embedding, output = parameters
        logits = embedding[self.local(self.input_ids[0])] @ output.T
        return next_token_logprobs(logits[None], self.input_ids, self.plan, cp_rank=self.cp_rank)

    def loss(self, kind: str, parameters: Sequence[Tensor]) -> TokenLoss:
        """As a trainer would write it with this package."""
        logprobs, mask, old = self.logprobs(parameters), self.local(self.mask[0]), self.local(self.old)
        place = {"cp_rank": self.cp_rank, "cp_size": self.plan.cp_size}
        scored = sequence_sum(mask.double(), self.plan, mask, self.group) > 0
        if kind == "gspo":
            ratio = sequence_ratio(logprobs, old, self.plan, mask, self.group)
            return sequence_loss(ppo_terms(ratio.log(), torch.zeros(()), self.firsts), mask=scored, **place)
        if kind == "dpo":
            return sequence_loss(dpo_terms(sequence_sum(logprobs - old, self.plan, mask, self.group)), **place)
        terms = ppo_terms(logprobs, old, self.local(self.advantages))
        return token_loss(terms, self.plan, self.mask, cp_rank=self.cp_rank, reduction=kind)


def split_samples(count: int, parts: int) -> list[list[int]]:
    """Pairs of samples, dealt in order to `parts` micro-batches of as equal size as possible."""
    pairs = torch.arange(count).unflatten(0, (-1, 2)).tensor_split(parts)
    return [x.flatten().tolist() for x in pairs]


@dataclass(frozen=True)
class Step:
    """One rank's micro-batches of a step, and the sizes and counts that emitters ask for."""

    shards: list[Shard]
    kind: str
    parameters: list[Tensor]
    dp_size: int
    cp_size: int

    @classmethod
    def of(
        cls, data: LossData, kind: str, group: dist.ProcessGroup, *, dp_size: int, cp_size: int, num_microbatches: int
    ) -> Step:
        dp_rank = dist.get_rank() // cp_size
        parts = split_samples(len(data.ids), dp_size * num_microbatches)[dp_rank::dp_size]
        shards = [Shard.of(data, part, group) for part in parts]
        return cls(shards, kind, [p.clone().requires_grad_() for p in data.parameters], dp_size, cp_size)

    def losses(self) -> Iterator[tuple[Shard, TokenLoss]]:
        for shard in self.shards:
            yield shard, shard.loss(self.kind, self.parameters)

    @cached_property
    def count(self) -> Tensor:
        return global_count([loss.local_count for _, loss in self.losses()], dist.group.WORLD)

    @cached_property
    def routed(self) -> Tensor:
        return global_count([shard.plan.local_tokens for shard in self.shards], dist.group.WORLD)

    def emit(self, emitter: str) -> Iterator[tuple[Any, ...]]:
        """What a loss function returns for each micro-batch."""
        count, routed, microbatches = self.count, self.routed, len(self.shards)
        for shard, loss in self.losses():
            if emitter == "default":
                yield emit_default(loss, global_count=count, num_microbatches=microbatches, dp_size=self.dp_size)
            elif emitter == "per_token":
                yield emit_per_token(loss)
            else:
                yield emit_per_token(
                    loss,
                    global_count=count,
                    routed_tokens_local=shard.plan.local_tokens,
                    routed_tokens_global=routed,
                )

    def mcore_gradient(self, returned: Iterator[tuple[Any, ...]], *, per_token: bool) -> Tensor:
        """The flat gradient that megatron-core 0.19 leaves in `main_grad` when loss functions return this.

        The schedule is its own code; DDP (distributed_data_parallel.py:179-213) and `finalize_model_grads` are restated.
        """
        schedules = import_megatron("megatron.core.pipeline_parallel.schedules")
        config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
        flat, total = self._flat([torch.zeros_like(p) for p in self.parameters]), torch.zeros([], dtype=torch.int)
        for _ in self.shards:
            output, num_tokens = schedules.forward_step_calc_loss(
                None, None, lambda _: next(returned), config, None, False, len(self.shards), [], self.cp_size, True
            )
            flat += self._flat(torch.autograd.grad(output, self.parameters))
            total += num_tokens
        flat = flat if per_token else flat / (self.dp_size * self.cp_size)
        dist.all_reduce(flat)
        dist.all_reduce(total)
        return flat / total.clamp(min=1) if per_token else flat

    def averaged_gradient(self) -> Tensor:
        """The gradient under torch's DDP or FSDP, micro-batches accumulated."""
        world, count = self.dp_size * self.cp_size, self.count
        means = [emit_mean(loss, global_count=count, world_size=world) for _, loss in self.losses()]
        flat = self._flat(torch.autograd.grad(sum(means), self.parameters)) / world
        dist.all_reduce(flat)
        return flat

    @staticmethod
    def _flat(gradients: Sequence[Tensor]) -> Tensor:
        return torch.cat([g.flatten() for g in gradients])


def cp_group_of(rank: int, dp_size: int, cp_size: int) -> dist.ProcessGroup:
    groups = [dist.new_group(range(d * cp_size, (d + 1) * cp_size)) for d in range(dp_size)]
    return groups[rank // cp_size]


KINDS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "gspo", "dpo")


def gradients_on_grid(rank: int, dp_size: int, cp_size: int, data: LossData) -> dict[tuple[str, int, str], Tensor]:
    """(loss, number of micro-batches, emitter) -> gradient, for every one that is right."""
    group = cp_group_of(rank, dp_size, cp_size)
    out: dict[tuple[str, int, str], Tensor] = {}
    for kind in KINDS:
        for m in (1, 2, 3):
            step = Step.of(data, kind, group, dp_size=dp_size, cp_size=cp_size, num_microbatches=m)
            for emitter in ("default", "per_token", "per_token_routed"):
                out[kind, m, emitter] = step.mcore_gradient(step.emit(emitter), per_token=emitter != "default")
            out[kind, m, "mean"] = step.averaged_gradient()
    return out


def wrong_gradients(rank: int, dp_size: int, cp_size: int, num_microbatches: int, data: LossData) -> dict[str, Tensor]:
    """The gradient of every known wrong mix, by name."""
    group = cp_group_of(rank, dp_size, cp_size)
    sizes = {"dp_size": dp_size, "cp_size": cp_size, "num_microbatches": num_microbatches}
    step = Step.of(data, "token_mean", group, **sizes)
    count = step.count

    def replicated(backward: GatherBackward) -> Iterator[TokenLoss]:
        """The loss of the whole micro-batch on every CP rank, from gathered logprobs."""
        for s in step.shards:
            logprobs = s.plan.gather(s.logprobs(step.parameters), group, backward=backward)
            total = ppo_terms(logprobs, s.old, s.advantages).where(s.mask[0], 0).sum()
            yield replicated_loss(total, s.mask.sum(), cp_rank=s.cp_rank)

    def default(losses: Iterator[TokenLoss]) -> Iterator[tuple[Any, ...]]:
        for loss in losses:
            yield emit_default(loss, global_count=count, num_microbatches=num_microbatches, dp_size=dp_size)

    def without_counteracting() -> Iterator[tuple[Any, ...]]:
        """NeMo-RL before its fix: the summed gather's c divided away, Megatron's c / M not."""
        for loss in replicated("sum"):
            yield loss.local_sum / count / cp_size, {}

    def summed_counts() -> Iterator[tuple[Any, ...]]:
        for s, loss in step.losses():
            yield loss.local_sum.clone(), s.mask.sum().to(torch.int), {}

    return {
        "right": step.mcore_gradient(default(replicated("slice")), per_token=False),
        "gather_sums": step.mcore_gradient(default(replicated("sum")), per_token=False),
        "flag_left_on": step.mcore_gradient(step.emit("default"), per_token=True),
        "not_counteracted": step.mcore_gradient(without_counteracting(), per_token=True),
        "counts_summed_over_cp": step.mcore_gradient(summed_counts(), per_token=True),
        "three_tuple_flag_off": step.mcore_gradient(step.emit("per_token"), per_token=False),
        "mean_without_world": step.averaged_gradient() / (dp_size * cp_size),
    }
