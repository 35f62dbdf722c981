"""Keeps Megatron's default loss scaling under context parallelism, for frameworks whose losses expect it.

Megatron-Bridge's Qwen3-VL providers switch `calculate_per_token_loss` on at cp_size > 1. A loss function that returns
(loss, metrics) then gets gradients that are dp * cp times too large, and DDP refuses `average_in_collective`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed.data_parallel_base import _BaseDataParallel  # pyright: ignore[reportPrivateUsage]
from torch import nn

FLAG = "calculate_per_token_loss"

logger = logging.getLogger(__name__)


def keep_default_loss_scaling[Model: nn.Module | Sequence[nn.Module]](model: Model) -> Model:
    """Clears `calculate_per_token_loss` everywhere in a built model; a pre-wrap hook. Returns `model` itself.

    model: one module or a list of chunks, wrapped or not, but not yet by a data-parallel wrapper. Cleared are every config
    that a module holds (a provider's model holds the provider), and every module that copied the flag when it was built:
    MoE routers do, and would go on multiplying their auxiliary losses by the number of tokens. What was cleared is logged.

    Harmless a second time, and in any order with Bridge's LoRA and freeze hooks. The flag stays cleared on the provider:
    call `provider.finalize()` before building from it again.
    """
    chunks: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
    modules = [(name, module) for chunk in chunks for name, module in chunk.named_modules()]
    configs = list(_set_configs(module for _, module in modules))
    copies = [(name, module) for name, module in modules if vars(module).get(FLAG)]
    if not configs and not copies:
        logger.info("keep_default_loss_scaling: %s was off already, nothing changed", FLAG)
        return model
    _check_not_wrapped(chunks)
    for holder in [*configs, *(module for _, module in copies)]:
        setattr(holder, FLAG, False)
    logger.info(
        "keep_default_loss_scaling: cleared %s on %s and on %s",
        FLAG,
        ", ".join(type(config).__name__ for config in configs) or "no config",
        ", ".join(name for name, _ in copies) or "no module",
    )
    return model


keep_skyrl_loss_scaling = keep_default_loss_scaling


def _set_configs(modules: Iterator[nn.Module]) -> Iterator[Any]:
    """Every config with the flag on, once."""
    seen: set[int] = set()
    for module in modules:
        config = getattr(module, "config", None)
        if config is not None and id(config) not in seen and getattr(config, FLAG, False):
            seen.add(id(config))
            yield config


def _check_not_wrapped(chunks: Sequence[nn.Module]) -> None:
    wrapper = next((m for chunk in chunks for m in chunk.modules() if isinstance(m, _BaseDataParallel)), None)
    reduced = any(hasattr(p, "main_grad") for chunk in chunks for p in chunk.parameters())
    if wrapper is not None or reduced:
        found = type(wrapper).__name__ if wrapper is not None else "parameters with main_grad"
        raise ValueError(
            f"model must not be wrapped for data parallelism yet, got {found}; its gradient scaling was fixed when it was "
            "wrapped, so clearing the flag now would leave gradients dp * cp times too large. Register this as a pre-wrap hook"
        )
