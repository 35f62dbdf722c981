import re

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from vlm_cp import Alignment, ContextParallelAttention, SequencePlan


def naive_attention(q, k, v, plan):
    """Causal attention over the full stream, from its definition."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.size(-1) ** -0.5
    same_sample = plan.sample_index[:, None] == plan.sample_index
    causal = torch.ones_like(same_sample).tril()
    weights = scores.masked_fill(~(same_sample & causal), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def stream_of(plan, heads, kv_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(plan.total_tokens, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def _against_naive(rank, lengths, heads, kv_heads, method, block_size):
    cp = dist.get_world_size()
    plan = SequencePlan.from_lengths(lengths, alignment=Alignment(cp_size=cp))
    *qkv, weight = stream_of(plan, heads, kv_heads)
    full = [x.clone().requires_grad_() for x in qkv]
    expected = naive_attention(*full, plan)
    (expected * weight).sum().backward()
    local = [plan.shard(x, rank).requires_grad_() for x in qkv]
    attend = ContextParallelAttention(
        plan=plan, group=dist.group.WORLD, cp_rank=rank, method=method, block_size=block_size
    )
    out = attend(*local)
    (out * plan.shard(weight, rank)).sum().backward()
    error = float((out - plan.shard(expected, rank)).detach().abs().max())
    grads = [float((x.grad - plan.shard(y.grad, rank)).abs().max()) for x, y in zip(local, full, strict=True)]
    return max(error, *grads)


LENGTHS = {"one": [1], "short": [3, 8], "ragged": [17, 5, 64, 1, 30]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("cp", "heads", "kv_heads", "method", "block_size"),
    [
        (1, 4, 2, "all_gather", 512),
        (1, 4, 2, "all_to_all", 5),
        (2, 4, 2, "all_gather", 512),
        (2, 4, 2, "all_to_all", 512),
        (3, 4, 1, "all_gather", 5),
        (3, 6, 3, "all_to_all", 5),
        (4, 6, 2, "all_gather", 3),
        (4, 8, 4, "all_to_all", 512),
    ],
)
def test_values_and_gradients_equal_the_definition(cp, heads, kv_heads, method, block_size, lengths):
    assert max(run_ranks(cp, _against_naive, lengths, heads, kv_heads, method, block_size)) <= 1e-13


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def _largest(rank, length):
    plan = SequencePlan.from_lengths([length], alignment=Alignment(cp_size=dist.get_world_size()))
    q, k, v, _ = stream_of(plan, 2, 1, torch.float32)
    local = [plan.shard(x, rank).requires_grad_() for x in (q, k, v)]
    attend = ContextParallelAttention(plan=plan, group=dist.group.WORLD, cp_rank=rank, block_size=32)
    with LargestTensor() as largest:
        attend(*local).sum().backward()
    return largest.numel


def test_memory_grows_with_the_length_not_its_square():
    """No [T, T] tensor, and no set of blocks that adds up to one, in forward or backward."""
    short, long = max(run_ranks(2, _largest, 1024)), max(run_ranks(2, _largest, 4096))
    assert long <= 4 * short
    assert long < 4096 * 4096 // 64


def _wrong_rank(rank):
    plan = SequencePlan.from_lengths([8], alignment=Alignment(cp_size=2))
    try:
        ContextParallelAttention(plan=plan, group=dist.group.WORLD, cp_rank=1 - rank)
    except ValueError as error:
        return str(error)


def test_wrong_rank():
    assert run_ranks(2, _wrong_rank)[0] == (
        "cp_rank must be the rank inside the group, 0, got 1; queries would attend as if they stood elsewhere in their sample"
    )


def _heads_do_not_divide(rank):
    plan = SequencePlan.from_lengths([8], alignment=Alignment(cp_size=2))
    q, k, v, _ = stream_of(plan, 4, 1)
    attend = ContextParallelAttention(plan=plan, group=dist.group.WORLD, cp_rank=rank, method="all_to_all")
    try:
        attend(*(plan.shard(x, rank) for x in (q, k, v)))
    except ValueError as error:
        return str(error)


def test_heads_that_do_not_divide():
    assert run_ranks(2, _heads_do_not_divide)[0] == (
        "query and key/value heads must be divisible by cp_size 2 for all_to_all, got 4 and 1; "
        'ranks would hold different heads. Use attention="all_gather"'
    )


def test_unknown_method_and_missing_group():
    plan = SequencePlan.from_lengths([8])
    message = "method must be one of all_gather, all_to_all, got 'ring'; nothing would be exchanged"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ContextParallelAttention(plan=plan, group=None, cp_rank=0, method="ring")
    plan = SequencePlan.from_lengths([8], alignment=Alignment(cp_size=2))
    with pytest.raises(ValueError, match=r"^group must be the context-parallel group at cp_size 2, got None; "):
        ContextParallelAttention(plan=plan, group=None, cp_rank=0)
