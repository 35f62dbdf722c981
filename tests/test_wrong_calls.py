"""Calls that cannot be right: engines, attention, vision work and the command line; and that no rank is left waiting."""

import re

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_batch import SPEC

from vlm_cp import Alignment, Metric, SequencePlan, pack_samples, reduce_metrics
from vlm_cp.attention import ContextParallelAttention
from vlm_cp.cli import main
from vlm_cp.engines.hf import HFEngine
from vlm_cp.subject import Subject
from vlm_cp.vision import assign_vision

PLAN = SequencePlan.from_lengths([3, 8])


def refuses(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    "shapes",
    [
        [(5, 4, 8), (11, 2, 8), (11, 2, 8)],
        [(22, 4, 8), (11, 2, 8), (11, 2, 8)],
        [(11, 8), (11, 8), (11, 8)],
        [(11, 4, 8), (11, 2, 8), (11, 1, 8)],
        [(4, 11, 8), (2, 11, 8), (2, 11, 8)],
    ],
    ids=["few queries", "many queries", "no heads", "other values", "heads first"],
)
def test_shapes_of_attention(shapes):
    """The wrong number of queries was computed as far as it went, or cut off."""
    attention = ContextParallelAttention(plan=PLAN, group=None, cp_rank=0)
    with refuses(
        "query, key and value must have shapes [11, Hq, D], [11, Hkv, D] and key's own, one row a slot of this rank, "
        f"got {shapes[0]}, {shapes[1]} and {shapes[2]}; queries would see other tokens, or none"
    ):
        attention(*map(torch.zeros, shapes))


def test_block_size():
    with refuses("block_size must be at least 1, got 0; no query would ever be computed"):
        ContextParallelAttention(plan=PLAN, group=None, cp_rank=0, block_size=0)


def test_vision_work():
    grids = torch.tensor([[2, 2], [4, 4], [4, 4]])
    why = "other frames would be dealt than the tower takes"
    with refuses(
        f"grids must be integers of shape [*, 3], (t, h, w) in patches, got torch.int64 of shape (3, 2); {why}"
    ):
        assign_vision(grids, cp_size=2, spec=SPEC)
    with refuses(
        f"grids must be integers of shape [*, 3], (t, h, w) in patches, got torch.float32 of shape (2, 3); {why}"
    ):
        assign_vision(grids.T + 0.5, cp_size=2, spec=SPEC)
    with refuses("cp_size must be at least 1, got 0; there would be no rank to deal frames to"):
        assign_vision(grids.T, cp_size=0, spec=SPEC)
    dealt = assign_vision(grids.T, cp_size=2, spec=SPEC)
    for call in (dealt.frames_of, dealt.shared_rows, dealt.cost_of):
        with refuses("rank must lie in [0, 2), got -1; another rank's frames would be taken"):
            call(-1)


# The HF engine.


def test_engines_that_are_refused():
    subject = Subject.demo("qwen3_vl")
    with refuses("attention must be one of all_gather, all_to_all, got 'ring'; nothing would be exchanged"):
        HFEngine(subject.model, spec=subject.spec, attention="ring")
    for model in (subject.model.model, torch.nn.Linear(1, 1)):
        with refuses(
            f"model must be a ...ForConditionalGeneration with its lm_head, got {type(model).__name__}; it has no logits"
        ):
            HFEngine(model, spec=subject.spec)
    batch = subject.batch(1)
    with HFEngine(subject.model, spec=subject.spec) as engine:
        with refuses(
            "model must have no other open HFEngine, got one; closing either would leave the other's attention on its shard"
        ):
            HFEngine(subject.model, spec=subject.spec)
        with refuses("batch must be a PackedBatch, the full stream, got LocalBatch; the engine cuts it itself"):
            engine(batch.local(0))
    with refuses("engine must be open, got a closed one; its layers would attend to the shard only"):
        engine(batch)


def own_batch(rank, cp_size, dealt, vision):
    """What a data loader that deals by global rank gives, or an alignment that forgot the layout."""
    subject = Subject.demo("qwen3_vl")
    samples = [sample.inputs for sample in subject.samples]
    batch = pack_samples(
        samples[rank:] + samples[:rank] if dealt else samples,
        alignment=Alignment(cp_size=cp_size),
        spec=subject.spec,
        pad_token_id=subject.pad_token_id,
    )
    with HFEngine(subject.model, spec=subject.spec, cp_group=dist.group.WORLD, vision=vision, min_patches=0) as engine:
        try:
            engine(batch)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("vision", ["replicated", "shared"])
def test_no_rank_waits_for_one_that_was_refused(vision):
    found = run_ranks(2, own_batch, 2, True, vision, timeout=60.0)
    assert found[0] == found[1]
    assert found[0].startswith("batch must be the same on all context-parallel ranks, got lengths (")
    found = run_ranks(2, own_batch, 1, False, vision, timeout=60.0)
    assert set(found) == {"group must have the plan's cp_size 1 ranks, got 2; shards would be lost"}


def own_samples(rank, pixels):
    text = {"input_ids": torch.tensor([1, 2, 3])}
    image = {
        "input_ids": torch.tensor([1, 90, 90]),
        "image_grid_thw": torch.tensor([[1, 2, 4]]),
        "pixel_values": torch.zeros(pixels, 12),
    }
    try:
        pack_samples(
            [image if rank else text], alignment=Alignment(), spec=SPEC, pad_token_id=0, group=dist.group.WORLD
        )
    except ValueError as error:
        return str(error)


def test_pixels_of_one_rank_stop_all():
    message = "pixel_values must have the 8 patches that its grids describe, got 4; images would shift into each other"
    assert run_ranks(2, own_samples, 4, timeout=30.0) == [f"{message} (found on rank 1 of 2)"] * 2
    assert run_ranks(2, own_samples, 8, timeout=30.0) == [None] * 2


def own_metrics(rank):
    other = Metric(1.0, "mean" if rank else "sum")
    try:
        reduce_metrics([{"kl": Metric(1.0, "sum")}, {"kl": other}], group=dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_metrics_of_one_rank_stop_all():
    message = "kl must have one reduction everywhere, got mean, sum; the result would depend on the order"
    assert run_ranks(2, own_metrics, timeout=30.0) == [f"{message} (found on rank 1 of 2)"] * 2


# The command line.


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_results_that_cannot_be_written(flag, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none" / "result"):
        assert main(["parity", flag, str(path)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert said.startswith(f"vlm-cp: {flag} must be a file in a folder that can be written to, got ")
        assert said.endswith("; the result would be lost after the run")


def test_brackets_in_errors_are_shown(tmp_path, capsys):
    """rich takes them for markup."""
    file = tmp_path / "[red]sizes[/x].jsonl"
    assert main(["plan", str(file)]) == 2
    assert "[red]sizes[/x].jsonl" in capsys.readouterr().err.replace("\n", "")
