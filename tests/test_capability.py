"""Every "no" of the capability table, asked of the installed Megatron-Bridge; every "yes" is run by test_bridge_parity.py."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from types import CodeType, SimpleNamespace
from typing import Any

import bridge_on_cpu  # noqa: F401  (imports Megatron-Bridge)
import pytest
import torch

from vlm_cp.alignment import Alignment
from vlm_cp.families.capability import CAPABILITIES, capability_of
from vlm_cp.plan import SequencePlan

MODELS = "megatron.bridge.models."
WHERE = {
    "Qwen3VLModel": MODELS + "qwen_vl.modelling_qwen3_vl.model",
    "GPTModel": "megatron.core.models.gpt",
    "Qwen25VLModel": MODELS + "qwen_vl.modeling_qwen25_vl",
    "GLM45VModel": MODELS + "glm_vl.modeling_glm_45v",
    "Ernie45VLModel": MODELS + "ernie_vl.modeling_ernie45_vl.model",
    "Step37Model": MODELS + "stepfun.modelling_step37.model",
    "Gemma3VLModel": MODELS + "gemma_vl.modeling_gemma3_vl",
    "KimiK25VLModel": MODELS + "kimi_vl.modeling_kimi_k25_vl",
    "Qwen3OmniThinkerModel": MODELS + "qwen_omni.modeling_qwen3_omni.thinker_model",
}
# What Bridge's models call to cut a stream for context parallelism.
CUTTERS = {
    "get_packed_seq_cp_partition_indices",
    "split_data_cp_rank",
    "slice_batch_for_context_parallel",
    "_split_on_cp_rank",
    "get_batch_on_this_cp_rank",
}


def model_class(name: str) -> Any:
    return getattr(importlib.import_module(WHERE[name]), name)


def names_used(code: CodeType) -> set[str]:
    """Global and attribute names in a function and the functions defined inside it."""
    nested = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*map(names_used, nested)) if nested else set(code.co_names)


def test_every_row_names_an_installed_model() -> None:
    assert set(WHERE) == set(CAPABILITIES)
    for name in WHERE:
        assert inspect.isclass(model_class(name))


@pytest.mark.parametrize("name", ["Qwen3VLModel", "KimiK25VLModel", "Qwen3OmniThinkerModel"])
def test_models_that_cut_are_seen_to_cut(name: str) -> None:
    assert names_used(model_class(name).forward.__code__) & CUTTERS
    assert CAPABILITIES[name].cut == "model"


@pytest.mark.parametrize("name", ["Qwen25VLModel", "GLM45VModel", "Ernie45VLModel", "Step37Model"])
def test_models_whose_forward_cuts_nothing(name: str) -> None:
    assert not names_used(model_class(name).forward.__code__) & CUTTERS
    assert CAPABILITIES[name].cut == "nowhere"


def test_gemma3_provider_refuses_context_parallelism() -> None:
    provider = importlib.import_module(MODELS + "gemma_vl.gemma3_vl_provider").Gemma3VLModelProvider
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        two_ranks = provider(context_parallel_size=2)
    with pytest.raises(ValueError, match="does not support context parallelism"):
        two_ranks.provide()


def test_kimi_cuts_the_row_not_the_samples() -> None:
    split = importlib.import_module(WHERE["KimiK25VLModel"])._split_on_cp_rank
    one = SequencePlan.from_lengths([16], alignment=Alignment(cp_size=2))
    two = SequencePlan.from_lengths([8, 8], alignment=Alignment(cp_size=2))
    for rank in (0, 1):
        row = split(torch.arange(16), 2, rank, 0)
        assert torch.equal(row, one.local_index(rank))
        assert not torch.equal(row, two.local_index(rank))


def test_qwen3_omni_refuses_packed_samples() -> None:
    forward = model_class("Qwen3OmniThinkerModel").forward
    with pytest.raises(NotImplementedError, match="packed sequence"):
        forward(SimpleNamespace(), input_ids=None, packed_seq_params=object())


@pytest.mark.parametrize("name", [name for name, row in CAPABILITIES.items() if row.reason is not None])
def test_refused_with_the_reason(name: str) -> None:
    text = f"model must be one of Qwen3VLModel, GPTModel for packed context parallelism, got {name}; {CAPABILITIES[name].reason}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        capability_of([name, "object"])


def test_refused_without_a_row() -> None:
    text = (
        "model must be one of Qwen3VLModel, GPTModel for packed context parallelism, got NemotronVLModel, which was never "
        "tried; where it cuts the stream is unknown, and a wrong cut raises no error"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        capability_of(["NemotronVLModel", "MegatronModule"])


def test_a_subclass_takes_its_base_row() -> None:
    assert capability_of(["WithValueHead", "Qwen3VLModel", "object"]) is CAPABILITIES["Qwen3VLModel"]
