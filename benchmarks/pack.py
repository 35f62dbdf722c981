"""Case d, packing: padded rows -> this rank's part of the packed stream, and values back to rows, against other frameworks.

    python -m benchmarks.run --case pack --skyrl-pack FILE --verl-pack FILE --nemo-rl-pack FILE [--device cuda]
        --nemo-rl-logprobs FILE --peer-versions skyrl=COMMIT,verl=COMMIT,nemo_rl=COMMIT

FILE is that project's own file (benchmarks/peers.py says which); without one the peer is left out. Rows hold S/4 to S tokens,
padded on the right, for CP=2 and TP=2 with sequence parallelism, on rank 0. Packing includes what the model's call needs of
offsets (`PackedSeqParams`). Values go back over as many CP ranks as there are: under torchrun with their exchange, else
for one rank. Every peer's ids and values must equal this package's before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers
from benchmarks.peers import Ranks
from benchmarks.results_file import KEYS, ResultsFile
from benchmarks.timing import beside, measure
from vlm_cp.alignment import Alignment
from vlm_cp.batch import postprocess_packed_seqs, preprocess_packed_seqs
from vlm_cp.engines.packed_params import packed_seq_params
from vlm_cp.plan import SequencePlan

CASES = ((8, 4096), (8, 16384), (64, 1024), (256, 512), (1024, 256))
TP = 2
Arms = dict[str, Callable[[], Tensor]]


def rows_of(samples: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, mask) [samples, width]."""
    generator = torch.Generator().manual_seed(samples)
    lengths = torch.randint(width // 4, width + 1, (samples,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    ids = torch.randint(1, 1000, (samples, width), generator=generator) * mask
    return ids.to(device), mask.to(device)


def pack_arms(args: argparse.Namespace, ids: Tensor, mask: Tensor) -> Arms:
    ranks = Ranks(tp_size=TP, cp_size=2, cp_rank=0)
    multiple = TP * 2 * ranks.cp_size
    alignment = Alignment(cp_size=2, sample_multiple=multiple)

    def vlm_cp() -> Tensor:
        local, plan = preprocess_packed_seqs(ids, mask, alignment=alignment, cp_rank=0)
        packed_seq_params(plan)
        return local

    arms: Arms = {"vlm_cp": vlm_cp}
    if args.skyrl_pack:
        skyrl = peers.load(
            args.skyrl_pack, ["preprocess_packed_seqs"], ranks, get_packed_seq_align_size=lambda *_, **__: multiple
        )
        arms["skyrl"] = lambda: skyrl.preprocess_packed_seqs(ids, mask)[0]
    if args.verl_pack:
        verl = peers.load(args.verl_pack, ["preprocess_packed_seqs"], ranks)
        arms["verl"] = lambda: verl.preprocess_packed_seqs(ids, mask)[0]
    if args.nemo_rl_pack:
        nemo = nemo_rl(args, ["_pack_sequences_for_megatron"], ranks)
        lengths = mask.sum(1)
        arms["nemo_rl"] = lambda: nemo._pack_sequences_for_megatron(ids, lengths, multiple, 1, None, 0, 2)[1]
    return arms


def nemo_rl(args: argparse.Namespace, names: list[str], ranks: Ranks) -> Any:
    """NeMo-RL's packing uses one function of its other file, and a rounding of a third."""
    cut = peers.load(args.nemo_rl_logprobs, ["_get_tokens_on_this_cp_rank"], ranks)._get_tokens_on_this_cp_rank
    round_up = lambda value, multiple: -(-value // multiple) * multiple  # noqa: E731
    return peers.load(args.nemo_rl_pack, names, ranks, _get_tokens_on_this_cp_rank=cut, _round_up_to_multiple=round_up)


def unpack_arms(args: argparse.Namespace, mask: Tensor) -> Arms:
    size = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.group.WORLD if size > 1 else None
    rank = dist.get_rank() if size > 1 else 0
    ranks = Ranks(tp_size=TP, cp_size=size, cp_rank=rank, group=group)
    alignment = Alignment(cp_size=size, sample_multiple=TP * 2 * size if size > 1 else 1)
    plan = SequencePlan.from_lengths(mask.sum(1), alignment=alignment).to(mask.device)
    values = plan.shard(torch.arange(plan.total_tokens, device=mask.device).float(), rank)
    params = packed_seq_params(plan)
    arms: Arms = {"vlm_cp": lambda: postprocess_packed_seqs(values, plan, mask, group=group)}
    if args.verl_pack:
        verl = peers.load(args.verl_pack, ["postprocess_packed_seqs"], ranks)
        arms["verl"] = lambda: verl.postprocess_packed_seqs(values[None], params, mask, *mask.shape)
    if args.nemo_rl_pack and size == 1:  # over several ranks it gathers elsewhere
        nemo = nemo_rl(args, ["_unpack_sequences_from_megatron"], ranks)
        lengths = mask.sum(1)
        arms["nemo_rl"] = lambda: nemo._unpack_sequences_from_megatron(
            values[None, :, None], lengths, plan.cu_seqlens, None, *mask.shape
        )[..., 0]
    return arms


def case(args: argparse.Namespace, part: str, samples: int, width: int, device: torch.device) -> list[dict[str, Any]]:
    ids, mask = rows_of(samples, width, device)
    arms = pack_arms(args, ids, mask) if part == "pack_and_shard" else unpack_arms(args, mask)
    row = {"part": part, "samples": samples, "width": width, "device": device.type}
    truth = arms["vlm_cp"]()
    for name, run in arms.items():
        if not torch.equal(run(), truth):
            return [{**row, "arm": name, "refused": "the result differs from vlm_cp's"}]
    found = measure(arms, rounds=args.rounds, warmup=3)
    return [{**row, **x} for x in beside(found, device.type)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run --case pack", description=__doc__.splitlines()[0])
    peers.add_options(parser, "pack")
    parser.add_argument(
        "--nemo-rl-logprobs", type=Path, metavar="FILE", help="NeMo-RL's nemo_rl/distributed/model_utils.py"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="results file; the one of today without it")
    args = parser.parse_args(arguments)
    device = torch.device("cpu")
    if args.device == "cuda":
        from benchmarks.models import start  # brings Megatron-Bridge

        device = start("cuda")
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    file = ResultsFile("pack", args.json, keys=KEYS["pack"], more_versions=args.peer_versions) if rank == 0 else None
    for samples, width in CASES:
        for part in ("pack_and_shard", "unpack"):
            rows = case(args, part, samples, width, device)
            if file:
                file.add(rows)
    return 0 if file is None or not any("refused" in row for row in file.rows) else 1
