"""Index maths under the plan: values repeated in runs, and cells of padded rows [rows, S]. Nothing asks a device for a number.

On the CPU numpy does some of it: for the sizes of a batch its calls take a fifth of torch's time.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def spread(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """[total]: values[i], counts[i] times, for every i; `total` is the sum of counts. Not differentiable."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
    return values.repeat_interleave(counts, output_size=total)


def true_cells(mask: Tensor, count: int) -> Tensor:
    """int64 [count]: the cells where a bool mask is True, counted along the rows.

    count: how many they are, so that no accelerator has to be asked.
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.flatten().nonzero_static(size=count)[:, 0]


def put(values: Tensor, cells: Tensor, size: int, fill: float) -> Tensor:
    """[size, ...]: values [N, ...] at their cells, `fill` elsewhere; differentiable."""
    empty = values.new_full((size, *values.shape[1:]), fill)
    # For numbers scatter takes a third of index_copy's time on the CPU.
    return empty.scatter(0, cells, values) if values.ndim == 1 else empty.index_copy(0, cells, values)


def check_counts(counts: Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]) -> None:
    """Refuses rows of these token counts [rows] unless they hold exactly the samples of `cu_seqlens`, each inside one row.

    On an accelerator this is an assertion on the device, since a Python error would need a host sync.
    """
    if counts.device.type != "cpu":
        ends, bounds = counts.cumsum(0), cu_seqlens.long()
        fits = (ends[:, None] == bounds).any(1).all() & (ends[-1] == bounds[-1])
        torch._assert_async(fits, "attention_mask must mark exactly the plan's tokens")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return
    found = counts.tolist()
    if (tuple(found) != lengths and not set(accumulate(found)) <= {0, *accumulate(lengths)}) or sum(found) != sum(
        lengths
    ):
        raise ValueError(
            f"attention_mask must mark exactly the plan's {sum(lengths)} tokens, samples whole in their rows, got "
            f"{sum(found)} in rows of {found}; values would move to other samples"
        )
