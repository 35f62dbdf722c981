"""The installed Megatron-Bridge models at CP=n against CP=1, in fp32 on gloo, through the whole path a framework takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from bridge_runs import Result, Run, execute, make_batch, spec_of
from megatron.core import utils as mcore_utils
from torch import nn
from transformers import AutoModelForImageTextToText
from vlm_cp_hooks import keep_default_loss_scaling

from vlm_cp.alignment import Alignment
from vlm_cp.engines.hf import HFEngine
from vlm_cp.engines.megatron import MegatronEngine
from vlm_cp.families import capability
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import VLMSpec

# Logprobs reach -20; fp32 sums in another order move them by 6e-6. Gated delta nets amplify rounding: another chunk size
# at CP=1 (8, 32, 64 for 16) already moves their logprobs by 2.4e-4 and single gradients by 2.1e-4.
LOGPROB = {"qwen3_vl": 3e-5, "qwen3_vl_moe": 3e-5, "qwen3_5": 5e-4, "qwen3_5_moe": 5e-4, "qwen3": 3e-5}
# Relative, of one parameter's gradient.
GRADIENT = {"qwen3_vl": 1e-5, "qwen3_vl_moe": 1e-5, "qwen3_5": 1e-3, "qwen3_5_moe": 1e-3, "qwen3": 1e-5}
NO_AUX = {"moe_aux_loss_coeff": 0.0}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def run_of(family: str, **settings: Any) -> Run:
    """The family's own settings: no auxiliary loss here (see test_bridge_loss_scaling.py), text models take local tokens."""
    own: dict[str, Any] = {"layout": "sharded"} if family == "qwen3" else {}
    if family.endswith("_moe"):
        own = {"provider": NO_AUX}
    return Run(family=family, **{**own, **settings})


@pytest.fixture(scope="module")
def one_rank(checkpoint: Callable[[str], str]) -> Callable[[str], Result]:
    return cache(lambda family: execute(run_of(family), checkpoint(family)))


def check(result: Result, reference: Result, family: str) -> None:
    assert result.worst_logprob(reference) < LOGPROB[family]
    assert result.worst_gradient(reference) < (GRADIENT[family], "")
    assert result.gradient_norm == pytest.approx(reference.gradient_norm, rel=GRADIENT[family])


