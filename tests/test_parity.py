"""`run_parity` finds equal what is equal, and names what each deliberate break did."""

from dataclasses import replace

import pytest
import torch
from exact import Keep64

from vlm_cp import ContextParallelAttention, SequencePlan
from vlm_cp.families import VisionRows
from vlm_cp.parity import Bound, Difference, run_parity
from vlm_cp.subject import Candidate, Outcome, Subject

EXACT = Bound(logprob_max_abs=1e-11, grad_max_rel=1e-10, loss_abs=1e-11)


def breaking(**methods):
    """A candidate whose engine has some methods replaced: name -> function(engine, original, *args)."""

    class Broken(Candidate):
        def __init__(self, *args):
            super().__init__(*args)
            for name, method in methods.items():
                original = getattr(self.engine, name)
                setattr(self.engine, name, lambda *a, m=method, o=original: m(self.engine, o, *a))

    return Broken


def parity_of(candidate, cp=2, family="qwen3_vl", **fields):
    subject = replace(Subject.demo(family, dtype=torch.float64), **fields)
    return run_parity(subject, cp=cp, numerics=Keep64, candidate=candidate, bound=EXACT)


def contiguous_cut(engine, original, batch):
    """Slices instead of zigzag chunks; everything else is right."""
    rank, size, local = engine.cp_rank, batch.plan.cp_size, original(batch)
    mine = slice(rank * batch.plan.local_tokens, (rank + 1) * batch.plan.local_tokens)
    assert size > 1
    return replace(
        local,
        input_ids=batch.input_ids[:, mine],
        position_ids=batch.position_ids[..., mine],
        slot_rows=batch.media.slot_rows()[mine],
    )


def positions_on_the_shard(engine, original, batch):
    """mRoPE of the local ids as if they were a stream: what a model does that is handed a shard."""
    local = original(batch)
    return replace(local, position_ids=torch.arange(batch.plan.local_tokens).expand(3, 1, -1))


def continued_positions(engine, original, batch):
    """Positions that run on from sample to sample."""
    local = original(batch)
    whole = torch.arange(batch.plan.total_tokens).expand(3, 1, -1)
    return replace(local, position_ids=batch.plan.shard(whole, local.cp_rank, 2))


def deepstack_one_off(engine, original, local, rows):
    levels = tuple(level.roll(1, 0) for level in rows.levels)
    return original(local, replace(rows, levels=levels))


def swapped_kinds(engine, original, batch):
    """Video rows first, although image placeholders are counted first."""
    rows, images = original(batch), int(batch.media.row_counts[: batch.media.num_images].sum())
    swap = lambda x: torch.cat([x[images:], x[:images]])  # noqa: E731
    return VisionRows(swap(rows.main), tuple(map(swap, rows.levels)))


def other_pixels(engine, original, batch):
    return original(replace(batch, pixel_values=batch.pixel_values.roll(4, 0)))


def one_long_sample(engine, original, batch):
    """Attention that does not know where samples end."""
    whole = SequencePlan.from_lengths([batch.plan.total_tokens], alignment=batch.plan.alignment)
    return ContextParallelAttention(plan=whole, group=engine.cp_group, cp_rank=engine.cp_rank)


def random_pad_positions(engine, original, batch):
    local = original(batch)
    pads = ~batch.plan.shard(batch.plan.valid, local.cp_rank)
    return replace(local, position_ids=torch.where(pads, 17 + torch.arange(len(pads)), local.position_ids))


class RolledOnTheShard(Candidate):
    def logprobs(self, logits, batch):
        local = batch.local(self.rank)
        targets = local.input_ids[0].roll(-1)
        found = logits[0].float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return found.where(batch.plan.shard(batch.plan.scored, self.rank), 0.0)


class RolledAcrossSamples(Candidate):
    def logprobs(self, logits, batch):
        targets = batch.plan.shard(batch.input_ids[0].roll(-1), self.rank)
        found = logits[0].float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return found.where(batch.plan.shard(batch.plan.valid, self.rank), 0.0)


class LostGradient(Candidate):
    """One rank's share of every gradient is missing."""

    def logits(self, batch):
        logits = super().logits(batch)
        return logits if self.rank == 0 else logits.detach() + 0 * logits


