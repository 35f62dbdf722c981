"""A model in training, whatever runs it: what the training loops of these examples ask of an engine.

A loop knows samples, losses of this rank's slots, and a global count. A learner packs the samples for its layout, runs them,
and steps. Loops see no difference between one rank and many, nor between the embedded engine and Megatron-Bridge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp.batch import PackedBatch, unpack
from vlm_cp.chat import IGNORE, EncodedSample
from vlm_cp.collate import SFTCollator
from vlm_cp.comm import group_rank, group_size
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.losses import TokenLoss
from vlm_cp.metrics import Metric, reduce_metrics
from vlm_cp.packing import restore_order
from vlm_cp.spec import TextSpec

# This rank's output [1, T/c, ...] and the full-stream batch -> its part of the loss, and what else is worth logging.
LossFn = Callable[[Tensor, PackedBatch], tuple[TokenLoss, Mapping[str, Metric]]]


class Learner(ABC):
    """One model, its optimizer and its parallel layout.

    capacity: what a micro-batch may cost, in text tokens (`SFTCollator.bins`). vocab_size: columns of the logits that are
    tokens. cp_group, dp_group, dp_cp_group: None for one rank; the last one holds the ranks of both.
    """

    def __init__(
        self,
        collator: SFTCollator,
        text: TextSpec,
        capacity: int,
        *,
        cp_group: dist.ProcessGroup | None,
        dp_group: dist.ProcessGroup | None,
        dp_cp_group: dist.ProcessGroup | None,
    ) -> None:
        self.collator, self.text, self.capacity = collator, text, capacity
        self.cp_group, self.dp_group, self.dp_cp_group = cp_group, dp_group, dp_cp_group
        self.cp_rank = group_rank(cp_group)
        self.vocab_size = len(collator.processor.tokenizer)

    @abstractmethod
    def output(self, batch: PackedBatch) -> Tensor:
        """Logits [1, T/c, V], or a critic's values [1, T/c, 1], of this rank's slots."""

    @abstractmethod
    def update(
        self, batches: Sequence[PackedBatch], loss_fn: LossFn, *, count: int, learning_rate: float
    ) -> dict[str, Metric]:
        """Steps once on sum / count over all ranks' micro-batches; "loss", "grad_norm" and the loss function's metrics.

        The metrics are this rank's part: `reduced` joins the ranks'.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def pack(
        self, samples: Sequence[EncodedSample], extras: Mapping[str, Sequence[Tensor]] | None = None
    ) -> list[PackedBatch]:
        """This data-parallel rank's micro-batches. extras: name -> one tensor [L_i] a sample, for the `token_extras`."""
        bins = self._bins(samples)[group_rank(self.dp_group) :: group_size(self.dp_group)]
        return [self._packed(samples, bin_, extras or {}) for bin_ in bins]

    @torch.no_grad()
    def per_sample(
        self,
        samples: Sequence[EncodedSample],
        fn: Callable[[Tensor, PackedBatch], list[Tensor]],
        extras: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> list[Tensor]:
        """What `fn` makes of every micro-batch's output, one tensor a sample on the CPU, in the samples' order on every rank."""
        own = [[x.cpu() for x in fn(self.output(batch), batch)] for batch in self.pack(samples, extras)]
        parts: list[Any] = [own] * group_size(self.dp_group)
        if self.dp_group is not None:
            dist.all_gather_object(parts, own, group=self.dp_group)
        bins = self._bins(samples)
        return restore_order(bins, [parts[i % len(parts)][i // len(parts)] for i in range(len(bins))])

    def reduced(self, parts: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
        """Metrics of several updates, over all ranks, as numbers."""
        return reduce_metrics(parts, group=self.dp_cp_group)

    def logprobs(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        """[T/c]: log p of each slot's next token."""
        return next_token_logprobs(
            logits, batch.input_ids, batch.plan, cp_rank=self.cp_rank, vocab_size=self.vocab_size
        )

    def local(self, x: Tensor, batch: PackedBatch) -> Tensor:
        """This rank's slots [T/c, ...] of a full stream [1, T, ...]."""
        return batch.plan.shard(x[0], self.cp_rank)

    def answers(self, samples: Sequence[EncodedSample]) -> tuple[float, list[bool]]:
        """Mean loss of the trained tokens, and for each sample whether greedy decoding writes its answer.

        It does when every one of the answer's tokens is the likeliest after the tokens before it.
        """

        def scores(logits: Tensor, batch: PackedBatch) -> list[Tensor]:
            labels = self.local(batch.labels, batch)
            right = (logits[0, :, : self.vocab_size].argmax(-1) == labels) | (labels == IGNORE)
            losses = -self.logprobs(logits, batch) * self.local(batch.loss_mask, batch)
            return unpack(torch.stack([losses.double(), right.double()], 1), batch.plan, group=self.cp_group)

        found = self.per_sample(samples, scores)
        total = sum(float(x[:, 0].sum()) for x in found)
        return total / trained_tokens(samples), [bool(x[:, 1].all()) for x in found]

    def _bins(self, samples: Sequence[EncodedSample]) -> list[list[int]]:
        ranks = group_size(self.dp_group)
        return self.collator.bins(samples, text=self.text, capacity=self.capacity, bins_multiple_of=ranks)

    def _packed(
        self, samples: Sequence[EncodedSample], bin_: Sequence[int], extras: Mapping[str, Sequence[Tensor]]
    ) -> PackedBatch:
        batch = self.collator([samples[i] for i in bin_])
        streams = {name: batch.plan.pack([x[i] for i in bin_], 0)[None] for name, x in extras.items()}
        return replace(batch, token_extras=streams)


def trained_tokens(samples: Sequence[EncodedSample]) -> int:
    """How many tokens carry the loss, the same on every rank, whatever the layout."""
    return sum(int((sample.inputs["labels"][1:] != IGNORE).sum()) for sample in samples)


def mean_of(loss: TokenLoss) -> Metric:
    """A rank's part of a mean over tokens."""
    count = int(loss.local_count)
    return Metric(loss.local_sum.detach() / max(count, 1), "mean", count)
