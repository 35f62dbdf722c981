"""The provider hooks by themselves: what they reach, what they refuse, what they say. No Megatron model is built here."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import bridge_on_cpu  # noqa: F401  (imports Megatron quietly)
import pytest
import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn
from vlm_cp_hooks import keep_default_loss_scaling, keep_skyrl_loss_scaling, register


class Router(nn.Module):
    """Copies the flag when it is built, as megatron-core's TopKRouter does."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.calculate_per_token_loss = config, config.calculate_per_token_loss


class Tower(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def model(flag: bool = True) -> Any:
    """A text model with two routers that share its config, and a tower with a config of its own."""
    root, config = nn.Module(), SimpleNamespace(calculate_per_token_loss=flag)
    root.config = config
    root.layers = nn.ModuleList([Router(config), Router(config)])
    root.tower = Tower(SimpleNamespace(calculate_per_token_loss=flag))
    root.plain = nn.Linear(2, 2)
    return root


def flags(root: nn.Module) -> list[bool]:
    holders = [m for m in root.modules() if "calculate_per_token_loss" in vars(m)]
    configs = [m.config for m in root.modules() if hasattr(m, "config")]
    return [holder.calculate_per_token_loss for holder in [*holders, *configs]]


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
@pytest.mark.parametrize("listed", [False, True], ids=["module", "list"])
def test_b50_clears_every_config_and_every_copy_and_returns_what_it_got(listed: bool, wrapped: bool) -> None:
    chunks = [Wrapper(model()) if wrapped else model() for _ in range(2 if listed else 1)]
    given = chunks if listed else chunks[0]
    assert keep_default_loss_scaling(given) is given
    assert not any(flag for chunk in chunks for flag in flags(chunk))


def test_says_what_it_cleared_and_does_nothing_twice(caplog: pytest.LogCaptureFixture) -> None:
    root = model()
    with caplog.at_level(logging.INFO, "vlm_cp_hooks"):
        keep_default_loss_scaling([root])
        keep_default_loss_scaling([root])
    assert [record.getMessage() for record in caplog.records] == [
        "keep_default_loss_scaling: cleared calculate_per_token_loss on SimpleNamespace, SimpleNamespace and on layers.0, layers.1",
        "keep_default_loss_scaling: calculate_per_token_loss was off already, nothing changed",
    ]


def test_both_names_are_one_hook() -> None:
    assert keep_skyrl_loss_scaling is keep_default_loss_scaling


def _data_parallel(module: Any) -> nn.Module:
    return _BaseDataParallel(module.config, module)


def _with_main_grad(module: Any) -> nn.Module:
    module.plain.weight.main_grad = torch.zeros(2, 2)
    return module


@pytest.mark.parametrize(
    ("wrap", "found"),
    [(_data_parallel, "_BaseDataParallel"), (_with_main_grad, "parameters with main_grad")],
    ids=["wrapper", "module-of-a-wrapper"],
)
def test_refuses_when_it_is_too_late(wrap: Any, found: str) -> None:
    root = model()
    text = (
        f"model must not be wrapped for data parallelism yet, got {found}; its gradient scaling was fixed when it was wrapped, so "
        "clearing the flag now would leave gradients dp * cp times too large. Register this as a pre-wrap hook"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        keep_default_loss_scaling([wrap(root)])
    assert all(flags(root))


def test_is_harmless_on_a_wrapped_model_with_nothing_to_clear() -> None:
    chunks = [_data_parallel(model(flag=False))]
    assert keep_default_loss_scaling(chunks) is chunks


class Provider:
    """What Bridge's ModelProviderMixin offers for hooks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.hooks: list[Any] = []
        self.error = error

    def register_pre_wrap_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def provide(self, pre_process: bool = True) -> str:
        if self.error is not None:
            raise self.error
        return f"model {pre_process}"


def _one(chunks: Any) -> Any:
    return chunks


def _two(chunks: Any) -> Any:
    return chunks


def test_register_appends_to_a_provider() -> None:
    provider = Provider()
    provider.register_pre_wrap_hook(_two)
    assert register(provider, _one, _two) is provider
    assert provider.hooks == [_two, _one, _two]
    assert provider.provide(pre_process=False) == "model False"


def test_register_appends_to_a_model_config() -> None:
    config = SimpleNamespace(pre_wrap_hooks=[_two])
    assert register(config, _one) is config
    assert config.pre_wrap_hooks == [_two, _one]


def test_register_refuses_what_takes_no_hooks() -> None:
    text = "provider_or_config must have register_pre_wrap_hook or a list pre_wrap_hooks, got SimpleNamespace; the hooks would never run"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        register(SimpleNamespace(), _one)


def test_register_refuses_what_is_no_hook() -> None:
    provider = Provider()
    text = "hooks must be functions of the list of model chunks, got 3; it would fail inside the build"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        register(provider, _one, 3)  # type: ignore[arg-type]
    assert provider.hooks == []


def test_register_leaves_other_assertions_of_the_build_alone() -> None:
    provider = register(Provider(AssertionError("num_layers must be even")), _one)
    with pytest.raises(AssertionError, match="num_layers must be even"):
        provider.provide()
