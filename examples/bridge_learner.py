"""Megatron-Bridge as a learner: its Qwen3-VL, mcore's DDP, schedule and optimizer; data- or context-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from learner import Learner, LossFn, mean_of
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import AutoConfig
from vlm_cp_hooks import keep_deepstack_gradients, keep_default_loss_scaling, register, value_head

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.chat import EncodedSample
from vlm_cp.collate import SFTCollator
from vlm_cp.comm import group_size
from vlm_cp.engines.megatron import MegatronEngine
from vlm_cp.losses import TokenLoss, emit_default
from vlm_cp.metrics import Metric, merge_metrics
from vlm_cp.spec import TextSpec, VLMSpec


def set_up_ranks(folder: str, cp: int, device: str) -> Any:
    """A finalized provider for the checkpoint in `folder`, with Megatron's groups for this cp_size; the ranks left are data-parallel."""
    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=True)
    half = device != "cpu"
    settings: dict[str, Any] = {
        "context_parallel_size": cp,
        "bf16": half,
        "params_dtype": torch.bfloat16 if half else torch.float32,
        "gradient_accumulation_fusion": False,  # needs APEX
        "perform_initialization": False,  # weights are loaded
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():  # a critic beside its policy
        provider.initialize_model_parallel(seed=1 if half else None)
    return provider


class BridgeLearner(Learner):
    """Trains the checkpoint in `folder` with mcore's Adam; critic: with a scalar head in the place of its output layer."""

    def __init__(
        self, folder: str, processor: Any, capacity: int, *, cp: int, device: str, critic: bool = False
    ) -> None:
        provider = set_up_ranks(folder, cp, device)
        hooks = [keep_default_loss_scaling, keep_deepstack_gradients, *([value_head()] if critic else [])]
        register(provider, *hooks)
        provider.finalize_model_grads_func = finalize_model_grads
        self.chunks = provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True), use_cpu_initialization=device == "cpu"
        )
        spec = VLMSpec.from_bridge(provider)
        self.engine = MegatronEngine(self.chunks, spec=spec)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1.0,  # every step sets its own
            bf16=provider.bf16,
            params_dtype=provider.params_dtype,
            adam_beta2=0.98,
            weight_decay=0.01,
            clip_grad=1.0,
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        collator = SFTCollator(
            processor, spec=spec, alignment=Alignment(cp_size=cp), pad_token_id=processor.tokenizer.pad_token_id
        )
        groups = self.engine.model.chunks[0].pg_collection
        super().__init__(
            collator,
            TextSpec.from_hf_config(AutoConfig.from_pretrained(folder)),
            capacity,
            cp_group=self.engine.cp_group,
            dp_group=groups.dp,
            dp_cp_group=groups.dp_cp,
        )
        self.device = device

    def output(self, batch: PackedBatch) -> Tensor:
        return self.engine(batch)

    def update(
        self, batches: Sequence[PackedBatch], loss_fn: LossFn, *, count: int, learning_rate: float
    ) -> dict[str, Metric]:
        metrics: list[Mapping[str, Metric]] = []

        def loss(output: Tensor, batch: PackedBatch) -> TokenLoss:
            local, logged = loss_fn(output, batch)
            metrics.append({"loss": mean_of(local), **logged})
            return local

        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        emitter = partial(
            emit_default, global_count=count, num_microbatches=len(batches), dp_size=group_size(self.dp_group)
        )
        get_forward_backward_func()(
            forward_step_func=self.engine.forward_step(emitter, loss),
            data_iterator=iter(batches),
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=batches[0].plan.total_tokens,
            micro_batch_size=1,
        )
        _, norm, _ = self.optimizer.step()
        return merge_metrics([*metrics, {"grad_norm": Metric(torch.as_tensor(float(norm)), "mean")}])

    def state_dict(self) -> dict[str, Any]:
        """Every rank holds the whole model and its optimizer's state: no tensor, pipeline or optimizer shards here."""
        parameters = {name: p.detach() for name, p in self.chunks[0].named_parameters()}
        return {"model": parameters, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_weights(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Of the parameters that `weights` names: a critic's head is not among its policy's."""
        for name, parameter in self.chunks[0].named_parameters():
            if name in weights and weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
        self.optimizer.reload_model_params()

    def _packed(
        self, samples: Sequence[EncodedSample], bin_: Sequence[int], extras: Mapping[str, Sequence[Tensor]]
    ) -> PackedBatch:
        return super()._packed(samples, bin_, extras).to(self.device)
