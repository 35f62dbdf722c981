import re

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks

from vlm_cp import comm
from vlm_cp.launch import run_ranks as launch


def _gather(rank, backward):
    group, size = dist.group.WORLD, dist.get_world_size()
    x = (10.0**rank * torch.arange(1, 7, dtype=torch.float64).view(3, 2)).requires_grad_()
    full = comm.all_gather(x, group, backward=backward)
    weight = torch.arange(full.numel(), dtype=torch.float64).view_as(full) + 100 * rank
    (full * weight).sum().backward()
    weights = [weight + 100 * (r - rank) for r in range(size)]
    rows = slice(3 * rank, 3 * rank + 3)
    expected = sum(weights)[rows] if backward == "sum" else weight[rows]
    parts = [10.0**r * torch.arange(1, 7, dtype=torch.float64).view(3, 2) for r in range(size)]
    return torch.equal(full, torch.cat(parts)), torch.equal(x.grad, expected)


@pytest.mark.parametrize("backward", ["slice", "sum"])
def test_all_gather_and_its_two_gradients(backward):
    assert run_ranks(3, _gather, backward) == [(True, True)] * 3


def _exchange(rank):
    size = dist.get_world_size()
    sent = torch.stack([torch.tensor([10.0 * rank + r, 1.0]) for r in range(size)]).requires_grad_()
    got = comm.all_to_all(sent, dist.group.WORLD)
    (got * (rank + 1)).sum().backward()
    return got[:, 0].tolist(), sent.grad[:, 0].tolist()


def test_all_to_all():
    found = run_ranks(3, _exchange)
    assert [got for got, _ in found] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert [grad for _, grad in found] == [[1, 2, 3]] * 3


def _rows(rank):
    """Rank r sends r + to rows to rank `to`, none where that is divisible by 3."""
    size = dist.get_world_size()
    counts = [[0 if (r + to) % 3 == 0 else r + to for to in range(size)] for r in range(size)]
    sent = torch.cat([torch.full((n, 2), 10.0 * rank + to) for to, n in enumerate(counts[rank])]).requires_grad_()
    received = [counts[r][rank] for r in range(size)]
    got = comm.all_to_all_rows(sent, sent=counts[rank], received=received, group=dist.group.WORLD)
    (got * (rank + 1)).sum().backward()
    expected = torch.cat([torch.full((n, 2), 10.0 * r + rank) for r, n in enumerate(received)])
    gradient = torch.cat([torch.full((n, 2), to + 1.0) for to, n in enumerate(counts[rank])])
    return torch.equal(got, expected), torch.equal(sent.grad, gradient)


def test_all_to_all_rows():
    assert run_ranks(3, _rows) == [(True, True)] * 3


def test_rows_that_would_be_waited_for_are_refused():
    message = "sent must add up to x's 3 rows, got [1, 1]; the ranks would wait for rows that never come"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        comm.all_to_all_rows(torch.zeros(3, 1), sent=[1, 1], received=[1, 1], group=None)


def test_one_rank_is_the_identity():
    x = torch.randn(1, 3, requires_grad=True)
    assert comm.all_gather(x, None, backward="sum") is x
    assert comm.all_to_all(x, None) is x
    assert comm.all_to_all_rows(x, sent=[1], received=[1], group=None) is x
    assert (comm.group_size(None), comm.group_rank(None)) == (1, 0)


def test_all_to_all_of_the_wrong_size():
    message = "x.size(0) must be the group's size 1, got 2; rows would go to the wrong rank"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        comm.all_to_all(torch.zeros(2), None)


def _fails_on_one(rank):
    if rank == 1:
        raise KeyError("lost")
    dist.barrier()


def test_a_rank_that_fails_is_reported_not_waited_for():
    with pytest.raises(RankError, match=r"(?s)rank 1:.*KeyError: 'lost'"):
        run_ranks(2, _fails_on_one)


def _never_together(rank):
    if rank == 0:
        dist.barrier()
    else:
        import time

        time.sleep(60)


def test_ranks_that_hang_are_killed():
    with pytest.raises(TimeoutError, match=r"ranks still running after 1\.0 s: not all of them entered a collective"):
        run_ranks(2, _never_together, timeout=1.0)


def test_forking_needs_one_thread():
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match=r"torch must run one thread to fork ranks, got 2; the ranks would hang"):
            launch(1, _gather, "sum")
    finally:
        torch.set_num_threads(1)
