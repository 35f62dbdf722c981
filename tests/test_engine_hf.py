"""The embedded engine against transformers, sample by sample, in float64: logits and every parameter's gradient."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exact import Keep64
from ranks import run_ranks

from vlm_cp import VLMSpec, unpack
from vlm_cp.engines.hf import HFEngine
from vlm_cp.subject import Subject

HEADS = {
    2: {},
    3: {"num_attention_heads": 6, "num_key_value_heads": 3},
    4: {"num_attention_heads": 8, "num_key_value_heads": 4},
}


def subject_of(family, cp, method, names=None):
    """The demo batch in float64; with all_to_all, heads that divide by cp."""
    heads = HEADS[cp] if method == "all_to_all" else {}
    if heads and family == "qwen2_5_vl":  # its head size follows from the width
        heads = {**heads, "hidden_size": 16 * heads["num_attention_heads"]}
    subject = Subject.demo(family, dtype=torch.float64, **heads)
    if names is not None:
        subject = replace(subject, samples=[s for s in subject.samples if s.conversation.name in names])
    return subject


def weights_of(subject):
    generator = torch.Generator().manual_seed(1)
    vocabulary = subject.model.lm_head.out_features
    lengths = [s.inputs["input_ids"].numel() for s in subject.samples]
    return [torch.randn(n, vocabulary, dtype=torch.float64, generator=generator) for n in lengths]


def reference(subject):
    """transformers' logits per sample, and the gradients of their weighted sum."""
    subject.model.zero_grad()
    logits = []
    for sample, weight in zip(subject.samples, weights_of(subject), strict=True):
        with Keep64():
            found = subject.model(**sample.inputs, use_cache=False).logits[0]
        (found * weight).sum().backward()
        logits.append(found.detach())
    return logits, {n: p.grad.clone() for n, p in subject.model.named_parameters() if p.grad is not None}


def _run(rank, subject, method, logits, gradients):
    """(largest logit difference, largest relative gradient difference, parameters with a gradient)."""
    cp = dist.get_world_size()
    model, group = subject.model, dist.group.WORLD
    model.zero_grad()
    batch = subject.batch(cp)
    with HFEngine(model, spec=subject.spec, cp_group=group, attention=method) as engine:
        with Keep64():
            local = engine(batch)
        weight = batch.plan.shard(batch.plan.pack(weights_of(subject), 0.0), rank)
        (local[0] * weight).sum().backward()
        engine.sync_gradients(group)
    pairs = zip(unpack(local[0].detach(), batch.plan, group=group), logits, strict=True)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) <= set(found)
    relative = max(float((found[n] - g).norm() / g.norm()) for n, g in gradients.items())
    assert all(float(g.abs().max()) == 0 for n, g in found.items() if n not in gradients)
    return max(float((x - y).abs().max()) for x, y in pairs), relative


