"""The arms of a whole training step: stock Bridge and this package at CP=1 and CP=n, all resident, one active at a time.

Their weights are the same tensors. Gradient buffers of the arms that wait are given back (Megatron's own
`offload_grad_buffers`), so that an arm's peak memory is what it would have alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from vlm_cp_hooks import keep_deepstack_gradients, shard_vision_over_cp

from benchmarks.cases import Shape
from benchmarks.models import RECOMPUTE, build, fill, forget_attention_choice, groups, share_weights, wrapped
from vlm_cp.batch import PackedBatch
from vlm_cp.engines.comm_type import set_comm_type
from vlm_cp.engines.deepstack import keep_deepstack_gradient
from vlm_cp.engines.megatron import MegatronEngine, packed_seq_params
from vlm_cp.engines.preflight import unwrap
from vlm_cp.exchange import COMM_TYPES, CommChoice, CommType
from vlm_cp.spec import VLMSpec


@dataclass(frozen=True)
class Arm:
    """stock: Bridge as it is, with its switches comm and by_count (`vision_dp_when_cp`); else this package's hooks.

    comm: how attention exchanges keys and values; None lets this package's cost model pick.
    """

    cp: int
    stock: bool
    comm: CommType | None = None
    by_count: bool = False

    @property
    def name(self) -> str:
        parts = [f"cp{self.cp}", "stock" if self.stock else "vlm_cp"]
        return "_".join([*parts, *([self.comm] if self.comm else []), *(["by_count"] if self.by_count else [])])


def all_arms(cp: int, *, by_count: bool = False, every_comm: bool = False) -> list[Arm]:
    """Every arm at CP=1 and CP=cp; stock with each of its switches. by_count: also the one for vision, nothing without media.

    every_comm: this package also with each way of exchange, beside the one that it picks. On one rank nothing is exchanged
    or dealt out: two arms.
    """
    if cp == 1:
        return [Arm(1, True), Arm(1, False)]
    counts = (False, True) if by_count else (False,)
    stock = [Arm(cp, True, comm, by_count) for comm in COMM_TYPES for by_count in counts]
    own = [Arm(cp, False, comm) for comm in (None, *(COMM_TYPES if every_comm else ()))]
    return [Arm(1, True), Arm(1, False), *stock, *own]


@dataclass
class Built:
    """A built model with its process groups; ddp: the same model wrapped for the present `overlap_grad_reduce`."""

    provider: Any
    model: Any
    groups: dict[str, Any]
    stock_decoder: type
    ddp: Any = None
    engine: Any = None


class Resident:
    """All models that the arms ask for. `activate` makes one arm's ready, `step` runs it."""

    def __init__(
        self, shape: Shape, device: torch.device, *, recompute: bool, hooks: Sequence[Any] = (), tower: dict[str, Any]
    ) -> None:
        """hooks: further ones of this package's arms. tower: arguments of `shard_vision_over_cp`."""
        self.shape, self.device = shape, device
        self.provider = RECOMPUTE if recompute else {}
        self.hooks = [keep_deepstack_gradients, shard_vision_over_cp(**tower), *hooks]
        self.built: dict[tuple[int, bool], Built] = {}
        self.overlap = False
        self.choice: CommChoice | None = None

    def model(self, cp: int, stock: bool) -> Built:
        if (cp, stock) not in self.built:
            provider, model = build(
                self.shape,
                cp=cp,
                hooks=() if stock else self.hooks,
                provider={**self.provider, "perform_initialization": False},
                wrap=False,
                device=self.device,
            )
            if self.built:
                share_weights(model, next(iter(self.built.values())).model)
            else:
                fill(model, self.device)
            self.built[cp, stock] = Built(provider, model, groups(), type(unwrap(model).vision_model.decoder))
        return self.built[cp, stock]

    @property
    def spec(self) -> VLMSpec:
        return VLMSpec.from_bridge(next(iter(self.built.values())).provider)

    def wrap(self, *, overlap: bool) -> None:
        """Wraps every model anew; gradient buffers exist only while a model is active."""
        self.overlap = overlap
        for built in self.built.values():
            self.wrap_again(built)

    def wrap_again(self, built: Built) -> None:
        """A new DDP: for another setting, or after a failure inside a step, which leaves half of the old one's state behind."""
        built.ddp = built.engine = None
        gc.collect()
        vars(parallel_state).update(built.groups)
        built.ddp = wrapped(built.model, overlap=self.overlap)
        built.engine = MegatronEngine([built.ddp], spec=self.spec)
        built.ddp.offload_grad_buffers(empty_cache=False)

    def activate(self, arm: Arm, batch: PackedBatch) -> Built:
        """Makes the arm's model the only one with gradient buffers, zeroed, and sets its switches."""
        forget_attention_choice()
        active = self.built[arm.cp, arm.stock]
        for built in self.built.values():
            if built is not active and _has_buffers(built.ddp):
                built.ddp.offload_grad_buffers(empty_cache=False)
        vars(parallel_state).update(active.groups)
        if not _has_buffers(active.ddp):
            active.ddp.restore_grad_buffers()
        active.ddp.zero_grad_buffer()
        active.provider.vision_dp_when_cp = arm.by_count
        allowed = COMM_TYPES if arm.comm is None else (arm.comm,)
        self.choice = None if arm.stock else active.engine.choose_comm_type([batch.plan], allowed=allowed)
        if arm.stock and arm.comm is not None:
            set_comm_type(unwrap(active.model), arm.comm)
        return active

    @property
    def must_stay_repaired(self) -> bool:
        """Stock cannot run with recompute and `overlap_grad_reduce`: DDP asserts that the lost gradients have come."""
        return self.overlap and bool(self.provider)

    def repair(self, on: bool) -> None:
        """Stock models with their deepstack gradients kept, as they must be to be compared; and as they come, to be timed."""
        for (_, stock), built in self.built.items():
            decoder = unwrap(built.model).vision_model.decoder
            if stock and on:
                keep_deepstack_gradient(unwrap(built.model))
            elif stock:
                decoder.__class__ = built.stock_decoder

    def step(self, arm: Arm, batch: PackedBatch, *, scale: float) -> Tensor:
        """Forward, backward and the sum of gradients over the ranks; returns this rank's losses [T/c]."""
        built = self.built[arm.cp, arm.stock]
        if arm.stock:
            inputs = stock_inputs(batch)
        else:
            batch = fresh(batch)
            unwrap(built.model).vision_model.vision_work.forget_layouts()
            inputs = built.engine.inputs(batch, built.ddp, with_labels=True)
        out = built.ddp(**inputs)
        losses = (out[0] if isinstance(out, tuple) else out)[0].float()
        mask = batch.plan.shard(batch.loss_mask, built.engine.cp_rank, 1)[0]
        ((losses * mask).sum() * scale).backward()
        built.ddp.finish_grad_sync()
        return losses.detach()

    def reduce_gradients(self, built: Built) -> Callable[[], None]:
        """The sum of all gradients over the ranks alone, nothing to overlap it with."""

        def run() -> None:
            if self.overlap:
                built.ddp.start_grad_sync()
            built.ddp.finish_grad_sync()

        return run


