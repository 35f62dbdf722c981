"""Drop-ins for NeMo-RL's Megatron PPO value model and its packed losses, with its own signatures (its commit 7ea279abf).

    theirs                                      here                        what it does beyond theirs
    megatron_value_worker.make_value_head_hook  make_value_head_hook        finds a VLM's head; same weights on all ranks
    megatron_value_worker._unpack_value_...     unpack_value_sequences      one gather and one copy to the host, not one a sample
    megatron_value_worker._value_loss_prepare   value_loss_prepare_fn       runs on any device
    loss.wrapper.SequencePackingLossWrapper     SequencePackingLossWrapper  extrema folded, also where all is masked; no [B, k]
                                                                            data cut; one call where the loss allows it
    (an assert at the first batch)              check_value_config          at construction

NeMo-RL divides every loss by the CP size and undoes Megatron's division by the micro-batches, so gathers here sum in their
backward, as its own does (the fourth row of the table in `vlm_cp.losses`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import comm
from vlm_cp.alignment import Alignment
from vlm_cp.metrics import Metric, merge_metrics
from vlm_cp.plan import SequencePlan
from vlm_cp.values import shifted_values
from vlm_cp_hooks.value_head import Hook, value_head


def check_value_config(config: Mapping[str, Any]) -> None:
    """Raises `ValueError`, at construction, for a `ValueConfig` whose first packed batch would fail or be cut wrongly."""
    megatron, packs = config["megatron_cfg"], config["sequence_packing"]["enabled"]
    cp_size, tp_size = megatron["context_parallel_size"], megatron["tensor_model_parallel_size"]
    if cp_size > 1 and not packs:
        raise ValueError(
            f"sequence_packing.enabled must be True at context_parallel_size {cp_size}, got {packs}; values would be cut by row"
        )
    if not packs:
        return
    divisor = config["make_sequence_length_divisible_by"]
    chunks = 2 * cp_size if cp_size > 1 else 1
    required = chunks * (tp_size if megatron["sequence_parallel"] else 1)
    if divisor % required:
        raise ValueError(
            f"make_sequence_length_divisible_by must be a multiple of {required} (2 * context_parallel_size above 1, times "
            f"tensor_model_parallel_size with sequence_parallel), got {divisor}; the first batch would fail"
        )
    counted = chunks * tp_size  # what its driver rounds lengths up to when it fills bins
    if megatron["pipeline_model_parallel_size"] > 1 and counted % divisor:
        raise ValueError(
            f"make_sequence_length_divisible_by must divide {counted}, which bins are counted with, in a pipeline, got {divisor}; "
            "samples would be padded beyond their bin, and the last one by a negative length"
        )


def make_value_head_hook(hidden_size: int, sequence_parallel: bool) -> Hook:
    """The pre-wrap hook of the value worker; both arguments must be the model's."""
    hook = value_head()

    def checked(model: Any) -> Any:
        for chunk in model if isinstance(model, list) else [model]:
            found = chunk.config.hidden_size, chunk.config.sequence_parallel
            if found != (hidden_size, sequence_parallel):
                raise ValueError(
                    f"hidden_size and sequence_parallel must be the model's {found}, got {(hidden_size, sequence_parallel)}; "
                    "the head would not fit its input"
                )
        return hook(model)

    return checked


def unpack_value_sequences(
    values: Tensor, cu_seqlens_padded: Tensor, unpacked_seqlen: int, cp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """[B, unpacked_seqlen]: every sample's values, gathered and then shifted, from the packed head output [1, T/c]."""
    plan = _plan_of(cu_seqlens_padded, comm.group_size(cp_group)).to(values.device)
    samples = shifted_values(values.flatten(), plan, group=cp_group if plan.cp_size > 1 else None)
    rows = values.new_zeros(len(samples), unpacked_seqlen)
    for row, sample in zip(rows, samples, strict=True):
        row[: len(sample)] = sample[:unpacked_seqlen]
    return rows


def value_loss_prepare_fn(
    logits: Tensor,
    data: Any,
    loss_fn: Any = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Tensor], Any]:
    """({"logits": values}, data): values [B, width of data["returns"]], gathered over CP along each row, then shifted.

    logits: the head's output for one padded sample a row, [B, P/c] or [B, P/c, 1].
    """
    values = logits.squeeze(-1) if logits.ndim > 2 and logits.shape[-1] == 1 else logits
    cp_size = comm.group_size(context_parallel_group)
    if cp_size > 1:
        plan = SequencePlan.from_lengths([values.size(1) * cp_size], alignment=Alignment(cp_size=cp_size))
        values = plan.to(values.device).gather(values, context_parallel_group, dim=1, backward="sum")
    shifted = torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)
    return {"logits": shifted[:, : data["returns"].shape[1]]}, data