@pytest.mark.parametrize("method", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_logits_and_gradients(family, cp, method):
    subject = subject_of(family, cp, method)
    expected = reference(subject)
    for logits, gradients in run_ranks(cp, _run, subject, method, *expected):
        assert logits <= 1e-11
        assert gradients <= 1e-10


BATCHES = {
    "text only": ["note", "text"],
    "one image, on few ranks": ["note", "launch"],
    "video only": ["video", "note"],
    "mixed": ["mixed", "text"],
}


@pytest.mark.parametrize("names", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_b36_b38_b39_batches(family, names):
    subject = subject_of(family, 4, "all_gather", names)
    expected = reference(subject)
    for logits, gradients in run_ranks(4, _run, subject, "all_gather", *expected):
        assert logits <= 1e-11
        assert gradients <= 1e-10


def test_b35_images_straddle_chunk_borders():
    """The demo batch holds an image over a border, one over the middle, and one over chunks 0 and 2c-1 of one rank."""
    batch = Subject.demo("qwen3_vl").batch(2)
    plan = batch.plan
    chunk = plan.token_index * 4 // torch.tensor(plan.padded_lengths)[plan.sample_index]
    ends = batch.media.row_counts.cumsum(0).tolist()
    spans = [chunk[batch.media.row_slots[a:b]].unique().tolist() for a, b in zip([0, *ends], ends, strict=False)]
    assert [0, 1] in spans  # two ranks
    assert [1, 2] in spans  # the middle: both chunks of rank 1
    owners = {tuple(sorted({min(c, 3 - c) for c in span})) for span in spans}
    assert {(0, 1), (0,), (1,)} <= owners


def test_b48_the_engine_isolates_samples_where_transformers_leaks():
    """One packed row through transformers' CPU gated delta net leaks state into the second sample; ours does not."""
    subject = Subject.demo("qwen3_5", dtype=torch.float64)
    layer = subject.model.model.language_model.layers[0].linear_attn
    a, b = torch.randn(1, 7, 64, dtype=torch.float64), torch.randn(1, 9, 64, dtype=torch.float64)
    with torch.no_grad():
        packed = layer(
            torch.cat([a, b], 1), cu_seq_lens_q=torch.tensor([0, 7, 16]), seq_idx=torch.tensor([[0] * 7 + [1] * 9])
        )
        assert float((packed[:, 7:] - layer(b)).abs().max()) > 1e-3  # transformers, whatever it is told
    first = replace(subject, samples=[subject.samples[0], subject.samples[5]])
    second = replace(subject, samples=[subject.samples[3], subject.samples[5]])
    with torch.no_grad(), HFEngine(subject.model, spec=subject.spec) as engine:
        outputs = [unpack(engine(s.batch(1))[0], s.batch(1).plan)[1] for s in (first, second)]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6, rtol=0)


def test_the_model_comes_back_as_it_was():
    subject = Subject.demo("qwen3_5")
    keys = list(subject.model.state_dict())
    sample = subject.samples[1].inputs
    before = subject.model(**sample, use_cache=False).logits
    with HFEngine(subject.model, spec=subject.spec) as engine:
        engine(subject.batch(1))
        assert list(subject.model.state_dict()) == keys
        with pytest.raises(ValueError, match=r"^the model must be called through its HFEngine while one is open"):
            subject.model(**sample, use_cache=False)
    assert torch.equal(subject.model(**sample, use_cache=False).logits, before)


def _checkpointed(rank, subject):
    """Gradients without and with recomputation, as shipped: the float64 mode would not be there when it recomputes."""
    gradients = []
    for recompute in (False, True):
        if recompute:
            subject.model.gradient_checkpointing_enable({"use_reentrant": False})
        subject.model.train()
        subject.model.zero_grad()
        with HFEngine(subject.model, spec=subject.spec, cp_group=dist.group.WORLD) as engine:
            engine(subject.batch(2)).square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in subject.model.named_parameters()})
    return max(float((gradients[1][n] - g).norm() / g.norm()) for n, g in gradients[0].items())


def test_recomputation_changes_nothing():
    assert max(run_ranks(2, _checkpointed, Subject.demo("qwen3_5"))) <= 1e-5


def refuses(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}")


def test_models_that_are_refused():
    subject = Subject.demo("qwen3_vl")
    with refuses("spec must describe the model, VLMSpec(family='qwen3_vl', "):
        HFEngine(subject.model, spec=replace(subject.spec, image_token_id=1))
    subject.model.config.text_config.attention_dropout = 0.1
    with refuses("attention_dropout must be 0 under context parallelism, got 0.1; ranks would drop different scores"):
        HFEngine(subject.model, spec=subject.spec)
    windowed = Subject.demo(
        "qwen2_5_vl", use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=None
    )
    with refuses("layer_types must not hold sliding_attention, got it; the window would not be applied across ranks"):
        HFEngine(windowed.model, spec=windowed.spec)


def test_b49_a_family_without_cp_is_refused():
    from transformers import Gemma3Config

    with refuses(
        "model_type must be one of qwen2_5_vl, qwen3_vl, qwen3_5, got 'gemma3'; "
        "its feature rows and positions would be placed by another family's rules"
    ):
        VLMSpec.from_hf_config(Gemma3Config())
    subject = Subject.demo("qwen3_vl")
    with refuses(
        "family must be one of qwen2_5_vl, qwen3_vl, qwen3_5 for context parallelism, got 'kimi'; "
        "its feature rows or positions would be cut wrongly without an error"
    ):
        HFEngine(subject.model, spec=replace(subject.spec, family="kimi"))


def _heads(rank):
    subject = Subject.demo("qwen3_vl")
    try:
        HFEngine(subject.model, spec=subject.spec, cp_group=dist.group.WORLD, attention="all_to_all")
    except ValueError as error:
        return str(error)


def test_heads_that_do_not_divide_are_refused_before_the_first_step():
    assert (
        run_ranks(3, _heads)
        == [
            "attention heads must be divisible by cp_size 3 for all_to_all, got 4 query and 2 key/value heads; "
            'ranks would hold different heads. Use attention="all_gather"'
        ]
        * 3
    )


def test_a_batch_for_another_group_is_refused():
    subject = Subject.demo("qwen3_vl")
    with (
        HFEngine(subject.model, spec=subject.spec) as engine,
        refuses("group must be the context-parallel group at cp_size 2, got None; "),
    ):
        engine(subject.batch(2))