def _has_buffers(ddp: Any) -> bool:
    return ddp.buffers[0].grad_data.untyped_storage().size() > 0


def fresh(batch: PackedBatch) -> PackedBatch:
    """The batch as it comes to a step, without the indices that were derived from its plan and media in a former one."""
    return replace(batch, plan=replace(batch.plan), media=replace(batch.media))


def stock_inputs(batch: PackedBatch) -> dict[str, Any]:
    """What a user of stock Bridge passes: ids, labels and what processors return; positions are Bridge's own business."""
    offsets, longest, device = batch.plan.cu_seqlens_padded, batch.plan.max_seqlen, batch.input_ids.device
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if device.type == "cpu":  # the attention that stands in for Transformer Engine's there reads the plan
        params = packed_seq_params(batch.plan)
    media = {
        "pixel_values": batch.pixel_values,
        "image_grid_thw": batch.image_grid_thw,
        "pixel_values_videos": batch.pixel_values_videos,
        "video_grid_thw": batch.video_grid_thw,
    }
    return {
        "input_ids": batch.input_ids,
        "position_ids": None,
        "attention_mask": None,
        "packed_seq_params": params,
        "labels": batch.labels.clamp(min=0),
        "loss_mask": batch.loss_mask.float(),
        **{name: x.to(device) for name, x in media.items() if x is not None},
    }


def whole_losses(losses: Tensor, batch: PackedBatch, built: Built) -> Tensor:
    """[N] losses of the scored real tokens, the same on every rank and at every cp_size."""
    return batch.plan.gather(losses, built.engine.cp_group)[batch.plan.scored]
