"""The embedded engine: a transformers VLM under context parallelism, on gloo (CPU) or NCCL (GPU), without patching it.

Seams: transformers' own attention registry for the text model, and forward hooks on the layers that carry state. The
path of a batch: vision tower on all media -> this rank's slots of the full-stream row table -> text model on the shard,
its attention exchanging keys and values -> local logits. Every rank must call the engine with the same batch; an engine's
first one is compared over the CP ranks, which costs one sync.
"""

from __future__ import annotations

from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface

from vlm_cp import comm
from vlm_cp.attention import AttentionMethod, ContextParallelAttention
from vlm_cp.batch import LocalBatch, PackedBatch
from vlm_cp.cost import VisionWork
from vlm_cp.engines.hf_vision import encode_shared
from vlm_cp.engines.same_batch import check_same_batch
from vlm_cp.families import VisionRows, family_of
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import VLMSpec
from vlm_cp.vision import MIN_PATCHES, VisionAssignment, assign_vision
from vlm_cp.vision_layout import VisionLayout

_NAME = "vlm_cp"


class HFEngine:
    """Runs `model` (a `...ForConditionalGeneration` of a supported family) on packed batches.

    cp_group: the context-parallel group, None for one rank. attention: see `vlm_cp.attention`.
    vision: "replicated", every rank encodes all images and frames; "shared", each its share (`vlm_cp.vision`), from
    min_patches patches in a batch.
    While the engine is open, the model's text attention only works through it; `close` (or leaving the `with` block) puts
    the former attention back and removes the hooks. Parameters, their names and the vision tower are never touched.

    >>> engine = HFEngine(model, spec=VLMSpec.from_hf_config(model.config), cp_group=group)   # doctest: +SKIP
    >>> logits_local = engine(batch)                                                          # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        spec: VLMSpec,
        cp_group: dist.ProcessGroup | None = None,
        attention: AttentionMethod = "all_gather",
        vision: VisionWork = "replicated",
        min_patches: int = MIN_PATCHES,
    ) -> None:
        self.model: Any = model
        self.family = family_of(spec)
        self.cp_group = cp_group
        self.cp_rank = comm.group_rank(cp_group)
        self.attention: AttentionMethod = attention
        self.vision: VisionWork = vision
        self.min_patches = min_patches
        if not hasattr(model, "lm_head") or not hasattr(getattr(model, "config", None), "text_config"):
            raise ValueError(
                f"model must be a ...ForConditionalGeneration with its lm_head, got {type(model).__name__}; it has no logits"
            )
        text = self.model.config.text_config
        found = VLMSpec.from_hf_config(self.model.config)
        if found != spec:
            raise ValueError(
                f"spec must describe the model, {found}, got {spec}; rows and positions would be placed by other rules"
            )
        if vision not in get_args(VisionWork):
            raise ValueError(
                f"vision must be one of {', '.join(get_args(VisionWork))}, got {vision!r}; every rank would encode everything"
            )
        self.spec = spec
        _check_text_config(text, attention, comm.group_size(cp_group))
        if text._attn_implementation == _NAME:
            raise ValueError(
                "model must have no other open HFEngine, got one; closing either would leave the other's attention on its shard"
            )
        self._seen_batch = False
        self._former_attention: str = text._attn_implementation
        AttentionInterface.register(_NAME, _attention)
        self.model.set_attn_implementation({"text_config": _NAME})
        self._hooks = [
            handle
            for layer in self.family.natural_order_layers(model)
            for handle in (
                layer.register_forward_pre_hook(_to_natural_order, with_kwargs=True),
                layer.register_forward_hook(_to_local_order, with_kwargs=True),
            )
        ]

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Logits [1, T/c, V] of this rank's slots, in local order; padding slots hold values that mean nothing."""
        return self.model.lm_head(self.hidden_states(batch))

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """The text model's last hidden states [1, T/c, H] of this rank's slots."""
        self._check(batch)
        cp = self.attention_of(batch)  # first: what it refuses, every rank refuses
        if not self._seen_batch:
            check_same_batch(batch, context=self.cp_group)
            self._seen_batch = True
        inputs = self.text_inputs(self.local(batch), self.encode(batch))
        return self.model.model.language_model(**inputs, use_cache=False, cp=cp).last_hidden_state

    def _check(self, batch: PackedBatch) -> None:
        if not isinstance(batch, PackedBatch):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"batch must be a PackedBatch, the full stream, got {type(batch).__name__}; the engine cuts it itself"
            )
        if self.model.config.text_config._attn_implementation != _NAME:
            raise ValueError("engine must be open, got a closed one; its layers would attend to the shard only")

    def local(self, batch: PackedBatch) -> LocalBatch:
        """This rank's part of the batch."""
        return batch.local(self.cp_rank)

    def attention_of(self, batch: PackedBatch) -> ContextParallelAttention:
        """The attention that every layer calls for this batch."""
        return ContextParallelAttention(
            plan=batch.plan, group=self.cp_group, cp_rank=self.cp_rank, method=self.attention
        )

    def text_inputs(self, local: LocalBatch, rows: VisionRows | None) -> dict[str, Any]:
        """What the text model takes: embeddings with feature rows in place, positions, and deepstack where there is one."""
        embeds = self.model.get_input_embeddings()(local.input_ids)
        if rows is None:
            return {"inputs_embeds": embeds, "position_ids": local.position_ids}
        visual = local.slot_rows >= 0
        index = local.slot_rows[visual]
        embeds = embeds.masked_scatter(visual[None, :, None], rows.main.index_select(0, index).to(embeds.dtype))
        deepstack = self.family.text_inputs(visual[None], tuple(x.index_select(0, index) for x in rows.levels))
        return {"inputs_embeds": embeds, "position_ids": local.position_ids, **deepstack}

    def encode(self, batch: PackedBatch) -> VisionRows | None:
        """Feature rows of the whole batch, images first; None for a batch of text only."""
        kinds = ((batch.pixel_values, batch.image_grid_thw), (batch.pixel_values_videos, batch.video_grid_thw))
        found = [(pixels, grids) for pixels, grids in kinds if pixels is not None and grids is not None]
        if not found:
            return None
        pixels = torch.cat([p for p, _ in found])
        if self.vision == "shared":
            assignment = self.assign(batch)
            if assignment.mode != "replicated":
                layout = VisionLayout.of(assignment, self.cp_rank, pixels.device)
                return encode_shared(self.model, self.family, pixels, layout, self.cp_group)
        return self.family.encode(self.model, pixels, torch.cat([g for _, g in found]))

    def assign(self, batch: PackedBatch) -> VisionAssignment:
        """Which rank encodes which of the batch's frames where vision is "shared"."""
        cp_size = comm.group_size(self.cp_group)
        return assign_vision(batch.media.grids, cp_size=cp_size, spec=self.spec, min_patches=self.min_patches)

    def sync_gradients(self, dp_cp_group: dist.ProcessGroup | None) -> None:
        """Sums every parameter's gradient over the ranks; right when each rank's loss is its share of the global loss.

        A parameter that got a gradient on some ranks only (a tower on a rank without images) gets the sum on all.
        """
        if comm.group_size(dp_cp_group) == 1:
            return
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(present, group=dp_cp_group)
        for parameter, ranks in zip(parameters, present.tolist(), strict=True):
            if ranks:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=dp_cp_group)

    def close(self) -> None:
        """Gives the model back as it came."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self.model.set_attn_implementation({"text_config": self._former_attention})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_text_config(text: Any, attention: AttentionMethod, cp_size: int) -> None:
    if attention not in get_args(AttentionMethod):
        raise ValueError(
            f"attention must be one of {', '.join(get_args(AttentionMethod))}, got {attention!r}; nothing would be exchanged"
        )
    if text.attention_dropout:
        raise ValueError(
            f"attention_dropout must be 0 under context parallelism, got {text.attention_dropout}; ranks would drop different scores"
        )
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(
            "layer_types must not hold sliding_attention, got it; the window would not be applied across ranks"
        )
    if attention == "all_to_all" and (text.num_attention_heads % cp_size or text.num_key_value_heads % cp_size):
        raise ValueError(
            f"attention heads must be divisible by cp_size {cp_size} for all_to_all, got {text.num_attention_heads} query and "
            f'{text.num_key_value_heads} key/value heads; ranks would hold different heads. Use attention="all_gather"'
        )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cp: ContextParallelAttention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T/c, D] -> [1, T/c, H, D]."""
    return _opened(cp)(*(x[0].transpose(0, 1) for x in (query, key, value)), scaling=scaling)[None], None


