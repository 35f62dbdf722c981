"""Checks that turn a silent fault or a hang of the first Megatron step into one sentence before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from vlm_cp import comm
from vlm_cp.batch import PackedBatch
from vlm_cp.engines import same_batch
from vlm_cp.engines.deepstack import lost_deepstack_gradient
from vlm_cp.families.capability import Capability, Layout, capability_of

# A `TokenLoss` -> what mcore's loss function returns: (loss, metrics) or (loss, num_tokens, metrics).
Emitter = Callable[[Any], tuple[Any, ...]]
EmitterKind = Literal["default", "per_token", "per_token_routed"]

PACKAGES = {"min_bridge": "megatron-bridge", "min_core": "megatron-core"}


@dataclass(frozen=True)
class BridgeModel:
    """What the engine reads off a built model: its config, its process groups and its capability row.

    chunks: this rank's stages without wrappers (DDP, Float16Module).
    """

    chunks: tuple[Any, ...]
    config: Any
    cp_group: dist.ProcessGroup | None
    tp_group: dist.ProcessGroup | None
    pp_size: int
    row: Capability

    @property
    def cp_size(self) -> int:
        return comm.group_size(self.cp_group)

    @property
    def cuts_itself(self) -> bool:
        """The model takes the full stream and cuts it after its features are placed."""
        return self.row.cut == "model"


def unwrap(module: nn.Module) -> Any:
    """The model inside Megatron's wrappers (DDP, FSDP, Float16Module): each holds the next one as `module`."""
    inner = module
    while isinstance(found := dict(inner.named_children()).get("module"), nn.Module):
        inner = found
    return inner


def inspect_model(chunks: Sequence[nn.Module]) -> BridgeModel:
    """Reads a built model; refuses one whose class has no usable capability row, for its call is not known either."""
    models = tuple(unwrap(chunk) for chunk in chunks)
    groups = models[0].pg_collection
    row = capability_of(base.__name__ for base in type(models[0]).__mro__)
    return BridgeModel(models, models[0].config, groups.cp, groups.tp, comm.group_size(groups.pp), row)


def installed_versions() -> dict[str, str]:
    """Versions of the Megatron packages, without importing them; one that is missing has no entry."""
    found: dict[str, str] = {}
    for package in PACKAGES.values():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_versions(row: Capability, found: Mapping[str, str]) -> None:
    """Refuses packages older than the row needs."""
    for attribute, package in PACKAGES.items():
        least = getattr(row, attribute)
        if least is not None and _numbers(found.get(package, "0")) < _numbers(least):
            raise ValueError(
                f"{package} must be {least} or newer for {row.model} under context parallelism, got "
                f"{found.get(package, 'none')}; older ones take the packed stream apart by other rules"
            )


def check_model(model: BridgeModel, layout: Layout) -> None:
    """Refuses a layout or a config that would compute something else at this cp_size."""
    row, config = model.row, model.config
    if layout not in row.layouts:
        raise ValueError(
            f"layout must be {' or '.join(repr(x) for x in row.layouts)} for {row.model}, got {layout!r}; "
            "the stream would be cut twice, or not at all"
        )
    _check_delta_net(config, model)
    if model.cp_size == 1:
        return
    check_versions(row, installed_versions())
    if config.context_parallel_size != model.cp_size:
        raise ValueError(
            f"context_parallel_size must be the CP group's size {model.cp_size}, got {config.context_parallel_size}; "
            "attention layers were built for another layout"
        )
    if getattr(config, "mtp_num_layers", None) and not row.mtp:
        raise ValueError(
            f"mtp_num_layers must be None under context parallelism, got {config.mtp_num_layers}; Megatron divides that "
            "loss by each rank's own tokens, so its gradient would depend on how samples fall on ranks"
        )


