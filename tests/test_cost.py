"""FLOPs against torch's own counter on the real models, pairs against enumeration, rates against measured steps."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.vision_utils import get_vision_window_index

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.collate import pack_samples
from vlm_cp.cost import Step, Work, frame_pairs, rank_costs, sample_costs, vision_work
from vlm_cp.demo.conversations import demo_conversations, encode
from vlm_cp.demo.models import tiny_model
from vlm_cp.demo.processor import build_processor
from vlm_cp.engines.hf import HFEngine
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import DeltaNetSpec, TextSpec, TowerSpec, VLMSpec

FORWARD = Step(backward=False)
TEXT = TextSpec(
    num_layers=28,
    hidden_size=2048,
    intermediate_size=6144,
    num_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
SPEC = VLMSpec(
    family="qwen3_vl",
    image_token_id=151655,
    video_token_id=151656,
    vision_start_token_id=151652,
    spatial_merge_size=2,
    position_scheme="frames",
    tokens_per_second=1,
    tower=TowerSpec(
        depth=24,
        hidden_size=1024,
        num_heads=16,
        intermediate_size=4096,
        patch_size=16,
        temporal_patch_size=2,
        out_hidden_size=2048,
    ),
    deepstack_levels=3,
)


def squares(*sides: int) -> Tensor:
    return torch.tensor([(1, side, side) for side in sides]).reshape(-1, 3)


@cache
def demo(family: str) -> tuple[Any, VLMSpec, TextSpec]:
    processor = build_processor(family)
    model = tiny_model(family, processor.tokenizer)
    return model, VLMSpec.from_hf_config(model.config), TextSpec.from_hf_config(model.config)


def counted(model: Any, spec: VLMSpec, batch: PackedBatch) -> dict[str, int]:
    with torch.no_grad(), HFEngine(model, spec=spec) as engine, FlopCounterMode(display=False) as counter:
        engine(batch)
    return {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_products_equal_what_torch_counts_on_the_real_model(family: str) -> None:
    model, spec, text = demo(family)
    processor = build_processor(family)
    samples = [encode(processor, conversation).inputs for conversation in demo_conversations()]
    batch = pack_samples(samples, alignment=Alignment(), spec=spec, pad_token_id=0)
    found = counted(model, spec, batch)
    (cost,) = rank_costs(batch.plan, batch.media.grids, text=text, spec=spec, step=FORWARD)
    products = found["aten.mm"] + found["aten.addmm"] + found["aten.convolution"]
    assert cost.text.flops + cost.vision.flops == products


def test_a_gated_delta_net_costs_what_torch_counts() -> None:
    model, spec, text = demo("qwen3_5")
    assert text.delta_net is not None
    length = 128  # whole chunks of 64
    ids = {"input_ids": torch.arange(length) % 200}
    batch = pack_samples([ids], alignment=Alignment(), spec=spec, pad_token_id=0)
    found = counted(model, spec, batch)
    (cost,) = rank_costs(batch.plan, text=text, spec=spec, step=FORWARD)
    net = text.delta_net
    # Row by row in transformers, so element-wise and not counted by torch.
    solve = net.num_layers * net.value_heads * length * 2 * 64**2 / 3
    # torch's convolution computes kernel - 1 outputs past the end, which are cut off; the rotary table is a product too.
    channels = 2 * net.key_heads * net.key_head_dim + net.value_heads * net.value_head_dim
    past_end = net.num_layers * 2 * channels * net.conv_kernel * (net.conv_kernel - 1)
    rotary = 2 * 3 * length * int(text.head_dim * 0.25) // 2
    products = sum(found[f"aten.{op}"] for op in ("mm", "bmm", "convolution"))
    assert cost.text.flops == pytest.approx(products - past_end - rotary + solve, rel=1e-12)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    cp_size=st.sampled_from([1, 2, 3, 4]),
)
def test_every_rank_attends_to_the_same_number_of_pairs(lengths: list[int], cp_size: int) -> None:
    plan = SequencePlan.from_lengths(lengths, alignment=Alignment(cp_size=cp_size))
    costs = rank_costs(plan, text=TEXT, spec=SPEC, step=FORWARD)
    pairs = sum(length * (length + 1) // 2 for length in plan.padded_lengths)
    per_pair = 4 * TEXT.num_heads * TEXT.head_dim * TEXT.num_layers
    assert {cost.attention.flops for cost in costs} == {pairs * per_pair / cp_size}
    assert sum(cost.tokens for cost in costs) == plan.total_tokens


def test_padding_is_counted() -> None:
    plan = SequencePlan.from_lengths([1], alignment=Alignment(cp_size=4))
    alone = SequencePlan.from_lengths([1])
    costs = rank_costs(plan, text=TEXT, spec=SPEC)
    one = rank_costs(alone, text=TEXT, spec=SPEC)[0]
    assert [cost.tokens for cost in costs] == [2] * 4
    assert costs[0].text.flops == 2 * one.text.flops
    assert sum(cost.attention.flops for cost in costs) == 36 * one.attention.flops


def test_a_replicated_tower_is_not_divided_and_a_shared_one_is() -> None:
    plan = SequencePlan.from_lengths([4096], alignment=Alignment(cp_size=2))
    grids = squares(64, 32)
    whole, attention = vision_work(grids, SPEC)
    replicated = rank_costs(plan, grids, text=TEXT, spec=SPEC, step=FORWARD)
    shared = rank_costs(plan, grids, text=TEXT, spec=SPEC, step=FORWARD, vision="shared")
    assert [(cost.vision, cost.vision_attention) for cost in replicated] == [(whole, attention)] * 2
    for cost in shared:
        assert cost.vision.flops == whole.flops / 2
        assert cost.vision_attention == attention * 0.5
        # Half of the 1280 feature rows of four levels, bf16, to the one other rank.
        assert cost.vision.sent_bytes == 640 * 4 * 2048 * 2


def test_the_tower_has_the_arithmetic_of_its_profile() -> None:
    """98304 patches in 24 images: 59.4 TFLOP of layers and 39.6 of attention, besides embedding and mergers."""
    dense, attention = vision_work(squares(*[64] * 24), SPEC)
    per_patch = 2 * 3 * 2 * 16**2 * 1024 + 4 * (2 * 4 * 1024**2 + 2 * 1024 * 2048)
    assert (dense.flops - 98304 * per_patch) / 1e12 == pytest.approx(59.4, abs=0.05)
    assert attention.flops / 1e12 == pytest.approx(39.6, abs=0.05)


def test_windows_have_the_pairs_that_transformers_cuts() -> None:
    _, spec, _ = demo("qwen2_5_vl")
    grids = torch.tensor([[1, 8, 8], [3, 6, 22], [1, 34, 2]])
    _, bounds = get_vision_window_index(grids, 2, 112, 14)
    windows = bounds.long().diff()
    frames = torch.cat([(grid[1] * grid[2]).repeat(int(grid[0])) for grid in grids])
    depth, full = spec.tower.depth, len(spec.tower.full_attention_layers)
    assert frame_pairs(grids, spec) == full * int((frames**2).sum()) + (depth - full) * int((windows**2).sum())


@pytest.mark.parametrize(
    ("lengths", "grids", "measured"),
    [
        pytest.param([4096] * 8, squares(), {"cp1": 1109, "cp2": 615}, id="text"),
        pytest.param([32768], squares(), {"cp1": 2022, "cp2": 1087}, id="long"),
        pytest.param([4096] * 8, squares(*[64] * 24), {"cp1": 2586, "cp2": 2209, "shared": 1359}, id="image"),
        pytest.param([16384] + [4096] * 4, squares(128, 128, 128, *[32] * 4), {"cp1": 2735, "cp2": 2201}, id="skewed"),
    ],
)
def test_the_default_rates_give_the_measured_steps(lengths: list[int], grids: Tensor, measured: dict[str, int]) -> None:
    """Milliseconds of stock Megatron-Bridge on H200, benchmarks' first baseline: fitted at CP=1, predicted at CP=2."""
    for arm, milliseconds in measured.items():
        alignment = Alignment(cp_size=1 if arm == "cp1" else 2)
        cost = rank_costs(
            SequencePlan.from_lengths(lengths, alignment=alignment),
            grids,
            text=TEXT,
            spec=SPEC,
            vision="shared" if arm == "shared" else "replicated",
            step=Step(recompute=True),
        )[0]
        bound = 0.01 if arm == "cp1" else 0.08
        assert 1e3 * cost.seconds() + 26 == pytest.approx(milliseconds, rel=bound)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    cp_size=st.sampled_from([1, 2, 4]),
    vision=st.sampled_from(["replicated", "shared"]),
    recompute=st.booleans(),
)
def test_sample_costs_add_up_to_the_rank_cost(lengths: list[int], cp_size: int, vision: Any, recompute: bool) -> None:
    alignment, step = Alignment(cp_size=cp_size), Step(recompute=recompute)
    grids = [squares(*[8, 32][: i % 3]) for i in range(len(lengths))]
    shape = {"text": TEXT, "spec": SPEC, "vision": vision, "step": step}
    plan = SequencePlan.from_lengths(lengths, alignment=alignment)
    costs = sample_costs(lengths, grids, alignment=alignment, **shape)
    token = rank_costs(SequencePlan.from_lengths([1]), text=TEXT, spec=SPEC, step=step)[0].text.flops / 452e12
    seconds = rank_costs(plan, torch.cat(grids), **shape)[0].seconds()
    assert sum(costs) * token / cp_size == pytest.approx(seconds, rel=1e-9)
    assert all(cost > padded for cost, padded in zip(costs, plan.padded_lengths, strict=True))


