"""Runs one benchmark case, its arms interleaved, and writes `benchmarks/results/<kind>_<hardware>_<date>.json`.

    python -m benchmarks.run --case mrope [--json FILE] [--help]
    torchrun --nproc_per_node 2 -m benchmarks.run --case step --tokens 32768

step      a: whole training step against stock Megatron-Bridge (2 GPUs; one: at CP=1 alone)
vision    b: the vision tower and the exchange of its rows (2 GPUs; one: the tower alone)
mrope     c: three-axis positions against Bridge's and transformers' functions (CPU)
pack      d: pack, shard and unpack against SkyRL's, verl's and NeMo-RL's, read from paths given (CPU or GPU)
logprobs  e: time and peak memory of log-probabilities, against the same (GPU)
longest   f: the longest sequence that fits at CP=1 and CP=n (2 GPUs; one: at CP=1 alone)
exchange     attention alone by `cp_comm_type`, from which `vlm_cp.exchange` picks (2 GPUs)

Every case compares results before it times anything, and refuses to time what differs. What comes after --case NAME are
the case's own options.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import torch.distributed as dist

CASES = {
    "step": "step",
    "vision": "vision_phase",
    "mrope": "mrope",
    "pack": "pack",
    "logprobs": "logprobs",
    "longest": "longest",
    "exchange": "exchange",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help="--case" not in sys.argv
    )
    parser.add_argument("--case", choices=tuple(CASES), required=True)
    args, rest = parser.parse_known_args()
    code = importlib.import_module(f"benchmarks.{CASES[args.case]}").main(rest)
    if dist.is_initialized():  # groups of several layouts would wait for one another in their destructors
        sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
