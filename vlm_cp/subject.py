"""What parity compares, and the ways to compute it: transformers alone at CP=1, and the engine over a CP group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_cp.alignment import Alignment
from vlm_cp.attention import AttentionMethod
from vlm_cp.batch import PackedBatch, unpack
from vlm_cp.collate import pack_samples
from vlm_cp.demo.conversations import Sample, demo_conversations, encode
from vlm_cp.demo.models import tiny_model
from vlm_cp.demo.processor import build_processor
from vlm_cp.engines.hf import HFEngine
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.spec import VLMSpec

Numerics = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What is compared: a model on the CPU, and samples as its processor returns them.

    tokenizer: the processor's; it pads, and writes the report's text.
    """

    family: str
    model: nn.Module = field(repr=False)
    spec: VLMSpec
    samples: Sequence[Sample]
    tokenizer: Any = field(repr=False)

    @classmethod
    def demo(
        cls,
        family: str,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        vision: Mapping[str, Any] | None = None,
        **text_overrides: Any,
    ) -> Subject:
        """The shipped conversations on a small random model of `family`; vision and `text_overrides` change its configs."""
        processor = build_processor(family)
        model = tiny_model(family, processor.tokenizer, dtype=dtype, seed=seed, vision=vision, **text_overrides)
        samples = [encode(processor, conversation) for conversation in demo_conversations()]
        spec = VLMSpec.from_hf_config(model.config)
        return cls(family=family, model=model, spec=spec, samples=samples, tokenizer=processor.tokenizer)

    @classmethod
    def from_pretrained(cls, folder: Path, *, dtype: torch.dtype = torch.float32) -> Subject:
        """The shipped conversations on a checkpoint: a folder that transformers saved model and processor to."""
        if not (folder / "config.json").is_file():
            raise ValueError(f"model must be a folder with a config.json, got {folder}; a hub's name is not looked up")
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        processor = AutoProcessor.from_pretrained(folder)
        spec = VLMSpec.from_hf_config(model.config)
        samples = [encode(processor, conversation) for conversation in demo_conversations()]
        return cls(family=spec.family, model=model, spec=spec, samples=samples, tokenizer=processor.tokenizer)

    @property
    def pad_token_id(self) -> int:
        return self.tokenizer.pad_token_id

    @property
    def targets(self) -> int:
        """How many tokens are scored, over all samples; at least 1, to divide by."""
        return max(1, sum(sample.inputs["input_ids"].numel() - 1 for sample in self.samples))

    def batch(self, cp_size: int, tp_size: int = 1) -> PackedBatch:
        """All samples in one packed stream, padded for CP and, above one TP rank, sequence parallelism."""
        inputs = [sample.inputs for sample in self.samples]
        alignment = Alignment(cp_size=cp_size, tp_size=tp_size, sequence_parallel=tp_size > 1)
        return pack_samples(inputs, alignment=alignment, spec=self.spec, pad_token_id=self.pad_token_id)


@dataclass(frozen=True, eq=False)
class Outcome:
    """One computation of the batch. logprobs: B tensors [L_i], slot j scoring token j + 1, the last slot 0."""

    logprobs: Sequence[Tensor]
    loss: float
    gradients: Mapping[str, Tensor] = field(repr=False)


class Candidate:
    """The computation under test, on one rank. Tests subclass it to break one thing at a time."""

    def __init__(
        self, model: nn.Module, spec: VLMSpec, group: dist.ProcessGroup | None, attention: AttentionMethod
    ) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.engine = HFEngine(model, spec=spec, cp_group=group, attention=attention)

    def logits(self, batch: PackedBatch) -> Tensor:
        """[1, T/c, V] of this rank's slots."""
        return self.engine(batch)

    def logprobs(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        """[T/c], this rank's slots."""
        return next_token_logprobs(logits, batch.input_ids, batch.plan, cp_rank=self.rank)


def run_samples(subject: Subject, device: str, numerics: Numerics = nullcontext, attention: str = "sdpa") -> Outcome:
    """transformers' own model on each sample alone, with its own attention; gradients of the mean over all targets."""
    model: Any = subject.model.to(device)
    model.zero_grad(set_to_none=True)
    former: str = model.config.text_config._attn_implementation
    model.set_attn_implementation(attention)
    found: list[Tensor] = []
    try:
        for sample in subject.samples:
            inputs = {key: value.to(device) for key, value in sample.inputs.items()}
            with numerics():
                logprobs = _stock_logprobs(model, inputs)
            (-logprobs.sum() / subject.targets).backward()
            found.append(logprobs[0].detach().cpu())
    finally:
        model.set_attn_implementation(former)
    return _outcome(subject, found)


def run_padded(subject: Subject, device: str, numerics: Numerics = nullcontext) -> Outcome:
    """transformers' own model on all samples as one right-padded batch: the same sums in another order."""
    model = subject.model.to(device)
    model.zero_grad(set_to_none=True)
    samples = [sample.inputs for sample in subject.samples]
    inputs: dict[str, Tensor] = {}
    for key in sorted(set().union(*samples)):
        values = [sample[key] for sample in samples if key in sample]
        is_row = key in ("input_ids", "attention_mask", "mm_token_type_ids")
        pad = subject.pad_token_id if key == "input_ids" else 0
        rows = (
            pad_sequence([x[0] for x in values], batch_first=True, padding_value=pad) if is_row else torch.cat(values)
        )
        inputs[key] = rows.to(device)
    with numerics():
        logprobs = _stock_logprobs(model, inputs)
    (-(logprobs[:, :-1] * inputs["attention_mask"][:, 1:]).sum() / subject.targets).backward()
    lengths = [sample["input_ids"].numel() for sample in samples]
    found = [F.pad(row[: length - 1], (0, 1)).detach().cpu() for row, length in zip(logprobs, lengths, strict=True)]
    return _outcome(subject, found)


def _stock_logprobs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """[B, S]: column j scores token j + 1; the last column is 0."""
    logprobs = model(**inputs, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return F.pad(logprobs.gather(2, inputs["input_ids"][:, 1:, None])[..., 0], (0, 1))


def run_packed(
    subject: Subject,
    group: dist.ProcessGroup | None,
    attention: AttentionMethod,
    device: str,
    numerics: Numerics,
    candidate: type[Candidate],
) -> Outcome:
    """All samples in one stream over the ranks of `group`; every rank returns the whole outcome."""
    model = subject.model.to(device)
    model.zero_grad(set_to_none=True)
    batch = subject.batch(1 if group is None else dist.get_world_size(group)).to(device)
    run = candidate(model, subject.spec, group, attention)
    with run.engine:
        with numerics():
            logprobs = run.logprobs(run.logits(batch), batch)
        (-logprobs.sum() / subject.targets).backward()
        run.engine.sync_gradients(group)
    found = [x.cpu() for x in unpack(logprobs.detach(), batch.plan, group=group)]
    return _outcome(subject, found)


def _outcome(subject: Subject, logprobs: list[Tensor]) -> Outcome:
    parameters = subject.model.named_parameters()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters}
    loss = -sum(float(x.double().sum()) for x in logprobs) / subject.targets
    return Outcome(logprobs, loss, {name: gradient.detach().cpu() for name, gradient in gradients.items()})
