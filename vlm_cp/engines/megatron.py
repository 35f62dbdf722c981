"""Packed batches through a Megatron-Bridge model: the call, the inputs of each pipeline stage, and mcore's forward step.

layout="full": every CP rank passes the whole stream [1, T] with explicit positions [3, 1, T] and all media as one
stream of images; the model places the tower's rows and then cuts everything by one index. No rank runs Bridge's own
position loop, and nothing about media is read off the ids.
layout="sharded": this rank's tokens [1, T/c] with local positions, for models that do not cut (megatron-core's GPTModel)
and as Bridge's second way for Qwen3VLModel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from vlm_cp import comm
from vlm_cp.batch import PackedBatch
from vlm_cp.engines.bridge_tower import HostGridTower
from vlm_cp.engines.idle_tower import with_idle_tower
from vlm_cp.engines.packed_params import PlannedSeqParams, packed_seq_params
from vlm_cp.engines.preflight import (
    Emitter,
    check_gradients,
    check_model,
    check_overlap,
    check_plan,
    check_same_batch,
    emitter_kind,
    inspect_model,
    unwrap,
)
from vlm_cp.families.capability import Layout
from vlm_cp.loss_contract import check_loss_contract
from vlm_cp.spec import VLMSpec

# The model's output on the last stage -> this rank's share of the loss (a `TokenLoss`); the batch is the full stream's.
LossFn = Callable[[Tensor, PackedBatch], Any]


class MegatronEngine:
    """Runs a built Megatron-Bridge model on packed batches.

    chunks: what `provide_distributed_model` returned on this rank. spec: `VLMSpec.from_bridge(provider)`, None for a text
    model. layout: who cuts the stream, see above. Everything that could go wrong silently is checked here, once. The
    model is never changed.

    >>> engine = MegatronEngine(chunks, spec=VLMSpec.from_bridge(provider))                    # doctest: +SKIP
    >>> forward_backward(forward_step_func=engine.forward_step(emitter, loss_fn), ...)         # doctest: +SKIP
    """

    def __init__(self, chunks: Sequence[nn.Module], *, spec: VLMSpec | None, layout: Layout = "full") -> None:
        self.chunks = list(chunks)
        self.model = inspect_model(self.chunks)
        check_model(self.model, layout)
        self.layout: Layout = layout
        self.first_total: int | None = None  # T of the first batch that came through a schedule
        _check_spec(self.model.chunks[0], spec)

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        return self.model.cp_group

    @property
    def cp_rank(self) -> int:
        return comm.group_rank(self.model.cp_group)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return self.model.tp_group

    def inputs(self, batch: PackedBatch, chunk: nn.Module, *, with_labels: bool = False) -> dict[str, Any]:
        """The keywords of `chunk`'s call. Ids and positions go to every stage, media to the first, labels to the last.

        with_labels: let the model compute the per-token loss itself (its output is then [1, T/c] losses).
        """
        stage, vlm = unwrap(chunk), self.model.cuts_itself
        full = self.layout == "full"
        cut = _whole if full else partial(_shard, batch, self.cp_rank)
        found: dict[str, Any] = {
            "input_ids": cut(batch.input_ids),
            "position_ids": cut(batch.position_ids, 2) if vlm else cut(batch.plan.token_index[None]),
            "attention_mask": None,
            "packed_seq_params": packed_seq_params(batch.plan),
        }
        if stage.pre_process and (images := batch.image_stream()) is not None:
            found["pixel_values"] = images.pixel_values
            on_host = isinstance(stage.vision_model, HostGridTower)
            found["image_grid_thw"] = images.grid_thw.to(
                "cpu" if on_host else images.pixel_values.device, non_blocking=True
            )
            found["image_input_mask"] = cut(images.placeholder_mask)
        if stage.post_process and with_labels:
            found["labels"] = cut(batch.labels).clamp(min=0)
            found["loss_mask"] = cut(batch.loss_mask).float()
        return found

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Logits [1, T/c, V/tp] of this rank's slots; for a model that is not split into pipeline stages."""
        if len(self.chunks) > 1 or self.model.pp_size > 1:
            raise ValueError(
                f"chunks must be one whole model for a direct call, got {self.model.pp_size} pipeline stages; use forward_step"
            )
        check_plan(self.model, batch)
        return _output(self.chunks[0](**self.inputs(batch, self.chunks[0])))

    def forward_step(self, emitter: Emitter | None, loss_fn: LossFn, *, with_labels: bool = False) -> ForwardStep:
        """The `forward_step_func` of Megatron's schedules; its data iterator yields `PackedBatch`es on the device.

        emitter: a pure function, tried once here to see which loss contract it serves; None for forward-only passes that
        collect `loss_fn`'s results (`collect_non_loss_data`). with_labels: see `inputs`.
        """
        if emitter is not None:
            device = next(self.model.chunks[0].parameters()).device
            check_loss_contract(self.chunks, emitter_kind(emitter, device))
            check_gradients(self.model)
        return ForwardStep(self, emitter, loss_fn, with_labels)


