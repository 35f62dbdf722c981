from types import SimpleNamespace

import pytest
import torch
from head_ranks import MODULES, critic_facts, fits_layout, head_on_tensor_ranks, tied_stage, two_heads
from megatron_import import import_megatron
from ranks import run_ranks
from torch import nn
from vlm_cp_hooks.value_head import ValueHead, value_head

from vlm_cp.alignment import Alignment


@pytest.fixture(scope="module")
def _megatron() -> None:
    """Imported once, before ranks are forked."""
    for name in MODULES:
        import_megatron(name)


@pytest.mark.usefixtures("_megatron")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vlm", [False, True], ids=["text", "vlm"])
def test_b22_head_replaces_the_language_models_output_layer(vlm: bool, tied: bool) -> None:
    facts = run_ranks(1, critic_facts, vlm, tied)[0]
    assert facts["head"] is ValueHead
    assert not facts["root_has_one"]
    assert facts["shape"] == (1, 6, 1)
    assert facts["error"] < 1e-6
    assert facts["tied"] == [False, False]
    assert facts["class"] == ("MegatronModule" if vlm else "GPTModel", True)
    key = "language_model.output_layer.weight" if vlm else "output_layer.weight"
    assert facts["new_keys"] == ({key} if tied else set())  # a tied model had none of its own
    assert facts["lost_keys"] == set()
    assert facts["hidden"] == []
    assert facts["fine_tuned"]
    assert facts["unhidden"] in ("KeyError", "RuntimeError")
    assert facts["resumed"]


@pytest.mark.usefixtures("_megatron")
def test_b22_last_stage_only_and_untied_on_all() -> None:
    """Megatron would sum the gradients of a [V, H] embedding and a [1, H] head, and hang or fail."""
    (heads_first, marks_first, largest_first), (heads_last, marks_last, largest_last) = run_ranks(2, tied_stage)
    assert heads_first == []
    assert heads_last == ["language_model.output_layer"]
    assert not marks_first
    assert not marks_last
    assert (largest_first, largest_last) == (1, 2)  # nothing was summed over the stages


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence_parallel"])
def test_b22_head_over_tensor_ranks_equals_one_process(sequence_parallel: bool) -> None:
    hidden = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(0))
    (values, input_grad, weight_grad), *_ = run_ranks(1, head_on_tensor_ranks, False, hidden)
    found = run_ranks(2, head_on_tensor_ranks, sequence_parallel, hidden)
    for rank, (own_values, own_grad, own_weight_grad) in enumerate(found):
        torch.testing.assert_close(own_values, values, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            own_grad, input_grad.chunk(2)[rank] if sequence_parallel else input_grad, rtol=0, atol=1e-6
        )
        torch.testing.assert_close(own_weight_grad, weight_grad, rtol=1e-6, atol=1e-6)


def test_head_is_drawn_from_its_seed_alone() -> None:
    first, second = two_heads()
    assert torch.equal(first.weight, second.weight)
    with torch.no_grad():
        first.weight.zero_()
    first.reset_parameters()  # as after a build on the meta device
    assert torch.equal(first.weight, second.weight)


def test_values_are_float32_of_bfloat16_weights() -> None:
    head = ValueHead(64, tp_group=None, sequence_parallel=False, std=1.0, seed=0, dtype=torch.bfloat16)
    hidden = torch.randn(5, 1, 64).bfloat16()
    values, _ = head(hidden)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, hidden.float() @ head.weight.float().T, rtol=0, atol=1e-5)


class FakeGPT(nn.Module):
    """What the hook asks of a GPTModel."""

    def __init__(self, *, post_process: bool = True, **config: object) -> None:
        super().__init__()
        self.decoder = nn.Linear(8, 8)
        self.post_process = post_process
        if post_process:
            self.output_layer = nn.Linear(8, 50)
        defaults = {"hidden_size": 8, "params_dtype": torch.float32, **fits_layout(Alignment())}
        self.config = SimpleNamespace(**{**defaults, **config})
        self.pg_collection = SimpleNamespace(tp=None)


class FakeVLM(nn.Module):
    def __init__(self, language_model: FakeGPT) -> None:
        super().__init__()
        self.language_model, self.config = language_model, language_model.config


