"""Megatron's own GPTModel, inside a VLM-like root, made a critic on gloo ranks."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron_import import import_megatron, megatron_may_warn
from torch import Tensor, nn
from vlm_cp_hooks.value_head import ValueHead, value_head

from vlm_cp.alignment import Alignment

VOCAB, WIDTH, LENGTH = 32, 16, 6
MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.parallel_state",
    "megatron.core.process_groups_config",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.module",
    "megatron.core.transformer.transformer_config",
)


def on_cpu() -> ExitStack:
    """Lets Megatron build and run models without CUDA."""
    stack = ExitStack()
    stack.enter_context(megatron_may_warn())
    stack.enter_context(
        patch.multiple("torch.cuda", current_device=lambda: torch.device("cpu"), current_stream=lambda: None)
    )
    stack.enter_context(patch.object(Tensor, "cuda", lambda self, *_, **__: self))
    no_random_state = SimpleNamespace(fork=nullcontext)
    stack.enter_context(patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: no_random_state))
    return stack


def build(*, tied: bool = False, rank: int = 0, pp_size: int = 1, vlm: bool = True, **options: Any) -> Any:
    """A root with `language_model` (or the GPTModel itself), as Megatron-Bridge builds one before its pre-wrap hooks."""
    config = import_megatron("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=pp_size,
        hidden_size=WIDTH,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **options,
    )
    config.share_embeddings_and_output_weights = tied  # Bridge's config is its provider, which has this field
    spec = import_megatron("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    torch.manual_seed(0)
    model = import_megatron("megatron.core.models.gpt.gpt_model").GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=rank == 0,
        post_process=rank == pp_size - 1,
        share_embeddings_and_output_weights=tied,
        pg_collection=import_megatron(
            "megatron.core.process_groups_config"
        ).ProcessGroupCollection.use_mpu_process_groups(),
    )
    if not vlm:
        return model
    root = import_megatron("megatron.core.transformer.module").MegatronModule(config)
    root.language_model, root.pre_process, root.post_process = model, model.pre_process, model.post_process
    root.share_embeddings_and_output_weights = tied
    root.shared_embedding_or_output_weight = model.shared_embedding_or_output_weight
    return root


def call(model: Any) -> Tensor:
    ids = torch.arange(LENGTH)[None] % VOCAB
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return model(ids, torch.arange(LENGTH)[None], later)


def load(model: Any, saved: dict[str, Tensor]) -> None:
    """A strict load of what `sharded_state_dict` names: a missing key is a KeyError, another shape a RuntimeError."""
    with torch.no_grad():
        for key, sharded in model.sharded_state_dict().items():
            if isinstance(getattr(sharded, "data", None), Tensor):
                sharded.data.copy_(
                    saved[key].expand_as(sharded.data) if saved[key].ndim == 0 else saved[key].view_as(sharded.data)
                )


def save(model: Any) -> dict[str, Tensor]:
    found = model.sharded_state_dict()
    return {key: x.data.clone() for key, x in found.items() if isinstance(getattr(x, "data", None), Tensor)}


def critic_facts(rank: int, vlm: bool, tied: bool) -> dict[str, Any]:
    """A model before and after the hook, and what loading does to it."""
    with on_cpu():
        import_megatron("megatron.core.parallel_state").initialize_model_parallel()
        base, model = build(vlm=vlm, tied=tied), build(vlm=vlm, tied=tied)
        keys_before = set(save(base))
        returned = value_head(std=0.5, seed=3)([model])
        assert returned == [model]
        language_model = model.language_model if vlm else model
        head = language_model.output_layer
        seen: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        values = call(language_model)
        handle.remove()
        facts = {
            "head": type(head),
            "root_has_one": hasattr(model, "output_layer") if vlm else None,
            "shape": tuple(values.shape),
            "error": float((values[0] - (seen[0][:, 0] @ head.weight.T)).abs().max()),
            "tied": [model.share_embeddings_and_output_weights, model.config.share_embeddings_and_output_weights],
            "class": (type(model).__name__, isinstance(model, type(base))),
            "new_keys": set(save(model)) - keys_before,
            "lost_keys": keys_before - set(save(model)),
        }
        # A fine-tune load: everything but the head comes from the base checkpoint, also by parameter name (HF weights).
        initial = head.weight.detach().clone()
        for p in base.parameters():
            p.data.add_(1)
        with model.hide_loss_modules():
            facts["hidden"] = [n for n, _ in model.named_parameters() if "output_layer" in n]
            load(model, save(base))
        facts["fine_tuned"] = torch.equal(head.weight, initial) and all(
            torch.equal(x, y)
            for (n, x), (_, y) in zip(model.named_parameters(), base.named_parameters(), strict=False)
            if "output" not in n
        )
        # Without the context the base checkpoint does not fit, and a resume restores the head.
        try:
            load(model, save(base))
            facts["unhidden"] = "loaded"
        except (KeyError, RuntimeError) as error:
            facts["unhidden"] = type(error).__name__
        with torch.no_grad():
            head.weight.add_(10)
        resumed = value_head(seed=4)(build(vlm=vlm, tied=tied))
        load(resumed, save(model))
        resumed_head = (resumed.language_model if vlm else resumed).output_layer
        facts["resumed"] = torch.equal(resumed_head.weight, head.weight)
        return facts


def tied_stage(rank: int) -> tuple[list[str], bool, float]:
    """One of two pipeline stages of a tied model; Megatron's own reduction of tied embeddings after the hook."""
    with on_cpu():
        parallel_state = import_megatron("megatron.core.parallel_state")
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        model = build(tied=True, rank=rank, pp_size=2)
        model = value_head()(model)
        model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        for p in model.parameters():
            p.main_grad = torch.full_like(p, rank + 1)
        finalize = import_megatron("megatron.core.distributed.finalize_model_grads")
        embedding_group = parallel_state.get_embedding_group()
        pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        finalize._allreduce_word_embedding_grads([model], model.config, embedding_group, pipeline_group)
        heads = [n for n, m in model.named_modules() if isinstance(m, ValueHead)]
        marks = any(getattr(p, "shared_embedding", False) for p in model.parameters())
        return heads, marks, max(float(p.main_grad.max()) for p in model.parameters())


