"""One of the two ranks. Runs the items it is given, in order; rank 0 appends a row to rows.jsonl as soon as it is known."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from shared_device import sum_buckets_one_by_one

from vlm_cp.launch import rank_device


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cuda:0", "cpu"), required=True)
    parser.add_argument(
        "--deadline", type=float, required=True, help="seconds of the epoch after which no item is begun"
    )
    parser.add_argument("items", nargs="+", help="family/layout")
    args = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    faulthandler.dump_traceback_later(240, exit=True)  # imports and the first handshake
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(rank_device(args.device, rank))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        from bridge_on_cpu import use_cpu

        use_cpu()
    torch._dynamo.config.disable = True  # compiling megatron-core's small functions costs more time than all rows
    import layouts
    from rows import Bench

    if args.device == "cuda:0":
        sum_buckets_one_by_one()

    bench = Bench(args.work, device)
    for item in args.items:
        if time.time() > args.deadline:
            break
        family, layout = item.split("/")
        limit = layouts.LIMITS.get(family, layouts.DEFAULT_LIMIT)
        faulthandler.dump_traceback_later(limit, exit=True)
        begin = time.time()
        # A world for each item: NCCL keeps the communicators of every layout that was built, gigabytes each, until it ends.
        store = args.work / f"store.{os.environ['MASTER_PORT']}.{item.replace('/', '.')}"
        backend = {"backend": "nccl", "device_id": device} if args.device == "cuda" else {"backend": "gloo"}
        dist.init_process_group(
            **backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=90)
        )
        if rank == 0:
            (args.work / "current").write_text(item)
        rows: list[dict[str, Any]] = bench.run(family, layout)
        dist.barrier()
        if rank == 0:
            seconds = round(time.time() - begin, 1)
            with (args.work / "rows.jsonl").open("a") as file:
                for row in rows:
                    file.write(json.dumps({"item": item, "seconds": seconds, **row}) + "\n")
            (args.work / "current").unlink()
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # process groups of destroyed layouts may wait for each other in their destructors


if __name__ == "__main__":
    main()
