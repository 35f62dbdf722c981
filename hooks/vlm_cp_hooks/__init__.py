"""Megatron-Bridge provider hooks and framework drop-ins. Imports vlm_cp, never the reverse."""

from vlm_cp_hooks.deepstack import keep_deepstack_gradients
from vlm_cp_hooks.loss_scaling import keep_default_loss_scaling, keep_skyrl_loss_scaling
from vlm_cp_hooks.register import register
from vlm_cp_hooks.rotary import fuse_text_rotary
from vlm_cp_hooks.value_head import ValueHead, value_head
from vlm_cp_hooks.vision import shard_vision_over_cp

__all__ = [
    "ValueHead",
    "fuse_text_rotary",
    "keep_deepstack_gradients",
    "keep_default_loss_scaling",
    "keep_skyrl_loss_scaling",
    "register",
    "shard_vision_over_cp",
    "value_head",
]