class SequencePackingLossWrapper:
    """Runs a loss of padded rows on a packed micro-batch, sample by sample, and folds its metrics.

    Arguments up to `context_parallel_group` are NeMo-RL's. token_keys: the data that is [B, S, ...] and cut to each sample;
    by default what is as wide as `input_ids`. A loss with `packing_invariant = True` whose `prepare_fn` is
    `value_loss_prepare_fn` is called once with all rows.
    """

    def __init__(
        self,
        loss_fn: Any,
        prepare_fn: Callable[..., Any],
        cu_seqlens_q: Tensor,
        cu_seqlens_q_padded: Tensor | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: dist.ProcessGroup | None = None,
        context_parallel_group: dist.ProcessGroup | None = None,
        *,
        token_keys: Collection[str] | None = None,
    ) -> None:
        self.loss_fn, self.prepare_fn, self.token_keys = loss_fn, prepare_fn, token_keys
        self.groups = {
            "vocab_parallel_rank": vocab_parallel_rank,
            "vocab_parallel_group": vocab_parallel_group,
            "context_parallel_group": context_parallel_group,
        }
        self.cp_group = context_parallel_group
        self.padded = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        bounds = torch.stack([cu_seqlens_q, self.padded]).tolist()  # the one copy to the host
        self.lengths = [end - start for start, end in zip(bounds[0], bounds[0][1:], strict=False)]
        self.bounds: list[int] = bounds[1]

    def __call__(
        self, next_token_logits: Tensor, data: Any, global_valid_seqs: Tensor | None, global_valid_toks: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """(loss, metrics): sums over the samples; "..._min" and "..._max" are folded, and stay infinite where all is masked."""
        totals = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        if getattr(self.loss_fn, "packing_invariant", False) and self.prepare_fn is value_loss_prepare_fn:
            inputs = {"logits": self._all_values(next_token_logits, data["returns"].shape[1])}
            loss, metrics = self.loss_fn(data=data, **totals, **inputs)
            return loss, _as_numbers([_declared(metrics, data)])
        fused = getattr(self.loss_fn, "use_fused_linear_logprobs", False)  # its logprobs may be one slot short
        cp_size = comm.group_size(self.cp_group)
        if not fused and next_token_logits.shape[1] != self.bounds[-1] // cp_size:
            raise ValueError(
                f"next_token_logits must have {self.bounds[-1] // cp_size} slots, a CP rank's share of the packed samples, got "
                f"{next_token_logits.shape[1]}; samples would be read from their neighbours' slots"
            )
        losses: list[Tensor] = []
        found: list[Mapping[str, Any]] = []
        for i, length in enumerate(self.lengths):
            sample = self._sample(data, i, length)
            local = next_token_logits[:, self.bounds[i] // cp_size : self.bounds[i + 1] // cp_size]
            inputs, sample = self.prepare_fn(logits=local, data=sample, loss_fn=self.loss_fn, **self.groups)
            loss, metrics = self.loss_fn(data=sample, **totals, **inputs)
            losses.append(loss)
            found.append(_declared(metrics, sample))
        return torch.stack(losses).sum(), _as_numbers(found)

    def _all_values(self, logits: Tensor, width: int) -> Tensor:
        plan = _plan_of(self.padded, comm.group_size(self.cp_group)).to(logits.device)
        stream = plan.gather(logits.flatten(), self.cp_group if plan.cp_size > 1 else None, backward="sum")
        first = plan.token_index == 0
        shifted = list(stream.roll(1).masked_fill(first, 0).split(list(plan.padded_lengths)))
        return torch.nn.utils.rnn.pad_sequence(shifted, batch_first=True)[:, :width]

    def _sample(self, data: Any, index: int, length: int) -> dict[str, Any]:
        width = data["input_ids"].shape[1]
        sample: dict[str, Any] = {}
        for name, x in data.slice(index, index + 1).items():
            wide = isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == width
            cut = wide if self.token_keys is None else name in self.token_keys
            sample[name] = x[:, :length] if cut else x
        return sample


def _plan_of(cu_seqlens_padded: Tensor, cp_size: int) -> SequencePlan:
    return SequencePlan.from_lengths(cu_seqlens_padded.diff(), alignment=Alignment(cp_size=cp_size))


def _declared(metrics: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics by their names; an extremum of a batch without a valid element is empty, whatever number the loss gave it."""
    mask = data["token_mask"] * data["sample_mask"][:, None]
    valid = (mask != 0).any()
    out: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.ndim:
            out[name] = value
            continue
        metric = Metric.named(name, value)
        out[name] = (
            metric if metric.reduction == "sum" else Metric(metric.value, metric.reduction, valid * metric.count)
        )
    return out


def _as_numbers(found: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Merged, as plain numbers; tables and other tensors of more than one number are added up."""
    scalars = [{k: v for k, v in metrics.items() if isinstance(v, Metric)} for metrics in found]
    tables: dict[str, Any] = {}
    for metrics in found:
        for name, x in metrics.items():
            if not isinstance(x, Metric):
                tables[name] = tables[name] + x if name in tables else x
    return {**{name: float(metric.value) for name, metric in merge_metrics(scalars).items()}, **tables}
