"""Builds one Bridge model on this rank and runs training steps on it; what comes back is compared across layouts."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import models
import torch
import torch.distributed as dist
from layouts import Layout
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from vlm_cp_hooks import keep_deepstack_gradients, keep_default_loss_scaling, register

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.engines.core_attention import use_torch_attention
from vlm_cp.engines.megatron import MegatronEngine
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.spec import VLMSpec


class TokenLoss(NamedTuple):
    local_sum: Tensor
    local_count: Tensor


def emit_default(
    loss: TokenLoss, *, global_count: int, num_microbatches: int, dp_size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    return loss.local_sum * (num_microbatches * dp_size / global_count), {"loss_sum": loss.local_sum.detach().clone()}


@dataclass(frozen=True)
class Outcome:
    """A step's result on rank 0: logprobs of the scored tokens sample by sample, gradients by Megatron name and, after a
    layout's last case, by HF name; what each expert router chose."""

    logprobs: list[Tensor]
    gradients: Mapping[str, Tensor]
    exported: Mapping[str, Tensor] | None
    tokens: int
    samples: int
    routing: list[Tensor] | None


class Model:
    """A built model of one layout; close it before the next one."""

    def __init__(self, family: str, layout: Layout, path: str, device: torch.device) -> None:
        self.family, self.layout, self.device = family, layout, device
        self.bridge = AutoBridge.from_hf_pretrained(path)
        self.provider = self._configure()
        hooks = [keep_default_loss_scaling, keep_deepstack_gradients]
        register(self.provider, *hooks, *([use_torch_attention] if layout.torch_attention else []))
        self.chunks = self.provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            use_cpu_initialization=device.type == "cpu",
        )
        self.spec = None if family == "qwen3" else VLMSpec.from_bridge(self.provider)
        self.engine = MegatronEngine(self.chunks, spec=self.spec, layout=layout.layout)
        self.provider.finalize_model_grads_func = finalize_model_grads

    def _configure(self) -> Any:
        layout, half = self.layout, self.device.type == "cuda"
        dtype = torch.bfloat16 if half else torch.float32
        provider = self.bridge.to_megatron_provider(load_weights=True)
        settings: dict[str, Any] = {
            "context_parallel_size": layout.cp,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "sequence_parallel": layout.tp > 1,
            "bf16": half,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "variable_seq_lengths": layout.pp > 1,
            "moe_token_dispatcher_type": "alltoall",
            "moe_permute_fusion": False,
            "moe_aux_loss_coeff": 0.0,
            "moe_enable_routing_replay": self.family == "qwen3_vl_moe",
            "gradient_accumulation_fusion": False,  # needs APEX
            "cross_entropy_loss_fusion": False,  # rounds the logits' gradient to bf16
            "perform_initialization": False,
            "freeze_language_model": False,
            "freeze_vision_model": False,
        }
        for name, value in {**settings, **layout.provider}.items():
            setattr(provider, name, value)
        provider.finalize()
        provider.initialize_model_parallel(seed=1 if half else None)
        return provider

    def batches(self, case: str) -> list[PackedBatch]:
        layout = self.layout
        multiple = 4 if self.family == "qwen3_vl_moe" else 1  # routing is replayed slot by slot: all streams alike
        alignment = Alignment(
            cp_size=layout.cp, tp_size=layout.tp, sequence_parallel=layout.tp > 1, sample_multiple=multiple
        )
        spec = self.spec or text_spec()
        made = models.case_batches(
            case, self.family, spec, alignment, total_tokens=layout.total_tokens, reverse=layout.reverse
        )
        return [batch.to(self.device) for batch in made]

    def step(self, case: str, *, export: bool, replay: Sequence[Tensor] | None = None) -> Outcome:
        """One training step over the case's micro-batches. replay: per router, the experts of every slot of the stream."""
        batches, engine, layout = self.batches(case), self.engine, self.layout
        kept: list[Tensor] = []

        def loss_fn(output: Tensor, batch: PackedBatch) -> TokenLoss:
            mask = batch.plan.shard(batch.plan.scored, engine.cp_rank)
            if layout.tp > 1:  # the model's own loss over the split vocabulary
                logprobs = (-output[0].float()).where(mask, 0.0)
            else:
                logprobs = next_token_logprobs(output, batch.input_ids, batch.plan, cp_rank=engine.cp_rank)
            kept.append(logprobs.detach().cpu())
            return TokenLoss(-logprobs.sum(), mask.sum())

        # Data-parallel ranks hold the same batches, so each one's tokens count once a rank.
        count = layout.dp * sum(int(batch.plan.scored.sum()) for batch in batches)
        emitter = partial(emit_default, global_count=count, num_microbatches=len(batches), dp_size=layout.dp)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._route(batches, replay)
        get_forward_backward_func()(
            forward_step_func=engine.forward_step(emitter, loss_fn, with_labels=layout.tp > 1),
            data_iterator=iter(batches),
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=batches[0].plan.total_tokens,
            micro_batch_size=1,
        )
        gradients = {
            name: p.main_grad.to("cpu", torch.float32, copy=True)
            for chunk in self.chunks
            for name, p in chunk.named_parameters()
            if p.requires_grad
        }
        return Outcome(
            logprobs=self._join(batches, kept),
            gradients=gradients,
            exported=self._exported() if export else None,
            tokens=sum(sum(batch.plan.lengths) for batch in batches),
            samples=sum(len(batch.plan.lengths) for batch in batches),
            routing=self._routing(batches),
        )

    def _join(self, batches: Sequence[PackedBatch], kept: Sequence[Tensor]) -> list[Tensor]:
        """Per sample, in the order in which `models.CASES` names them; gathered from the ranks that saw the last stage."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.engine.cp_rank, list(kept)))
        shards = {cp_rank: part for cp_rank, part in reversed(found) if part}
        samples: list[Tensor] = []
        for i, batch in enumerate(batches):
            plan = batch.plan.to("cpu")
            stream = plan.unshard([shards[cp_rank][i] for cp_rank in range(self.layout.cp)])
            own = [stream[(plan.sample_index == b) & plan.scored] for b in range(len(plan.lengths))]
            samples += own[::-1] if self.layout.reverse else own
        return samples

    def _exported(self) -> dict[str, Tensor]:
        """HF name -> gradient, by Bridge's own export of gradients in the parameters' place; the model is spent afterwards."""
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.data = parameter.main_grad.float()
        weights = self.bridge.export_hf_weights(self.chunks, cpu=True, show_progress=False)
        return {name: x.float().clone() for name, x in weights}

    def _routers(self) -> list[Any]:
        modules = (m for chunk in self.engine.model.chunks for m in chunk.modules())
        return [m.router_replay for m in modules if getattr(m, "router_replay", None) is not None]

    def _route(self, batches: Sequence[PackedBatch], replay: Sequence[Tensor] | None) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        for number, router in enumerate(self._routers()):
            router.clear_indices()
            router.set_router_replay_action(RouterReplayAction.RECORD)
            if replay is not None:
                local = batches[0].plan.shard(replay[number].to(self.device), self.engine.cp_rank)
                router.set_target_indices(local)
                router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def _routing(self, batches: Sequence[PackedBatch]) -> list[Tensor] | None:
        """Per router, the experts of every slot of the stream [T, k]; recorded for a case of one micro-batch."""
        recorded = [router.get_recorded_indices() for router in self._routers()]
        if not recorded or recorded[0] is None:
            return None
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.engine.cp_rank, [x.cpu() for x in recorded]))
        shards = dict(found)
        plan = batches[0].plan.to("cpu")
        return [plan.unshard([shards[r][i] for r in range(self.layout.cp)]) for i in range(len(recorded))]

    def close(self) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay

        self.chunks = self.engine = self.bridge = self.provider = None  # type: ignore[assignment]
        RouterReplay.clear_global_router_replay_instances()
        parallel_state.destroy_model_parallel()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def text_spec() -> VLMSpec:
    """Any VLM's spec will do to pack text: its media ids do not occur."""
    config_class, _, text, vision = models.FAMILIES["qwen3_vl"]
    return VLMSpec.from_hf_config(
        config_class(text_config=dict(text), vision_config=dict(vision or {}), **models.TOKENS)
    )


__all__ = ["Model", "Outcome"]
