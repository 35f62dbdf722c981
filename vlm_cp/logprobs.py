"""Local logits or hidden states -> next-token log-probabilities and entropies. Logits are never gathered over the CP ranks.

Targets are taken on the full stream and cut by the plan's index, so the target of a slot is the next token of its own
sample also where that token lies on another rank, and never the first token of the next sample.

The maths is `vlm_cp.vocab_parallel`'s. Beyond the logits it holds `chunk_size` rows of float32 in either direction, and in the
backward the gradient of the logits, which with `inplace_backward` is the memory of the logits themselves. From hidden
states no logits ever exist but one chunk's.

Everything is computed in float32, from float64 logits in float64, and so are the results. A logit of -inf (top-k, top-p)
is a token of probability 0. A slot whose own target is one, or lies beyond the vocabulary, has the logprob -inf and no
gradient: take it out of a loss with `torch.where`, since 0 * -inf is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import comm, vocab_parallel
from vlm_cp.plan import SequencePlan
from vlm_cp.vocab_parallel import Query

CHUNK_SIZE = 256
HIDDEN_CHUNK_SIZE = 1024  # larger: every chunk reads and writes the gradient of the output layer's weight


def next_token_ids(input_ids: Tensor, plan: SequencePlan) -> Tensor:
    """int64 [T]: slot j holds the id after token j of its own sample; 0 where the slot is not scored.

    input_ids: [1, T], the full stream.
    """
    if tuple(input_ids.shape) != (1, plan.total_tokens):
        raise ValueError(
            f"input_ids must be the full stream [1, {plan.total_tokens}], got {tuple(input_ids.shape)}; "
            "targets rolled inside a shard are wrong at the end of every chunk"
        )
    if input_ids.dtype not in (torch.int32, torch.int64) or input_ids.device != plan.device:
        raise ValueError(
            f"input_ids must be int32 or int64 on the plan's device {plan.device}, got {input_ids.dtype} on {input_ids.device}; "
            "half precision rounds ids to other ids"
        )
    targets = input_ids[0].roll(-1).where(plan.scored, 0)
    negative = (targets < 0).any()
    if negative.device.type != "cpu":
        torch._assert_async(~negative, "input_ids must not hold -100 at tokens")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif negative:
        raise ValueError(
            f"input_ids must be ids, got {int(targets.min())} at a token; labels are shifted already, and targets would be one token off"
        )
    return targets


def next_token_logprobs(
    logits_local: Tensor,
    input_ids: Tensor,
    plan: SequencePlan,
    *,
    cp_rank: int,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int = CHUNK_SIZE,
    inplace_backward: bool = False,
) -> Tensor:
    """float32 [T/c]: slot j holds log p(token j + 1 | tokens <= j), exactly 0 with zero gradient where not `plan.scored`.

    logits_local: [1, T/c, V/tp], this rank's slots and its share of the vocabulary, TP rank r owning columns
    [r V/tp, (r + 1) V/tp). input_ids: [1, T], the full stream on every rank.
    tp_group: the ranks that share the vocabulary; None for one. vocab_size: columns from here on count as -inf (padding).
    temperature: a number, or [T] over the full stream, one a slot. chunk_size: rows that are cast to float32 at a time.
    inplace_backward: the gradient is written over the logits, which nothing else may need after the backward; autograd
    raises when something it saved was overwritten.
    """
    query = _query(input_ids, plan, cp_rank, tp_group, vocab_size, temperature, chunk_size, False)
    return _from_logits(logits_local, query, plan, inplace_backward)[0]


def next_token_entropy(
    logits_local: Tensor,
    input_ids: Tensor,
    plan: SequencePlan,
    *,
    cp_rank: int,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int = CHUNK_SIZE,
    inplace_backward: bool = False,
) -> Tensor:
    """float32 [T/c]: slot j holds the entropy, in nats, of the token after j; 0 where not scored, as `next_token_logprobs`."""
    query = _query(input_ids, plan, cp_rank, tp_group, vocab_size, temperature, chunk_size, True)
    return _from_logits(logits_local, query, plan, inplace_backward)[1]


def next_token_logprobs_and_entropy(
    logits_local: Tensor,
    input_ids: Tensor,
    plan: SequencePlan,
    *,
    cp_rank: int,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int = CHUNK_SIZE,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """`next_token_logprobs` and `next_token_entropy` in one pass over the logits, forward and backward."""
    query = _query(input_ids, plan, cp_rank, tp_group, vocab_size, temperature, chunk_size, True)
    return _from_logits(logits_local, query, plan, inplace_backward)


def next_token_logprobs_from_hidden(
    hidden_local: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    plan: SequencePlan,
    *,
    cp_rank: int,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int = HIDDEN_CHUNK_SIZE,
) -> Tensor:
    """`next_token_logprobs` of hidden_local @ weight.T, of which only chunks of `chunk_size` rows ever exist.

    hidden_local: [1, T/c, H], the output layer's input, the same on every TP rank; with sequence_parallel this TP rank's
    slice [1, T/(c tp), H]. weight: [V/tp, H]. Gradients are the true ones: of hidden_local summed over the TP ranks, of
    weight for this rank's columns. The backward multiplies again, chunk by chunk, and holds weight's gradient in float32.
    """
    query = _query(input_ids, plan, cp_rank, tp_group, vocab_size, temperature, chunk_size, False)
    return _from_hidden(hidden_local, weight, query, plan, sequence_parallel)[0]


def next_token_logprobs_and_entropy_from_hidden(
    hidden_local: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    plan: SequencePlan,
    *,
    cp_rank: int,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int = HIDDEN_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """`next_token_logprobs_and_entropy` of hidden_local @ weight.T; see `next_token_logprobs_from_hidden`."""
    query = _query(input_ids, plan, cp_rank, tp_group, vocab_size, temperature, chunk_size, True)
    return _from_hidden(hidden_local, weight, query, plan, sequence_parallel)


def output_processor(
    input_ids: Tensor,
    plan: SequencePlan,
    *,
    cp_rank: int,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_size: int = HIDDEN_CHUNK_SIZE,
) -> Callable[..., Tensor]:
    """What Megatron's GPTModel and Megatron-Bridge's VLMs take as `output_processor`: the model then returns logprobs.

    It returns [1, T/c]; with `entropy` [2, T/c], logprobs and entropies. No [T/c, V] tensor is made. Arguments are those of
    `next_token_logprobs_from_hidden`; what the model passes (its hidden states, output layer and config) is not asked for.
    """

    def process(
        *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, config: Any, **_: Any
    ) -> Tensor:
        weight = getattr(output_layer, "weight", None) if output_weight is None else output_weight
        if weight is None or getattr(output_layer, "bias", None) is not None:
            raise ValueError(
                f"output_layer must hold a weight and no bias, got {type(output_layer).__name__}; "
                "a bias or an adapter would be left out of the logprobs"
            )
        scale = config.mup_output_mult if config.use_mup else 1.0  # of the logits, as GPTModel scales them
        query = _query(input_ids, plan, cp_rank, tp_group, vocab_size, temperature / scale, chunk_size, entropy)
        found = _from_hidden(hidden_states.transpose(0, 1), weight, query, plan, output_layer.sequence_parallel)
        return torch.stack(found) if entropy else found[0][None]

    return process


def _query(
    input_ids: Tensor,
    plan: SequencePlan,
    cp_rank: int,
    tp_group: dist.ProcessGroup | None,
    vocab_size: int | None,
    temperature: float | Tensor,
    chunk_size: int,
    entropy: bool,
) -> Query:
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; no slot would ever be computed")
    scored = plan.shard(plan.scored, cp_rank)
    if isinstance(temperature, Tensor):
        if tuple(temperature.shape) != (plan.total_tokens,):
            raise ValueError(
                f"temperature must be a number or the full stream's [{plan.total_tokens}], got {tuple(temperature.shape)}; "
                "rows would be divided by other slots' temperatures"
            )
        # Slots without a next token may carry anything, padding often 0.
        temperature = plan.shard(temperature.detach(), cp_rank).where(scored, 1)[:, None]
        positive = ((temperature > 0) & (temperature < math.inf)).all()
        if temperature.device.type != "cpu":
            torch._assert_async(positive, "temperature must be positive and finite")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        elif not positive:
            wrong = ~((temperature > 0) & (temperature < math.inf))
            raise _temperature_error(float(temperature[wrong][0]))
    elif not 0 < temperature < math.inf:
        raise _temperature_error(temperature)
    return Query(
        targets=plan.shard(next_token_ids(input_ids, plan), cp_rank),
        scored=scored,
        temperature=temperature,
        tp_group=tp_group,
        vocab_size=vocab_size,
        entropy=entropy,
        chunk_size=chunk_size,
    )


def _temperature_error(value: float) -> ValueError:
    return ValueError(
        f"temperature must be positive and finite, got {value}; likely tokens would become unlikely, or NaN"
    )


def _from_logits(logits: Tensor, query: Query, plan: SequencePlan, inplace: bool) -> tuple[Tensor, Tensor]:
    _check_local("logits_local", logits, plan.local_tokens)
    # squeeze, for the backward of logits[0] would copy the gradient into a second one.
    return vocab_parallel.from_logits(logits.squeeze(0), query, inplace_backward=inplace)


def _from_hidden(
    hidden: Tensor, weight: Tensor, query: Query, plan: SequencePlan, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    slices = comm.group_size(query.tp_group) if sequence_parallel else 1
    _check_local("hidden_local", hidden, plan.local_tokens // slices)
    # Each TP rank sees the whole of every row and returns its part of the gradient; either way the parts are summed.
    if sequence_parallel:
        rows = comm.all_gather(hidden.squeeze(0), query.tp_group, backward="sum")
    else:
        rows = comm.sum_gradient(hidden.squeeze(0), query.tp_group)
    return vocab_parallel.from_hidden(rows, weight, query)


def _check_local(name: str, x: Tensor, rows: int) -> None:
    if x.ndim != 3 or tuple(x.shape[:2]) != (1, rows):
        raise ValueError(
            f"{name} must have shape [1, {rows}, ...], one row a slot of this rank, got {tuple(x.shape)}; "
            "rows would be given other slots' targets"
        )
