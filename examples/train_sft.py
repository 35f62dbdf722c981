"""Teaches a small Qwen3-VL from nothing to read digits and count shapes, at CP=1 and at CP=2, and draws both curves.

    python examples/train_sft.py --out examples/results        # about ten minutes on two free CPU cores

Each arm trains to the middle, writes a checkpoint, ends its processes, and resumes from it in new ones. What is compared is
a whole training run: every batch packed with ragged padding, pixels through the tower, gradients through the exchange.
Training amplifies rounding, so a third arm shows how much of a difference means nothing: CP=1 again, with the same samples of
every step split into other micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import arms
import curves
import pictures
from hf_learner import HFLearner, small_model
from learner import Learner, LossFn, trained_tokens
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.chat import EncodedSample
from vlm_cp.collate import SFTCollator
from vlm_cp.demo.models import tiny_config
from vlm_cp.demo.processor import build_processor
from vlm_cp.losses import TokenLoss, token_loss
from vlm_cp.metrics import Metric
from vlm_cp.spec import VLMSpec

VALIDATION = 10**6  # the number of the first picture that is never trained on

LOOK = curves.Look(
    title="Read the digits, count the shapes: a small Qwen3-VL from random weights",
    panels={"loss": "loss a token"},
    validated="loss",
)


@dataclass(frozen=True, kw_only=True)
class Settings(arms.Settings):
    """One SFT run."""

    steps: int = 600
    resume_at: int = 300
    batch_size: int = 32
    capacity: int = 4096
    learning_rate: float = 3e-3
    warmup: int = 30
    validate_every: int = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Encoded samples; what they cost and how they are padded depends on the arm, what they hold does not."""

    train: Sequence[EncodedSample]
    validation: Sequence[EncodedSample]


def encode_all(settings: arms.Settings, processor: Any, spec: VLMSpec) -> Data:
    """Every picture through the processor, once."""
    collator = SFTCollator(processor, spec=spec, alignment=Alignment(), pad_token_id=processor.tokenizer.pad_token_id)

    def encoded(first: int, count: int) -> list[EncodedSample]:
        found = (collator.encode(pictures.chat_sample(first + i), i) for i in range(count))
        return [sample for sample in found if sample is not None]

    return Data(train=encoded(0, settings.train_samples), validation=encoded(VALIDATION, settings.validation_samples))


def picked(settings: arms.Settings, step: int, samples: Sequence[EncodedSample]) -> list[EncodedSample]:
    """The batch that belongs to this step's number."""
    return random.Random(f"{settings.seed}/{step}").sample(samples, settings.batch_size)


def exact(learner: Learner, samples: Sequence[EncodedSample]) -> dict[str, float]:
    """Loss, and the share of exact answers to each question, on pictures that were never trained on."""
    loss, right = learner.answers(samples)
    return {"loss": loss, "count": sum(right[0::2]) / len(right[0::2]), "read": sum(right[1::2]) / len(right[1::2])}


def sft_loss(learner: Learner) -> LossFn:
    """The negative log-probability of trained tokens."""

    def loss(logits: Tensor, batch: PackedBatch) -> tuple[TokenLoss, dict[str, Metric]]:
        terms = -learner.logprobs(logits, batch)
        return token_loss(terms, batch.plan, batch.loss_mask, cp_rank=learner.cp_rank), {}

    return loss


class Trainer(arms.Trainer):
    """One rank of one arm."""

    def __init__(self, settings: arms.Settings, data: Data, learner: Learner) -> None:
        super().__init__(settings)
        self.data, self.learner = data, learner

    def train_step(self) -> dict[str, float]:
        """The loss is the mean over the step's trained tokens, however they fall on micro-batches and ranks."""
        samples = picked(self.settings, self.step, self.data.train)
        found = self.learner.update(
            self.learner.pack(samples),
            sft_loss(self.learner),
            count=trained_tokens(samples),
            learning_rate=self.settings.rate(self.step),
        )
        return self.learner.reduced([found])

    def validate(self) -> dict[str, float]:
        return exact(self.learner, self.data.validation)

    def state_dict(self) -> dict[str, Any]:
        return self.learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)


def load_processor() -> Any:
    return build_processor("qwen3_vl")


def load_data(settings: arms.Settings) -> tuple[Data, Any]:
    """The data and the processor."""
    processor = load_processor()
    spec = VLMSpec.from_hf_config(tiny_config("qwen3_vl", processor.tokenizer))
    return encode_all(settings, processor, spec), processor


def makers(data: Data, processor: Any) -> Any:
    """How each arm makes its trainer."""
    return lambda settings: (
        lambda group: Trainer(
            settings,
            data,
            HFLearner(small_model(settings.seed, processor.tokenizer), processor, settings.capacity, group),
        )
    )


if __name__ == "__main__":
    arms.main(__doc__ or "", "sft", Settings(), lambda settings: makers(*load_data(settings)), LOOK)
