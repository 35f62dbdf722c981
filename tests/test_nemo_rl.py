"""The drop-ins by themselves and, where VLM_CP_NEMO_RL names a checkout of NeMo-RL, against its own functions."""

from __future__ import annotations

import inspect
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemo_rl_case import LENGTHS, Batch, ValueLoss, expected_values, load, make_pack
from ranks import run_ranks
from torch import Tensor
from vlm_cp_hooks.nemo_rl import (
    SequencePackingLossWrapper,
    check_value_config,
    make_value_head_hook,
    unpack_value_sequences,
    value_loss_prepare_fn,
)
from vlm_cp_hooks.value_head import ValueHead


def on_rank(rank: int, cp_size: int, invariant: bool) -> tuple[Tensor, Tensor, dict[str, Any], Tensor]:
    plan, heads, data = make_pack(cp_size)
    group = torch.distributed.group.WORLD if cp_size > 1 else None
    own = plan.shard(heads, rank).clone().requires_grad_()
    wrapper = SequencePackingLossWrapper(
        ValueLoss(invariant), value_loss_prepare_fn, plan.cu_seqlens_padded, context_parallel_group=group
    )
    loss, metrics = wrapper(own[None, :, None], data, None, torch.tensor(7.0).double())
    (loss / cp_size).backward()  # as NeMo-RL divides
    with torch.no_grad():
        values = unpack_value_sequences(own[None], plan.cu_seqlens_padded, 12, cp_group=group)
    return loss.detach(), own.grad, metrics, values


