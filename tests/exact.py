"""A test-only mode in which transformers' float64 models really compute in float64.

Norms, rotary tables, the gated delta rule and the losses hard-code float32. On a rounding tie that turns noise of 1e-16
into a whole float32 ulp, so a bound of 1e-10 would pass nearly always and then flake.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Keep64(TorchFunctionMode):
    """Turns `.float()`, `.to(float32)` and `dtype=float32` on float64 tensors into no-ops; wrap the forward only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = (args[0], *(torch.float64 if a is torch.float32 else a for a in args[1:]))
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
