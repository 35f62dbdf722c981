"""A VLM critic, CP=1 against CP=n: a scalar head on the embedded engine, packed samples with pictures and video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from exact import Keep64
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch, unpack
from vlm_cp.collate import pack_samples
from vlm_cp.demo.conversations import Sample, demo_conversations, encode
from vlm_cp.demo.models import tiny_model
from vlm_cp.demo.processor import build_processor
from vlm_cp.engines.hf import HFEngine
from vlm_cp.launch import rank_device
from vlm_cp.losses import TokenLoss, emit_mean
from vlm_cp.spec import VLMSpec
from vlm_cp.values import make_value_head, shifted_values, value_loss, value_terms

CLIP = 0.2


@dataclass(frozen=True)
class CriticData:
    """Demo samples and, for each, what PPO holds values against; masks are of tokens and may mark a first one."""

    family: str
    samples: list[Sample]
    returns: list[Tensor]
    old_values: list[Tensor]
    masks: list[Tensor]


def make_critic_data(family: str) -> CriticData:
    processor = build_processor(family, longest_edge=64 * 64)
    samples = [encode(processor, conversation) for conversation in demo_conversations()]
    lengths = [sample.inputs["input_ids"].numel() for sample in samples]
    generator = torch.Generator().manual_seed(0)
    returns = [10.0 ** (i % 3 - 1) * torch.randn(n, generator=generator).double() for i, n in enumerate(lengths)]
    old = [torch.randn(n, generator=generator).double() for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.5 for n in lengths]
    for mask in masks:
        mask[0] = True  # counts nowhere
    masks[1] = torch.zeros_like(masks[1])
    return CriticData(family, samples, returns, old, masks)


def build_critic(data: CriticData) -> tuple[torch.nn.Module, VLMSpec]:
    model = tiny_model(data.family, build_processor(data.family).tokenizer, dtype=torch.float64)
    model.value_head = make_value_head(model.config.text_config.hidden_size, std=0.3, dtype=torch.float64)
    return model, VLMSpec.from_hf_config(model.config)


def flat_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def naive_critic(data: CriticData, device: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """transformers' own forward, sample by sample and unpacked: values, and gradients of the clipped value loss."""
    model, _ = build_critic(data)
    model.to(device)
    values: list[Tensor] = []
    terms: list[Tensor] = []
    for i, sample in enumerate(data.samples):
        with Keep64():
            inputs = {k: (x.double() if x.is_floating_point() else x).to(device) for k, x in sample.inputs.items()}
            hidden = model.model(**inputs, use_cache=False).last_hidden_state
        heads = model.value_head(hidden)[0, :, 0].cpu()
        values.append(torch.cat([heads.new_zeros(1), heads[:-1]]))
        mask = data.masks[i].clone()
        mask[0] = False
        terms.append(value_terms(values[-1], data.returns[i], data.old_values[i], clip=CLIP)[mask])
    torch.cat(terms).mean().backward()
    return [x.detach() for x in values], {name: x.cpu() for name, x in flat_gradients(model).items()}


def packed(data: CriticData, chosen: Sequence[int], cp_size: int, spec: VLMSpec) -> PackedBatch:
    batch = pack_samples(
        [data.samples[i].inputs for i in chosen],
        alignment=Alignment(cp_size=cp_size),
        spec=spec,
        pad_token_id=0,
    )
    extras = {"returns": data.returns, "old_values": data.old_values, "mask": data.masks}
    streams = {name: batch.plan.pack([x[i] for i in chosen], 0)[None] for name, x in extras.items()}
    pixels = {
        name: None if x is None else x.double()
        for name, x in (("pixel_values", batch.pixel_values), ("pixel_values_videos", batch.pixel_values_videos))
    }
    return replace(batch, token_extras=streams, **pixels)


def check_critic(
    run_ranks: Callable[..., list[Any]], family: str, cases: Sequence[tuple[int, int]], device: str, tolerance: float
) -> None:
    """(cp_size, micro-batches) of `critic_on_ranks` against `naive_critic`: values, every parameter's gradient, its norm."""
    data = make_critic_data(family)
    expected, gradients = naive_critic(data, rank_device(device, 0))
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for cp_size, microbatches in cases:
        more = {} if device == "cpu" else {"device": device}
        for values, found, wrong in run_ranks(cp_size, critic_on_ranks, cp_size, microbatches, data, device, **more):
            for x, y in zip(values, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=tolerance)
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-9)
                assert error < 100 * tolerance, f"{name}: {error}"
            found_norm = torch.stack([g.norm() for g in found.values()]).norm()
            torch.testing.assert_close(found_norm, norm, rtol=tolerance, atol=0)
            if cp_size > 1:  # shifted on the shard, values are another token's
                assert max((x - y).abs().max() for x, y in zip(wrong, expected, strict=True)) > 0.1


def critic_on_ranks(
    rank: int, cp_size: int, num_microbatches: int, data: CriticData, device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
    """Values of all samples, gradients after the ranks' sum, and values as shifting the shard would give them."""
    group = dist.group.WORLD if cp_size > 1 else None
    model, spec = build_critic(data)
    model.to(device)
    order = torch.arange(len(data.samples)).tensor_split(num_microbatches)
    batches = [packed(data, part.tolist(), cp_size, spec).to(device) for part in order]
    count = sum(int(m[1:].sum()) for m in data.masks)
    values: list[Tensor] = []
    wrong: list[Tensor] = []
    with HFEngine(model, spec=spec, cp_group=group) as engine:
        for batch in batches:
            with Keep64():
                heads = model.value_head(engine.hidden_states(batch))
            loss = value_loss(
                heads,
                batch.plan,
                returns=batch.token_extras["returns"],
                old_values=batch.token_extras["old_values"],
                loss_mask=batch.token_extras["mask"],
                cp_rank=rank,
                clip=CLIP,
            )
            emit_mean(TokenLoss(*loss), global_count=count, world_size=1).backward()
            values += [x.detach() for x in shifted_values(heads, batch.plan, group=group)]
            local = heads.detach().flatten()
            rolled = torch.cat([local.new_zeros(1), local[:-1]])
            wrong += unpack(rolled, batch.plan, group=group)
        engine.sync_gradients(group)
    gradients = {name: x.cpu() for name, x in flat_gradients(model).items()}
    return [x.cpu() for x in values], gradients, [x.cpu() for x in wrong]
