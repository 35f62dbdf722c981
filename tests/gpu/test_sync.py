"""Nothing between a batch in host memory and its loss waits for the GPU; the CPU runs the same bodies to check their values."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from test_batch import batch_of

from vlm_cp import (
    Alignment,
    ContextParallelAttention,
    SequencePlan,
    next_token_logprobs_and_entropy,
    unpack,
)
from vlm_cp.batch import postprocess_packed_seqs, preprocess_packed_seqs
from vlm_cp.losses import token_loss

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
LENGTHS = [300, 7, 512, 1, 64]
WIDTH = 512


@contextmanager
def no_syncs(device: str) -> Iterator[None]:
    """Raises at whatever waits for the GPU, as torch's detector sees it."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows_on(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(1, 99, (len(LENGTHS), WIDTH), generator=torch.Generator().manual_seed(0))
    return ids.to(device), mask.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cp", [1, 2])
def test_rows_to_shards_and_full_stream(device: str, cp: int) -> None:
    ids, mask = rows_on(device)
    rule = Alignment(cp_size=cp, sample_multiple=2 * cp)
    of_rows = {"sub_seq_lengths": [[n] for n in LENGTHS], "alignment": rule}
    with no_syncs(device):
        stream, plan = preprocess_packed_seqs(ids, mask, shard_for_cp=False, **of_rows)
        shards = [preprocess_packed_seqs(ids, mask, cp_rank=rank, **of_rows)[0][0] for rank in range(cp)]
        joined = plan.unshard(shards)
        slots = torch.stack([plan.sample_index, plan.token_index, plan.inverse_index])
        packed = plan.pack_rows(ids, mask, 0)
    assert slots.device == stream.device
    assert torch.equal(joined, stream[0])
    assert torch.equal(packed, stream[0])
    assert torch.equal(stream[0, plan.valid], ids[mask])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("align", ["slot", "token"])
def test_values_back_to_rows_and_samples(device: str, align: str) -> None:
    mask = rows_on(device)[1]
    plan = SequencePlan.from_lengths(LENGTHS, alignment=Alignment(sample_multiple=8))
    weight = torch.rand(mask.shape, device=device)
    values = torch.rand(plan.total_tokens, device=device, requires_grad=True)
    with no_syncs(device):
        plan = plan.to(device)
        rows = postprocess_packed_seqs(values, plan, mask, align=align)
        (rows * weight).sum().backward()
        without_gradients = postprocess_packed_seqs(values.detach(), plan, mask, align=align)
        samples = unpack(values, plan)
    assert torch.equal(rows, without_gradients)
    assert torch.equal(torch.cat(samples), values[plan.valid])
    if align == "slot":
        assert torch.equal(rows[mask], values[plan.valid])
        assert torch.equal(values.grad, plan.pack_rows(weight, mask, 0.0))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_its_shards_and_its_images(device: str) -> None:
    batch = batch_of(cp=2)
    with no_syncs(device):
        moved = batch.to(device)
        parts = [moved.local(rank) for rank in (0, 1)]
        images = moved.image_stream()
    for name in ("input_ids", "labels", "loss_mask", "pixel_values", "image_grid_thw", "position_ids"):
        assert torch.equal(getattr(moved, name).cpu(), getattr(batch, name))
    for name in ("cu_seqlens", "cu_seqlens_padded", "valid"):
        assert torch.equal(getattr(moved.plan, name).cpu(), getattr(batch.plan, name))
    assert torch.equal(moved.media.row_slots.cpu(), batch.media.row_slots)
    for kind in ("token_extras", "sample_extras"):
        found, expected = getattr(moved, kind), getattr(batch, kind)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)
    for part, expected in zip(parts, [batch.local(0), batch.local(1)], strict=True):
        assert torch.equal(part.position_ids.cpu(), expected.position_ids)
        assert torch.equal(part.slot_rows.cpu(), expected.slot_rows)
    assert torch.equal(images.placeholder_mask.cpu(), batch.image_stream().placeholder_mask)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean"])
def test_logprobs_entropies_and_loss(device: str, reduction: str) -> None:
    plan = SequencePlan.from_lengths(LENGTHS, alignment=Alignment(cp_size=2))
    ids = torch.randint(1, 99, (1, plan.total_tokens), device=device)
    logits = torch.randn(1, plan.local_tokens, 100, device=device, requires_grad=True)
    temperature = torch.ones(plan.total_tokens, device=device)
    with no_syncs(device):
        plan = plan.to(device)
        logprobs, entropies = next_token_logprobs_and_entropy(logits, ids, plan, cp_rank=1, temperature=temperature)
        loss = token_loss(entropies - logprobs, plan, plan.scored[None], cp_rank=1, reduction=reduction)
        loss.local_sum.backward()
    counted = plan.shard(plan.scored, 1)
    assert bool(((logits.grad[0] != 0).any(1) == counted).all())
    assert bool((logprobs[~counted] == 0).all())
    # Four of the five samples have a scored slot; they are counted by the two ranks in turn.
    assert int(loss.local_count) == (int(counted.sum()) if reduction == "token_mean" else 1)


@pytest.mark.parametrize("device", DEVICES)
def test_attention(device: str) -> None:
    """At CP=1; tests/gpu/test_attention.py has the exchange between two GPUs."""
    plan = SequencePlan.from_lengths(LENGTHS).to(device)
    qkv = [
        torch.randn(plan.total_tokens, heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    with no_syncs(device):
        ContextParallelAttention(plan=plan, group=None, cp_rank=0)(*qkv).sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in qkv)
