"""Shares the vision work of Megatron-Bridge's Qwen3-VL and Qwen3.5-VL towers over the context-parallel ranks, and speeds the tower up.

    register(provider, shard_vision_over_cp())

Stock Bridge encodes every image on every CP rank, or deals images out by count (`vision_dp_when_cp`). This hook deals frames
by cost and cuts the largest ones where whole frames do not balance; rows and gradients stay those of the replicated tower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from vlm_cp.engines.bridge_tower import FeatureCache, TowerOptions, prepare_tower
from vlm_cp.engines.preflight import unwrap
from vlm_cp.vision import MIN_PATCHES

logger = logging.getLogger(__name__)


def shard_vision_over_cp(
    *,
    share: bool = True,
    min_patches: int = MIN_PATCHES,
    fuse: bool = True,
    recompute_layers: int | None = None,
    cache: FeatureCache | None = None,
) -> Callable[[Any], Any]:
    """A pre-wrap hook; returns what it gets, one module or a list of chunks. Harmless a second time.

    share: deal vision work over the CP ranks; False leaves it replicated and only makes the tower faster, as at cp_size 1.
    min_patches: a batch of fewer patches stays replicated.
    fuse: fused rotary, bias + GELU and bias + residual kernels. Positions and attention lengths are computed without host
    syncs and the patch embedding as one matrix product whatever this says.
    recompute_layers: None keeps what the tower took over from the language model's recompute; 0 recomputes nothing, k the
    first k layers. A rank that encodes 1/c of the patches often affords less.
    cache: where a frozen tower keeps a batch's rows for further passes; pass the same one to the hooks of models whose
    frozen towers are the same, as policy and reference.

    Grids given on the CPU save a host sync a call; `MegatronEngine` does so. What was changed is logged.
    """
    options = TowerOptions(share=share, min_patches=min_patches, fuse=fuse)
    features = FeatureCache() if cache is None else cache

    def hook[Model: nn.Module | Sequence[nn.Module]](model: Model) -> Model:
        for chunk in map(unwrap, [model] if isinstance(model, nn.Module) else model):
            _check(chunk)
            if prepare_tower(chunk, options, features):
                _set_recompute(chunk.vision_model.config, recompute_layers)
                logger.info("shard_vision_over_cp: %s, recompute_layers=%s", options, recompute_layers)
        return model

    return hook


def _check(model: Any) -> None:
    if getattr(model, "vision_model", None) is None:
        return
    if model.config.vision_dp_when_cp:
        raise ValueError(
            "vision_dp_when_cp must be off with shard_vision_over_cp, got True; every image would be dealt out twice, and "
            "its rows lost"
        )
    if model.vision_model.config.cuda_graph_impl != "none":
        raise ValueError(
            f'the tower\'s cuda_graph_impl must be "none" with shard_vision_over_cp, got {model.vision_model.config.cuda_graph_impl!r}; '
            "a captured graph has one number of patches, and ranks get another one every batch"
        )
    if model.use_dist_train:
        raise ValueError(
            "use_dist_train must be off with shard_vision_over_cp, got True; its towers have no context-parallel group"
        )


def _set_recompute(config: Any, layers: int | None) -> None:
    if layers == 0:
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    elif layers is not None:
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "block", layers