@dataclass(frozen=True)
class ForwardStep:
    """One micro-batch on one stage: `(data_iterator, chunk) -> (output, loss function)`.

    An engine's first batch is compared over the CP and TP ranks, which costs one sync; later ones are not.
    """

    engine: MegatronEngine
    emitter: Emitter | None
    loss_fn: LossFn
    with_labels: bool = False

    def __call__(self, data_iterator: Iterator[PackedBatch], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch, engine = next(data_iterator), self.engine
        check_plan(engine.model, batch)
        if self.emitter is not None:
            check_overlap(chunk)
        if engine.first_total is None:
            check_same_batch(engine.model, batch)
            engine.first_total = batch.plan.total_tokens
        _check_fixed_length(engine, engine.first_total, batch)
        inputs = engine.inputs(batch, chunk, with_labels=self.with_labels)
        output = _output(chunk(**inputs))
        tower = getattr(unwrap(chunk), "vision_model", None)
        if tower is not None and "pixel_values" not in inputs:
            output = with_idle_tower(output, tower)
        return output, partial(self._loss, batch)

    def _loss(self, batch: PackedBatch, output: Tensor, non_loss_data: bool = False) -> Any:
        loss = self.loss_fn(output, batch)
        return loss if non_loss_data or self.emitter is None else self.emitter(loss)


def _whole(x: Tensor, dim: int = 1) -> Tensor:
    return x


def _shard(batch: PackedBatch, rank: int, x: Tensor, dim: int = 1) -> Tensor:
    return batch.plan.shard(x, rank, dim)


def _output(out: Any) -> Tensor:
    """Bridge returns (output, local loss mask) when it has cut a loss mask, the output alone otherwise."""
    return out[0] if isinstance(out, tuple) else out


def _check_spec(model: Any, spec: VLMSpec | None) -> None:
    for name in ("image_token_id", "video_token_id"):
        wanted = getattr(model, name, None)
        if wanted is not None and (spec is None or getattr(spec, name) != wanted):
            raise ValueError(
                f"spec must have the model's {name} {wanted}, got {spec and getattr(spec, name)}; "
                "feature rows would be placed at other tokens"
            )


def _check_fixed_length(engine: MegatronEngine, total: int, batch: PackedBatch) -> None:
    fixed = engine.model.pp_size > 1 and not engine.model.config.variable_seq_lengths
    if fixed and batch.plan.total_tokens != total:
        raise ValueError(
            f"batch.plan must have total_tokens {total} like the first batch while variable_seq_lengths is off, got "
            f"{batch.plan.total_tokens}; the next pipeline stage would wait for another shape"
        )


__all__ = ["Emitter", "ForwardStep", "LossFn", "MegatronEngine", "PlannedSeqParams", "packed_seq_params"]
