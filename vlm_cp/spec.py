"""`VLMSpec`: the few facts of a vision-language model that packing, positions, media checks and costs depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

PositionScheme = Literal["time", "frames"]

# model_type of a transformers config -> (family, position scheme)
_HF_MODEL_TYPES: dict[str, tuple[str, PositionScheme]] = {
    "qwen2_5_vl": ("qwen2_5_vl", "time"),
    "qwen3_vl": ("qwen3_vl", "frames"),
    "qwen3_5": ("qwen3_5", "frames"),
}

# Class name of a Megatron-Bridge provider -> family. Names, so that no Megatron is imported to look one up.
_BRIDGE_PROVIDERS: dict[str, str] = {
    "Qwen3VLModelProvider": "qwen3_vl",
    "Qwen3VLMoEModelProvider": "qwen3_vl",
    "Qwen35VLModelProvider": "qwen3_5",
    "Qwen35VLMoEModelProvider": "qwen3_5",
}


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """The vision tower's shape, from which its cost follows. Sizes in channels, `patch_size` and `window_size` in pixels."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    out_hidden_size: int
    window_size: int | None = None  # None: every layer attends over the whole frame
    full_attention_layers: tuple[int, ...] = ()  # layers that do so although window_size is set
    gated_mlp: bool = False  # three matrices (gate, up, down) instead of two


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec:
    """The gated delta net layers of a hybrid text model: how many there are, and their heads."""

    num_layers: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """The text model's shape, from which its cost follows; sizes in channels.

    num_layers counts all layers, those of `delta_net` too. intermediate_size: the width of the gated MLP that a token
    passes through; of a mixture of experts, the experts it is routed to and the shared one together.
    gated_attention: the query projection also makes a gate of its own size (Qwen3.5).
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    gated_attention: bool = False
    delta_net: DeltaNetSpec | None = None

    @classmethod
    def from_hf_config(cls, config: Any) -> TextSpec:
        """The text shape of the same transformers configs that `VLMSpec.from_hf_config` takes."""
        family, _ = _family_of_model_type(config.model_type)
        text = config.text_config
        hybrid = family == "qwen3_5"
        return cls(
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=text.hidden_size // text.num_attention_heads if family == "qwen2_5_vl" else text.head_dim,
            vocab_size=text.vocab_size,
            gated_attention=hybrid,
            delta_net=DeltaNetSpec(
                num_layers=text.layer_types.count("linear_attention"),
                key_heads=text.linear_num_key_heads,
                value_heads=text.linear_num_value_heads,
                key_head_dim=text.linear_key_head_dim,
                value_head_dim=text.linear_value_head_dim,
                conv_kernel=text.linear_conv_kernel_dim,
            )
            if hybrid
            else None,
        )


@dataclass(frozen=True, kw_only=True)
class VLMSpec:
    """What one model family calls its tokens and how it numbers positions.

    family: "qwen2_5_vl", "qwen3_vl" or "qwen3_5".
    image_token_id, video_token_id: the ids that stand for one feature row each.
    spatial_merge_size: m; an image of grid (t, h, w) patches has t * h/m * w/m feature rows.
    position_scheme: "time" is Qwen2.5-VL's: one run of placeholders a video, and the temporal axis advances by
    `tokens_per_second * int(second_per_grid_ts)` a temporal patch. "frames" is Qwen3-VL's and Qwen3.5's: every frame of a
    video is a run of its own, its time written as text before it, so its temporal axis does not advance inside the frame.
    deepstack_levels: further feature sets that the tower sends to the first text layers (0 where there are none).
    """

    family: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    spatial_merge_size: int
    position_scheme: PositionScheme
    tokens_per_second: int
    tower: TowerSpec
    deepstack_levels: int

    @classmethod
    def from_hf_config(cls, config: Any) -> VLMSpec:
        """The spec of a transformers config (`Qwen2_5_VLConfig`, `Qwen3VLConfig`, `Qwen3_5Config`).

        Any other model type is refused: its rows and positions would be placed by another model's rules.
        """
        family, scheme = _family_of_model_type(config.model_type)
        return cls._build(family, scheme, token_ids=config, vision=config.vision_config)

    @classmethod
    def from_bridge(cls, provider: Any) -> VLMSpec:
        """The spec of a Megatron-Bridge provider: Qwen3-VL and Qwen3.5-VL, dense and MoE, or a subclass of one of them.

        Any other provider is refused: Bridge's other models cut the stream elsewhere or not at all, and number
        positions by other rules. The provider holds the tower's transformers config, so the spec equals `from_hf_config`'s.
        """
        names = [base.__name__ for base in type(provider).__mro__]
        family = next((_BRIDGE_PROVIDERS[name] for name in names if name in _BRIDGE_PROVIDERS), None)
        if family is None:
            raise ValueError(
                f"provider must be one of {', '.join(_BRIDGE_PROVIDERS)}, got {names[0]}; "
                "its feature rows and positions would be placed by another family's rules"
            )
        return cls._build(family, "frames", token_ids=provider, vision=provider.vision_config)

    @classmethod
    def _build(cls, family: str, scheme: PositionScheme, *, token_ids: Any, vision: Any) -> VLMSpec:
        timed = scheme == "time"
        return cls(
            family=family,
            image_token_id=token_ids.image_token_id,
            video_token_id=token_ids.video_token_id,
            vision_start_token_id=token_ids.vision_start_token_id,
            spatial_merge_size=vision.spatial_merge_size,
            position_scheme=scheme,
            tokens_per_second=vision.tokens_per_second if timed else 1,
            tower=TowerSpec(
                depth=vision.depth,
                hidden_size=vision.hidden_size,
                num_heads=vision.num_heads,
                intermediate_size=vision.intermediate_size,
                patch_size=vision.patch_size,
                temporal_patch_size=vision.temporal_patch_size,
                out_hidden_size=vision.out_hidden_size,
                window_size=vision.window_size if timed else None,
                full_attention_layers=tuple(vision.fullatt_block_indexes) if timed else (),
                gated_mlp=timed,
            ),
            deepstack_levels=len(vision.deepstack_visual_indexes) if family == "qwen3_vl" else 0,
        )


def _family_of_model_type(model_type: str) -> tuple[str, PositionScheme]:
    if model_type not in _HF_MODEL_TYPES:
        raise ValueError(
            f"model_type must be one of {', '.join(_HF_MODEL_TYPES)}, got {model_type!r}; "
            "its feature rows and positions would be placed by another family's rules"
        )
    return _HF_MODEL_TYPES[model_type]