def _opened(cp: ContextParallelAttention | None) -> ContextParallelAttention:
    if cp is None:
        raise ValueError(
            "the model must be called through its HFEngine while one is open, got a direct call; "
            "its layers would see the shard only"
        )
    return cp


def _to_natural_order(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hidden states [1, T/c, H] -> one row a sample [B, longest, H], so that no state passes from sample to sample.

    Rows are padded at their end, where a causal layer does not look back from. Every rank runs every sample; each keeps
    its own slots' outputs, so gradients of the gathered states are summed over the ranks.
    """
    cp = _opened(kwargs.get("cp"))
    stream = cp.plan.gather(kwargs["hidden_states"][0], cp.group, backward="sum")
    rows = stream.new_zeros(len(cp.plan.lengths) * cp.plan.max_seqlen, stream.size(1))
    rows = rows.index_copy(0, _row_cells(cp.plan), stream)
    return args, {**kwargs, "hidden_states": rows.unflatten(0, (len(cp.plan.lengths), -1))}


def _to_local_order(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    cp = _opened(kwargs.get("cp"))
    return output.flatten(0, 1).index_select(0, cp.plan.shard(_row_cells(cp.plan), cp.cp_rank))[None]


def _row_cells(plan: SequencePlan) -> Tensor:
    """int64 [T]: each slot's cell when every sample is a row of `max_seqlen` cells."""
    return plan.sample_index * plan.max_seqlen + plan.token_index
