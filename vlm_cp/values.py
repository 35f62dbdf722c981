"""Values of a critic: scalar head outputs -> per-sample values, and the value loss.

A head at slot j sees tokens 0..j, so its output is the value of the state before token j + 1; `values[t]`, the value before
token t, is the output of slot t - 1, and `values[0]` is 0 since nothing was seen. Slot t - 1 may lie on another CP rank
than token t. So values are either gathered and then shifted inside each sample (`shifted_values`, for advantages), or not
moved at all: the loss shifts what they are held against, on the full stream before the cut, as labels are. Shifting the
shard itself is wrong at every chunk's start, silently.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlm_cp.plan import SequencePlan


def shifted_values(values_local: Tensor, plan: SequencePlan, *, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """B tensors [L_i] on every CP rank: values[0] = 0 without gradient, values[t] = the value before token t.

    values_local: the head's outputs of this rank's slots, [T/c], [T/c, 1] or [1, T/c, 1].
    group: the CP group. The backward takes the own slice, right when every CP rank computes the same loss from the result
    (then see `losses.replicated_loss`). As padded rows: `postprocess_packed_seqs(..., align="token")`.
    """
    stream = plan.gather(slot_values(values_local, plan), group)
    slots = plan.real_index
    first = plan.token_index[slots] == 0
    values = stream.index_select(0, (slots - 1).clamp(min=0)).masked_fill(first, 0)
    return list(values.split(list(plan.lengths)))


def slot_values(values_local: Tensor, plan: SequencePlan) -> Tensor:
    """[T/c] in float32 (float64 stays) from head outputs [T/c], [T/c, 1] or [1, T/c, 1]."""
    n = plan.local_tokens
    if tuple(values_local.shape) not in ((n,), (n, 1), (1, n, 1)):
        raise ValueError(
            f"values_local must have shape [{n}], [{n}, 1] or [1, {n}, 1], one value a slot of this rank, got "
            f"{tuple(values_local.shape)}; values would belong to other tokens"
        )
    return values_local.reshape(n).to(torch.promote_types(values_local.dtype, torch.float32))


def slot_targets(x: Tensor, plan: SequencePlan, *, cp_rank: int, fill: float = 0) -> Tensor:
    """[T/c, ...]: what this rank's slots are held against: slot j gets token j + 1's entry of x [1, T, ...].

    For returns, old values, advantages and masks, which belong to tokens. A sample's first token is nobody's target;
    slots without a next token get `fill`.
    """
    if tuple(x.shape[:2]) != (1, plan.total_tokens):
        raise ValueError(
            f"x must be the full stream [1, {plan.total_tokens}, ...], got {tuple(x.shape)}; "
            "shifted inside a shard it is wrong at the end of every chunk"
        )
    scored = plan.scored.view(-1, *[1] * (x.ndim - 2))
    return plan.shard(x[0].roll(-1, 0).where(scored, fill), cp_rank)


def value_terms(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, *, clip: float | None = None
) -> Tensor:
    """0.5 max((v - R)^2, (clip(v) - R)^2), elementwise, with clip(v) within `clip` of the old value (PPO); without: 0.5 (v - R)^2."""
    if (clip is None) != (old_values is None) or (clip is not None and not clip > 0):
        raise ValueError(
            f"clip must be positive and come with old_values, got {clip} and {'no ' if old_values is None else ''}old_values; "
            "values would not be clipped, or not move at all"
        )
    for name, x in (("returns", returns), ("old_values", old_values)):
        if x is not None and x.shape != values.shape:
            raise ValueError(
                f"{name} must have the values' shape {tuple(values.shape)}, got {tuple(x.shape)}; every value would be held against every entry"
            )
    errors = (values - returns).square()
    if clip is not None and old_values is not None:
        clipped = torch.clamp(values, old_values - clip, old_values + clip)
        errors = torch.maximum(errors, (clipped - returns).square())
    return 0.5 * errors


def value_loss(
    values_local: Tensor,
    plan: SequencePlan,
    *,
    returns: Tensor,
    loss_mask: Tensor,
    cp_rank: int,
    old_values: Tensor | None = None,
    clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """This rank's (sum, count) of `value_terms`: `TokenLoss(*value_loss(...))`. No collective.

    values_local: the head's outputs, unshifted, as for `shifted_values`. returns, old_values, loss_mask (bool or weights):
    [1, T], of tokens; old_values are what `shifted_values` gave. A first token counts neither in the sum nor in the count,
    whatever its mask: its value is the constant 0.
    """
    if tuple(loss_mask.shape) != (1, plan.total_tokens):
        raise ValueError(
            f"loss_mask must be the full stream's [1, {plan.total_tokens}], got {tuple(loss_mask.shape)}; terms would count for other tokens"
        )
    weights = slot_targets(loss_mask, plan, cp_rank=cp_rank)
    # Before the square: what padding holds would make the gradient NaN even where its weight is 0.
    values = slot_values(values_local, plan).where(weights != 0, 0)
    old = None if old_values is None else slot_targets(old_values, plan, cp_rank=cp_rank).to(values.dtype)
    terms = value_terms(values, slot_targets(returns, plan, cp_rank=cp_rank).to(values.dtype), old, clip=clip)
    return (terms * weights).where(weights != 0, 0).sum(), (weights != 0).sum()


def make_value_head(
    hidden_size: int,
    *,
    std: float = 0.02,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> nn.Linear:
    """A hidden -> 1 head without bias, the same on every rank whatever its random state; call it on `HFEngine.hidden_states`."""
    # Made on meta: its own initialisation would draw from the random state.
    head = nn.Linear(hidden_size, 1, bias=False, dtype=dtype, device="meta").to_empty(device=device)
    fill_value_head(head.weight, std=std, seed=seed)
    return head


@torch.no_grad()
def fill_value_head(weight: Tensor, *, std: float, seed: int) -> None:
    """Normal values of this deviation, drawn on the CPU from this seed alone."""
    weight.copy_(std * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
