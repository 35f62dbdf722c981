"""Parity of the embedded engine over families, CP sizes and exchange methods: the rows that the README's support table cites.

python -m benchmarks.parity [--device cuda|cuda:0 --dtype bfloat16 --cp 2]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.results_file import write_results
from vlm_cp.families import FAMILIES
from vlm_cp.parity import run_parity
from vlm_cp.subject import Subject

# Heads that every CP size divides, for all_to_all; Qwen2.5-VL's head size follows from its width.
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda", "cuda:0"], help="cuda:0: all ranks on one device"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cp", default="2,3,4", help="comma-separated")
    parser.add_argument("--methods", default="all_gather,all_to_all", help="comma-separated")
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated")
    parser.add_argument("--json", type=Path, help="results file; the one of today without it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, file = [], None
    for family in options.families.split(","):
        for method in options.methods.split(","):
            heads = HEADS if method == "all_to_all" else {}
            if heads and family == "qwen2_5_vl":
                heads = {**heads, "hidden_size": 12 * 16}
            subject = Subject.demo(family, dtype=getattr(torch, options.dtype), **heads)
            for cp in map(int, options.cp.split(",")):
                row = run_parity(subject, cp=cp, attention=method, device=options.device).summary()
                rows.append(row)
                keys = ("family", "attention", "cp", "passed", "logprob_max_abs", "grad_max_rel", "grad_norm_ratio")
                print({key: row[key] for key in keys}, flush=True)
                file = write_results("parity-hf", rows, options.json)  # after every row, for what ends early
    print(file)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
