"""What a user does wrong, and the one sentence that comes back before the first step. Models here are shells with a config."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import bridge_on_cpu  # noqa: F401  (imports Megatron quietly)
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.collate import pack_samples
from vlm_cp.demo.models import tiny_config
from vlm_cp.demo.processor import build_tokenizer
from vlm_cp.engines.megatron import MegatronEngine
from vlm_cp.engines.preflight import check_versions, emitter_kind
from vlm_cp.families.capability import CAPABILITIES
from vlm_cp.spec import VLMSpec

SPEC = VLMSpec.from_hf_config(tiny_config("qwen3_vl", build_tokenizer()))


def shell(class_name: str = "Qwen3VLModel", *, cp: Any = None, tp: Any = None, pp: Any = None, **settings: Any) -> Any:
    """A module with a Bridge model's name, config and groups; `settings` go to the config, `router` copies the flag."""
    config = SimpleNamespace(
        **{
            "context_parallel_size": dist.get_world_size(cp) if cp else 1,
            "sequence_parallel": False,
            "calculate_per_token_loss": False,
            "variable_seq_lengths": True,
            **settings,
        }
    )
    model = type(class_name, (nn.Module,), {"forward": lambda self, **inputs: inputs["input_ids"]})()
    model.weight = nn.Parameter(torch.zeros(1))
    model.pre_process = model.post_process = True
    model.config, model.pg_collection = config, SimpleNamespace(cp=cp, tp=tp, pp=pp)
    model.image_token_id, model.video_token_id = SPEC.image_token_id, SPEC.video_token_id
    if "router" in settings:
        model.router = nn.Module()
        model.router.calculate_per_token_loss = settings["router"]
    return model


def batch(*lengths: int, cp: int = 1, first: int = 5, total_tokens: int | None = None) -> PackedBatch:
    samples = [{"input_ids": torch.arange(first, first + length)} for length in lengths]
    alignment = Alignment(cp_size=cp)
    return pack_samples(samples, alignment=alignment, spec=SPEC, pad_token_id=0, total_tokens=total_tokens)


def engine(model: Any, layout: Any = "full", spec: VLMSpec | None = SPEC) -> MegatronEngine:
    return MegatronEngine([model], spec=spec, layout=layout)


def emit_default(loss: Any) -> tuple[Any, ...]:
    return loss.local_sum * 2, {}


def emit_per_token(loss: Any) -> tuple[Any, ...]:
    return loss.local_sum * 1, loss.local_count.int(), {}


def refuses(text: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(text)}$")


def test_a_model_of_an_unknown_class() -> None:
    with refuses(
        "model must be one of Qwen3VLModel, GPTModel for packed context parallelism, got NemotronVLModel, which was never tried; "
        "where it cuts the stream is unknown, and a wrong cut raises no error"
    ):
        engine(shell("NemotronVLModel"))


@pytest.mark.parametrize(
    ("class_name", "layout", "allowed"),
    [("GPTModel", "full", "'sharded'"), ("Qwen3VLModel", "packed", "'full' or 'sharded'")],
)
def test_b12_a_layout_that_the_model_does_not_take(class_name: str, layout: str, allowed: str) -> None:
    with refuses(
        f"layout must be {allowed} for {class_name}, got {layout!r}; the stream would be cut twice, or not at all"
    ):
        engine(shell(class_name), layout)


def test_a_spec_of_another_model() -> None:
    other = VLMSpec(**{**vars(SPEC), "image_token_id": 3})
    with refuses(
        f"spec must have the model's image_token_id {SPEC.image_token_id}, got 3; feature rows would be placed at other tokens"
    ):
        engine(shell(), spec=other)
    with refuses(
        f"spec must have the model's image_token_id {SPEC.image_token_id}, got None; feature rows would be placed at other tokens"
    ):
        engine(shell(), spec=None)


@pytest.mark.parametrize(
    ("found", "package", "least", "got"),
    [
        ({"megatron-bridge": "0.5.1", "megatron-core": "0.19.2"}, "megatron-bridge", "0.6.0", "0.5.1"),
        ({"megatron-bridge": "0.6.2", "megatron-core": "0.17.0rc1"}, "megatron-core", "0.18.0", "0.17.0rc1"),
        ({"megatron-core": "0.19.2"}, "megatron-bridge", "0.6.0", "none"),
    ],
    ids=["old-bridge", "old-core", "no-bridge"],
)
def test_old_packages(found: dict[str, str], package: str, least: str, got: str) -> None:
    with refuses(
        f"{package} must be {least} or newer for Qwen3VLModel under context parallelism, got {got}; "
        "older ones take the packed stream apart by other rules"
    ):
        check_versions(CAPABILITIES["Qwen3VLModel"], found)