@pytest.mark.parametrize("invariant", [False, True], ids=["by-sample", "one-call"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_value_loss_and_values_equal_unpacked_rows(cp_size: int, invariant: bool) -> None:
    plan, heads, data = make_pack(cp_size)
    leaf = heads.clone().requires_grad_()
    rows = expected_values(plan, leaf, 9)
    loss, _ = ValueLoss()(rows, data, None, 7.0)
    loss.backward()
    valid = rows.detach()[(data["token_mask"] * data["sample_mask"][:, None]).bool()]
    for rank, (found, grad, metrics, values) in enumerate(run_ranks(cp_size, on_rank, cp_size, invariant)):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-14, atol=0)
        torch.testing.assert_close(grad, plan.shard(leaf.grad, rank), rtol=1e-13, atol=0)
        assert metrics["values_min"] == valid.min().item()
        assert metrics["values_max"] == valid.max().item()
        assert metrics["num_valid_samples"] == 4
        assert metrics["values_mean"] == pytest.approx(valid.sum().item() / 7, abs=1e-12)
        assert torch.equal(values, expected_values(plan, heads, 12))


def wrapped(values: list[list[float]], masks: list[list[int]], prepare: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """The wrapper over samples of these values, which its loss takes as they are."""
    lengths = [len(x) for x in values]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    shape = len(values), max(lengths)
    data = Batch(
        {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "token_mask": torch.tensor(masks).double(),
            "sample_mask": torch.ones(len(values)).double(),
            "returns": torch.zeros(shape).double(),
            "values": torch.zeros(shape).double(),
        }
    )
    wrapper = SequencePackingLossWrapper(ValueLoss(), prepare or as_they_are, bounds)
    logits = torch.tensor([x for sample in values for x in sample], dtype=torch.float64)[None]
    return wrapper(logits, data, None, 9.0)


def as_they_are(*, logits: Tensor, data: Any, **_: Any) -> tuple[dict[str, Tensor], Any]:
    return {"logits": logits}, data


def test_b28_masked_sample_is_no_extremum_though_the_loss_says_zero() -> None:
    values = [[3.0, 5, 4], [6.0, 9, 7], [8.0, 8.5, 8.2]]
    _, metrics = wrapped(values, [[1, 1, 1], [1, 1, 1], [0, 0, 0]])
    assert (metrics["values_min"], metrics["values_max"]) == (3, 9)
    _, metrics = wrapped([[-3.0, 1], [0.5, 9], [2.0, 4]], [[1, 1]] * 3)
    assert (metrics["values_min"], metrics["values_max"]) == (-3, 9)
    assert metrics["num_valid_samples"] == 3
    assert metrics["values_mean"] == pytest.approx(13.5 / 9)


def test_b29_all_masked_leaves_the_infinities_that_the_framework_drops() -> None:
    _, metrics = wrapped([[3.0, 5], [6.0, 9]], [[0, 0]] * 2)
    assert (metrics["values_min"], metrics["values_max"]) == (math.inf, -math.inf)


def test_b53_data_that_is_not_a_sequence_is_not_cut() -> None:
    seen: list[dict[str, tuple[int, ...]]] = []

    def prepare(*, logits: Tensor, data: Any, **_: Any) -> tuple[dict[str, Tensor], Any]:
        seen.append({k: tuple(x.shape) for k, x in data.items()})
        return {"logits": expected_values(plan, heads, 9)[:1, : data["returns"].shape[1]]}, data

    plan, heads, data = make_pack(1)
    lengths = plan.cu_seqlens
    SequencePackingLossWrapper(ValueLoss(), prepare, lengths, plan.cu_seqlens_padded)(heads[None], data, None, 7.0)
    for shapes, length in zip(seen, LENGTHS, strict=True):
        assert shapes["grids"] == (1, 3)
        assert shapes["returns"] == (1, length)
    seen.clear()
    keys = ("returns", "values", "token_mask")
    wrapper = SequencePackingLossWrapper(ValueLoss(), prepare, lengths, plan.cu_seqlens_padded, token_keys=keys)
    wrapper(heads[None], data, None, 7.0)
    assert seen[0]["input_ids"] == (1, 9)  # not declared, not cut


def test_metrics_of_more_than_one_number_are_added_up() -> None:
    def loss_fn(*, logits: Tensor, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        return logits.sum(), {"table": torch.ones(2), "x": torch.tensor(1.5)}

    _, _, data = make_pack(1)
    bounds = torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32)
    loss, metrics = SequencePackingLossWrapper(loss_fn, as_they_are, bounds)(torch.ones(1, 8), data, None, None)
    assert loss.item() == 8
    assert metrics["x"] == 6
    assert metrics["table"].tolist() == [4, 4]


def test_b7_wrong_number_of_slots_is_refused() -> None:
    plan, heads, data = make_pack(1)
    wrapper = SequencePackingLossWrapper(ValueLoss(), value_loss_prepare_fn, plan.cu_seqlens_padded)
    with pytest.raises(
        ValueError, match=r"^next_token_logits must have 40 slots, a CP rank's share of the packed samples, got 39;"
    ):
        wrapper(heads[None, :-1], data, None, 7.0)


def value_config(
    cp: int = 1, tp: int = 1, pp: int = 1, sp: bool = False, packs: bool = True, divisor: int = 1
) -> dict[str, Any]:
    return {
        "megatron_cfg": {
            "context_parallel_size": cp,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "sequence_parallel": sp,
        },
        "sequence_packing": {"enabled": packs},
        "make_sequence_length_divisible_by": divisor,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packs": False, "tp": 2, "sp": True, "divisor": 3},
        {"cp": 2, "divisor": 4},
        {"cp": 2, "tp": 2, "sp": True, "divisor": 8, "pp": 2},
        {"cp": 2, "tp": 2, "divisor": 4, "pp": 2},
        {"cp": 2, "tp": 2, "divisor": 16},
    ],
    ids=str,
)
def test_value_configs_that_work(options: dict[str, Any]) -> None:
    check_value_config(value_config(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cp": 2, "packs": False},
            "sequence_packing.enabled must be True at context_parallel_size 2, got False; values would be cut by row",
        ),
        (
            {"cp": 2, "tp": 2, "sp": True, "divisor": 2},  # its default: the TP size
            "make_sequence_length_divisible_by must be a multiple of 8 (2 * context_parallel_size above 1, times "
            "tensor_model_parallel_size with sequence_parallel), got 2; the first batch would fail",
        ),
        (
            {"cp": 2, "pp": 2, "divisor": 16},
            "make_sequence_length_divisible_by must divide 4, which bins are counted with, in a pipeline, got 16; "
            "samples would be padded beyond their bin, and the last one by a negative length",
        ),
    ],
    ids=["rows", "divisor", "bins"],
)
def test_b52_value_configs_that_do_not_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_value_config(value_config(**options))
    assert str(error.value) == message


class FakeGPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.post_process, self.output_layer = True, torch.nn.Linear(8, 50)
        self.config = SimpleNamespace(hidden_size=8, sequence_parallel=False, params_dtype=torch.float32)
        self.pg_collection = SimpleNamespace(tp=None)


