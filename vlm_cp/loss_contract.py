"""Checks on a built Megatron model that its gradient scaling fits the emitter that the loss will use (see `vlm_cp.losses`)."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import nn

Emitter = Literal["default", "per_token", "per_token_routed"]


def check_loss_contract(model_chunks: Any, emitter: Emitter) -> None:
    """Raises `ValueError` unless flags, cached flags and DDP's frozen scaling of the model all fit `emitter`.

    Call it once, on what Megatron-Bridge returned (one module or a list; wrapped by DDP or not), before the first step.
    emitter: "default" for `emit_default`; "per_token" and "per_token_routed" for the first and second form of
    `emit_per_token`. The first form is refused beside MoE auxiliary losses, and multi-token prediction beside the emitters
    whose scaling it does not follow. Nothing is imported: the model is read by its attributes.
    """
    if emitter not in get_args(Emitter):
        raise ValueError(f"emitter must be one of {', '.join(get_args(Emitter))}, got {emitter!r}; nothing was checked")
    chunks: list[nn.Module] = (
        list(model_chunks) if isinstance(model_chunks, list | tuple | nn.ModuleList) else [model_chunks]
    )
    modules = [(name or type(m).__name__, m) for chunk in chunks for name, m in chunk.named_modules()]
    roots = {id(getattr(chunk, "config", None)) for chunk in chunks}
    configs: dict[int, Any] = {}
    for name, module in modules:
        _check_flag(module, name, emitter)
        config = getattr(module, "config", None)
        if hasattr(config, "calculate_per_token_loss") and id(config) not in configs:
            configs[id(config)] = config
            if id(config) in roots:  # what the schedule and DDP read; a vision tower's own config stays as it is
                _check_flag(config, f"the config of {name}", emitter)
            _check_auxiliary_losses(config, emitter)
    if not configs:
        raise ValueError(
            f"model_chunks must hold a Megatron model, got {[type(chunk).__name__ for chunk in chunks]} without "
            "config.calculate_per_token_loss; nothing was checked"
        )
    for _, module in modules:
        _check_ddp(module, emitter)


def _check_flag(holder: Any, name: str, emitter: Emitter) -> None:
    wanted, found = emitter != "default", getattr(holder, "calculate_per_token_loss", None)
    if found is not None and bool(found) != wanted:
        advice = "" if wanted else "; register vlm_cp_hooks.keep_default_loss_scaling before the model is built"
        raise ValueError(
            f'calculate_per_token_loss of {name} must be {wanted} for the emitter "{emitter}", got {found}; '
            f"gradients would be scaled by data- and context-parallel size, or auxiliary losses by the number of tokens{advice}"
        )


def _check_ddp(module: Any, emitter: Emitter) -> None:
    """DDP read the flag when it wrapped the model; its factor does not follow the flag afterwards."""
    ddp_config = getattr(module, "ddp_config", None)
    if ddp_config is None:
        return
    averages = bool(getattr(ddp_config, "average_in_collective", False))
    if averages and emitter != "default":
        raise ValueError(
            f'average_in_collective must be False for the emitter "{emitter}", got True; '
            "gradients would be divided by the number of ranks beside the number of tokens"
        )
    found = [getattr(module, name, None) for name in ("buffers", "expert_parallel_buffers")]
    buffers = [b for x in found if isinstance(x, list) for b in x] + [
        b for b in [getattr(module, "param_and_grad_buffer", None)] if b is not None
    ]
    group = getattr(module, "dp_cp_group", None)
    for factor in (buffer.gradient_scaling_factor for buffer in buffers):
        # None is Megatron-FSDP's way to say that the flag was on.
        was_on = factor is None or (factor == 1 and (group is None or group.size() > 1))
        was_off = factor is not None and factor != 1
        if not averages and ((was_on and emitter == "default") or (was_off and emitter != "default")):
            raise ValueError(
                f"the gradient scaling that DDP froze must be that of calculate_per_token_loss={emitter != 'default'} for the "
                f'emitter "{emitter}", got a factor of {factor}; clear or set the flag before DDP wraps the model, in a pre-wrap hook'
            )


def _check_auxiliary_losses(config: Any, emitter: Emitter) -> None:
    coefficients = [getattr(config, name, None) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")]
    if getattr(config, "moe_router_load_balancing_type", None) == "none":
        coefficients[0] = None
    flat = [c for x in coefficients for c in (x if isinstance(x, list) else [x])]
    if getattr(config, "num_moe_experts", None) and any(flat) and emitter == "per_token":
        raise ValueError(
            f'the emitter must be "default" or "per_token_routed" with MoE auxiliary losses (coefficients {coefficients}), got '
            '"per_token"; they would be too large by routed / scored tokens. Give emit_per_token its token counts'
        )
    cp_size = getattr(config, "context_parallel_size", 1)
    if getattr(config, "mtp_num_layers", None) and (
        emitter == "per_token_routed" or (emitter == "default" and cp_size > 1)
    ):
        raise ValueError(
            f'mtp_num_layers must be None or 0 with the emitter "{emitter}" at context_parallel_size {cp_size}, got '
            f"{config.mtp_num_layers}; Megatron normalises that loss by each rank's own tokens, whatever the main loss does"
        )