@pytest.mark.parametrize("version", ["0.6.0", "0.6.2", "0.10.0", "1.0"])
def test_new_enough_packages(version: str) -> None:
    check_versions(CAPABILITIES["Qwen3VLModel"], {"megatron-bridge": version, "megatron-core": "0.18.0+git1234"})


CONTRACTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "flag-left-on": (
        {"calculate_per_token_loss": True},
        emit_default,
        'calculate_per_token_loss of the config of Qwen3VLModel must be False for the emitter "default", got True; '
        "gradients would be scaled by data- and context-parallel size, or auxiliary losses by the number of tokens"
        "; register vlm_cp_hooks.keep_default_loss_scaling before the model is built",
    ),
    "flag-left-on-in-a-router": (
        {"router": True},
        emit_default,
        'calculate_per_token_loss of router must be False for the emitter "default", got True; '
        "gradients would be scaled by data- and context-parallel size, or auxiliary losses by the number of tokens"
        "; register vlm_cp_hooks.keep_default_loss_scaling before the model is built",
    ),
    "flag-off-for-per-token": (
        {},
        emit_per_token,
        'calculate_per_token_loss of the config of Qwen3VLModel must be True for the emitter "per_token", got False; '
        "gradients would be scaled by data- and context-parallel size, or auxiliary losses by the number of tokens",
    ),
    "an-emitter-for-another-framework": (
        {},
        lambda loss: loss.local_sum,
        "emitter must return (loss, metrics) or (loss, num_tokens, metrics), got Tensor; Megatron's schedule would not know how to scale it",
    ),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_an_emitter_that_does_not_fit_the_flag(name: str) -> None:
    settings, emitter, text = CONTRACTS[name]
    with refuses(text):
        engine(shell(**settings)).forward_step(emitter, lambda output, b: None)


def test_the_kind_of_an_emitter() -> None:
    cpu = torch.device("cpu")
    assert emitter_kind(emit_default, cpu) == "default"
    assert emitter_kind(emit_per_token, cpu) == "per_token"
    assert emitter_kind(lambda loss: (loss.local_sum, torch.tensor(64), {}), cpu) == "per_token_routed"


def test_emitters_that_fit() -> None:
    engine(shell(router=False)).forward_step(emit_default, lambda output, b: None)
    engine(shell(calculate_per_token_loss=True, router=True)).forward_step(emit_per_token, lambda output, b: None)
    engine(shell(calculate_per_token_loss=True)).forward_step(None, lambda output, b: None)


@pytest.mark.parametrize(
    ("tower", "reason"),
    [({"recompute_granularity": "full"}, 'recompute_granularity "full" drops the graph of the deepstack rows')],
)
def test_lost_deepstack_gradients(tower: dict[str, Any], reason: str) -> None:
    model = shell()
    model.vision_model = nn.Module()
    model.vision_model.config = SimpleNamespace(**tower)
    model.vision_model.decoder = nn.Module()
    model.vision_model.decoder.deepstack_merger_list = nn.ModuleList([nn.Linear(2, 2)])
    with refuses(
        f"the tower must keep its deepstack gradients, got a model where {reason}; "
        "register vlm_cp_hooks.keep_deepstack_gradients before the build"
    ):
        engine(model).forward_step(emit_default, lambda output, b: None)
    engine(model).forward_step(None, lambda output, b: None)  # a forward-only pass loses nothing
    for parameter in model.vision_model.parameters():
        parameter.requires_grad = False
    engine(model).forward_step(emit_default, lambda output, b: None)


def test_b13_a_batch_that_was_cut_already() -> None:
    with refuses(
        "batch must be a PackedBatch, the full stream, got LocalBatch; the engine cuts it itself, as its layout says"
    ):
        engine(shell())(batch(8).local(0))  # type: ignore[arg-type]


def test_a_direct_call_of_one_stage() -> None:
    model = shell()
    with refuses("chunks must be one whole model for a direct call, got 1 pipeline stages; use forward_step"):
        MegatronEngine([model, model], spec=SPEC)(batch(8))


