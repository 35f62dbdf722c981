"""`keep_default_loss_scaling` on the installed Bridge models: gradients at CP=n over CP=1, with it, without it, half of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from bridge_on_cpu import use_cpu
from bridge_runs import Result, Run, build, execute, relative
from megatron.bridge.peft.lora import LoRA
from megatron.core.distributed import DistributedDataParallelConfig
from ranks import run_ranks
from vlm_cp_hooks import keep_deepstack_gradients, keep_default_loss_scaling

FEW = {"family": "qwen3_vl", "micro_batches": ((0, 1), (5,))}
AUX = {
    "family": "qwen3_vl_moe",
    "provider": {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "aux_loss"},
    "sample_multiple": 4,  # padding is routed too, so CP=1 must have CP=2's
    "micro_batches": ((0, 1), (5,)),
}
TIGHT = 1e-5


@pytest.fixture(scope="module")
def run(checkpoint: Callable[[str], str]) -> Callable[..., Result]:
    return lambda **settings: execute(Run(**settings), checkpoint(settings["family"]))


@pytest.fixture(scope="module")
def one_rank(run: Callable[..., Result]) -> Callable[[str], Result]:
    settings = {"few": FEW, "aux": AUX}
    return cache(lambda name: run(**settings[name]))


def ratio(result: Result, reference: Result) -> tuple[float, float]:
    """The factor between two sets of gradients (least squares), and the worst relative rest of one parameter."""
    names = reference.gradients
    dot = sum(float((result.gradients[n].double() * names[n].double()).sum()) for n in names)
    factor = dot / sum(float(g.double().square().sum()) for g in names.values())
    return factor, max(relative(result.gradients[n] / factor, g) for n, g in names.items())


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2)])
def test_without_the_hook_gradients_are_dp_times_cp_too_large(
    dp: int, cp: int, run: Callable[..., Result], one_rank: Callable[[str], Result]
) -> None:
    factor, rest = ratio(run(**FEW, dp=dp, cp=cp, hooks=(), checked=False), one_rank("few"))
    assert factor == pytest.approx(dp * cp, rel=1e-6)
    assert rest < TIGHT


SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("dp", "ddp"),
    [(2, {"average_in_collective": True}), (1, SHARDED), (2, OVERLAPPED)],
    ids=["average-in-collective", "distributed-optimizer", "distributed-optimizer-overlapped"],
)
def test_with_the_hook_the_ratio_is_one(
    dp: int, ddp: dict[str, Any], run: Callable[..., Result], one_rank: Callable[[str], Result]
) -> None:
    factor, rest = ratio(run(**FEW, dp=dp, cp=2, ddp=ddp), one_rank("few"))
    assert factor == pytest.approx(1.0, rel=1e-6)
    assert rest < TIGHT


def test_without_the_hook_ddp_refuses_to_average_in_the_collective(run: Callable[..., Result]) -> None:
    with pytest.raises(Exception, match="Cannot average in collective when calculating per-token loss!"):
        run(**FEW, cp=2, hooks=(), ddp={"average_in_collective": True})


def _clear_the_config_only(chunks: list[Any]) -> list[Any]:
    chunks[0].config.calculate_per_token_loss = False
    return chunks


def test_auxiliary_loss_of_experts(run: Callable[..., Result], one_rank: Callable[[str], Result]) -> None:
    right = run(**AUX, cp=2)
    assert right.worst_gradient(one_rank("aux")) < (TIGHT, "")
    half = run(**AUX, cp=2, hooks=(_clear_the_config_only, keep_deepstack_gradients), checked=False)
    error, name = half.worst_gradient(one_rank("aux"))
    assert error > 50  # the router multiplies by its tokens, here more than 100
    assert "mlp.gate" in name


def lora(chunks: list[Any]) -> list[Any]:
    return LoRA(target_modules=["linear_qkv", "linear_proj"], dim=4, alpha=8)(chunks, training=True)


def freeze(chunks: list[Any]) -> list[Any]:
    for chunk in chunks:
        chunk.freeze(freeze_language_model=False, freeze_vision_model=True, freeze_vision_projection=False)
    return chunks


def trained(chunks: Sequence[Any], provider: Any) -> list[str]:
    return [name for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("other", [lora, freeze])
def test_any_order_with_bridges_own_hooks(other: Callable[..., Any], run: Callable[..., Result]) -> None:
    ours = (keep_default_loss_scaling, keep_deepstack_gradients)
    reference = run(**FEW, hooks=(other,), after_build=trained)
    for hooks in ((*ours, other), (other, *ours)):
        result = run(**FEW, cp=2, hooks=hooks, after_build=trained)
        assert result.note == reference.note
        factor, rest = ratio(result, reference)
        assert factor == pytest.approx(1.0, rel=1e-6)
        assert rest < TIGHT


def _names_with(hooks: Sequence[Any], path: str) -> dict[str, Any]:
    """What a model built with these hooks exports and stores, on two TP ranks with full recompute."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    bridge, _, chunks = build(Run(family="qwen3_vl", tp=2, hooks=hooks, provider=recompute), path)
    weights = {name: x.clone() for name, x in bridge.export_hf_weights(chunks, cpu=True, show_progress=False)}
    return {
        "exported": weights,
        "state": sorted(name for chunk in chunks for name in chunk.state_dict()),
        "parameters": [name for chunk in chunks for name, _ in chunk.named_parameters()],
    }


def _names(rank: int, path: str) -> list[dict[str, Any]]:
    use_cpu()
    hooks = ((), (keep_default_loss_scaling,), (keep_deepstack_gradients,), (keep_deepstack_gradients,) * 2)
    return [_names_with(some, path) for some in hooks]


def test_names_and_values_stay_as_they_were(checkpoint: Callable[[str], str]) -> None:
    without, *with_hooks = run_ranks(2, _names, checkpoint("qwen3_vl"))[0]
    for found in with_hooks:
        assert found["state"] == without["state"]
        assert found["parameters"] == without["parameters"]
        assert found["exported"].keys() == without["exported"].keys()
        assert all(bool((x == without["exported"][name]).all()) for name, x in found["exported"].items())


def _rebuild(rank: int, path: str) -> list[Any]:
    use_cpu()
    _, provider, _ = build(Run(family="qwen3_vl", cp=2), path)
    seen: list[Any] = [provider.calculate_per_token_loss]
    again = {"ddp_config": DistributedDataParallelConfig(), "use_cpu_initialization": True}
    try:
        provider.provide_distributed_model(**again)
    except ValueError as error:
        seen.append(str(error))
    provider.finalize()
    seen.append(provider.calculate_per_token_loss)
    provider.provide_distributed_model(**again)
    return [*seen, provider.calculate_per_token_loss]


def test_a_second_build_needs_finalize(checkpoint: Callable[[str], str]) -> None:
    sentence = (
        "provider must be finalized again before a second build, got one whose calculate_per_token_loss a hook has cleared; "
        "call provider.finalize() first, Megatron-Bridge refuses to build it otherwise"
    )
    assert run_ranks(2, _rebuild, checkpoint("qwen3_vl")) == [[False, sentence, True, False]] * 2
