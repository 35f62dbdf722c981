"""The installed Megatron-Bridge on CPU and gloo, for tests only: what stands in for CUDA and Transformer Engine.

Importing this file imports Megatron-Bridge (9 s), with a stub in Transformer Engine's place where that is absent. `use_cpu()`
then replaces what needs a GPU. Call it inside a forked rank, which ends with the test; nothing is ever put back. The
modules standing in for Transformer Engine's have its parameter names, so that Bridge's own weight mappings apply.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("megatron.core")
if importlib.util.find_spec("transformer_engine") is not None:
    pytest.skip("the CPU oracle replaces Transformer Engine, which is installed here", allow_module_level=True)


class _Stub(ModuleType):
    """A module that has every name: classes for capitalised ones, modules for the others."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {}) if name[0].isupper() else importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        stubbed = name.split(".")[0] == "transformer_engine"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _transformer_engine_stubbed() -> Iterator[None]:
    finder = _StubFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]


def _import_bridge() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            importlib.import_module("megatron.core.models.gpt")  # sees that Transformer Engine is absent
            with _transformer_engine_stubbed():
                importlib.import_module("megatron.core.extensions.transformer_engine_spec_provider")
                importlib.import_module("megatron.bridge")
        finally:
            logging.disable(logging.NOTSET)


_import_bridge()

from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model as qwen3_vl_model
from megatron.bridge.peft import module_matcher
from megatron.bridge.peft import utils as peft_utils
from megatron.core import utils as mcore_utils
from megatron.core.extensions import transformer_engine_spec_provider as te_spec_provider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variant_specs
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.vision import vit_layer_specs
from megatron.core.optimizer import optimizer as mcore_optimizer
from megatron.core.ssm.gated_delta_net import common as gdn_common
from megatron.core.ssm.gated_delta_net import gdn
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP

from vlm_cp.engines.core_attention import CoreAttention


class Norm(nn.Module):
    """Transformer Engine's LayerNorm or RMSNorm, whichever the config names."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        _add_norm_parameters(self, "", config, hidden_size)
        self.config, self.eps = config, eps

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(self, "", x, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm and column-parallel linear in one module."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        _add_norm_parameters(self, "layer_norm_", config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = _normalise(self, "layer_norm_", input_, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


def _add_norm_parameters(module: nn.Module, prefix: str, config: Any, size: int) -> None:
    start = torch.zeros(size) if config.layernorm_zero_centered_gamma else torch.ones(size)
    module.register_parameter(f"{prefix}weight", nn.Parameter(start.to(config.params_dtype)))
    if config.normalization == "LayerNorm":
        module.register_parameter(f"{prefix}bias", nn.Parameter(torch.zeros(size, dtype=config.params_dtype)))
    for name, parameter in module.named_parameters(recurse=False):
        if name == f"{prefix}weight" or name == f"{prefix}bias":
            parameter.sequence_parallel = config.sequence_parallel


def _normalise(module: Any, prefix: str, x: Tensor, eps: float) -> Tensor:
    weight = getattr(module, f"{prefix}weight") + float(module.config.layernorm_zero_centered_gamma)
    if module.config.normalization == "LayerNorm":
        return F.layer_norm(x, weight.shape, weight, getattr(module, f"{prefix}bias"), eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class VisionAttention(MegatronModule):
    """Full attention of each run of queries to its keys, at cp_size 1, for the tower."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__(config=config)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None, *, packed_seq_params: Any, **_: Any) -> Tensor:
        queries, keys = (x.diff().tolist() for x in (packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv))
        parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        out = [F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in part)) for part in parts]
        return torch.cat([x[0].transpose(0, 1) for x in out]).flatten(1)


def core_attention(*, attn_mask_type: AttnMaskType, **kwargs: Any) -> MegatronModule:
    if attn_mask_type == AttnMaskType.no_mask:
        return VisionAttention(**kwargs)
    return CoreAttention(attn_mask_type=attn_mask_type, **kwargs)


def partitioned_indices(cu_seqlens: Tensor, total_tokens: int, cp_size: int, rank: int) -> Tensor:
    """Transformer Engine's `thd_get_partitioned_indices`, written from its definition: chunks r and 2c-1-r of each sample."""
    parts: list[Tensor] = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        chunks = torch.arange(start, end, dtype=torch.int32).chunk(2 * cp_size)
        parts += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
    index = torch.cat(parts)
    assert len(index) * cp_size == total_tokens
    return index


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """fla's: a depthwise causal convolution [1, T, D] that starts anew at each sample, then SiLU."""
    width = weight.size(1)
    samples = x[0].t().split(cu_seqlens.diff().tolist(), 1)
    out = [F.conv1d(F.pad(s, (width - 1, 0)), weight[:, None], bias, groups=len(weight)) for s in samples]
    return F.silu(torch.cat(out, 1).t()[None]), None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """fla's `chunk_gated_delta_rule`, by megatron-core's torch version, one sample after the other."""
    lengths = cu_seqlens.diff().tolist()
    samples = zip(*(x.split(lengths, 1) for x in (q, k, v, g, beta)), strict=True)
    out = [gdn_common.torch_chunk_gated_delta_rule(a, b, c, g=d, beta=e, chunk_size=16)[0] for a, b, c, d, e in samples]
    return torch.cat(out, 1), None


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def use_cpu() -> None:
    """Replaces CUDA and Transformer Engine in this process, for good. Only for a forked rank."""
    gc.disable()  # a collection would copy the parent's memory page by page
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch._dynamo.config.disable = True  # megatron-core compiles small functions
    _replace_cuda()
    _replace_transformer_engine()
    mcore_optimizer.clip_grad_by_total_norm_fp32 = _clip
    gdn_common.HAVE_FLA = True
    gdn_common.l2norm = lambda x, eps=1e-6: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = causal_conv1d, gated_delta_rule


def _replace_cuda() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = lambda *_: _Stream()
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    mcore_random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    mcore_random._get_cuda_rng_state = mcore_random._set_cuda_rng_state = lambda *_, **__: None
    torch.utils._device._device_constructors()  # remembers the functions below as they are, for `with torch.device(...)`
    for name in ("zeros", "empty", "tensor", "ones"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _clip(parameters: list[Tensor], max_norm: float, total_norm: float, *_: Any, **__: Any) -> None:
    """Megatron's asserts CUDA tensors."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, max_norm / (total_norm + 1e-6)))


def _on_cpu(factory: Any) -> Any:
    def build(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return factory(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

    return build


def _replace_transformer_engine() -> None:
    transformer_block.LayerNormImpl = Norm
    mcore_utils.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    standing_in = {
        "TENorm": Norm,
        "TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TEDotProductAttention": core_attention,
    }
    for module in (te_spec_provider, vit_layer_specs, qwen3_vl_model):
        for name, replacement in standing_in.items():
            if hasattr(module, name):
                setattr(module, name, replacement)
    provider = te_spec_provider.TESpecProvider
    provider.layer_norm = lambda *_, **__: Norm
    provider.activation_func = lambda *_: None
    provider.grouped_mlp_modules = lambda *_: _experts
    for name in [n for m in (peft_utils, module_matcher) for n in vars(m) if n.startswith("HAVE_TE")]:
        setattr(peft_utils, name, False)
        setattr(module_matcher, name, False)
    gpt_layer_specs.TESpecProvider = variant_specs.TESpecProvider = provider


def _experts(*args: Any, **kwargs: Any) -> SequentialMLP:
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(*args, submodules=submodules, **kwargs)
