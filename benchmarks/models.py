"""Megatron-Bridge models to measure: stock, or with this package's hooks, at any context-parallel size, in one process group."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

if importlib.util.find_spec("transformer_engine") is None:  # to try a program on the CPU; tests/ must be on the path
    import bridge_on_cpu

from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.utils import get_model_config
from vlm_cp_hooks import register

from benchmarks.cases import Shape, hf_config
from vlm_cp.engines.preflight import unwrap

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def start(device: str) -> torch.device:
    """Joins the process group that torchrun describes (one rank without it); on the CPU, gloo and no Transformer Engine."""
    logging.disable(logging.INFO)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29655")
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
        bridge_on_cpu.use_cpu()
        return torch.device("cpu")
    found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(found)
    # Without device_id, for with it every one of Megatron's groups opens a communicator, and keeps its GPU memory.
    dist.init_process_group("nccl", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    return found


def build(
    shape: Shape,
    *,
    cp: int = 1,
    hooks: Sequence[Any] = (),
    provider: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    wrap: bool = True,
    device: torch.device,
) -> tuple[Any, Any]:
    """(provider, the model, wrapped for data parallelism). Equal from build to build: the seed is set anew before each."""
    found = AutoBridge.from_hf_config(hf_config(shape)).to_megatron_provider(load_weights=False)
    half = device.type == "cuda"
    settings: dict[str, Any] = {
        "context_parallel_size": cp,
        "bf16": half,
        "params_dtype": torch.bfloat16 if half else torch.float32,
        "pipeline_dtype": torch.bfloat16 if half else torch.float32,
        "moe_token_dispatcher_type": "alltoall",
        "gradient_accumulation_fusion": False,  # needs APEX
        "cross_entropy_loss_fusion": half,
        "calculate_per_token_loss": True,
    }
    for name, value in {**settings, **(provider or {})}.items():
        setattr(found, name, value)
    found.finalize()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    found.initialize_model_parallel(seed=1 if half else None, create_gloo_process_groups=False)
    torch.manual_seed(0)
    register(found, *hooks)
    config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, "overlap_grad_reduce": False, **(ddp or {})})
    (model,) = found.provide_distributed_model(ddp_config=config, wrap_with_ddp=wrap, use_cpu_initialization=not half)
    return found, model


def wrapped(model: Any, *, overlap: bool) -> Any:
    """`model` in Megatron's DDP, as Bridge wraps it; gradients are summed in float32."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    return DistributedDataParallel(
        config=get_model_config(model), ddp_config=config, module=model, pg_collection=unwrap(model).pg_collection
    )


def fill(model: Any, device: torch.device) -> None:
    """Random weights, made on the device: normal with the models' own width of 0.02; norms 1, biases 0."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.02, generator=generator)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)


def share_weights(model: Any, source: Any) -> None:
    """`model`'s parameters become `source`'s tensors, so that both are the same and lie in memory once."""
    weights = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.shape == weights[name].shape
        parameter.data = weights[name].data


def groups() -> dict[str, Any]:
    """Megatron's global process groups as they are now; `vars(parallel_state).update(...)` brings them back."""
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z0-9_]+", name)}


def forget_attention_choice() -> None:
    """Makes Transformer Engine choose its attention kernel anew at the next call, so that no arm pays for the one before it.

    It keeps the parameters of its last choice, process-wide, and compares every call's with them. Stock's tower leaves a
    CUDA tensor there as the longest frame; for an arm with equal sizes it stays, and each comparison waits for the device.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as engine

        engine._attention_backends["attention_params"] = None
