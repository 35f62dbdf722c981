"""Keeps the gradient of Qwen3-VL's deepstack rows, which megatron-bridge 0.6.2 loses under sequence parallelism and recompute."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from vlm_cp.engines.deepstack import keep_deepstack_gradient, lost_deepstack_gradient
from vlm_cp.engines.preflight import unwrap

logger = logging.getLogger(__name__)


def keep_deepstack_gradients[Model: nn.Module | Sequence[nn.Module]](model: Model) -> Model:
    """Repairs every chunk's tower that would lose deepstack gradients; a pre-wrap hook. Returns `model` itself.

    Harmless a second time, in any order with other hooks, and where nothing is lost; what was lost is logged.
    """
    for chunk in [model] if isinstance(model, nn.Module) else model:
        reason = lost_deepstack_gradient(unwrap(chunk))
        if keep_deepstack_gradient(unwrap(chunk)):
            logger.info("keep_deepstack_gradients: repaired the tower, since %s", reason)
    return model
