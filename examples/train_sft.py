"""Teaches a small Qwen3-VL from nothing to read digits and count shapes, at CP=1 and at CP=2, and draws both curves.

    python examples/train_sft.py --out examples/results        # about ten minutes on two free CPU cores

Each arm trains to the middle, writes a checkpoint, ends its processes, and resumes from it in new ones. What is compared is
a whole training run: every batch packed with ragged padding, pixels through the tower, gradients through the exchange.
Training amplifies rounding, so a third arm shows how much of a difference means nothing: CP=1 again, with the same samples of
every step split into other micro-batches.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import cos, pi
from pathlib import Path
from typing import Any

import curves
import pictures
import torch
import torch.distributed as dist
from float64 import Float64
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch, unpack
from vlm_cp.chat import IGNORE, EncodedSample
from vlm_cp.collate import SFTCollator
from vlm_cp.comm import group_rank
from vlm_cp.demo.models import tiny_config
from vlm_cp.demo.processor import build_processor
from vlm_cp.engines.hf import HFEngine
from vlm_cp.launch import run_ranks
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.report import versions
from vlm_cp.spec import TextSpec, VLMSpec

VALIDATION = 10**6  # the number of the first picture that is never trained on


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. capacity: what a micro-batch may cost, in text tokens (`SFTCollator.bins`)."""

    steps: int = 600
    resume_at: int = 300
    batch_size: int = 32
    capacity: int = 4096
    learning_rate: float = 3e-3
    warmup: int = 30
    train_samples: int = 3000
    validation_samples: int = 256
    validate_every: int = 50
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Encoded samples; what they cost and how they are padded depends on the arm, what they hold does not."""

    train: Sequence[EncodedSample]
    validation: Sequence[EncodedSample]


def small_model(seed: int, tokenizer: Any) -> nn.Module:
    """A Qwen3-VL of 450,000 random weights, the same on every call and rank."""
    config = tiny_config("qwen3_vl", tokenizer, num_hidden_layers=2, initializer_range=0.05)
    vision = config.vision_config
    vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads = 2, 64, 128, 4
    vision.deepstack_visual_indexes, vision.initializer_range = [0], 0.05
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float64, attn_implementation="sdpa")


def encode_all(settings: Settings, processor: Any, spec: VLMSpec) -> Data:
    """Every picture through the processor, once."""
    collator = SFTCollator(processor, spec=spec, alignment=Alignment(), pad_token_id=processor.tokenizer.pad_token_id)

    def encoded(first: int, count: int) -> list[EncodedSample]:
        found = (collator.encode(pictures.chat_sample(first + i), i) for i in range(count))
        return [sample for sample in found if sample is not None]

    return Data(train=encoded(0, settings.train_samples), validation=encoded(VALIDATION, settings.validation_samples))


class Trainer:
    """One rank of one arm."""

    def __init__(self, settings: Settings, data: Data, processor: Any, group: dist.ProcessGroup | None) -> None:
        self.settings, self.data, self.group = settings, data, group
        self.model = small_model(settings.seed, processor.tokenizer)
        self.spec = VLMSpec.from_hf_config(self.model.config)
        self.text = TextSpec.from_hf_config(self.model.config)
        self.engine = HFEngine(self.model, spec=self.spec, cp_group=group)
        size = 1 if group is None else dist.get_world_size(group)
        self.collator = SFTCollator(
            processor,
            spec=self.spec,
            alignment=Alignment(cp_size=size),
            pad_token_id=processor.tokenizer.pad_token_id,
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.step = 0

    def logits(self, batch: PackedBatch) -> Tensor:
        """[1, T/c, V] of this rank's slots."""
        with Float64():
            return self.engine(batch)

    def micro_batches(self, samples: Sequence[EncodedSample]) -> list[tuple[list[int], PackedBatch]]:
        """Bins of samples with what each is packed to."""
        bins = self.collator.bins(samples, text=self.text, capacity=self.settings.capacity)
        return [(bin_, self.collator([samples[i] for i in bin_])) for bin_ in bins]

    def train_step(self) -> dict[str, float]:
        """Steps once on the batch that belongs to this step's number; the loss is the mean over its trained tokens."""
        settings, step = self.settings, self.step
        picked = random.Random(f"{settings.seed}/{step}").sample(range(len(self.data.train)), settings.batch_size)
        micro = self.micro_batches([self.data.train[i] for i in picked])
        count = sum(
            int(batch.loss_mask.sum()) for _, batch in micro
        )  # of the full streams: no rank counts a token twice
        decay = 0.5 + 0.5 * cos(pi * step / settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / settings.warmup) * decay
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        for _, batch in micro:
            loss = self.local_loss(batch, self.logits(batch)) / count
            loss.backward()
            total += loss.detach()
        self.engine.sync_gradients(self.group)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return {"loss": self.summed(total), "grad_norm": float(norm)}

    def local_loss(self, batch: PackedBatch, logits: Tensor) -> Tensor:
        """This rank's sum of the negative log-probabilities of trained tokens."""
        rank = group_rank(self.group)
        with Float64():
            logprobs = next_token_logprobs(logits, batch.input_ids, batch.plan, cp_rank=rank)
        return -(logprobs * self.engine.local(batch).loss_mask[0]).sum()

    def summed(self, value: Tensor) -> float:
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return float(value)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss and exact answers on pictures that were never trained on.

        An answer is exact when every one of its tokens is the likeliest after the tokens before it, which is when greedy
        decoding writes it.
        """
        samples = self.data.validation
        loss, count, exact = torch.zeros((), dtype=torch.float64), 0, [False] * len(samples)
        for bin_, batch in self.micro_batches(samples):
            logits, labels = self.logits(batch), self.engine.local(batch).labels[0]
            loss += self.local_loss(batch, logits)
            count += int(batch.loss_mask.sum())
            right = (logits[0].argmax(-1) == labels) | (labels == IGNORE)
            for i, tokens in zip(bin_, unpack(right, batch.plan, group=self.group), strict=True):
                exact[i] = bool(tokens.all())
        found = {"step": self.step, "loss": self.summed(loss) / count}
        return found | {"count": sum(exact[0::2]) / len(exact[0::2]), "read": sum(exact[1::2]) / len(exact[1::2])}

    def save(self, path: Path) -> None:
        """Written beside `path` and moved there, so that a run that ends here leaves the former checkpoint whole."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        if group_rank(self.group) == 0:
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Every rank reads before any goes on: else one could save anew, and another read what is not its step."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        if self.group is not None:
            dist.barrier(self.group)

    def run(self, until: int) -> dict[str, list[Any]]:
        """Trains up to step `until`; the curves of these steps."""
        steps: list[dict[str, float]] = []
        validation: list[dict[str, float]] = []
        while self.step < until:
            steps.append(self.train_step())
            if self.step % self.settings.validate_every == 0 or self.step == self.settings.steps:
                validation.append(self.validate())
                if group_rank(self.group) == 0:
                    print(
                        f"step {self.step}: " + ", ".join(f"{k} {v:.3f}" for k, v in validation[-1].items()), flush=True
                    )
        return {key: [step[key] for step in steps] for key in ("loss", "grad_norm")} | {"validation": validation}


