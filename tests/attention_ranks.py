"""What the ranks of tests/gpu/test_attention.py run; spawned ranks import it by name."""

import torch
import torch.distributed as dist
from test_attention import naive_attention, stream_of

from vlm_cp import Alignment, ContextParallelAttention, SequencePlan

LENGTHS = [1000, 37, 1, 2048, 511]


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METHODS = ("all_gather", "all_to_all")


def all_errors(rank):
    """One start of the ranks for all cases: (method, dtype) -> `errors_of`."""
    return {(method, dtype): errors_of(rank, method, dtype) for method in METHODS for dtype in DTYPES}


def errors_of(rank, method, dtype):
    """Largest error of output and gradients over their scale, against float64, at CP=2 and at CP=1 of the same kernel."""
    cp = dist.get_world_size()
    plan = SequencePlan.from_lengths(LENGTHS, alignment=Alignment(cp_size=cp)).to("cuda")
    *qkv, weight = [torch.cat([x] * 8, -1).to("cuda", dtype) for x in stream_of(plan, 8, 4, torch.float32)]
    exact = [x.double().requires_grad_() for x in qkv]
    expected = naive_attention(*exact, plan)
    (expected * weight.double()).sum().backward()
    local = [plan.shard(x, rank).requires_grad_() for x in qkv]
    out = ContextParallelAttention(plan=plan, group=dist.group.WORLD, cp_rank=rank, method=method)(*local)
    (out * plan.shard(weight, rank)).sum().backward()
    whole = SequencePlan.from_lengths(plan.padded_lengths).to("cuda")
    alone = [x.clone().requires_grad_() for x in qkv]
    stock = ContextParallelAttention(plan=whole, group=None, cp_rank=0)(*alone)
    (stock * weight).sum().backward()

    def error(found, wanted):
        return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())

    cut = [plan.shard(x, rank) for x in (expected.detach(), *(x.grad for x in exact))]
    ours = max(error(a, b) for a, b in zip([out.detach(), *(x.grad for x in local)], cut, strict=True))
    kernel = max(
        error(a, b)
        for a, b in zip(
            [stock.detach(), *(x.grad for x in alone)], [expected.detach(), *(x.grad for x in exact)], strict=True
        )
    )
    return ours, kernel


def runs_without_syncs(rank):
    """What tests/gpu/test_sync.py runs on one GPU, between two: joining and attention, under the detector of host syncs."""
    ids = torch.randint(1, 100, (64, 512), device="cuda")
    plan = SequencePlan.from_lengths([300] * 64, alignment=Alignment(cp_size=2))
    mask = (torch.arange(512, device="cuda") < 300).expand(64, -1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = plan.to("cuda")
        stream = plan.pack_rows(ids, mask, 0)
        local = plan.shard(stream, rank)
        direct = plan.shard_cells(ids, plan.row_cells(mask, ids), rank, 0)
        back = plan.gather(local.float(), dist.group.WORLD)
        for method in METHODS:
            qkv = [
                torch.ones(plan.local_tokens, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
                for _ in "qkv"
            ]
            attention = ContextParallelAttention(plan=plan, group=dist.group.WORLD, cp_rank=rank, method=method)
            attention(*qkv).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.equal(direct, local) and torch.equal(back[plan.real_index], ids[mask].float())