def test_b33_every_stage_gets_what_it_reads() -> None:
    first, last = shell(), shell()
    first.post_process = last.pre_process = False
    first.vision_model = nn.Module()
    ids = torch.tensor([SPEC.vision_start_token_id, *[SPEC.image_token_id] * 2, 5])
    image = {"pixel_values": torch.zeros(8, 12), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    packed = pack_samples([{"input_ids": ids, **image}], alignment=Alignment(), spec=SPEC, pad_token_id=0)
    split = MegatronEngine([first, last], spec=SPEC)
    everywhere = {"input_ids", "position_ids", "attention_mask", "packed_seq_params"}
    media = {"pixel_values", "image_grid_thw", "image_input_mask"}
    assert split.inputs(packed, first, with_labels=True).keys() == everywhere | media
    assert split.inputs(packed, last, with_labels=True).keys() == everywhere | {"labels", "loss_mask"}


def _message(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except ValueError as error:
        return str(error)
    return None


def _on_two_ranks(rank: int) -> dict[str, str | None]:
    world = dist.group.WORLD
    build = partial(shell, cp=world)
    heads = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 3,
    }
    step = engine(build()).forward_step(None, lambda output, b: None)
    fixed = engine(shell(pp=world, variable_seq_lengths=False)).forward_step(None, lambda output, b: None)
    fixed.engine.first_total = 8
    split = shell("GPTModel", tp=world, sequence_parallel=True)
    return {
        "config": _message(lambda: engine(build(context_parallel_size=4))),
        "mtp": _message(lambda: engine(build(mtp_num_layers=1))),
        "heads": _message(lambda: engine(build(**heads))),
        "delta net over tp": _message(lambda: engine(shell(tp=world, **heads))),
        "plan": _message(lambda: engine(build())(batch(8))),
        "padding": _message(lambda: engine(split, "sharded")(batch(7))),
        "other batch": _message(lambda: step(iter([batch(8 + 8 * rank, cp=2)]), step.engine.chunks[0])),
        "other ids": _message(lambda: step(iter([batch(8, cp=2, first=5 + rank)]), step.engine.chunks[0])),
        "same batch": _message(lambda: step(iter([batch(8, cp=2)]), step.engine.chunks[0])),
        "fixed length": _message(lambda: fixed(iter([batch(12)]), fixed.engine.chunks[0])),
        "stage": _message(lambda: engine(shell(pp=world))(batch(8))),
    }


SENTENCES = {
    "config": "context_parallel_size must be the CP group's size 2, got 4; attention layers were built for another layout",
    "mtp": "mtp_num_layers must be None under context parallelism, got 1; Megatron divides that loss by each rank's own tokens, so its "
    "gradient would depend on how samples fall on ranks",
    "heads": "linear_num_key_heads and linear_num_value_heads must be divisible by tp * cp = 2, got 2 and 3; gated delta nets trade tokens "
    "for heads over those ranks",
    "delta net over tp": "sequence_parallel must be on for gated delta nets over 2 TP ranks, got it off; megatron-core 0.19 then leaves the "
    "gradient of their output norm unsummed",
    "plan": "batch.plan must be made for the model's cp_size 2, got 1; samples are padded and cut for other ranks",
    "padding": "batch.plan must be padded to a multiple of cp * tp = 2 tokens with sequence parallelism, got 7; pass tp_size and "
    "sequence_parallel to its Alignment",
    "other batch": "batch must be the same on all context-parallel ranks, got lengths (8,) on rank 0 and (16,) on rank 1, or other ids; "
    "ranks would attend to another batch's tokens",
    "other ids": "batch must be the same on all context-parallel ranks, got lengths (8,) on rank 0 and (8,) on rank 1, or other ids; "
    "ranks would attend to another batch's tokens",
    "same batch": None,
    "fixed length": "batch.plan must have total_tokens 8 like the first batch while variable_seq_lengths is off, got 12; the next pipeline "
    "stage would wait for another shape",
    "stage": "chunks must be one whole model for a direct call, got 2 pipeline stages; use forward_step",
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, str | None]]:
    return run_ranks(2, _on_two_ranks)


@pytest.mark.parametrize("name", SENTENCES)
def test_on_two_ranks_every_rank_says_the_same(name: str, found: list[dict[str, str | None]]) -> None:
    assert [rank[name] for rank in found] == [SENTENCES[name]] * 2
