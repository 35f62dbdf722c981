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

_NO_MASS = -1000.0  # log p of a column of probability 0, also in float64; finite, for 0 times -inf is NaN


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
        """The rows to compute together: with the entropy half as many, as its backward needs log p beside p. None without columns."""
        size = max(1, self.chunk_size // 2) if self.entropy else self.chunk_size
        starts = range(0, len(self.targets), size) if self.columns(width) else ()
        return [slice(start, start + size) for start in starts]

    def own_targets(self, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """[rows, 1] each: the target's column, clamped to a real one, and whether it is this rank's."""
        column = self.targets[rows, None] - comm.group_rank(self.tp_group) * width
        columns = self.columns(width)
        return column.clamp(0, columns - 1), (column >= 0) & (column < columns)

    def divisor(self, rows: slice, dtype: torch.dtype) -> float | Tensor:
        """These rows' temperature."""
        return self.temperature[rows].to(dtype) if isinstance(self.temperature, Tensor) else self.temperature

    def place(self, x: Tensor, rows: slice, shift: Tensor, out: Tensor) -> Tensor:
        """x / temperature + shift into `out`, of higher precision: one pass on a GPU, where operators cast as they read."""
        divisor = self.divisor(rows, out.dtype)
        if not x.is_cuda:
            return out.copy_(x).div_(divisor).add_(shift)
        if isinstance(divisor, Tensor):
            return torch.addcdiv(shift, x, divisor, out=out)
        return torch.add(shift, x, alpha=1 / divisor, out=out)


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
        columns = query.columns(logits.size(1))
        joined = _join(_fold(lambda rows: logits[rows, :columns], logits.size(1), logits, query), query)
        ctx.save_for_backward(logits, *joined.saved())
        ctx.set_materialize_grads(False)
        return joined.outputs(query.scored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query: Query = ctx.query
        logits, *saved = ctx.saved_tensors
        width = logits.size(1)
        columns, scratch = query.columns(width), _scratch(logits, width, query, 2 if query.entropy else 1)
        # Detached, it keeps the version counter of the logits: who saved them for its own backward will notice.
        gradient = logits.detach() if ctx.inplace else torch.empty_like(logits)
        for rows in query.chunks(width):
            _gradient(logits[rows, :columns], rows, width, query, saved, grads, scratch, gradient[rows, :columns])
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
        scratch = _scratch(hidden, width, query, 2 if query.entropy else 1)
        of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # Chunks are many and their parts small: summed in float32.
        of_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight)) if ctx.needs_input_grad[1] else None
        for rows in query.chunks(width):
            x = logits_of(rows)
            _gradient(x, rows, width, query, saved, grads, scratch, x)
            if of_hidden is not None:
                torch.mm(x, weight[:columns], out=of_hidden[rows])
            if of_weight is not None:
                of_weight[:columns] += x.t() @ hidden[rows]
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scratch(like: Tensor, width: int, query: Query, count: int) -> list[Tensor]:
    """`count` chunks to compute in, each for all chunks in turn."""
    most = max((len(query.targets[rows]) for rows in query.chunks(width)), default=0)
    return [like.new_empty(most, query.columns(width), dtype=_sum_dtype(like)) for _ in range(count)]


def _project(hidden: Tensor, weight: Tensor, query: Query) -> Callable[[slice], Tensor]:
    """rows -> their real columns of hidden @ weight.T, in the same memory every time."""
    columns = query.columns(weight.size(0))
    most = max((len(hidden[rows]) for rows in query.chunks(weight.size(0))), default=0)
    product = hidden.new_empty(most, columns)
    return lambda rows: torch.mm(hidden[rows], weight[:columns].t(), out=product[: len(hidden[rows])])


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
    (scratch,) = _scratch(like, width, query, 1)
    for rows in query.chunks(width):
        out = (largest[rows], target[rows], mass[rows], weighted[rows])
        _fold_rows(logits_of(rows), rows, width, query, scratch, out)
    return _Folded(largest, target, mass, weighted)


def _fold_rows(x: Tensor, rows: slice, width: int, query: Query, scratch: Tensor, out: Sequence[Tensor]) -> None:
    """Fills `_Folded`'s rows from their logits `x`."""
    largest, target, mass, weighted = out
    divisor = query.divisor(rows, scratch.dtype)
    column, own = query.own_targets(rows, width)
    target.copy_(x.gather(1, column)).div_(divisor).masked_fill_(~own, -torch.inf)
    largest.copy_(x.amax(1, keepdim=True)).div_(divisor)
    p = query.place(x, rows, -_finite(largest), scratch[: len(x)]).exp_()
    torch.sum(p, 1, keepdim=True, out=mass)
    if query.entropy:
        torch.sum(p.xlogy_(p), 1, keepdim=True, out=weighted)


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
    x: Tensor,
    rows: slice,
    width: int,
    query: Query,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    scratch: Sequence[Tensor],
    out: Tensor,
) -> None:
    """The gradient of the rows' logits `x` into `out`, which may be `x`. saved: `_Folded.saved`. grads: of logprobs and entropies."""
    log_sum, entropy, target = (s[rows] for s in saved)
    dtype = scratch[0].dtype
    of_logprob, of_entropy = (log_sum.new_zeros(()) if g is None else g[rows, None].to(dtype) for g in grads)
    of_logprob = of_logprob.where(target != -torch.inf, 0)
    divisor = query.divisor(rows, dtype)
    of_logprob, of_entropy = of_logprob / divisor, of_entropy / divisor
    log_p = query.place(x, rows, -_finite(log_sum), scratch[0][: len(x)])
    at_target = target - _finite(log_sum)
    if query.entropy:
        constant = -(of_logprob + of_entropy * entropy)
        p = torch.exp(log_p.clamp_(min=_NO_MASS), out=scratch[1][: len(x)])
        _product(p, torch.addcmul(constant, log_p, -of_entropy, out=log_p), out)
        at_target = at_target.clamp(min=_NO_MASS)
        own_value = of_logprob + at_target.exp() * (constant - of_entropy * at_target)
    else:
        _product(log_p.exp_(), -of_logprob, out)
        own_value = of_logprob * (1 - at_target.exp())
    # The target's own entry from the numbers of its row, before they were rounded to the dtype of `out`.
    column, own = query.own_targets(rows, width)
    row = torch.arange(len(x), device=x.device)[:, None]
    out.index_put_((row, column), own_value.to(out.dtype).where(own, out.gather(1, column)))
    out.masked_fill_(~query.scored[rows, None], 0)


def _product(x: Tensor, y: Tensor, out: Tensor) -> None:
    """x y into `out`, of lower precision; `x` may be overwritten. One pass on a GPU, where operators cast as they write."""
    if x.is_cuda:
        torch.mul(x, y, out=out)
    else:
        out.copy_(x.mul_(y))


def _finite(x: Tensor) -> Tensor:
    """-inf, where a row has no mass at all, becomes 0."""
    return x.where(x != -torch.inf, 0)
