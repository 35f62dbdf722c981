"""The pieces of the vision tower that `shard_vision_over_cp` replaces, each beside what replaces it.

Every entry of `PARTS` returns (arms, errors): functions to time, and how far each is from float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import apply_rotary_pos_emb_absolute
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from benchmarks.tower_oracle import rotate
from vlm_cp.cut_attention import attend_frames
from vlm_cp.engines.bridge_tower import _narrow, _seq_params
from vlm_cp.engines.rotary import rotated
from vlm_cp.tower import PositionTables, rotary_angles
from vlm_cp.vision_layout import Runs

Arms = dict[str, Callable[[], Any]]


def _layout(profile: Any, grids: Tensor) -> Any:
    return profile.towers["hook"].vision_work.layout(grids.cpu(), profile.device)


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found.detach().double() - truth).norm() / truth.norm())


def _both(arms: Arms, inputs: list[Tensor]) -> Arms:
    """Each arm forward alone, and forward with backward to its inputs."""
    timed: Arms = {}
    for name, run in arms.items():

        def forward(run: Any = run) -> None:
            with torch.no_grad():
                run()

        def backward(run: Any = run) -> None:
            out = run()
            torch.autograd.grad(out, inputs, torch.ones_like(out))

        timed[f"{name}_forward"], timed[f"{name}_forward_backward"] = forward, backward
    return timed


def position_embedding(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    tower, layout = profile.towers["stock"], _layout(profile, grids)
    table = tower.pos_embed.weight
    tables = PositionTables(tower.num_grid_per_side, 2)
    arms: Arms = {
        "stock": lambda: tower.fast_pos_embed_interpolate(grids),
        "tables": lambda: tables.embeddings(table, layout),
    }
    truth = PositionTables(tower.num_grid_per_side, 2).embeddings(table.double(), layout)
    weight = torch.randn_like(truth)
    (true_gradient,) = torch.autograd.grad(truth, table, weight)
    errors = {}
    for name, run in arms.items():
        found = run()
        (gradient,) = torch.autograd.grad(found, table, weight.to(found.dtype))
        errors[name] = (_error(found, truth.detach()), _error(gradient, true_gradient.double()))
    return _both(arms, [table]), {"errors_value_gradient": errors}


def angles(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    tower, layout = profile.towers["stock"], _layout(profile, grids)
    side = int(grids[:, 1:].max())
    arms: Arms = {
        "stock": lambda: tower.rot_pos_emb(grids).reshape(len(pixels), 1, 1, -1).repeat(1, 1, 1, 2),
        "tables": lambda: rotary_angles(tower.rotary_pos_emb(side), layout)[:, None, None],
    }
    return arms, {"equal": bool(torch.equal(*(run() for run in arms.values())))}


def rotary(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    """A query as it comes out of the fused projection: a strided view."""
    tower, layout = profile.towers["stock"], _layout(profile, grids)
    config, patches = tower.config, len(pixels)
    heads, width = config.num_attention_heads, config.kv_channels
    mixed = torch.randn(patches, heads, 3 * width, device=profile.device, dtype=profile.dtype).requires_grad_()
    query = mixed[..., :width]
    table = rotary_angles(tower.rotary_pos_emb(int(grids[:, 1:].max())), layout)[:, None, None]
    offsets = layout.own.cu_q
    arms: Arms = {
        "stock": lambda: apply_rotary_pos_emb_absolute(query, table, config=config, cu_seqlens=offsets),
        "fused": lambda: rotated(query, table),
    }
    few = slice(0, min(patches, 8192))
    source = query[few].detach().double().requires_grad_()
    truth = rotate(source, table[few, 0].double())
    weight = torch.randn_like(truth)
    (true_gradient,) = torch.autograd.grad(truth, source, weight)
    errors = {}
    for name, run in arms.items():
        out = run()
        full = torch.zeros_like(out)
        full[few] = weight.to(out.dtype)
        (gradient,) = torch.autograd.grad(out, mixed, full)
        errors[name] = (_error(out[few], truth.detach()), _error(gradient[few, :, :width], true_gradient))
    return _both(arms, [mixed]), {"errors_value_gradient": errors}


def text_rotary(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    """A query of the language model at 32768 positions, whose cosines stock rounds to the query's precision."""
    config, width = profile.models["stock"].config, 128
    tokens = 32768 if profile.device.type == "cuda" else 64
    query = torch.randn(tokens, 16, width, device=profile.device, dtype=profile.dtype).requires_grad_()
    frequencies = 5e6 ** (-torch.arange(0, width, 2, device=profile.device) / width)
    angles = torch.arange(tokens, device=profile.device)[:, None] * frequencies
    table = torch.cat([angles, angles], 1)[:, None, None]
    offsets = torch.tensor([0, tokens], device=profile.device, dtype=torch.int32)
    arms: Arms = {
        "stock": lambda: apply_rotary_pos_emb_absolute(query, table, config=config, cu_seqlens=offsets),
        "fused": lambda: rotated(query, table),
    }
    source = query.detach().double().requires_grad_()
    truth = rotate(source, table[:, 0].double())
    weight = torch.randn_like(truth)
    (true_gradient,) = torch.autograd.grad(truth, source, weight)
    errors = {}
    for name, run in arms.items():
        out = run()
        (gradient,) = torch.autograd.grad(out, query, weight.to(out.dtype))
        errors[name] = (_error(out, truth.detach()), _error(gradient, true_gradient))
    return _both(arms, [query]), {"errors_value_gradient": errors}