def part(
    rank: int, cp: int, settings: Settings, data: Data, processor: Any, until: int, folder: str, resume: bool
) -> dict[str, list[Any]]:
    """Runs on every rank: from nothing, or from the checkpoint in `folder`, up to step `until`, and saves there."""
    trainer = Trainer(settings, data, processor, dist.group.WORLD if cp > 1 else None)
    path = Path(folder) / "checkpoint.pt"
    if resume:
        trainer.load(path)
    found = trainer.run(until)
    trainer.save(path)
    return found


def arms(settings: Settings) -> dict[str, tuple[int, Settings]]:
    """Name -> cp and settings of each arm."""
    other = replace(settings, capacity=settings.capacity // 3)
    return {"cp1": (1, settings), "cp2": (2, settings), "cp1_other_micro_batches": (1, other)}


def train_arm(
    name: str, cp: int, settings: Settings, data: Data, processor: Any, timeout: float = 3600.0
) -> dict[str, Any]:
    """A whole run at this cp: to the middle, then from its checkpoint to the end, in new processes."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        halves: list[Mapping[str, list[Any]]] = [
            run_ranks(cp, part, cp, settings, data, processor, until, folder, resume, timeout=timeout)[0]
            for until, resume in ((settings.resume_at, False), (settings.steps, True))
        ]
    joined = {key: halves[0][key] + halves[1][key] for key in halves[0]}
    return {"arm": name, "cp": cp, "resumed_at": settings.resume_at, "seconds": time.monotonic() - start, **joined}


def prepare(settings: Settings) -> tuple[Data, Any]:
    """The data and the processor that every arm shares."""
    processor = build_processor("qwen3_vl")
    spec = VLMSpec.from_hf_config(tiny_config("qwen3_vl", processor.tokenizer))
    return encode_all(settings, processor, spec), processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(arms(Settings()))
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help="which to train (default: all)")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="of each arm (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the curves and their picture; arms found there are kept"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # before any operation, since ranks are forked
    settings = replace(Settings(), steps=options.steps, resume_at=options.steps // 2)
    data, processor = prepare(settings)
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", *sys.argv])
    path = options.out / f"sft_cpu_{datetime.now(UTC):%Y-%m-%d}.json"
    rows = {row["arm"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for name in options.arms:
        print(name)
        rows[name] = train_arm(name, *arms(settings)[name], data, processor) | {"command": command}
    ordered = [rows[name] for name in names if name in rows]
    path.write_text(json.dumps({"versions": versions(), "command": command, "rows": ordered}) + "\n")
    curves.plot(path, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
