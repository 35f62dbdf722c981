"""Bridge's deepstack rows in the backward: megatron-bridge 0.6.2 loses parts of their gradient, in two ways, without an error.

Sequence parallelism: every TP rank encodes all images and adds to its own tokens the deepstack rows that belong to them,
taken by a plain slice. Each rank's tower gets the gradient of its slice only, and nothing adds the slices up.

Full recompute: the tower's checkpointed blocks return the deepstack rows in a list, which autograd does not look into. The
rows come out without a graph, and the deepstack mergers are not trained at all.

The main rows are not concerned. Forward values are right in both cases, so a loss curve tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint, copy_to_tensor_model_parallel_region
from torch import Tensor

from vlm_cp import comm


def lost_deepstack_gradient(model: Any) -> str | None:
    """Why this (unwrapped) model would lose deepstack gradients in a training step; None if not, or if its tower is frozen."""
    tower = getattr(model, "vision_model", None)
    if tower is None or not len(tower.decoder.deepstack_merger_list):
        return None
    if not any(parameter.requires_grad for parameter in tower.parameters()):
        return None
    if tower.config.recompute_granularity == "full" and not isinstance(tower.decoder, _TrackedDeepstack):
        return 'recompute_granularity "full" drops the graph of the deepstack rows'
    if _is_split(model) and not any(isinstance(hook, _SumOverTP) for hook in tower._forward_hooks.values()):
        return "sequence_parallel leaves each TP rank's tower the gradient of its own tokens' deepstack rows"
    return None


def keep_deepstack_gradient(model: Any) -> bool:
    """Repairs a built (unwrapped) model in place, once; whether anything had to be done.

    The tower gets a forward hook that sums its deepstack rows' gradients over TP, and its block of layers becomes a
    subclass of its own class that checkpoints with the rows as outputs. Parameters and their names are not touched.
    """
    repaired = False
    while lost_deepstack_gradient(model) is not None:
        tower, repaired = model.vision_model, True
        if not isinstance(tower.decoder, _TrackedDeepstack) and tower.config.recompute_granularity == "full":
            base = type(tower.decoder)
            tower.decoder.__class__ = type(f"Tracked{base.__name__}", (_TrackedDeepstack, base), {})
        else:
            tower.register_forward_hook(_SumOverTP(model.pg_collection.tp))
    return repaired


def _is_split(model: Any) -> bool:
    return model.config.sequence_parallel and comm.group_size(model.pg_collection.tp) > 1


@dataclass(frozen=True)
class _SumOverTP:
    """A forward hook of the tower: rows pass unchanged; backward, the levels' gradients are summed over the TP group."""

    tp_group: dist.ProcessGroup

    def __call__(self, tower: Any, args: Any, output: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        rows, levels = output
        return rows, [copy_to_tensor_model_parallel_region(level, group=self.tp_group) for level in levels]


class _TrackedDeepstack:
    """Mixed into Bridge's `Qwen3VLVisionTransformerBlock`: full recompute that keeps the graph of the deepstack rows."""

    def _checkpointed_forward(self: Any, hidden_states: Tensor, **context: Any) -> tuple[Tensor, list[Tensor]]:
        features: list[Tensor] = []
        for first, last, recomputed in self._spans():

            def run(hidden: Tensor, first: int = first, last: int = last) -> tuple[Tensor, ...]:
                return self._run_layers(hidden, range(first, last), **context)

            out = checkpoint(run, False, hidden_states) if recomputed else run(hidden_states)
            hidden_states = out[0]
            features += out[1:]
        return hidden_states, features

    def _spans(self: Any) -> Iterator[tuple[int, int, bool]]:
        """(first layer, end, whether it is recomputed): spans of `recompute_num_layers`, or that many single layers."""
        layers, number = self.num_layers_per_pipeline_rank, self.config.recompute_num_layers
        if self.config.recompute_method == "uniform":
            for first in range(0, layers, number):
                yield first, min(first + number, layers), True
        else:
            for layer in range(layers):
                yield layer, layer + 1, layer < number

    def _run_layers(
        self: Any, hidden: Tensor, numbers: range, *, use_inner_fp8_context: bool = False, **context: Any
    ) -> tuple[Tensor, ...]:
        """(hidden states, deepstack rows of these layers...), flat, so that autograd sees every one of them."""
        if use_inner_fp8_context:
            raise ValueError("the tower's fp8 must be off with full recompute, got it on; its layers would run in bf16")
        features: list[Tensor] = []
        for number in numbers:
            hidden, _ = self._get_layer(number)(hidden_states=hidden, inference_context=None, **context)
            if number in self.deepstack_visual_indexes:
                features.append(self.deepstack_merger_list[self.deepstack_visual_indexes.index(number)](hidden))
        return hidden, *features
