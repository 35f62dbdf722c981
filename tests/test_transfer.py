import pytest
import torch

from vlm_cp import transfer

TENSORS = [
    torch.arange(3, dtype=torch.int32),
    torch.tensor(True),
    torch.empty(0, 3, dtype=torch.int64),
    torch.arange(24.0).view(4, 6).T,  # not contiguous
    torch.tensor([[True, False, True]]),
    torch.arange(5, dtype=torch.bfloat16),
]


def same(found, expected):
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("tensors", [TENSORS, TENSORS[:1], []], ids=["many", "one", "none"])
def test_one_buffer_holds_tensors_of_any_kind(tensors):
    calls = []

    def move(buffer):
        calls.append(buffer)
        return buffer.clone()

    found = transfer.through_one_buffer(tensors, move)
    assert len(calls) == 1
    assert all(same(x, y) for x, y in zip(found, tensors, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in found if x.numel()}) <= 1


def test_pieces_of_a_buffer_do_not_overlap():
    first, second = transfer.through_one_buffer([torch.zeros(3, dtype=torch.int8), torch.ones(2)], torch.clone)
    first.fill_(9)
    assert second.tolist() == [1, 1]
    assert second.data_ptr() % 16 == 0


def test_on_the_same_device_nothing_is_copied():
    assert transfer.moved(TENSORS[0], "cpu") is TENSORS[0]
    assert all(x is y for x, y in zip(transfer.moved_together(TENSORS, "cpu"), TENSORS, strict=True))


def test_another_device_than_cuda():
    found = transfer.moved_together(TENSORS, "meta")
    assert [(x.device.type, x.shape, x.dtype) for x in found] == [("meta", x.shape, x.dtype) for x in TENSORS]


def test_resolved_leaves_a_device_with_an_index():
    assert transfer.resolved("cpu") == torch.device("cpu")
    assert transfer.resolved("cuda:1") == torch.device("cuda", 1)


@pytest.mark.gpu(1)
def test_to_a_gpu_in_one_copy():
    mixed = [*TENSORS, torch.arange(4, device="cuda")]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = transfer.moved_together(mixed, "cuda")
        alone = transfer.moved(TENSORS[3], "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(same(x.cpu(), y.cpu()) and x.is_cuda for x, y in zip([*found, alone], [*mixed, TENSORS[3]], strict=True))
    assert len({x.untyped_storage().data_ptr() for x in found[:-1]}) == 1
    assert found[-1] is mixed[-1]
    assert transfer.resolved("cuda") == found[0].device
