"""A mode in which transformers' float64 models compute in float64: norms, rotary tables and losses ask for float32.

Training amplifies rounding: in float32 two right runs part by a percent within 150 steps. In float64 they stay together, so that
a difference between CP=1 and CP=2 would be seen for what it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Leaves float64 tensors alone where `.float()`, `.to(float32)` or `dtype=float32` is asked of them; for the forward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = (args[0], *(torch.float64 if x is torch.float32 else x for x in args[1:]))
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