BREAKS = {
    "contiguous cut": (breaking(local=contiguous_cut), "partition", "input_ids"),
    "positions on the shard": (breaking(local=positions_on_the_shard), "positions", "position_ids"),
    "positions not restarted": (breaking(local=continued_positions), "positions", "position_ids"),
    "deepstack rows one off": (breaking(text_inputs=deepstack_one_off), "deepstack", "deepstack.0"),
    "image and video rows swapped": (breaking(encode=swapped_kinds), "media_rows", "inputs_embeds"),
    "tower fed other patches": (breaking(encode=other_pixels), "vision", "model.visual.patch_embed.proj"),
    "a sample attends to another": (
        breaking(attention_of=one_long_sample),
        "attention",
        "model.language_model.layers.0.self_attn.o_proj",
    ),
    "labels rolled on the shard": (RolledOnTheShard, "labels", "log-probabilities"),
    "labels rolled across samples": (RolledAcrossSamples, "labels", "log-probabilities"),
    "gradient of one rank lost": (LostGradient, "gradients", "log-probabilities"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_breaks_are_caught_by_name(name):
    candidate, cause, module = BREAKS[name]
    report = parity_of(candidate)
    assert not report.passed
    assert report.first_divergence.cause == cause
    assert report.first_divergence.module == module
    assert report.first_divergence.max_abs > 1e-2 or cause == "gradients"


def test_the_place_is_named():
    where = parity_of(breaking(encode=swapped_kinds)).first_divergence
    assert (where.sample, where.item) == (0, "image 0")
    assert (where.first_token, where.last_token) == (7, 30)  # all 24 rows of the first image
    where = parity_of(RolledOnTheShard).first_divergence
    assert (where.first_token, where.last_token) == (
        24,
        74,
    )  # the ends of the chunks whose next token is on the other rank
    where = parity_of(breaking(encode=other_pixels)).first_divergence
    assert (where.sample, where.item, where.first_token) == (0, "image 0", None)


def test_a_leaking_state_is_named():
    """Qwen3.5's layers in local order instead of natural order."""

    class LocalOrder(Candidate):
        def __init__(self, *args):
            super().__init__(*args)
            for handle in self.engine._hooks:
                handle.remove()

    where = parity_of(LocalOrder, family="qwen3_5").first_divergence
    assert where.cause == "state"
    assert where.module.startswith("model.language_model.layers.0.linear_attn")


def test_b43_pad_positions_do_not_matter():
    assert parity_of(breaking(local=random_pad_positions)).passed


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("cp", [1, 3])
def test_equal_within_the_measured_floor(family, cp):
    steps = []
    report = run_parity(Subject.demo(family), cp=cp, progress=steps.append)
    assert report.passed
    assert report.first_divergence is None
    assert set(report.floors) == {"kernel", "order"}
    assert len(steps) == 4
    assert 0 < report.tolerance.logprob_max_abs < 1e-3
    assert abs(report.difference.grad_norm_ratio - 1) < 1e-4


def test_the_model_keeps_its_attention():
    subject = Subject.demo("qwen3_vl")
    run_parity(subject, cp=1)
    config = subject.model.config
    assert {c._attn_implementation for c in (config, config.text_config, config.vision_config)} == {"sdpa"}


def test_a_break_fails_the_measured_bound_too():
    report = run_parity(Subject.demo("qwen3_vl"), cp=2, candidate=breaking(text_inputs=deepstack_one_off))
    assert not report.passed


def test_the_summary_has_the_fixed_keys():
    row = run_parity(Subject.demo("qwen3_vl"), cp=2).summary()
    fixed = (
        "family engine device dtype cp tp tokens samples logprob_max_abs logprob_mean_abs grad_norm_ratio grad_max_rel "
        "tolerance passed first_divergence"
    )
    assert set(fixed.split()) <= set(row)
    assert row["tokens"] == 732
    assert row["first_divergence"] is None


def outcome(logprobs, gradient):
    return Outcome([torch.tensor(logprobs)], 0.0, {"a": torch.tensor(gradient), "b": torch.tensor([10.0])})


def test_differences():
    found = Difference.between(outcome([1.0, 2.0, 0.0], [3.0, 4.0]), outcome([1.0, 2.5, 0.0], [3.0, 5.0]))
    assert (found.logprob_max_abs, found.logprob_mean_abs, found.worst_parameter) == (0.5, 0.25, "a")
    assert found.grad_max_rel == pytest.approx(1 / 34**0.5)
    assert found.grad_norm_ratio == pytest.approx((125 / 134) ** 0.5)


@pytest.mark.parametrize("place", ["logprobs", "gradient"])
def test_nan_never_passes(place):
    nan = float("nan")
    found = outcome([nan, 0.0], [1.0, 1.0]) if place == "logprobs" else outcome([0.0, 0.0], [nan, 1.0])
    difference = Difference.between(found, outcome([0.0, 0.0], [1.0, 1.0]))
    assert not Bound(1.0, 1.0, 1.0).holds(difference)
    assert difference.worst_parameter == "a"