def _check_delta_net(config: Any, model: BridgeModel) -> None:
    if getattr(config, "experimental_attention_variant", None) != "gated_delta_net":
        return
    tp_size = comm.group_size(model.tp_group)
    if tp_size > 1 and not config.sequence_parallel:
        raise ValueError(
            f"sequence_parallel must be on for gated delta nets over {tp_size} TP ranks, got it off; "
            "megatron-core 0.19 then leaves the gradient of their output norm unsummed"
        )
    ranks = tp_size * model.cp_size
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    if heads[0] % ranks or heads[1] % ranks:
        raise ValueError(
            f"linear_num_key_heads and linear_num_value_heads must be divisible by tp * cp = {ranks}, got {heads[0]} and "
            f"{heads[1]}; gated delta nets trade tokens for heads over those ranks"
        )


def emitter_kind(emitter: Emitter, device: torch.device) -> EmitterKind:
    """Which loss contract an emitter serves, found out by giving it an empty loss; emitters are pure functions."""
    count = torch.zeros((), dtype=torch.int64, device=device)
    out: Any = emitter(SimpleNamespace(local_sum=torch.zeros((), device=device), local_count=count))
    if not isinstance(out, tuple) or len(out) not in (2, 3):
        raise ValueError(
            f"emitter must return (loss, metrics) or (loss, num_tokens, metrics), got {type(out).__name__}; "
            "Megatron's schedule would not know how to scale it"
        )
    if len(out) == 2:
        return "default"
    return "per_token_routed" if int(out[1]) else "per_token"


def check_gradients(model: BridgeModel) -> None:
    """Refuses a model whose deepstack rows would get part of their gradient, or none."""
    reason = next((r for chunk in model.chunks if (r := lost_deepstack_gradient(chunk)) is not None), None)
    if reason is not None:
        raise ValueError(
            f"the tower must keep its deepstack gradients, got a model where {reason}; "
            "register vlm_cp_hooks.keep_deepstack_gradients before the build"
        )


def check_overlap(chunk: Any) -> None:
    """Refuses overlapped gradient reduction without `no_sync_func` (Megatron's training loop sets it; a schedule does not)."""
    ddp_config = getattr(chunk, "ddp_config", None)
    if getattr(ddp_config, "overlap_grad_reduce", False) and chunk.config.no_sync_func is None:
        raise ValueError(
            "no_sync_func of the model's config must be the DDP chunk's no_sync (or a list of them) with overlap_grad_reduce, "
            "got None; from the second step on, a step's first micro-batch would be reduced alone and the others' gradients "
            "stay on their ranks"
        )


def check_plan(model: BridgeModel, batch: PackedBatch) -> None:
    """Refuses a batch that was packed for another parallel layout, or that lies on another device than the model."""
    if not isinstance(batch, PackedBatch):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"batch must be a PackedBatch, the full stream, got {type(batch).__name__}; the engine cuts it itself, as its layout says"
        )
    alignment, device = batch.plan.alignment, next(model.chunks[0].parameters()).device
    if alignment.cp_size != model.cp_size:
        raise ValueError(
            f"batch.plan must be made for the model's cp_size {model.cp_size}, got {alignment.cp_size}; "
            "samples are padded and cut for other ranks"
        )
    slices = model.cp_size * (comm.group_size(model.tp_group) if model.config.sequence_parallel else 1)
    if batch.plan.total_tokens % slices:
        raise ValueError(
            f"batch.plan must be padded to a multiple of cp * tp = {slices} tokens with sequence parallelism, got "
            f"{batch.plan.total_tokens}; pass tp_size and sequence_parallel to its Alignment"
        )
    if batch.plan.device != device:
        raise ValueError(
            f"batch must be on the model's device {device}, got {batch.plan.device}; move it once with batch.to(device)"
        )


def check_same_batch(model: BridgeModel, batch: PackedBatch) -> None:
    """`same_batch.check_same_batch` over the model's CP and TP ranks."""
    same_batch.check_same_batch(batch, context=model.cp_group, tensor=model.tp_group)


def _numbers(text: str) -> tuple[int, ...]:
    """ "0.19.2rc1" -> (0, 19, 2): what stands before the first part that is no number."""
    parts: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)
