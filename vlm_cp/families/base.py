"""What the embedded engine asks of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class VisionRows:
    """The tower's output for all media of a batch: main rows [R, H], and the same rows of every deepstack level."""

    main: Tensor
    levels: tuple[Tensor, ...] = ()


class Family(Protocol):
    """A transformers model family; `model` is its `...ForConditionalGeneration`."""

    def encode(self, model: Any, pixels: Tensor, grid_thw: Tensor) -> VisionRows:
        """Feature rows of images and frames, in the order of their grids: pixels [patches, channels], grid_thw [M, 3]."""
        ...

    def text_inputs(self, visual: Tensor, levels: tuple[Tensor, ...]) -> dict[str, Any]:
        """Further keywords of the text model: visual [1, T/c] marks feature slots, levels are their local rows."""
        ...

    def natural_order_layers(self, model: Any) -> list[nn.Module]:
        """Layers that carry a state along a sample and so must see whole samples in their natural order."""
        ...
