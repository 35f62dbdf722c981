"""Losses over a grid of data- and context-parallel ranks, through Megatron's scaling, against plain torch.

The model is an embedding and an output layer, so that everything between the ranks comes from the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
