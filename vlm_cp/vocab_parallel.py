"""Log-probability and entropy of vocabulary-parallel logits, forward and backward, chunk by chunk.

With p = softmax(logits / temperature) over the real columns of all TP ranks, and t a row's target,

    logprob = log p_t               d logprob / d logit_v = ([v = t] - p_v) / temperature
    entropy = -sum_v p_v log p_v    d entropy / d logit_v = -p_v (log p_v + entropy) / temperature

Every TP rank folds its own columns, a chunk of rows at a time, into four numbers a row; two all-reduces of these numbers,
whatever the number of chunks, join the ranks. The backward computes p again from the logits and what was joined. A
column of -inf has probability 0 and contributes nothing, forward or backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import comm


@dataclass(frozen=True, kw_only=True, eq=False)
class Query:
    """What is asked of n rows of logits.

    targets: int64 [n], ids over the whole vocabulary. scored: bool [n]; other rows give exactly 0 and have no gradient,
    whatever their logits hold. temperature: a number, or [n, 1].
    tp_group: the ranks that share the vocabulary, rank r holding columns [r W, (r + 1) W) of W each. vocab_size: columns
    from here on are padding. entropy: whether it is wanted beside the logprob. chunk_size: rows computed at a time.
    """

    targets: Tensor
    scored: Tensor
    temperature: float | Tensor
    tp_group: dist.ProcessGroup | None
    vocab_size: int | None
    entropy: bool
    chunk_size: int

    def columns(self, width: int) -> int:
        """How many of this rank's `width` columns are real."""
        total = width * comm.group_size(self.tp_group)
        size = total if self.vocab_size is None else self.vocab_size
        if not 0 < size <= total:
            raise ValueError(
                f"vocab_size must lie in [1, {total}], the columns of all TP ranks, got {size}; "
                "the padding columns would not be where they are looked for"
            )
        return min(max(size - comm.group_rank(self.tp_group) * width, 0), width)

    def chunks(self, width: int) -> list[slice]:
        """The rows to compute together: with the entropy half as many, since it needs log p beside p. None without columns."""
        size = max(1, self.chunk_size // 2) if self.entropy else self.chunk_size
        starts = range(0, len(self.targets), size) if self.columns(width) else ()
        return [slice(start, start + size) for start in starts]

    def own_targets(self, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """[rows, 1] each: the target's column, clamped to a real one, and whether it is this rank's."""
        column = self.targets[rows, None] - comm.group_rank(self.tp_group) * width
        columns = self.columns(width)
        return column.clamp(0, columns - 1), (column >= 0) & (column < columns)

    def divided(self, x: Tensor, rows: slice) -> Tensor:
        """x / temperature of these rows, in place."""
        if isinstance(self.temperature, Tensor):
            return x.div_(self.temperature[rows].to(x.dtype))
        return x if self.temperature == 1 else x.div_(self.temperature)


def from_logits(logits: Tensor, query: Query, *, inplace_backward: bool = False) -> tuple[Tensor, Tensor]:
    """(logprobs [n], entropies [n]) of logits [n, W] in float32, or float64 of float64; entropies are 0 unless asked for.

    inplace_backward: the gradient takes the memory of `logits`.
    """
    return _FromLogits.apply(logits, query, inplace_backward)  # pyright: ignore[reportReturnType]


def from_hidden(hidden: Tensor, weight: Tensor, query: Query) -> tuple[Tensor, Tensor]:
    """`from_logits` of hidden [n, H] @ weight.T [H, W], which never exists as a whole.

    The gradient of `hidden` is this TP rank's part: sum it over the group.
    """
    return _FromHidden.apply(hidden, weight, query)  # pyright: ignore[reportReturnType]


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, query: Query, inplace: bool) -> tuple[Tensor, Tensor]:
        ctx.query, ctx.inplace = query, inplace
        joined = _join(_fold(_cast(logits, query), logits.size(1), logits, query), query)
        ctx.save_for_backward(logits, *joined.saved())
        ctx.set_materialize_grads(False)
        return joined.outputs(query.scored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query: Query = ctx.query
        logits, *saved = ctx.saved_tensors
        width = logits.size(1)
        columns, logits_of = query.columns(width), _cast(logits, query)
        # Detached, it keeps the version counter of the logits: who saved them for its own backward will notice.
        gradient = logits.detach() if ctx.inplace else torch.empty_like(logits)
        for rows in query.chunks(width):
            gradient[rows, :columns] = _gradient(logits_of(rows), rows, width, query, saved, grads)
        gradient[:, columns:] = 0
        return gradient, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, query: Query) -> tuple[Tensor, Tensor]:
        ctx.query = query
        joined = _join(_fold(_project(hidden, weight, query), weight.size(0), hidden, query), query)
        ctx.save_for_backward(hidden, weight, *joined.saved())
        ctx.set_materialize_grads(False)
        return joined.outputs(query.scored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query: Query = ctx.query
        hidden, weight, *saved = ctx.saved_tensors
        width = weight.size(0)
        columns, logits_of = query.columns(width), _project(hidden, weight, query)
        of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # Chunks are many and their parts small: summed in float32.
        of_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight)) if ctx.needs_input_grad[1] else None
        for rows in query.chunks(width):
            x = _gradient(logits_of(rows), rows, width, query, saved, grads).to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(x, weight[:columns], out=of_hidden[rows])
            if of_weight is not None:
                of_weight[:columns] += x.t() @ hidden[rows]
            del x  # else the next chunk is made beside it
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _cast(logits: Tensor, query: Query) -> Callable[[slice], Tensor]:
    """rows -> their real columns, in memory of their own."""
    columns, dtype = query.columns(logits.size(1)), _sum_dtype(logits)
    return lambda rows: logits[rows, :columns].to(dtype, copy=True)


