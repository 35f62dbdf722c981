"""How CP=n compares with the floor that `vlm-cp parity` measures, over many random models: what `FLOOR_FACTOR` rests on.

python -m benchmarks.floor [--seeds 8] [--dtype float32]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.results_file import write_results
from vlm_cp.families import FAMILIES
from vlm_cp.parity import FLOOR_FACTOR, run_parity
from vlm_cp.subject import Subject


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in FAMILIES:
        for seed in range(options.seeds):
            subject = Subject.demo(family, dtype=getattr(torch, options.dtype), seed=seed)
            for cp in (2, 3, 4):
                report = run_parity(subject, cp=cp)
                found, bound = report.difference, report.tolerance
                row = {
                    "family": family,
                    "dtype": options.dtype,
                    "seed": seed,
                    "cp": cp,
                    "passed": report.passed,
                    "logprob_max_abs": found.logprob_max_abs,
                    "logprob_over_floor": round(FLOOR_FACTOR * found.logprob_max_abs / bound.logprob_max_abs, 3),
                    "grad_max_rel": found.grad_max_rel,
                    "grad_over_floor": round(FLOOR_FACTOR * found.grad_max_rel / bound.grad_max_rel, 3),
                }
                rows.append(row)
                print(row, flush=True)
    for key in ("logprob_over_floor", "grad_over_floor"):
        print(key, "largest", max(row[key] for row in rows))
    print(write_results("floor", rows))


if __name__ == "__main__":
    main()
