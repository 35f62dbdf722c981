"""`value_head`: a pre-wrap hook that makes a Megatron-Bridge model, text or VLM, a critic.

The output layer of the *language model* is replaced: a VLM's root has none, and one set there would never be called. The new
head is hidden -> 1, whole on every TP rank, in float32; the model then returns values [1, T/c, 1].
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlm_cp import comm
from vlm_cp.alignment import Alignment
from vlm_cp.values import fill_value_head

_log = logging.getLogger(__name__)

Hook = Callable[[Any], Any]


class ValueHead(nn.Module):
    """Scalar head in the place of Megatron's output layer: [S, B, H] -> ([S, B, 1] in float32, None).

    With sequence_parallel the input is this TP rank's slice of S, the output all of it. Every TP rank then goes on to compute
    the same loss, so each has the whole gradient and takes its slice; the weight's gradient is a part, which Megatron sums
    over the TP ranks because the weight is marked `sequence_parallel`.
    The weight is normal with deviation `std`, drawn from `seed` alone: the same on every rank.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        tp_group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        std: float,
        seed: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel, self.std, self.seed = tp_group, sequence_parallel, std, seed
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=dtype, device=device))
        self.mark(sequence_parallel=sequence_parallel, is_embedding_or_output_parameter=True)
        self.reset_parameters()

    def mark(self, **marks: bool) -> None:
        """Sets attributes of the weight by which Megatron tells parameters apart."""
        for name, value in marks.items():
            setattr(self.weight, name, value)

    def reset_parameters(self) -> None:
        """Megatron calls it too, after a model was built on the meta device."""
        fill_value_head(self.weight, std=self.std, seed=self.seed)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """`weight` is the embedding of a tied model, which this one no longer is; both arguments are there to be called with."""
        # Computed again in the backward: otherwise it would keep the input in float32.
        values = checkpoint(_project, input_, self.weight, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(values, Tensor)
        return comm.all_gather(values, self.tp_group, backward="slice") if self.sequence_parallel else values, None

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`. Training also makes the weight trainable: Bridge's LoRA freezes every weight, then calls this."""
        super().train(mode)
        if mode:
            self.weight.requires_grad_()
        return self


def _project(input_: Tensor, weight: Tensor) -> Tensor:
    return F.linear(input_.float(), weight.float())


def value_head(
    *,
    alignment: Alignment | None = None,
    sequence_divisor: int | None = None,
    packed: bool = True,
    std: float = 0.02,
    seed: int = 0,
) -> Hook:
    """A pre-wrap hook: list of model chunks (or one) in, the same out, built and not yet wrapped by DDP.

    On the last pipeline stage the language model's output layer becomes a `ValueHead` with normal weights of deviation `std`
    from `seed`, the same on every rank. On all stages embedding and output layer are untied. The head is left out of what is
    loaded inside `chunk.hide_loss_modules()`, which Megatron-Bridge enters to fine-tune from a base checkpoint or from HF
    weights, and is saved and resumed like any other weight.

    alignment: the layout that will be trained; must be the model's. sequence_divisor: what the framework pads every sample to,
    where it pads by a number of its own. packed: whether it packs samples. Both are refused here, at construction, when
    context parallelism cannot work with them.
    """
    if alignment is not None:
        _check_padding(alignment, sequence_divisor, packed)

    def hook(model_chunks: Any) -> Any:
        chunks = model_chunks if isinstance(model_chunks, list | nn.ModuleList) else [model_chunks]
        for chunk in chunks:
            _install(chunk, alignment, std, seed)
        return model_chunks

    return hook


def _check_padding(alignment: Alignment, divisor: int | None, packed: bool) -> None:
    if alignment.cp_size > 1 and not packed:
        raise ValueError(
            f"packed must be True at cp_size {alignment.cp_size}, got False; padded rows are cut by row, values by sample, "
            "and values of other tokens would be trained"
        )
    required = replace(alignment, fp8=None).stream_multiple
    if divisor is not None and divisor % required:
        raise ValueError(
            f"sequence_divisor must be a multiple of {required} at cp_size {alignment.cp_size}, tp_size {alignment.tp_size}, "
            f"sequence_parallel {alignment.sequence_parallel}, got {divisor}; the first batch would fail, or be cut unevenly"
        )


def _install(chunk: nn.Module, alignment: Alignment | None, std: float, seed: int) -> None:
    path, language_model = _language_model(chunk)
    config = language_model.config
    _check_config(config, alignment)
    _untie(chunk, language_model)
    chunk.__class__ = _hiding(type(chunk), f"{path}output_layer.")
    if not language_model.post_process:
        return
    head = ValueHead(
        config.hidden_size,
        tp_group=language_model.pg_collection.tp,
        sequence_parallel=config.sequence_parallel,
        std=std,
        seed=seed,
        dtype=config.params_dtype,
        device=next(language_model.parameters()).device,
    )
    language_model.output_layer = head.train(language_model.training)
    _register_with_bridge()
    _log.info("value_head: %soutput_layer is now a ValueHead of %d -> 1", path, config.hidden_size)


def _language_model(chunk: Any) -> tuple[str, Any]:
    """(its path inside the chunk with a dot, the language model); through Float16Module and the like, never through DDP."""
    path = ""
    while not hasattr(chunk, "post_process") and isinstance(getattr(chunk, "module", None), nn.Module):
        if hasattr(chunk, "ddp_config"):
            raise ValueError(
                f"model_chunks must not be wrapped by DDP yet, got {type(chunk).__name__}; the new head would not be synchronised"
            )
        path, chunk = f"{path}module.", chunk.module
    if isinstance(getattr(chunk, "language_model", None), nn.Module):
        path, chunk = f"{path}language_model.", chunk.language_model
    headless = getattr(chunk, "post_process", False) and not hasattr(chunk, "output_layer")
    if headless or not hasattr(chunk, "post_process") or not hasattr(chunk, "pg_collection"):
        raise ValueError(
            f"model_chunks must hold a Megatron GPTModel, itself or as language_model, got {type(chunk).__name__}; "
            "its output layer cannot be found"
        )
    return path, chunk


def _check_config(config: Any, alignment: Alignment | None) -> None:
    if getattr(config, "mtp_num_layers", None):
        raise ValueError(
            f"mtp_num_layers must be None or 0 in a value model, got {config.mtp_num_layers}; "
            "the prediction of further tokens would go through the scalar head"
        )
    if alignment is None:
        return
    names = {"cp_size": "context_parallel_size", "tp_size": "tensor_model_parallel_size"}
    for mine, theirs in {**names, "sequence_parallel": "sequence_parallel"}.items():
        if getattr(alignment, mine) != getattr(config, theirs):
            raise ValueError(
                f"alignment.{mine} must be the model's {theirs}, {getattr(config, theirs)}, got {getattr(alignment, mine)}; "
                "samples would be padded for another layout"
            )


def _untie(chunk: Any, language_model: Any) -> None:
    """Every flag and mark by which Megatron would go on to sum the gradients of embedding and output layer over stages."""
    holders: list[Any] = [chunk, language_model, getattr(chunk, "config", None), language_model.config]
    for holder in holders:
        if getattr(holder, "share_embeddings_and_output_weights", False):
            holder.share_embeddings_and_output_weights = False
            _log.info("value_head: share_embeddings_and_output_weights of %s is now False", type(holder).__name__)
    embedding = getattr(language_model, "embedding", None)
    for mark in ("shared_embedding", "shared", "zero_out_wgrad"):
        if embedding is not None and getattr(embedding.word_embeddings.weight, mark, False):
            setattr(embedding.word_embeddings.weight, mark, False)


@cache
def _hiding(base: type[Any], prefix: str) -> type[Any]:
    """A subclass of `base` by the same name, whose instances leave the weights at `prefix` out while asked to."""

    class Hiding(base):
        head_is_hidden = False

        @contextmanager
        def hide_loss_modules(self) -> Generator[None]:
            """Megatron-Bridge's name for it: inside, the value head is not part of what is loaded."""
            before, self.head_is_hidden = self.head_is_hidden, True
            try:
                yield
            finally:
                self.head_is_hidden = before

        def sharded_state_dict(self, key_prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
            key_prefix = kwargs.pop("prefix", key_prefix)
            found = super().sharded_state_dict(key_prefix, *args, **kwargs)
            hidden = key_prefix + prefix
            return {k: v for k, v in found.items() if not (self.head_is_hidden and k.startswith(hidden))}

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            hidden = kwargs.get("prefix", args[0] if args else "")
            hidden = f"{hidden}.{prefix}" if hidden else prefix
            for name, parameter in super().named_parameters(*args, **kwargs):
                if not (self.head_is_hidden and name.startswith(hidden)):
                    yield name, parameter

    Hiding.__name__, Hiding.__qualname__, Hiding.__module__ = base.__name__, base.__qualname__, base.__module__
    return Hiding


def _register_with_bridge() -> None:
    """Tells Megatron-Bridge's weight conversion, where it built the model, that the head is whole on every TP rank."""
    conversion = sys.modules.get("megatron.bridge.models.conversion.param_mapping")
    if conversion is not None:
        conversion.AutoMapping.register_module_type(ValueHead.__name__, "replicated")