def test_hook_returns_what_it_got_and_finds_the_model_in_wrappers() -> None:
    one, chunks = FakeVLM(FakeGPT()), [FakeGPT(post_process=False), FakeGPT()]
    hook = value_head()
    assert hook(one) is one
    assert hook(chunks) is chunks
    assert isinstance(one.language_model.output_layer, ValueHead)
    assert isinstance(chunks[1].output_layer, ValueHead)
    assert not hasattr(chunks[0], "output_layer")
    for chunk in (one, *chunks):  # Bridge asks the first chunk and calls all
        with chunk.hide_loss_modules():
            pass
    wrapped = nn.Module()
    wrapped.module = FakeVLM(FakeGPT())
    hook([wrapped])
    with wrapped.hide_loss_modules():
        assert [n for n, _ in wrapped.named_parameters() if "output" in n] == []
        assert [n for n, _ in wrapped.named_parameters(prefix="a") if "output" in n] == []
    assert [n for n, _ in wrapped.named_parameters() if "output" in n] == ["module.language_model.output_layer.weight"]


@pytest.mark.parametrize("lora_first", [False, True])
def test_head_trains_in_any_order_with_a_hook_that_freezes_everything(lora_first: bool) -> None:
    """What Bridge's LoRA does (peft/base.py): freeze every parameter, add adapters, call `train()`."""

    def freeze(model: nn.Module) -> nn.Module:
        for p in model.parameters():
            p.requires_grad = False
        return model.train(mode=True)

    hooks = [freeze, value_head()] if lora_first else [value_head(), freeze]
    model: nn.Module = FakeVLM(FakeGPT())
    for hook in hooks:
        model = hook(model)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["language_model.output_layer.weight"]


@pytest.mark.parametrize(
    ("cp_size", "tp_size", "sequence_parallel", "divisor"),
    [(1, 1, False, 1), (2, 1, False, 4), (2, 2, True, 4), (2, 4, True, 8), (4, 2, False, 8), (3, 1, False, 6)],
)
def test_required_divisor_is_named_at_construction(
    cp_size: int, tp_size: int, sequence_parallel: bool, divisor: int
) -> None:
    alignment = Alignment(cp_size=cp_size, tp_size=tp_size, sequence_parallel=sequence_parallel)
    value_head(alignment=alignment, sequence_divisor=3 * divisor)
    if divisor == 1:
        return
    with pytest.raises(ValueError) as error:  # noqa: PT011
        value_head(alignment=alignment, sequence_divisor=3 * divisor + divisor // 2)
    assert str(error.value) == (
        f"sequence_divisor must be a multiple of {divisor} at cp_size {cp_size}, tp_size {tp_size}, sequence_parallel "
        f"{sequence_parallel}, got {3 * divisor + divisor // 2}; the first batch would fail, or be cut unevenly"
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: value_head(alignment=Alignment(cp_size=2), packed=False),
            "packed must be True at cp_size 2, got False; padded rows are cut by row, values by sample, "
            "and values of other tokens would be trained",
        ),
        (
            lambda: value_head(alignment=Alignment(cp_size=2))(FakeGPT()),
            "alignment.cp_size must be the model's context_parallel_size, 1, got 2; samples would be padded for another layout",
        ),
        (
            lambda: value_head()(FakeGPT(mtp_num_layers=1)),
            "mtp_num_layers must be None or 0 in a value model, got 1; "
            "the prediction of further tokens would go through the scalar head",
        ),
        (
            lambda: value_head()([nn.Linear(2, 2)]),
            "model_chunks must hold a Megatron GPTModel, itself or as language_model, got Linear; "
            "its output layer cannot be found",
        ),
        (
            lambda: value_head()(make_wrapped()),
            "model_chunks must not be wrapped by DDP yet, got Module; the new head would not be synchronised",
        ),
    ],
    ids=["packed", "layout", "mtp", "not-gpt", "ddp"],
)
def test_what_cannot_work_is_refused(act, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        act()
    assert str(error.value) == message


def test_a_root_without_a_language_model_gets_no_head() -> None:
    """A VLM's root on ranks that only encode: a head set there would never be called."""
    root = FakeGPT()
    del root.output_layer
    root.language_model = None
    with pytest.raises(
        ValueError, match=r"^model_chunks must hold a Megatron GPTModel, itself or as language_model, got FakeGPT;"
    ):
        value_head()([root])


def make_wrapped() -> nn.Module:
    wrapped = nn.Module()
    wrapped.module, wrapped.ddp_config = FakeGPT(), SimpleNamespace()
    return wrapped
