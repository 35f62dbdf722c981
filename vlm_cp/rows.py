"""Index maths under the plan: runs of neighbouring slots, and cells of padded rows [rows, S]. Nothing asks a device for a number.

On the CPU numpy does some of it: for the sizes of a batch its calls take a fifth of torch's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm_cp import transfer

_NUMPY_TOO = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


def spread(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """[total, ...]: values[i], counts[i] times, for every i; `total` is the sum of counts. Not differentiable."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().repeat(counts.numpy(), 0))
    return values.repeat_interleave(counts, 0, output_size=total)


def expand(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Tensor:
    """int64 on `device`: starts[i], starts[i] + 1, ... lengths[i] numbers, for every i; the runs travel there, not the numbers."""
    total, shifts = int(lengths.sum()), starts - (lengths.cumsum() - lengths)
    if device.type == "cpu":
        return torch.arange(total).add_(torch.from_numpy(shifts.repeat(lengths)))
    on_device, counts = transfer.moved(torch.from_numpy(np.stack([shifts, lengths])), device)
    return torch.arange(total, device=device).add_(spread(on_device, counts, total))


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


def counts_of(mask: Tensor) -> Tensor:
    """int32 [rows]: how many cells of each row of a bool mask are True."""
    return mask.sum(1, dtype=torch.int32)  # int64, the default, takes twice the time on the CPU


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


def put_where(values: Tensor, mask: Tensor, fill: float) -> Tensor:
    """[rows, S, ...]: values [N, ...] at the N cells where a bool mask is True, in order, `fill` elsewhere; differentiable."""
    if mask.device.type == "cpu" and values.dtype in _NUMPY_TOO and not values.requires_grad:
        found = values.new_full((*mask.shape, *values.shape[1:]), fill)
        found.numpy()[mask.numpy()] = values.numpy()  # a third of the time of the two calls below
        return found
    return put(values, true_cells(mask, len(values)), mask.numel(), fill).unflatten(0, mask.shape)


def check_counts(counts: Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]) -> None:
    """Refuses rows of these token counts [rows] unless they hold exactly the samples of `cu_seqlens`, each inside one row.

    On an accelerator this is an assertion on the device, since a Python error would need a host sync.
    """
    if counts.device.type != "cpu":
        ends = counts.cumsum(0)
        fits = (ends[:, None] == cu_seqlens).any(1).all() & (ends[-1] == cu_seqlens[-1])
        torch._assert_async(fits, "attention_mask must mark exactly the plan's tokens")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return
    found = counts.tolist()
    if tuple(found) == lengths:
        return
    if sum(found) != sum(lengths) or not set(accumulate(found)) <= {0, *accumulate(lengths)}:
        raise ValueError(
            f"attention_mask must mark exactly the plan's {sum(lengths)} tokens, samples whole in their rows, got "
            f"{sum(found)} in rows of {found}; values would move to other samples"
        )


def check_row_arguments(sub_seq_lengths: Sequence[Any] | None, row_multiple: int | None) -> None:
    """Refuses what cannot place several samples in a row."""
    if row_multiple is not None and (sub_seq_lengths is None or row_multiple < 1):
        raise ValueError(
            f"row_multiple must be at least 1 and come with sub_seq_lengths, got {row_multiple}"
            f"{' alone' if sub_seq_lengths is None else ''}; samples would be looked for at other columns"
        )
    for row, lengths in enumerate(sub_seq_lengths or ()):
        if not isinstance(lengths, Sequence) and getattr(lengths, "ndim", 0) != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"sub_seq_lengths[{row}] must be a list of lengths, one a sample in that row, got {lengths!r}; "
                "samples would move to other rows"
            )


def check_row_layout(mask: Tensor, sub_seq_lengths: Sequence[Sequence[int]], row_multiple: int) -> None:
    """The mask must be True at exactly the tokens that `sub_seq_lengths` and `row_multiple` place."""
    rows, width = mask.shape
    counts = torch.tensor([len(lengths) for lengths in sub_seq_lengths])
    if len(counts) != rows:
        raise ValueError(
            f"sub_seq_lengths must have one list a row, {rows} in all, got {len(counts)}; samples would move to other rows"
        )
    lengths = torch.tensor(list(chain.from_iterable(sub_seq_lengths)))
    steps = (lengths + row_multiple - 1) // row_multiple * row_multiple
    row = torch.repeat_interleave(counts, output_size=len(lengths))
    before = steps.cumsum(0) - steps
    starts = before - before[(counts.cumsum(0) - counts).clamp(max=len(lengths) - 1)][row]
    if bool((starts + lengths > width).any()):
        sample = int((starts + lengths > width).nonzero()[0, 0])
        raise ValueError(
            f"sub_seq_lengths must fit their rows of width {width}, got sample {sample} of {int(lengths[sample])} tokens at column "
            f"{int(starts[sample])} with row_multiple {row_multiple}; tokens of the next row would be read"
        )
    edges = torch.zeros(rows, width + 1, dtype=torch.int32)
    edges.index_put_((row, starts), torch.ones_like(row, dtype=torch.int32), accumulate=True)
    edges.index_put_((row, starts + lengths), -torch.ones_like(row, dtype=torch.int32), accumulate=True)
    expected = transfer.moved(edges.cumsum(1)[:, :width].bool(), mask.device)
    if mask.device.type != "cpu":
        torch._assert_async((mask == expected).all(), "attention_mask must be True at exactly sub_seq_lengths' tokens")  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif not torch.equal(mask, expected):
        wrong = (mask != expected).nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask must be True at exactly the tokens that sub_seq_lengths and row_multiple {row_multiple} place, "
            f"got {bool(mask[tuple(wrong)])} at row {wrong[0]}, column {wrong[1]}; padding inside the row would be packed as text"
        )
