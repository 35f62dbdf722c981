"""Registers pre-wrap hooks on whatever Megatron-Bridge builds a model from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Hook = Callable[[Any], Any]


def register[Builder](provider_or_config: Builder, *hooks: Hook) -> Builder:
    """Adds `hooks`, in order, after those already registered; returns what it got.

    provider_or_config: a model provider (`register_pre_wrap_hook`) or a `ModelConfig` (its list `pre_wrap_hooks`). Never
    pass hooks as `provide_distributed_model(pre_wrap_hook=...)`: that replaces all others, the loading of weights included.
    A provider also learns to say why a second build fails when `finalize()` was left out (see `keep_default_loss_scaling`).
    """
    target: Any = provider_or_config
    for hook in hooks:
        if not callable(hook):
            raise ValueError(
                f"hooks must be functions of the list of model chunks, got {hook!r}; it would fail inside the build"
            )
    if hasattr(target, "register_pre_wrap_hook"):
        for hook in hooks:
            target.register_pre_wrap_hook(hook)
        _explain_rebuild(target)
    elif isinstance(getattr(target, "pre_wrap_hooks", None), list):
        target.pre_wrap_hooks.extend(hooks)
    else:
        raise ValueError(
            "provider_or_config must have register_pre_wrap_hook or a list pre_wrap_hooks, got "
            f"{type(target).__name__}; the hooks would never run"
        )
    return provider_or_config


def _explain_rebuild(provider: Any) -> None:
    """Replaces this one instance's `provide`, once: only there can Bridge's assertion be given a reason."""
    if "provide" not in vars(provider):
        provider.provide = partial(_provide, provider)


def _provide(provider: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return type(provider).provide(provider, *args, **kwargs)
    except AssertionError as error:
        if "calculate_per_token_loss" not in str(error):
            raise
        raise ValueError(
            "provider must be finalized again before a second build, got one whose calculate_per_token_loss a hook has cleared; "
            "call provider.finalize() first, Megatron-Bridge refuses to build it otherwise"
        ) from error
