"""The embedded engine as a learner: a small Qwen3-VL from transformers, in float64 on gloo ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from float64 import Float64
from learner import Learner, LossFn, mean_of
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.collate import SFTCollator
from vlm_cp.comm import group_size
from vlm_cp.demo.models import tiny_config
from vlm_cp.engines.hf import HFEngine
from vlm_cp.losses import emit_mean
from vlm_cp.metrics import Metric, merge_metrics
from vlm_cp.spec import TextSpec, VLMSpec


def small_model(
    seed: int,
    tokenizer: Any,
    *,
    dtype: torch.dtype = torch.float64,
    tower: Mapping[str, Any] | None = None,
    **text: Any,
) -> Any:
    """A Qwen3-VL of 450,000 random weights, the same on every call and rank; tower, text: other sizes of its two halves."""
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "deepstack_visual_indexes": [0]}
    vision |= {"initializer_range": 0.05, **(tower or {})}
    sizes = {"num_hidden_layers": 2, "initializer_range": 0.05, **text}
    config = tiny_config("qwen3_vl", tokenizer, vision=vision, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation="sdpa")


class HFLearner(Learner):
    """Trains `model` with AdamW; a model that has a `value_head` is a critic.

    group: the CP ranks, all there are.
    """

    def __init__(self, model: nn.Module, processor: Any, capacity: int, group: dist.ProcessGroup | None) -> None:
        spec = VLMSpec.from_hf_config(model.config)
        collator = SFTCollator(
            processor,
            spec=spec,
            alignment=Alignment(cp_size=group_size(group)),
            pad_token_id=processor.tokenizer.pad_token_id,
        )
        super().__init__(
            collator, TextSpec.from_hf_config(model.config), capacity, cp_group=group, dp_group=None, dp_cp_group=group
        )
        self.model: Any = model
        self.engine = HFEngine(model, spec=spec, cp_group=group)
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)

    def output(self, batch: PackedBatch) -> Tensor:
        with Float64():
            head = getattr(self.model, "value_head", None)
            return self.engine(batch) if head is None else head(self.engine.hidden_states(batch))

    def update(
        self, batches: Sequence[PackedBatch], loss_fn: LossFn, *, count: int, learning_rate: float
    ) -> dict[str, Metric]:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        metrics: list[dict[str, Metric]] = []
        for batch in batches:
            local, logged = loss_fn(self.output(batch), batch)
            emit_mean(local, global_count=count, world_size=1).backward()  # the engine adds up, it does not average
            metrics.append({"loss": mean_of(local), **logged})
        self.engine.sync_gradients(self.cp_group)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return merge_metrics([*metrics, {"grad_norm": Metric(norm, "mean")}])

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
