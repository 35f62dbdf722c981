"""One kernel for the rotary embedding of Qwen3-VL's and Qwen3.5-VL's language models, where Megatron-Bridge launches ten.

    register(provider, fuse_text_rotary)

Bridge switches `apply_rope_fusion` off for these models, so queries and keys are rotated by plain torch in every layer,
forward, recompute and backward: about a third of all launches of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from vlm_cp.engines.preflight import unwrap
from vlm_cp.engines.rotary import prepare_text

logger = logging.getLogger(__name__)


def fuse_text_rotary[Model: nn.Module | Sequence[nn.Module]](model: Model) -> Model:
    """Rotates packed samples inside the core attention, by Transformer Engine's kernel; a pre-wrap hook. Returns `model` itself.

    Not bit-equal to stock: that rounds cosines and sines to the model's dtype, the kernel computes in float32 and is the
    closer of the two. Batches that are not packed, gated delta nets and towers are left alone.

    Harmless a second time, and in any order with other hooks; how many layers were changed is logged.
    """
    for chunk in [model] if isinstance(model, nn.Module) else model:
        layers = prepare_text(unwrap(chunk))
        if layers:
            logger.info("fuse_text_rotary: changed %s layers", layers)
    return model
