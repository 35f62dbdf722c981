"""Losses as local sums with explicit counts, and the emitters that fit them to a framework's gradient scaling.

Over the c CP ranks, `TokenLoss.local_sum` and `.local_count` add up to a micro-batch's sum and count, value and gradient.
What is wanted everywhere is the gradient of

    L = (1/N) sum over ranks r and micro-batches k of l_rk          N = global count, over all ranks and micro-batches

and the frameworks differ in what they do to the tensor l' that a loss function returns. Megatron-core 0.19 does, with M
micro-batches and dp data-parallel ranks, in this order:

    schedule    (l', x):    l' c / M             whatever the flag `calculate_per_token_loss`
                (l', n, x): l' / max(n, 1) / M   flag off;    l'   flag on
    DDP         sums over the dp c ranks, times 1 / (dp c) with the flag off, times 1 with it on (fixed when DDP wraps)
    finalize    flag on: divides by max(sum of n, 1), over ranks and micro-batches; a loss without n leaves it at 1

so that the gradient, as a multiple of the wanted one, is (l, n: local sum and count; "slice" and "sum": the backward of a
gather of scalars behind a loss that every CP rank computes as a whole, see `comm.all_gather`):

    flag  returns                    gather       gradient
    off   (l M dp / N, x)            none, slice  1             `emit_default`; also what SkyRL and verl return
    off   (l M dp / N, x)            sum          c
    on    (l M dp / N, x)            none, slice  dp c          the flag that Bridge's VLMs set when c > 1, left on
    on    (l / N M / c, x)           sum / c      1             NeMo-RL's own set; without its M / c: c / M
    on    (l, n, x)                  none         1             `emit_per_token`, N the sum of n
    on    (l R / N, n_r, x)          none         1             `emit_per_token` with routed tokens; R the sum of n_r
    on    (l, n summed over CP, x)   none         1 / c
    off   (l, n, x)                  none         no multiple: a mean of local means
    -     l W / N, DDP or FSDP       none         1             `emit_mean`; torch averages over the W ranks
    -     l / N, DDP or FSDP         none         1 / W

A mean over micro-batches instead of the global count gives 1 / M. MoE auxiliary losses scale with the flag: with it on,
routers multiply them by the tokens they routed and expect a division by all routed tokens. They get it in the second form
of `emit_per_token`; in the first, where n counts scored tokens, they are too large by routed / scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import comm, transfer
from vlm_cp.loss_contract import Emitter, check_loss_contract
from vlm_cp.plan import SequencePlan

Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]
EmptySamples = Literal["skip", "count"]
Count = int | float | Tensor


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """This rank's part of one micro-batch's loss.

    local_sum: 0-dim, differentiable. local_count: a 0-dim integer tensor or an int, of tokens or of sequences.
    """

    local_sum: Tensor
    local_count: Tensor | int

    def __post_init__(self) -> None:
        if not isinstance(self.local_sum, Tensor) or not self.local_sum.dtype.is_floating_point:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"local_sum must be a floating-point tensor, got {self.local_sum!r}; there would be no gradient"
            )
        if self.local_sum.ndim:
            raise ValueError(
                f"local_sum must be a scalar, got shape {tuple(self.local_sum.shape)}; schedules would sum or average it"
            )
        count = self.local_count
        if not _is_integer(count):
            raise ValueError(
                f"local_count must be one integer, got {count!r}; Megatron adds counts up in an integer tensor and would crash"
            )


# From terms of tokens and sequences to sums and counts.


def token_loss(
    terms_local: Tensor,
    plan: SequencePlan,
    loss_mask: Tensor,
    *,
    cp_rank: int,
    reduction: Reduction = "token_mean",
    empty_samples: EmptySamples = "skip",
) -> TokenLoss:
    """The loss of terms_local [T/c], one a slot; no collective.

    loss_mask: [1, T] over the full stream, bool or weights, of slots as labels are (shifted; `values.slot_targets` shifts a
    mask of tokens); a term counts where it is not 0, and only there is it read.
    reduction: "token_mean" is sum / tokens; "sequence_mean_token_mean" and "..._token_sum" are the mean over samples of
    each sample's mean (by weight) or sum. The count is `local_count`'s; summed over ranks and micro-batches it is N.
    """
    count = local_count(plan, loss_mask, cp_rank=cp_rank, reduction=reduction, empty_samples=empty_samples)
    if tuple(terms_local.shape) != (plan.local_tokens,):
        raise ValueError(
            f"terms_local must have shape [{plan.local_tokens}], one term a slot of this rank, got {tuple(terms_local.shape)}; "
            "terms would be weighed by other slots' masks"
        )
    weights = loss_mask[0].to(torch.promote_types(terms_local.dtype, torch.float32))
    if reduction == "sequence_mean_token_mean":
        totals = _sample_sums(weights, plan.padded_lengths)
        weights = weights / totals.where(totals > 0, 1)[plan.sample_index]
    local = plan.shard(weights, cp_rank)
    return TokenLoss((terms_local * local).where(local != 0, 0).sum(), count)


def local_count(
    plan: SequencePlan,
    loss_mask: Tensor,
    *,
    cp_rank: int,
    reduction: Reduction = "token_mean",
    empty_samples: EmptySamples = "skip",
) -> Tensor:
    """int64: this rank's share of a micro-batch's tokens (slots whose mask is not 0) or samples (sample i on rank i % c).

    empty_samples: whether samples with an empty mask "count" in a mean over sequences, or are skipped.
    """
    if reduction not in get_args(Reduction) or empty_samples not in get_args(EmptySamples):
        raise ValueError(
            f"reduction must be one of {', '.join(get_args(Reduction))} and empty_samples one of "
            f"{', '.join(get_args(EmptySamples))}, got {reduction!r} and {empty_samples!r}; the mean would be another"
        )
    if tuple(loss_mask.shape) != (1, plan.total_tokens):
        raise ValueError(
            f"loss_mask must be the full stream's [1, {plan.total_tokens}], got {tuple(loss_mask.shape)}; "
            "a rank's shard of it would be weighed by its own tokens only"
        )
    plan.check_rank(cp_rank)
    scored = loss_mask[0] != 0
    _check_slots(scored, plan)
    if reduction == "token_mean":
        return plan.shard(scored, cp_rank).sum()
    counted = _sample_sums(scored.double(), plan.padded_lengths) > 0
    return (counted | (empty_samples == "count"))[cp_rank :: plan.cp_size].sum()


def _check_slots(scored: Tensor, plan: SequencePlan) -> None:
    wrong = scored & ~plan.scored
    if wrong.device.type != "cpu":
        torch._assert_async(~wrong.any(), "loss_mask must be 0 at slots without a next token")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif wrong.any():
        slot = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"loss_mask must be 0 at slots without a next token, got 1 at slot {slot}, the end or padding of sample "
            f"{int(plan.sample_index[slot])}; a mask of tokens that was not shifted would count one token too many a sample"
        )


def global_count(local_counts: Sequence[Tensor | int], group: dist.ProcessGroup | None) -> Tensor:
    """int64: local counts of all micro-batches, summed over `group`: DP and CP ranks together, since CP ranks share a batch."""
    wrong = [count for count in local_counts if not _is_integer(count)]
    if wrong:
        raise ValueError(f"local_counts must be single integers, got {wrong[0]!r}; fractions would be cut off")
    return comm.all_reduce(torch.as_tensor(sum(local_counts), dtype=torch.int64), group)


def sequence_sum(x_local: Tensor, plan: SequencePlan, mask_local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[B, ...]: every sample's sum of x_local [T/c, ...] times mask_local [T/c] (bool or weights), on every CP rank.

    What goes under a non-linear function (a sequence's ratio, a preference's logit) must be summed over the CP ranks
    before. The backward sums the ranks' gradients, so of a loss that follows each term may count on one rank only:
    `sequence_loss` sees to it. Sums run in float64, in an order that is always the same.
    """
    plan.check_group(group)
    n, shapes = plan.local_tokens, (tuple(x_local.shape), tuple(mask_local.shape))
    if shapes[0][:1] != (n,) or shapes[1] != (n,):
        raise ValueError(
            f"x_local and mask_local must have shapes [{n}, ...] and [{n}], one entry a slot of this rank, got {shapes[0]} and "
            f"{shapes[1]}; terms of other samples would be summed"
        )
    mask = mask_local.view(-1, *[1] * (x_local.ndim - 1))
    terms = (x_local * mask).where(mask != 0, 0)
    sums = _sample_sums(terms, [length // plan.cp_size for length in plan.padded_lengths])
    return comm.all_reduce(sums, group).to(terms.dtype)


def sequence_ratio(
    logprobs_local: Tensor,
    old_logprobs_local: Tensor,
    plan: SequencePlan,
    mask_local: Tensor,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """[B]: exp of the mean over a sample's masked slots of log p - log p_old, GSPO's sequence ratio; 1 where there are none."""
    if logprobs_local.shape != old_logprobs_local.shape:
        shapes = f"{tuple(logprobs_local.shape)}, got {tuple(old_logprobs_local.shape)}"
        raise ValueError(f"old_logprobs_local must have the shape of logprobs_local {shapes}; slots would be mixed up")
    difference = logprobs_local - old_logprobs_local
    both = torch.stack([difference, torch.ones_like(difference)], 1)
    total, count = sequence_sum(both, plan, mask_local, group).unbind(1)
    return (total / _at_least_one(count)).exp()


def sequence_loss(terms: Tensor, *, cp_rank: int, cp_size: int, mask: Tensor | None = None) -> TokenLoss:
    """The loss of terms [K], one a sequence or a pair of them, that every CP rank holds: term i counts on rank i % c.

    The others stay in this rank's graph with gradient 0, so that it enters the collective of `sequence_sum`'s backward.
    mask: [K], bool or weights; terms count where it is not 0.
    """
    if terms.ndim != 1 or (mask is not None and mask.shape != terms.shape):
        raise ValueError(
            f"terms and mask must have shape [K], one entry a sequence, got {tuple(terms.shape)} and "
            f"{None if mask is None else tuple(mask.shape)}; terms would count for other sequences"
        )
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must lie in [0, {cp_size}), got {cp_rank}; no rank would count its terms")
    weights = torch.ones_like(terms) if mask is None else mask.to(terms.dtype)
    own = (torch.arange(len(terms), device=terms.device) % cp_size == cp_rank) & (weights != 0)
    return TokenLoss((terms * weights).where(own, 0).sum(), own.sum())


def replicated_loss(loss: Tensor, count: Tensor | int, *, cp_rank: int) -> TokenLoss:
    """A loss that every CP rank computed as a whole from gathered scalars, with the gather's backward "slice".

    Its value and count are left on rank 0; each rank's gradient, that of its own scalars, is kept.
    """
    return TokenLoss(loss if cp_rank == 0 else loss - loss.detach(), count if cp_rank == 0 else count * 0)


def _sample_sums(x: Tensor, lengths: Sequence[int]) -> Tensor:
    counts = transfer.moved(torch.tensor(lengths, dtype=torch.int64), x.device)
    return torch.segment_reduce(x.double(), "sum", lengths=counts, axis=0, unsafe=True)


# Emitters. What they return is the caller's own: Megatron's schedules scale the loss in place.


def emit_default(
    loss: TokenLoss,
    *,
    global_count: Count,
    num_microbatches: int,
    dp_size: int,
    metrics: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a Megatron loss function returns while `calculate_per_token_loss` is off: (l M dp / N, metrics).

    dp_size excludes CP: the schedule multiplies by c itself. global_count 0 gives the loss 0.
    metrics: returned as detached copies beside "loss", [local sum, local count], which Megatron's loops add up and divide.
    """
    _check_sizes(num_microbatches=num_microbatches, dp_size=dp_size)
    scaled = loss.local_sum * (num_microbatches * dp_size) / _divisor(global_count)
    return scaled, _metrics(loss, metrics)


def emit_per_token(
    loss: TokenLoss,
    *,
    global_count: Count | None = None,
    routed_tokens_local: int | Tensor | None = None,
    routed_tokens_global: Count | None = None,
    metrics: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What a Megatron loss function returns while `calculate_per_token_loss` is on: (loss, number of tokens, metrics).

    First form, nothing else given: (l, n), for a mean over tokens and no MoE auxiliary loss.
    Second form, all three given: (l R / N, R_local), for any count N, right beside MoE auxiliary losses.
    routed_tokens_local: tokens that went through this rank's routers, padding included (`plan.local_tokens`);
    routed_tokens_global: their sum over the ranks and micro-batches of the step.
    """
    given = (global_count, routed_tokens_local, routed_tokens_global)
    if global_count is None or routed_tokens_local is None or routed_tokens_global is None:
        if given != (None, None, None):
            raise ValueError(
                f"global_count, routed_tokens_local and routed_tokens_global must be given together, got {given}; "
                "the loss would be divided by the wrong count"
            )
        return loss.local_sum.clone(), _tokens(loss.local_count, loss.local_sum), _metrics(loss, metrics)
    scaled = loss.local_sum * routed_tokens_global / _divisor(global_count)
    return scaled, _tokens(routed_tokens_local, loss.local_sum), _metrics(loss, metrics)


def emit_mean(loss: TokenLoss, *, global_count: Count, world_size: int) -> Tensor:
    """What to call `backward` on where gradients are averaged over dp * cp = `world_size` ranks (torch's DDP, FSDP)."""
    _check_sizes(world_size=world_size)
    return loss.local_sum * world_size / _divisor(global_count)


def _is_integer(count: object) -> bool:
    if isinstance(count, Tensor):
        return not count.ndim and not count.dtype.is_floating_point and count.dtype != torch.bool
    return isinstance(count, int) and not isinstance(count, bool)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name} must be an int of at least 1, got {size!r}; the loss would be scaled away")


def _divisor(count: Count) -> Count:
    if count.ndim if isinstance(count, Tensor) else not 0 <= count < math.inf:
        raise ValueError(
            f"global_count must be one number of at least 0, got {count!r}; the loss would be divided by another"
        )
    return _at_least_one(count)


def _at_least_one(count: Count) -> Count:
    """`count`, and 1 for 0: nothing was scored, and the sums are 0."""
    return count.where(count > 0, 1) if isinstance(count, Tensor) else count if count > 0 else 1


def _tokens(count: Tensor | int, like: Tensor) -> Tensor:
    if not _is_integer(count):
        raise ValueError(f"routed_tokens_local must be one integer, got {count!r}; Megatron adds counts up as integers")
    return torch.as_tensor(count, device=like.device).to(torch.int, copy=True)


def _metrics(loss: TokenLoss, metrics: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    for name, x in (metrics or {}).items():
        if name == "loss" or not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f'metrics must be tensors under other names than "loss", got {name!r}: {x!r}; Megatron\'s loops add tensors up, '
                "and the loss' own sum and count would be replaced"
            )
    total = loss.local_sum.detach()
    pair = torch.stack([total, torch.as_tensor(loss.local_count, device=total.device).to(total.dtype)])
    return {"loss": pair, **{name: x.detach().clone() for name, x in (metrics or {}).items()}}


__all__ = [
    "Emitter",
    "EmptySamples",
    "Reduction",
    "TokenLoss",
    "check_loss_contract",
    "emit_default",
    "emit_mean",
    "emit_per_token",
    "global_count",
    "local_count",
    "replicated_loss",
    "sequence_loss",
    "sequence_ratio",
    "sequence_sum",
    "token_loss",
]