def patch_embedding(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    embed = profile.towers["stock"].patch_embed
    weight, bias = embed.proj.weight, embed.proj.bias
    arms: Arms = {"stock": lambda: embed(pixels), "product": lambda: F.linear(pixels, weight.flatten(1), bias)}
    truth = F.linear(pixels[:4096].double(), weight.flatten(1).double(), bias.double()).detach()
    return _both(arms, [weight, bias]), {"errors": {n: _error(run()[:4096], truth) for n, run in arms.items()}}


def attention(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    """The core attention with an int and with a tensor as its longest frame, and torch's own flash kernel."""
    tower, layout = profile.towers["stock"], _layout(profile, grids)
    config, patches = tower.config, len(pixels)
    shape = (patches, config.num_attention_heads, config.kv_channels)
    q, k, v = (torch.randn(shape, device=profile.device, dtype=profile.dtype).requires_grad_() for _ in range(3))
    core, ours = tower.decoder.layers[0].self_attention.core_attention, _seq_params(layout.own)
    stock = tower.build_packed_seq_params(grids)

    def run(params: PackedSeqParams) -> Tensor:
        return core(q, k, v, None, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=params)

    arms: Arms = {
        "stock": lambda: run(stock),
        "int_lengths": lambda: run(ours),
        "torch_flash": lambda: attend_frames(q, k, v, layout.own).flatten(1),
    }
    found = {name: call() for name, call in arms.items()}
    errors = {name: _error(x, found["stock"].detach().double()) for name, x in found.items()}
    return _both(arms, [q, k, v]), {"against_stock": errors}


def shared_attention(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    """What shared frames need of the core attention: fewer heads, and part of the queries against whole frames."""
    tower, layout = profile.towers["stock"], _layout(profile, grids)
    config, frame = tower.config, layout.own.q_lengths[0]
    heads, width = config.num_attention_heads, config.kv_channels
    patches = 4 * frame
    shape = (patches, heads, width)
    q, k, v = (torch.randn(shape, device=profile.device, dtype=profile.dtype).requires_grad_() for _ in range(3))
    core = tower.decoder.layers[0].self_attention.core_attention
    narrow = _narrow(core, config, 2, tower)

    def runs(queries: list[int], keys: list[int]) -> Runs:
        bounds = [torch.tensor([0, *x], device=profile.device).cumsum(0).int() for x in (queries, keys)]
        return Runs(tuple(queries), tuple(keys), bounds[0], bounds[0] if queries == keys else bounds[1])

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, found: Runs) -> Tensor:
        out = module(q, k, v, None, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=_seq_params(found))
        return out.unflatten(1, (q.size(1), width))

    # Twice, since a graph of Transformer Engine's fused attention can be walked backward only once.
    whole, again = (attend(core, q, k, v, runs([frame] * 4, [frame] * 4)) for _ in range(2))
    packed = torch.stack([x[:, : heads // 2] for x in (q, k, v)], 1)
    half = attend(narrow, packed[:, 0], packed[:, 1], packed[:, 2], runs([frame] * 4, [frame] * 4))
    cut = frame // 3 // 4 * 4
    middle = slice(cut, 3 * frame - cut)
    part = attend(
        core, q[middle].clone(), k[: 3 * frame], v[: 3 * frame], runs([frame - cut, frame, frame - cut], [frame] * 3)
    )
    expected, weight = whole.detach().double(), torch.randn_like(whole)
    (all_keys,) = torch.autograd.grad(again[middle], k, weight[middle])
    (part_keys,) = torch.autograd.grad(part, k, weight[middle])
    (half_values,) = torch.autograd.grad(half, v, weight[:, : heads // 2])
    (all_values,) = torch.autograd.grad(whole, v, weight)
    errors = {
        "half_of_the_heads": _error(half, expected[:, : heads // 2]),
        "half_of_the_heads_gradient": _error(half_values[:, : heads // 2], all_values[:, : heads // 2].double()),
        "part_of_the_queries": _error(part, expected[middle]),
        "part_of_the_queries_gradient": _error(part_keys, all_keys.double()),
    }
    return {
        "half": lambda: attend(narrow, packed[:, 0], packed[:, 1], packed[:, 2], runs([frame] * 4, [frame] * 4))
    }, errors


def products(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    """A layer's four matrix products, norms included, and the merger: what no replacement touches."""
    tower, patches = profile.towers["stock"], len(pixels)
    layer, config = tower.decoder.layers[0], tower.config
    x = torch.randn(patches, 1, config.hidden_size, device=profile.device, dtype=profile.dtype).requires_grad_()
    wide = torch.randn(patches, 1, config.ffn_hidden_size, device=profile.device, dtype=profile.dtype).requires_grad_()
    modules = {
        "qkv": (layer.self_attention.linear_qkv, x),
        "projection": (layer.self_attention.linear_proj, x),
        "fc1": (layer.mlp.linear_fc1, x),
        "fc2": (layer.mlp.linear_fc2, wide),
        "merger": (lambda y: (tower.merger(y), None), x),
    }
    timed: Arms = {}
    for name, (module, y) in modules.items():
        timed |= _both({name: lambda module=module, y=y: module(y)[0]}, [y])
    return timed, {}


def bias_gelu(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    config = profile.towers["stock"].config
    wide = torch.randn(len(pixels), 1, config.ffn_hidden_size, device=profile.device, dtype=profile.dtype)
    bias = torch.randn(config.ffn_hidden_size, device=profile.device, dtype=profile.dtype)
    wide, bias = wide.requires_grad_(), bias.requires_grad_()
    arms: Arms = {
        "stock": lambda: F.gelu(wide + bias, approximate="tanh"),
        "fused": lambda: bias_gelu_impl(wide, bias),
    }
    truth = F.gelu(wide[:4096].detach().double() + bias.detach().double(), approximate="tanh")
    return _both(arms, [wide, bias]), {"errors": {n: _error(run()[:4096], truth) for n, run in arms.items()}}


def bias_residual(profile: Any, pixels: Tensor, grids: Tensor) -> tuple[Arms, dict[str, Any]]:
    config = profile.towers["stock"].config
    make = lambda *shape: torch.randn(*shape, device=profile.device, dtype=profile.dtype).requires_grad_()  # noqa: E731
    shape = (len(pixels), 1, config.hidden_size)
    x, residual, bias = make(*shape), make(*shape), make(config.hidden_size)
    arms: Arms = {
        "stock": lambda: get_bias_dropout_add(True, False)((x, bias), residual, 0.0),
        "fused": lambda: get_bias_dropout_add(True, True)((x, bias), residual, 0.0),
    }
    truth = (x + bias + residual)[:4096].detach().double()
    return _both(arms, [x, residual, bias]), {
        "against_each_other": {n: _error(run()[:4096], truth) for n, run in arms.items()}
    }


PARTS = {
    "position_embedding": position_embedding,
    "angles": angles,
    "rotary": rotary,
    "text_rotary": text_rotary,
    "patch_embedding": patch_embedding,
    "attention": attention,
    "shared_attention": shared_attention,
    "products": products,
    "bias_gelu": bias_gelu,
    "bias_residual": bias_residual,
}
