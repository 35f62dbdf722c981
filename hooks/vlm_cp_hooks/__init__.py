"""Hooks for Megatron-Bridge, and drop-ins with the signatures of the RL frameworks that build on it."""

from vlm_cp_hooks.value_head import ValueHead, value_head

__all__ = ["ValueHead", "value_head"]
