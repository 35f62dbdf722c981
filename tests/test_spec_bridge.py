"""`VLMSpec.from_bridge`: by the provider's class, and equal to what the transformers config gives."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vlm_cp.demo.models import tiny_config
from vlm_cp.demo.processor import build_tokenizer
from vlm_cp.spec import VLMSpec


def provider(class_name: str, config: Any, *, base: type = object) -> Any:
    """What from_bridge reads off a Bridge provider: the token ids and the tower's transformers config."""
    instance = type(class_name, (base,), {})()
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_config"):
        setattr(instance, name, getattr(config, name))
    return instance


@pytest.mark.parametrize(
    ("class_name", "family"),
    [
        ("Qwen3VLModelProvider", "qwen3_vl"),
        ("Qwen3VLMoEModelProvider", "qwen3_vl"),
        ("Qwen35VLModelProvider", "qwen3_5"),
        ("Qwen35VLMoEModelProvider", "qwen3_5"),
    ],
)
def test_equals_the_transformers_config(class_name: str, family: str) -> None:
    config = tiny_config(family, build_tokenizer())
    assert VLMSpec.from_bridge(provider(class_name, config)) == VLMSpec.from_hf_config(config)


def test_a_subclass_of_a_provider_keeps_its_family() -> None:
    config = tiny_config("qwen3_vl", build_tokenizer())
    base = type("Qwen3VLModelProvider", (), {})
    assert VLMSpec.from_bridge(provider("OurProvider", config, base=base)) == VLMSpec.from_hf_config(config)


@pytest.mark.parametrize("class_name", ["Qwen25VLModelProvider", "GPTModelProvider", "KimiK25VLModelProvider"])
def test_any_other_provider_is_refused(class_name: str) -> None:
    config = tiny_config("qwen3_vl", build_tokenizer())
    text = (
        "provider must be one of Qwen3VLModelProvider, Qwen3VLMoEModelProvider, Qwen35VLModelProvider, Qwen35VLMoEModelProvider, "
        f"got {class_name}; its feature rows and positions would be placed by another family's rules"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        VLMSpec.from_bridge(provider(class_name, config))
