"""Megatron's own router and DDP on gloo: a model of one linear layer and one MoE router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron_import import import_megatron, megatron_may_warn
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.losses import Emitter, TokenLoss, check_loss_contract, emit_default, emit_per_token, global_count
from vlm_cp.plan import SequencePlan

EXPERTS, WIDTH = 4, 8
MODULES = (
    "megatron.core.distributed",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.process_groups_config",
    "megatron.core.transformer.module",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.transformer_config",
)


def build_model(cp_size: int, *, per_token: bool, **options: Any) -> Any:
    """A MegatronModule with `linear` and `router`; options are TransformerConfig's."""
    with megatron_may_warn():
        config = import_megatron("megatron.core.transformer.transformer_config").TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=2,
            num_moe_experts=EXPERTS,
            moe_ffn_hidden_size=WIDTH,
            context_parallel_size=cp_size,
            calculate_per_token_loss=per_token,
            use_cpu_initialization=True,
            **{"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, **options},
        )
        groups = import_megatron("megatron.core.process_groups_config").ProcessGroupCollection.use_mpu_process_groups()
        model = import_megatron("megatron.core.transformer.module").MegatronModule(config)
        torch.manual_seed(0)
        model.linear = torch.nn.Linear(WIDTH, WIDTH)
        model.router = import_megatron("megatron.core.transformer.moe.router").TopKRouter(config, groups)
        return model


def wrap_model(model: Any, *, average: bool = False) -> Any:
    distributed = import_megatron("megatron.core.distributed")
    ddp_config = distributed.DistributedDataParallelConfig(average_in_collective=average)
    return distributed.DistributedDataParallel(model.config, ddp_config, model)


def clear_flag(model: Any, *, router: bool = True) -> Any:
    model.config.calculate_per_token_loss = False
    if router:
        model.router.calculate_per_token_loss = False
    return model


def start_megatron(cp_size: int) -> Any:
    """Initialises this rank's groups; the returned patch lets Megatron's DDP live on the CPU."""
    parallel_state = import_megatron("megatron.core.parallel_state")
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    return patch.multiple("torch.cuda", current_device=lambda: torch.device("cpu"), current_stream=lambda: None)


def contract_errors(rank: int, cp_size: int) -> dict[str, str]:
    """The refusal, or "", of models in every state that they can be in when training starts."""

    def error_of(chunks: Any, emitter: Any) -> str:
        try:
            check_loss_contract(chunks, emitter)
        except ValueError as error:
            return str(error)
        return ""

    quiet: dict[str, Any] = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    with start_megatron(cp_size):
        on, off = (
            (lambda **o: build_model(cp_size, per_token=True, **o)),
            (lambda: build_model(cp_size, per_token=False)),
        )
        late = wrap_model(on())
        clear_flag(late.module)
        overwritten = wrap_model(off())
        overwritten.module.config.calculate_per_token_loss = True
        overwritten.module.router.calculate_per_token_loss = True
        found = {
            "default: built with the flag off": error_of([wrap_model(off())], "default"),
            "default: averaging in the collective": error_of([wrap_model(off(), average=True)], "default"),
            "default: cleared everywhere before DDP": error_of(wrap_model(clear_flag(on())), "default"),
            "default: flag left on": error_of(wrap_model(on()), "default"),
            "default: config cleared, router not": error_of(wrap_model(clear_flag(on(), router=False)), "default"),
            "default: cleared after DDP": error_of(late, "default"),
            "per_token_routed: flag on": error_of([wrap_model(on())], "per_token_routed"),
            "per_token: flag on, no auxiliary loss": error_of([wrap_model(on(**quiet))], "per_token"),
            "per_token: beside auxiliary losses": error_of([wrap_model(on())], "per_token"),
            "per_token_routed: flag off": error_of([wrap_model(off())], "per_token_routed"),
            "per_token_routed: set after DDP": error_of(overwritten, "per_token_routed"),
        }
        averaging = wrap_model(off(), average=True)
        averaging.module.config.calculate_per_token_loss = True
        averaging.module.router.calculate_per_token_loss = True
        return {**found, "per_token_routed: averaging in the collective": error_of(averaging, "per_token_routed")}


def router_gradient(
    rank: int, cp_size: int, emitter: Emitter, scored: float, num_microbatches: int
) -> tuple[Tensor, float]:
    """The router's gradient from its auxiliary losses alone, after Megatron's schedule, DDP and division.

    scored: the part of the tokens that the main loss, always 0 here, counts. Also returns routed / scored tokens.
    """
    with start_megatron(cp_size):
        model = wrap_model(build_model(cp_size, per_token=emitter != "default"))
        if emitter != "per_token":
            check_loss_contract(model, emitter)
        plan = SequencePlan.from_lengths([16, 24], alignment=Alignment(cp_size=cp_size))
        generator = torch.Generator().manual_seed(1)
        streams = [torch.randn(40, WIDTH, generator=generator) for _ in range(num_microbatches)]
        mask = plan.shard(torch.rand(40, generator=generator) < scored, rank)
        group = import_megatron("megatron.core.parallel_state").get_data_parallel_group(with_context_parallel=True)
        count = global_count([mask.sum()] * num_microbatches, group)
        routed = plan.total_tokens * num_microbatches

        def loss_function(probabilities: Tensor) -> tuple[Any, ...]:
            loss = TokenLoss(0 * probabilities.sum(), mask.sum())
            if emitter == "default":
                return emit_default(loss, global_count=count, num_microbatches=num_microbatches, dp_size=1)
            if emitter == "per_token":
                return emit_per_token(loss)
            return emit_per_token(
                loss, global_count=count, routed_tokens_local=plan.local_tokens, routed_tokens_global=routed
            )

        calc_loss = import_megatron("megatron.core.pipeline_parallel.schedules").forward_step_calc_loss
        total = torch.zeros([], dtype=torch.int)
        model.zero_grad_buffer()
        for stream in streams:
            probabilities, _ = model.module.router(plan.shard(stream, rank)[:, None])
            output, num_tokens = calc_loss(
                None, probabilities, loss_function, model.config, None, False, num_microbatches, [], cp_size, True
            )
            output.backward()
            total += num_tokens
        model.finish_grad_sync(force_all_reduce=True)
        gradient = model.module.router.weight.main_grad.clone()
        torch.distributed.all_reduce(total, group=group)
        return gradient if emitter == "default" else gradient / total.clamp(min=1), routed / float(count)


def fake_model(**config: Any) -> torch.nn.Module:
    """A module with a config of these fields, as `check_loss_contract` reads it."""
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(calculate_per_token_loss=False, **config)  # pyright: ignore[reportAttributeAccessIssue]
    return model
