"""`train_sft.py` and `train_ppo.py` through Megatron-Bridge on GPUs: bf16, Transformer Engine, mcore's DDP, schedule and optimizer.

    torchrun --nproc_per_node 2 examples/train_bridge.py --out examples/results [--task ppo] [--steps 300]

The same global batches with the ranks as data-parallel ones (cp1) and as context-parallel ones (cp2); one GPU runs cp1 alone. In
the middle each arm writes a checkpoint, takes model and optimizer down, and goes on from it in new ones. bf16 rounds at other
places in the two layouts, so curves lie on top of each other within noise, not to the last digit as those of the CPU do.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import arms
import torch
import torch.distributed as dist
import train_ppo
import train_sft
from bridge_learner import BridgeLearner
from hf_learner import small_model
from megatron.core import parallel_state

# Heads of the sizes that Transformer Engine's kernels take.
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [12, 10, 10]}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "rope_parameters": ROPE}
TOWER = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 2}


def start(folder: Path, processor: Any, device: str) -> str:
    """The folder where rank 0 saved a checkpoint of random weights, that every layout loads."""
    box = [str(folder)]
    dist.broadcast_object_list(box, 0)
    if dist.get_rank() == 0:
        small_model(0, processor.tokenizer, dtype=torch.float32, tower=TOWER, **SIZES).save_pretrained(box[0])
    dist.barrier()
    return box[0]


def train_arm(
    name: str, cp: int, settings: arms.Settings, make: Callable[[], arms.Trainer], checkpoint: Path
) -> dict[str, Any]:
    """A whole run on the ranks there are; model, optimizer and Megatron's groups are built anew at `resume_at`."""
    begin = time.monotonic()
    halves: list[dict[str, list[Any]]] = []
    for until in sorted({settings.resume_at, settings.steps}):
        trainer = make()
        if halves:
            trainer.load(checkpoint)
        halves.append(trainer.run(until))
        trainer.save(checkpoint)
        parallel_state.destroy_model_parallel()
        dist.barrier()
    return arms.row(name, cp, settings, halves, time.monotonic() - begin)


def sft(settings: train_sft.Settings, folder: str, device: str) -> Callable[[int], arms.Trainer]:
    data, processor = train_sft.load_data(settings)
    return lambda cp: train_sft.Trainer(
        settings, data, BridgeLearner(folder, processor, settings.capacity, cp=cp, device=device)
    )


def ppo(settings: train_ppo.Settings, folder: str, device: str) -> Callable[[int], arms.Trainer]:
    """All arms start from the policy that a short SFT on data-parallel ranks leaves."""
    data, processor = train_sft.load_data(settings)

    def learner(cp: int, **options: Any) -> BridgeLearner:
        return BridgeLearner(folder, processor, settings.capacity, cp=cp, device=device, **options)

    first = learner(1)
    train_sft.Trainer(train_ppo.warm_settings(settings), data, first).run(settings.warm_steps)
    weights = {name: x.clone() for name, x in first.state_dict()["model"].items()}
    parallel_state.destroy_model_parallel()

    def make(cp: int) -> arms.Trainer:
        policy, critic = learner(cp), learner(cp, critic=True)
        for model in (policy, critic):
            model.load_weights(weights)
        return train_ppo.Trainer(settings, data, policy, critic)

    return make


TASKS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (train_sft.Settings(steps=300, resume_at=150, learning_rate=2e-3), sft, train_sft.LOOK),
    "ppo": (train_ppo.Settings(steps=30, resume_at=15, warm_steps=150), ppo, train_ppo.LOOK),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default="sft")
    parser.add_argument("--steps", type=int, help="of each arm")
    parser.add_argument("--out", type=Path, required=True, help="folder for the curves and their picture")
    options = parser.parse_args()
    settings, prepare, look = TASKS[options.task]
    if options.steps:
        settings = replace(settings, steps=options.steps, resume_at=options.steps // 2)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    device = f"cuda:{local}"
    dist.init_process_group("nccl", device_id=torch.device(device))
    ranks = dist.get_world_size()
    with tempfile.TemporaryDirectory() as scratch:
        folder = start(Path(scratch) / "weights", train_sft.load_processor(), device)
        make = prepare(settings, folder, device)
        names = {f"cp{cp}": cp for cp in sorted({1, ranks})}
        rows = [
            train_arm(name, cp, settings, lambda cp=cp: make(cp), Path(folder) / "checkpoint.pt")
            for name, cp in names.items()
        ]
        dist.barrier()
    if dist.get_rank() == 0:
        gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
        path = arms.results_path(options.out, f"{options.task}_bridge", f"{ranks}x{gpu}")
        arms.write_rows(path, rows, list(names), arms.command("torchrun", "--nproc_per_node", str(ranks)), look)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # process groups of destroyed layouts may wait for each other in their destructors


if __name__ == "__main__":
    main()