def test_passes() -> None:
    train = Step(recompute=True)
    assert (train.head, train.layers, train.attention) == (3, 4, 4.5)
    assert (Step().layers, FORWARD.layers, FORWARD.attention, FORWARD.head) == (3, 1, 1, 1)
    frozen = Step(recompute=True, train_vision=False).vision()
    assert (frozen.layers, frozen.attention) == (1, 1)
    assert train.vision() is train


def test_traffic_and_bytes_sent() -> None:
    small = TextSpec(
        num_layers=2,
        hidden_size=8,
        intermediate_size=16,
        num_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=32,
    )
    plan = SequencePlan.from_lengths([8, 8], alignment=Alignment(cp_size=2))
    cost = rank_costs(plan, text=small, spec=SPEC, step=FORWARD)[0]
    weights = 2 * (8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16) + 8 * 32
    token = 2 * ((8 + 8 + 2 * 4) + 2 * (8 + 4) + (8 + 8) + 12 * 8 + 6 * 16) + (8 + 2 * 32)
    assert cost.text == Work(
        flops=8 * (2 * (2 * 8 * 16 + 2 * 8 * 8 + 6 * 8 * 16) + 2 * 8 * 32), memory_bytes=2 * (8 * token + weights)
    )
    # Queries and outputs of the 8 own tokens, keys and values of all 16; the own keys and values go to one rank.
    assert cost.attention == Work(
        flops=2 * 4 * 8 * 36, memory_bytes=2 * 2 * (2 * 8 * 8 + 2 * 4 * 16), sent_bytes=2 * 2 * 2 * 4 * 8
    )
    net = DeltaNetSpec(num_layers=1, key_heads=1, value_heads=2, key_head_dim=4, value_head_dim=4, conv_kernel=4)
    hybrid = rank_costs(plan, text=replace(small, delta_net=net), spec=SPEC, step=FORWARD)[0]
    # One layer attends. Half of a token's 2 Kd + 2 Vd + 4 there and Vd back stays on this rank.
    assert hybrid.attention == cost.attention * 0.5
    assert hybrid.text.sent_bytes == 8 * (2 * 4 + 3 * 8 + 4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_text_spec_of_a_config(family: str) -> None:
    _, _, text = demo(family)
    layers = 4 if family == "qwen3_5" else 3
    assert (text.num_layers, text.hidden_size, text.num_heads, text.num_key_value_heads) == (layers, 64, 4, 2)
    assert text.head_dim == (32 if family == "qwen3_5" else 16)
    assert text.gated_attention == (family == "qwen3_5")
    net = DeltaNetSpec(num_layers=3, key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=16, conv_kernel=4)
    assert text.delta_net == (net if family == "qwen3_5" else None)


def test_text_spec_of_another_model_is_refused() -> None:
    class Config:
        model_type = "gemma3"

    message = (
        "model_type must be one of qwen2_5_vl, qwen3_vl, qwen3_5, got 'gemma3'; "
        "its feature rows and positions would be placed by another family's rules"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TextSpec.from_hf_config(Config())


def test_bad_arguments_are_refused() -> None:
    plan = SequencePlan.from_lengths([8], alignment=Alignment(cp_size=2))
    vision: Any = "split"
    message = (
        "vision must be one of replicated, shared, got 'split'; the tower would be charged once or cp-fold by accident"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rank_costs(plan, text=TEXT, spec=SPEC, vision=vision)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sample_costs([3], [None], alignment=Alignment(), text=TEXT, spec=SPEC, vision=vision)
    message = "grids must have one entry a sample, 2 in all, got 1; media would be charged to other samples"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sample_costs([3, 4], [None], alignment=Alignment(), text=TEXT, spec=SPEC)
