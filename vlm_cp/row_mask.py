"""`attention_mask` of padded rows, read in one place: 1 at tokens, 0 at padding, nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def row_mask(attention_mask: Tensor) -> Tensor:
    """bool [rows, S] of a mask that is 0 and 1, whatever its dtype; on an accelerator an assertion there sees to its values."""
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must have shape [rows, S], got {tuple(attention_mask.shape)}; it would not say which cells are tokens"
        )
    mask = attention_mask.bool()
    if attention_mask.dtype == torch.bool:
        return mask
    fits = (attention_mask == mask).all()
    if mask.device.type != "cpu":
        torch._assert_async(fits, "attention_mask must be 0 or 1")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif not fits:
        raise ValueError(
            f"attention_mask must be 0 or 1, got {attention_mask[attention_mask != mask][0].item()}; of a mask that is added to scores "
            "the padding would be packed, and of numbered samples all as one"
        )
    return mask