def head_on_tensor_ranks(rank: int, sequence_parallel: bool, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, the input's gradient, and the weight's after what Megatron does to a weight with its mark."""
    size = dist.get_world_size()
    own = (hidden.chunk(size)[rank] if sequence_parallel else hidden).clone().requires_grad_()
    head = ValueHead(
        hidden.size(-1),
        tp_group=dist.group.WORLD,
        sequence_parallel=sequence_parallel,
        std=1.0,
        seed=0,
        dtype=hidden.dtype,
    )
    values, bias = head(own, weight=torch.zeros(9, 9), runtime_gather_output=True)
    assert bias is None
    (values * torch.arange(1.0, len(values) + 1)[:, None, None]).sum().backward()
    assert own.grad is not None
    assert head.weight.grad is not None
    if head.weight.sequence_parallel:  # pyright: ignore[reportAttributeAccessIssue]
        dist.all_reduce(head.weight.grad)
    return values.detach(), own.grad, head.weight.grad


def two_heads() -> nn.ModuleList:
    """Two heads made after different random draws."""
    first = ValueHead(8, tp_group=None, sequence_parallel=False, std=0.5, seed=3)
    torch.randn(7)
    return nn.ModuleList([first, ValueHead(8, tp_group=None, sequence_parallel=False, std=0.5, seed=3)])


def fits_layout(alignment: Alignment) -> dict[str, int | bool]:
    return {
        "context_parallel_size": alignment.cp_size,
        "tensor_model_parallel_size": alignment.tp_size,
        "sequence_parallel": alignment.sequence_parallel,
    }