def test_value_head_hook_with_the_frameworks_arguments() -> None:
    model = [FakeGPT()]
    assert make_value_head_hook(8, False)(model) is model
    assert isinstance(model[0].output_layer, ValueHead)
    with pytest.raises(
        ValueError, match=r"^hidden_size and sequence_parallel must be the model's \(8, False\), got \(16, True\);"
    ):
        make_value_head_hook(16, True)(FakeGPT())


@pytest.fixture
def checkout() -> Path:
    path = os.environ.get("VLM_CP_NEMO_RL")
    if path is None:
        pytest.skip("VLM_CP_NEMO_RL does not name a checkout of NeMo-RL")
    return Path(path)


def test_values_equal_nemo_rls_own(checkout: Path) -> None:
    file = "nemo_rl/models/value/workers/megatron_value_worker.py"
    names = ["make_value_head_hook", "_unpack_value_sequences", "_value_loss_prepare_fn"]
    theirs = load(checkout, file, names)
    plan, heads, _ = make_pack(1)
    for width in (3, 9, 12, 40):
        found = unpack_value_sequences(heads[None], plan.cu_seqlens_padded, width)
        assert torch.equal(found, theirs._unpack_value_sequences(heads[None], plan.cu_seqlens_padded, width))
    for logits in (heads.view(5, 8), heads.view(5, 8, 1)):
        rows = {"returns": torch.zeros(5, 6)}
        ours, own_rows = value_loss_prepare_fn(logits, rows)
        expected, _ = theirs._value_loss_prepare_fn(logits, rows)
        assert own_rows is rows
        assert torch.equal(ours["logits"], expected["logits"])
    for mine, original in (
        (make_value_head_hook, theirs.make_value_head_hook),
        (unpack_value_sequences, theirs._unpack_value_sequences),
        (value_loss_prepare_fn, theirs._value_loss_prepare_fn),
    ):
        assert parameters_of(mine) == parameters_of(original)


def test_wrapper_equals_nemo_rls_own(checkout: Path) -> None:
    """Its wrapper around its value loss: the same loss, gradient and sums; the extrema that it adds up are folded here."""
    wrapper = load(checkout, "nemo_rl/algorithms/loss/wrapper.py", ["SequencePackingLossWrapper"])
    helpers = load(checkout, "nemo_rl/algorithms/utils.py", ["masked_mean"])
    losses = load(
        checkout,
        "nemo_rl/algorithms/loss/loss_functions.py",
        ["MseValueLossFn"],
        LossFunction=object,
        LossInputType=SimpleNamespace(LOGIT="logit"),
        LossType=SimpleNamespace(TOKEN_LEVEL="token"),
        masked_mean=helpers.masked_mean,
    )
    loss_fn = losses.MseValueLossFn(SimpleNamespace(scale=1.0, cliprange=0.2))
    plan, heads, data = make_pack(1)
    assert parameters_of(SequencePackingLossWrapper)[:7] == parameters_of(wrapper.SequencePackingLossWrapper)
    results = []
    for cls, invariant in (
        (wrapper.SequencePackingLossWrapper, False),
        (SequencePackingLossWrapper, False),
        (SequencePackingLossWrapper, True),
    ):
        loss_fn.packing_invariant = invariant
        leaf = heads.clone().requires_grad_()
        run = cls(loss_fn, value_loss_prepare_fn, plan.cu_seqlens_padded, plan.cu_seqlens_padded)
        loss, metrics = run(leaf[None], data, torch.tensor(3.0), torch.tensor(7.0))
        loss.backward()
        results.append((loss.detach(), leaf.grad, metrics))
    (loss, grad, metrics), *ours = results
    for found, found_grad, found_metrics in ours:
        torch.testing.assert_close(found, loss, rtol=1e-14, atol=0)
        torch.testing.assert_close(found_grad, grad, rtol=1e-13, atol=0)
        assert found_metrics.keys() == metrics.keys()
        for name, value in metrics.items():
            if name not in ("values_min", "values_max"):
                assert found_metrics[name] == pytest.approx(value, abs=1e-12), name
    valid = expected_values(plan, heads, 9)[(data["token_mask"] * data["sample_mask"][:, None]).bool()]
    for _, _, found_metrics in ours:
        assert found_metrics["values_min"] == valid.min().item() != pytest.approx(metrics["values_min"])
        assert found_metrics["values_max"] == valid.max().item() != pytest.approx(metrics["values_max"])


def parameters_of(fn: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(fn).parameters.values()]
