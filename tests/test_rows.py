import re

import numpy as np
import pytest
import torch

from vlm_cp import rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_spread_repeats_each_value(dtype):
    values = torch.tensor([1, 0, 3]).to(dtype)
    found = rows.spread(values, torch.tensor([2, 0, 3], dtype=torch.int32), 5)
    assert found.dtype == dtype
    assert torch.equal(found, torch.tensor([1, 1, 3, 3, 3]).to(dtype))


@pytest.mark.parametrize(
    ("starts", "lengths", "numbers"),
    [
        ([5, 100, 0], [3, 1, 2], [5, 6, 7, 100, 0, 1]),
        ([7, 9], [0, 2], [9, 10]),
        ([7, 9], [0, 0], []),
    ],
    ids=["any order", "an empty run", "nothing"],
)
def test_expand_counts_on_inside_each_run(starts, lengths, numbers):
    found = rows.expand(np.array(starts), np.array(lengths), CPU)
    assert found.dtype == torch.int64
    assert found.tolist() == numbers


def test_cells_of_a_mask_with_holes():
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    assert rows.counts_of(mask).tolist() == [2, 0, 2]
    assert rows.true_cells(mask, 4).tolist() == [0, 2, 6, 7]
    assert rows.true_cells(mask.T.contiguous().T, 4).tolist() == [0, 2, 6, 7]  # along the rows, however they are stored


@pytest.mark.parametrize("shape", [(), (3,)], ids=["numbers", "vectors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool], ids=str)
def test_put_and_put_where_agree(dtype, shape):
    mask = torch.tensor([[True, False, True], [False, True, True]])
    values = (torch.arange(1, 5).view(4, *[1] * len(shape)).expand(4, *shape) * 10).to(dtype)
    fill = 0 if dtype == torch.bool else 7
    expected = torch.full((2, 3, *shape), fill, dtype=dtype)
    expected[mask] = values
    assert torch.equal(rows.put_where(values, mask, fill), expected)
    assert torch.equal(rows.put(values, rows.true_cells(mask, 4), 6, fill).view_as(expected), expected)


@pytest.mark.parametrize("shape", [(), (3,)], ids=["numbers", "vectors"])
def test_put_where_with_gradients(shape):
    mask = torch.tensor([[True, False, True], [False, True, True]])
    values = torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, 10, 100, 1000, 1e4, 1e5], dtype=torch.float64).view(2, 3, *[1] * len(shape))
    found = rows.put_where(values, mask, -1.0)
    assert torch.equal(found, rows.put_where(values.detach(), mask, -1.0))
    (found * weight).sum().backward()
    assert torch.equal(values.grad, weight.expand_as(found)[mask])
    assert torch.autograd.gradcheck(lambda x: rows.put_where(x, mask, -1.0), values)


def test_put_where_leaves_what_it_was_given():
    values, mask = torch.arange(3.0), torch.tensor([[True, True, True]])
    rows.put_where(values, mask, 0.0)[0, 0] = 99
    assert values.tolist() == [0, 1, 2]


LENGTHS = (3, 2, 4)
OFFSETS = torch.tensor([0, 3, 5, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    "counts", [[3, 2, 4], [5, 4], [3, 0, 6], [0, 9, 0]], ids=["one each", "two in a row", "an empty row", "all in one"]
)
def test_rows_of_whole_samples_pass(counts):
    rows.check_counts(torch.tensor(counts), OFFSETS, LENGTHS)


@pytest.mark.parametrize("counts", [[4, 1, 4], [3, 2, 3], [3, 2, 4, 1], [9, 3], [3, 2], [0]], ids=str)
def test_other_counts_are_refused(counts):
    message = (
        f"attention_mask must mark exactly the plan's 9 tokens, samples whole in their rows, got {sum(counts)} in rows "
        f"of {counts}; values would move to other samples"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rows.check_counts(torch.tensor(counts), OFFSETS, LENGTHS)