def _project(hidden: Tensor, weight: Tensor, query: Query) -> Callable[[slice], Tensor]:
    """The same of hidden @ weight.T, rounded to its dtype as the output layer would."""
    columns, dtype = query.columns(weight.size(0)), _sum_dtype(hidden)
    return lambda rows: (hidden[rows] @ weight[:columns].t()).to(dtype)


@dataclass(frozen=True, eq=False)
class _Folded:
    """Of each row, [n, 1]: the largest logit m, the target's logit, the sums of e^(x - m) and of e^(x - m) (x - m)."""

    largest: Tensor
    target: Tensor
    mass: Tensor
    weighted: Tensor

    def saved(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the backward needs beside the logits: log of the partition sum, entropy, the target's logit."""
        return self.largest + self.mass.log(), self.entropy(), self.target

    def entropy(self) -> Tensor:
        return (self.mass.log() - self.weighted / self.mass).masked_fill(self.mass == 0, 0)

    def outputs(self, scored: Tensor) -> tuple[Tensor, Tensor]:
        # A target without mass among columns without any: the difference would be NaN.
        logprobs = (self.target - self.largest - self.mass.log()).where(self.target != -torch.inf, -torch.inf)
        return logprobs[:, 0].masked_fill(~scored, 0), self.entropy()[:, 0].masked_fill(~scored, 0)


def _fold(logits_of: Callable[[slice], Tensor], width: int, like: Tensor, query: Query) -> _Folded:
    """Over this rank's columns; `target` is -inf where the target is not among them. `like` gives device and dtype."""
    dtype = _sum_dtype(like)
    largest, target, mass, weighted = like.new_zeros((4, len(query.targets), 1), dtype=dtype)
    for x in (largest, target):
        x.fill_(-torch.inf)
    for rows in query.chunks(width):
        # A call, so that no chunk outlives it: the next one would be made beside it.
        _fold_rows(logits_of(rows), rows, width, query, (largest[rows], target[rows], mass[rows], weighted[rows]))
    return _Folded(largest, target, mass, weighted)


def _fold_rows(x: Tensor, rows: slice, width: int, query: Query, out: Sequence[Tensor]) -> None:
    """Fills `_Folded`'s rows from their logits `x`, which are overwritten."""
    largest, target, mass, weighted = out
    query.divided(x, rows)
    column, own = query.own_targets(rows, width)
    target.copy_(x.gather(1, column).masked_fill_(~own, -torch.inf))
    torch.amax(x, 1, keepdim=True, out=largest)
    x.sub_(_finite(largest))
    if not query.entropy:
        torch.sum(x.exp_(), 1, keepdim=True, out=mass)
        return
    p = x.exp()
    torch.sum(p, 1, keepdim=True, out=mass)
    # 0 times -inf is NaN, 0 times the lowest number is 0.
    torch.sum(p.mul_(x.clamp_(min=torch.finfo(x.dtype).min)), 1, keepdim=True, out=weighted)


def _join(own: _Folded, query: Query) -> _Folded:
    """Over the columns of all TP ranks."""
    if query.tp_group is None or comm.group_size(query.tp_group) == 1:
        return own
    tops = torch.stack([own.largest, own.target])
    dist.all_reduce(tops, dist.ReduceOp.MAX, group=query.tp_group)
    shift = (own.largest - tops[0]).nan_to_num_(nan=0.0, neginf=torch.finfo(tops.dtype).min)
    sums = torch.stack([own.mass, own.weighted + shift * own.mass]) * shift.exp()
    dist.all_reduce(sums, group=query.tp_group)
    return _Folded(*tops, *sums)


def _gradient(
    x: Tensor, rows: slice, width: int, query: Query, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Tensor:
    """The gradient of the rows' logits `x`, written over them. saved: `_Folded.saved`. grads: of logprobs and entropies."""
    log_sum, entropy, target = (s[rows] for s in saved)
    of_logprob, of_entropy = (x.new_zeros(()) if g is None else g[rows, None].to(x.dtype) for g in grads)
    of_logprob = of_logprob.where(target != -torch.inf, 0)
    query.divided(x, rows).sub_(_finite(log_sum))
    if query.entropy:
        p = x.clamp_(min=torch.finfo(x.dtype).min).exp()
        # p first: the lowest number times a weight beyond 1 would be infinite.
        x.add_(entropy).mul_(p).mul_(-of_entropy).addcmul_(p, of_logprob, value=-1)
    else:
        x.exp_().mul_(-of_logprob)
    column, own = query.own_targets(rows, width)
    x.scatter_add_(1, column, of_logprob * own)
    return query.divided(x, rows).masked_fill_(~query.scored[rows, None], 0)


def _finite(x: Tensor) -> Tensor:
    """-inf, where a row has no mass at all, becomes 0."""
    return x.where(x != -torch.inf, 0)