def choose_all_to_all(chunks: list[Any], provider: Any) -> None:
    """Layers are built to gather keys and values; the engine sets them to trade tokens for heads."""
    engine = MegatronEngine(chunks, spec=VLMSpec.from_bridge(provider))
    layers = [layer.self_attention.core_attention for layer in engine.model.chunks[0].language_model.decoder.layers]
    assert {layer.method for layer in layers} == {"all_gather"}
    plan = SequencePlan.from_lengths([8], alignment=Alignment(cp_size=2))
    assert engine.choose_comm_type([plan], allowed=("a2a",)).comm_type == "a2a"
    assert {layer.method for layer in layers} == {"all_to_all"}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{family}-{name}": (family, sizes)
        for family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5")
        for name, sizes in {"cp2": {"cp": 2}, "cp4": {"cp": 4}, "tp2sp-cp2": {"tp": 2, "cp": 2}}.items()
    },
    "qwen3_5_moe-cp2": ("qwen3_5_moe", {"cp": 2}),
    "qwen3_vl-pp2-cp2-lengths-vary": ("qwen3_vl", {"pp": 2, "cp": 2}),
    "qwen3_vl-pp2-fixed-total": (
        "qwen3_vl",
        {"pp": 2, "total_tokens": 320, "provider": {"variable_seq_lengths": False}},
    ),
    "qwen3_vl-cp2-sharded-by-the-caller": ("qwen3_vl", {"cp": 2, "layout": "sharded"}),
    "qwen3_vl-cp2-per-token-loss": ("qwen3_vl", {"cp": 2, "emitter": "per_token", "hooks": ()}),
    "qwen3_vl-cp2-model-computes-the-loss": ("qwen3_vl", {"cp": 2, "with_labels": True}),
    "qwen3_vl-cp2-all-to-all-chosen-before-the-step": ("qwen3_vl", {"cp": 2, "after_build": choose_all_to_all}),
    "qwen3_vl-cp2-recompute": (
        "qwen3_vl",
        {
            "cp": 2,
            "provider": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        },
    ),
    "qwen3-text-cp2": ("qwen3", {"cp": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_rank(name: str, checkpoint: Callable[[str], str], one_rank: Callable[[str], Result]) -> None:
    family, settings = CASES[name]
    check(execute(run_of(family, **settings), checkpoint(family)), one_rank(family), family)


def test_b34_gradients_of_several_schedule_calls_are_reduced_once(
    checkpoint: Callable[[str], str], one_rank: Callable[[str], Result]
) -> None:
    found = execute(run_of("qwen3_vl", cp=2, calls=(2, 1)), checkpoint("qwen3_vl"))
    check(found, one_rank("qwen3_vl"), "qwen3_vl")


IMAGE_FREE = ((0, 1), (1, 5), (2,), (5,))  # every second one, which are the second data-parallel rank's


@pytest.mark.parametrize(
    ("layout", "before"),
    [({"dp": 2}, ((1,), (5,))), ({"dp": 2, "cp": 2}, ((0, 1), (2, 3)))],
    ids=["dp2-after-text", "dp2-cp2-after-images"],
)
def test_b39_b40_text_only_micro_batches_under_overlapped_reduction(
    layout: dict[str, int], before: tuple[tuple[int, ...], ...], checkpoint: Callable[[str], str]
) -> None:
    """Megatron waits for a gradient of every parameter that the first step had one of, and of no other."""
    run = partial(run_of, "qwen3_vl", micro_batches=IMAGE_FREE)
    found = execute(run(**layout, step_before=before, ddp={"overlap_grad_reduce": True}), checkpoint("qwen3_vl"))
    reference = execute(run(), checkpoint("qwen3_vl"))
    check(found, reference, "qwen3_vl")


def test_overlapped_reduction_without_no_sync_is_refused(checkpoint: Callable[[str], str]) -> None:
    with pytest.raises(
        ValueError, match=r"^no_sync_func of the model's config must be the DDP chunk's no_sync .*, got None; "
    ):
        execute(run_of("qwen3_vl", ddp={"overlap_grad_reduce": True}, no_sync=False), checkpoint("qwen3_vl"))


def _cut_contiguously(chunks: list[Any], provider: Any) -> None:
    def contiguous(cu_seqlens: Any, total: int, size: int, rank: int) -> torch.Tensor:
        return torch.arange(rank * total // size, (rank + 1) * total // size, dtype=torch.int32)

    mcore_utils.tex.thd_get_partitioned_indices = contiguous


def test_a_contiguous_cut_is_seen(checkpoint: Callable[[str], str], one_rank: Callable[[str], Result]) -> None:
    wrong = execute(run_of("qwen3_vl", cp=2, after_build=_cut_contiguously), checkpoint("qwen3_vl"))
    assert wrong.worst_logprob(one_rank("qwen3_vl")) > 1.0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_same_weights_in_the_embedded_engine(
    family: str, checkpoint: Callable[[str], str], one_rank: Callable[[str], Result]
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(family), dtype=torch.float32)
    # Bridge's mergers use the tower's own activation, the tanh form of GELU; transformers' use the exact one.
    for merger in [m for m in model.model.visual.modules() if hasattr(m, "act_fn") and hasattr(m, "linear_fc2")]:
        merger.act_fn = nn.GELU(approximate="tanh")
    run = run_of(family)
    with HFEngine(model, spec=spec_of(family)) as engine:
        for indices, expected in zip(run.micro_batches, one_rank(family).logprobs, strict=True):
            batch = make_batch(run, indices, spec_of(family))
            with torch.no_grad():
                found = next_token_logprobs(engine(batch), batch.input_ids, batch.plan, cp_rank=0)
            assert float((found[batch.plan.scored] - expected).abs().max()) < LOGPROB[family]


@pytest.mark.parametrize("settings", [{"tp": 2}, {"provider": RECOMPUTE}], ids=["sequence-parallel", "full-recompute"])
def test_bridge_alone_loses_deepstack_gradients(
    settings: dict[str, Any], checkpoint: Callable[[str], str], one_rank: Callable[[str], Result]
) -> None:
    """Why `engines.deepstack` exists; when this fails, Bridge has been mended and the repair can go."""
    wrong = execute(
        run_of("qwen3_vl", hooks=(keep_default_loss_scaling,), checked=False, **settings), checkpoint("qwen3_vl")
    )
    assert wrong.worst_logprob(one_rank("qwen3_vl")) < LOGPROB["qwen3_vl"]
    error, name = wrong.worst_gradient(one_rank("qwen3_vl"))
    assert error > 0.3
    assert "deepstack_merger_list" in name


def _allow_mtp(chunks: list[Any], provider: Any) -> None:
    row = capability.CAPABILITIES["Qwen3VLModel"]
    capability.CAPABILITIES["Qwen3VLModel"] = replace(row, mtp=True)


def test_b46_multi_token_prediction_depends_on_the_ranks(checkpoint: Callable[[str], str]) -> None:
    """Why it is refused; when this fails, Megatron normalises that loss over the whole batch and the row can say yes."""
    mtp = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5, "calculate_per_token_loss": True}
    make = partial(
        Run, family="qwen3_5_mtp", provider=mtp, hooks=(), emitter="per_token", with_labels=True, after_build=_allow_mtp
    )
    reference, split = (execute(make(cp=cp), checkpoint("qwen3_5_mtp")) for cp in (1, 2))
    assert split.worst_logprob(reference) < LOGPROB["qwen3_5"]
    error, name = split.worst_gradient(reference)
    assert error > 5e-3
    assert "mtp" in name
