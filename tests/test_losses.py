from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from contract_ranks import MODULES, contract_errors, fake_model, router_gradient
from loss_ranks import KINDS, LossData, gradients_on_grid, make_loss_data, naive_losses, split_samples, wrong_gradients
from megatron_import import import_megatron
from ranks import run_ranks
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.losses import (
    TokenLoss,
    check_loss_contract,
    emit_default,
    emit_mean,
    emit_per_token,
    global_count,
    local_count,
    replicated_loss,
    sequence_loss,
    sequence_sum,
    token_loss,
)
from vlm_cp.plan import SequencePlan

GRID = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]


def naive_gradients(data: LossData) -> dict[str, Tensor]:
    for p in data.parameters:
        p.requires_grad_()
    losses = naive_losses(data)
    grads = {kind: torch.autograd.grad(x, data.parameters, retain_graph=True) for kind, x in losses.items()}
    for p in data.parameters:
        p.requires_grad_(False)
    return {kind: torch.cat([g.flatten() for g in found]) for kind, found in grads.items()}


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported once, before ranks are forked."""
    for name in MODULES:
        import_megatron(name)


@pytest.mark.parametrize(("dp_size", "cp_size"), GRID, ids=lambda n: str(n))
def test_b23_gradient_is_that_of_one_process(dp_size: int, cp_size: int) -> None:
    """Five losses, M in 1, 2, 3, every emitter, through Megatron's own scaling.

    Among the samples: one token only, none scored, a whole micro-batch without a scored one, ranks without any (b26).
    """
    data = make_loss_data()
    expected = naive_gradients(data)
    for found in run_ranks(dp_size * cp_size, gradients_on_grid, dp_size, cp_size, data):
        assert len(found) == len(KINDS) * 3 * 4
        for (kind, _, _), gradient in found.items():
            torch.testing.assert_close(gradient, expected[kind], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("dp_size", "cp_size", "microbatches"), [(2, 2, 3), (1, 4, 2), (4, 1, 3)], ids=lambda n: str(n)
)
def test_b24_wrong_mixes_are_off_by_their_factor(dp_size: int, cp_size: int, microbatches: int) -> None:
    """What the docstring's table says of each; so the test above would see any of them."""
    data = make_loss_data()
    expected = naive_gradients(data)["token_mean"]
    factors = {
        "right": 1.0,
        "gather_sums": cp_size,
        "flag_left_on": dp_size * cp_size,
        "not_counteracted": cp_size / microbatches,
        "counts_summed_over_cp": 1 / cp_size,
        "mean_without_world": 1 / (dp_size * cp_size),
    }
    for found in run_ranks(dp_size * cp_size, wrong_gradients, dp_size, cp_size, microbatches, data):
        biased = found.pop("three_tuple_flag_off")
        cosine = torch.nn.functional.cosine_similarity(biased, expected, dim=0)
        assert cosine < 0.999  # no multiple at all
        assert found.keys() == factors.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(
                gradient, factors[name] * expected, rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("cp_size", [1, 2])
def test_contract_of_a_real_model_in_every_state(cp_size: int) -> None:
    """Megatron's own router and DDP."""
    found = run_ranks(cp_size, contract_errors, cp_size)[0]
    right = [name for name, error in found.items() if not error]
    expected = [
        "default: built with the flag off",
        "default: averaging in the collective",
        "default: cleared everywhere before DDP",
        "per_token_routed: flag on",
        "per_token: flag on, no auxiliary loss",
    ]
    # One rank has nothing to be scaled by: what DDP froze then is 1 either way.
    harmless = ["default: cleared after DDP", "per_token_routed: set after DDP"] if cp_size == 1 else []
    assert sorted(right) == sorted(expected + harmless)
    if cp_size == 1:
        return
    keep = "; register vlm_cp_hooks.keep_default_loss_scaling before the model is built"
    scaled = "gradients would be scaled by data- and context-parallel size, or auxiliary losses by the number of tokens"
    assert found["default: flag left on"] == (
        f'calculate_per_token_loss of the config of DistributedDataParallel must be False for the emitter "default", got True; {scaled}{keep}'
    )
    assert found["default: config cleared, router not"] == (
        f'calculate_per_token_loss of module.router must be False for the emitter "default", got True; {scaled}{keep}'
    )
    assert found["default: cleared after DDP"] == (
        "the gradient scaling that DDP froze must be that of calculate_per_token_loss=False for the emitter "
        '"default", got a factor of 1.0; clear or set the flag before DDP wraps the model, in a pre-wrap hook'
    )
    assert found["per_token: beside auxiliary losses"] == (
        'the emitter must be "default" or "per_token_routed" with MoE auxiliary losses (coefficients [0.1, 0.01]), got '
        '"per_token"; they would be too large by routed / scored tokens. Give emit_per_token its token counts'
    )
    assert found["per_token_routed: flag off"] == (
        f'calculate_per_token_loss of the config of DistributedDataParallel must be True for the emitter "per_token_routed", got False; {scaled}'
    )
    assert found["per_token_routed: set after DDP"] == (
        "the gradient scaling that DDP froze must be that of calculate_per_token_loss=True for the emitter "
        '"per_token_routed", got a factor of 0.5; clear or set the flag before DDP wraps the model, in a pre-wrap hook'
    )


def test_b32_averaging_collective_is_refused_with_a_per_token_loss() -> None:
    found = run_ranks(1, contract_errors, 1)[0]["per_token_routed: averaging in the collective"]
    assert found == (
        'average_in_collective must be False for the emitter "per_token_routed", got True; '
        "gradients would be divided by the number of ranks beside the number of tokens"
    )


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_b25_auxiliary_loss_does_not_depend_on_cp_nor_on_how_much_is_scored(num_microbatches: int) -> None:
    """Megatron's own router, whose auxiliary losses follow the flag."""
    reference, _ = run_ranks(1, router_gradient, 1, "default", 0.5, num_microbatches)[0]
    assert reference.norm() > 1e-3
    for cp_size in (1, 2):
        for emitter, scored in (("default", 0.9), ("per_token_routed", 0.9), ("per_token_routed", 0.2)):
            for found, _ in run_ranks(cp_size, router_gradient, cp_size, emitter, scored, num_microbatches):
                torch.testing.assert_close(found, reference, rtol=2e-5, atol=1e-8)
    # Divided by scored instead of routed tokens, which is why the contract refuses it:
    for found, factor in run_ranks(2, router_gradient, 2, "per_token", 0.2, num_microbatches):
        assert factor > 3
        torch.testing.assert_close(found, factor * reference, rtol=2e-5, atol=1e-8)


def test_contract_of_models_that_only_some_fields_tell_about() -> None:
    check_loss_contract(fake_model(), "default")
    check_loss_contract(torch.nn.ModuleList([fake_model(mtp_num_layers=1)]), "default")
    message = (
        'mtp_num_layers must be None or 0 with the emitter "default" at context_parallel_size 2, got 1; '
        "Megatron normalises that loss by each rank's own tokens, whatever the main loss does"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_loss_contract(fake_model(mtp_num_layers=1, context_parallel_size=2), "default")
    with pytest.raises(
        ValueError, match=r"^model_chunks must hold a Megatron model, got \['Linear'\] without config\.calc"
    ):
        check_loss_contract([torch.nn.Linear(1, 1)], "default")
    with pytest.raises(
        ValueError, match=r"^emitter must be one of default, per_token, per_token_routed, got 'mean'; nothing was"
    ):
        check_loss_contract(fake_model(), "mean")


def test_contract_reads_what_megatron_fsdp_froze() -> None:
    model = fake_model()
    model.ddp_config = SimpleNamespace(average_in_collective=False)
    model.param_and_grad_buffer = SimpleNamespace(gradient_scaling_factor=0.5)
    check_loss_contract(model, "default")
    model.param_and_grad_buffer.gradient_scaling_factor = None  # how it says that the flag was on
    with pytest.raises(ValueError, match="got a factor of None"):
        check_loss_contract(model, "default")
    model.config.calculate_per_token_loss = True
    check_loss_contract(model, "per_token")


def make_loss(value: float = 6.0, count: int = 3) -> TokenLoss:
    return TokenLoss(torch.tensor(value, requires_grad=True) * 1, torch.tensor(count, dtype=torch.int32))


def test_emitters_return_what_may_be_scaled_in_place() -> None:
    """Megatron's schedule does `*=` and `/=` on the loss."""
    loss, extra = make_loss(), torch.tensor(2.0)
    outputs = [
        emit_default(loss, global_count=3, num_microbatches=1, dp_size=1, metrics={"kl": extra}),
        emit_per_token(loss, metrics={"kl": extra}),
        emit_per_token(loss, global_count=3, routed_tokens_local=3, routed_tokens_global=3, metrics={"kl": extra}),
    ]
    for output in outputs:
        output[0].mul_(10)
        output[-1]["kl"].mul_(10)
        output[-1]["loss"].mul_(10)
        if len(output) == 3:
            assert output[1].dtype == torch.int32
            output[1].add_(1)
        assert not output[-1]["loss"].requires_grad
    emit_mean(loss, global_count=1, world_size=1).mul_(10)
    assert loss.local_sum.item() == 6
    assert loss.local_count.item() == 3
    assert extra.item() == 2


def test_metrics_hold_the_pair_that_megatron_adds_up_and_divides() -> None:
    loss, metrics = emit_default(make_loss(), global_count=12, num_microbatches=2, dp_size=2)
    assert loss.item() == 6 * 2 * 2 / 12
    assert metrics["loss"].tolist() == [6, 3]


@pytest.mark.parametrize("count", [0, torch.tensor(0)], ids=["int", "tensor"])
def test_b26_nothing_scored_in_the_whole_step_is_a_loss_of_zero(count: int | Tensor) -> None:
    loss = TokenLoss(torch.zeros((), requires_grad=True) * 1, 0)
    assert emit_default(loss, global_count=count, num_microbatches=2, dp_size=2)[0].item() == 0
    assert emit_per_token(loss, global_count=count, routed_tokens_local=4, routed_tokens_global=8)[0].item() == 0
    assert emit_mean(loss, global_count=count, world_size=2).item() == 0


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b27_counts_do_not_change_with_cp(cp_size: int) -> None:
    plan = SequencePlan.from_lengths([1, 13, 2, 7, 5], alignment=Alignment(cp_size=cp_size))
    mask = plan.scored.clone()
    mask[plan.sample_index == 3] = False

    def count(reduction: str, empty: str = "skip") -> int:
        parts = [
            local_count(plan, mask[None], cp_rank=r, reduction=reduction, empty_samples=empty) for r in range(cp_size)
        ]
        return int(global_count(parts, None))

    assert count("token_mean") == 12 + 1 + 4
    assert count("sequence_mean_token_mean") == count("sequence_mean_token_sum") == 3  # the first has no scored slot
    assert count("sequence_mean_token_sum", "count") == 5


def test_b28_fractional_masks_weigh_and_count_once() -> None:
    plan = SequencePlan.from_lengths([3, 4])
    terms = torch.tensor([1.0, 10.0, torch.nan, 100.0, torch.inf, 1000.0, torch.nan], requires_grad=True)
    mask = torch.tensor([[0.5, 1.0, 0.0, 0.25, 0.0, 0.5, 0.0]])
    loss = token_loss(terms, plan, mask, cp_rank=0)
    assert loss.local_sum.item() == 0.5 + 10 + 25 + 500
    assert loss.local_count.item() == 4
    loss = token_loss(terms, plan, mask, cp_rank=0, reduction="sequence_mean_token_mean")
    torch.testing.assert_close(loss.local_sum.item(), 10.5 / 1.5 + 525 / 0.75)
    assert loss.local_count.item() == 2
    loss.local_sum.backward()
    assert terms.grad.isfinite().all()
    assert terms.grad[[2, 4, 6]].tolist() == [0, 0, 0]
    sequence = sequence_loss(torch.tensor([3.0, 5.0, 7.0]), cp_rank=0, cp_size=1, mask=torch.tensor([0.5, 0.0, 1.0]))
    assert (sequence.local_sum.item(), sequence.local_count.item()) == (8.5, 2)


def test_what_is_masked_out_of_a_sequence_may_hold_anything() -> None:
    plan = SequencePlan.from_lengths([2, 3])
    terms = torch.tensor([1.0, torch.nan, 10.0, torch.inf, 100.0], requires_grad=True)
    sums = sequence_sum(terms, plan, torch.tensor([1.0, 0, 1, 0, 0.5]), None)
    sums.sum().backward()
    assert sums.tolist() == [1, 60]
    assert terms.grad.tolist() == [1, 0, 1, 0, 0.5]


def test_empty_samples_count_or_not_as_asked() -> None:
    plan = SequencePlan.from_lengths([2, 2, 2])
    terms, mask = torch.tensor([4.0, 0, 9.0, 0, 5.0, 0]), torch.tensor([[1.0, 0, 0, 0, 1, 0]])
    for empty, count in (("skip", 2), ("count", 3)):
        loss = token_loss(terms, plan, mask, cp_rank=0, reduction="sequence_mean_token_mean", empty_samples=empty)
        assert (loss.local_sum.item(), loss.local_count.item()) == (9, count)


def test_replicated_loss_counts_once_and_keeps_every_ranks_gradient() -> None:
    leaf = torch.tensor(3.0, requires_grad=True)
    parts = [replicated_loss(2 * leaf, torch.tensor(5), cp_rank=rank) for rank in range(2)]
    assert [p.local_sum.item() for p in parts] == [6, 0]
    assert [int(p.local_count) for p in parts] == [5, 0]
    for p in parts:
        assert torch.autograd.grad(p.local_sum, leaf)[0].item() == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TokenLoss(torch.zeros(2), 1),
            "local_sum must be a scalar, got shape (2,); schedules would sum or average it",
        ),
        (
            lambda: TokenLoss(torch.zeros(()), torch.tensor(1.5)),
            "local_count must be one integer, got tensor(1.5000); Megatron adds counts up in an integer tensor and would crash",
        ),
        (
            lambda: emit_per_token(make_loss(), global_count=3),
            "global_count, routed_tokens_local and routed_tokens_global must be given together, got (3, None, None); "
            "the loss would be divided by the wrong count",
        ),
        (
            lambda: local_count(SequencePlan.from_lengths([3]), torch.ones(1, 3), cp_rank=0, reduction="mean"),
            "reduction must be one of token_mean, sequence_mean_token_mean, sequence_mean_token_sum and empty_samples one of "
            "skip, count, got 'mean' and 'skip'; the mean would be another",
        ),
        (
            lambda: token_loss(torch.ones(3), SequencePlan.from_lengths([3]), torch.ones(3), cp_rank=0),
            "loss_mask must be the full stream's [1, 3], got (3,); a rank's shard of it would be weighed by its own tokens only",
        ),
        (
            lambda: local_count(SequencePlan.from_lengths([2, 3]), torch.tensor([[0, 0, 0, 1, 1]]), cp_rank=0),
            "loss_mask must be 0 at slots without a next token, got 1 at slot 4, the end or padding of sample 1; "
            "a mask of tokens that was not shifted would count one token too many a sample",
        ),
    ],
    ids=["sum", "count", "emit", "reduction", "mask", "tokens"],
)
def test_bad_input_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make()
    assert str(error.value) == message


def test_megatrons_accumulator_takes_our_counts_and_not_floats() -> None:
    total = torch.zeros([], dtype=torch.int)
    total += emit_per_token(make_loss(count=3))[1]
    assert total.item() == 3
    with pytest.raises(RuntimeError, match="can't be cast"):
        total += torch.tensor(3.0)


def test_b26_the_grid_above_holds_ranks_and_micro_batches_with_nothing_to_score() -> None:
    data = make_loss_data()
    micro_batches = [part for m in (1, 2, 3) for part in split_samples(len(data.ids), 4 * m)]
    assert any(not any(data.masks[i].any() for i in part) for part in micro_batches)
    idle = 0
    for part in micro_batches:
        plan = SequencePlan.from_lengths([len(data.ids[i]) for i in part], alignment=Alignment(cp_size=4))
        mask = plan.pack([data.masks[i] for i in part], False)
        scored = [bool(plan.shard(mask, rank).any()) for rank in range(4)]
        idle += any(scored) and not all(scored)
    assert idle
