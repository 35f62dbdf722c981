"""A critic and a policy without logits on the installed Megatron-Bridge: CP, TP x SP and PP against one rank, on gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

bridge_runs = pytest.importorskip("bridge_runs", reason="Megatron-Bridge's CPU oracle is not here")

from bridge_on_cpu import use_cpu  # noqa: E402
from megatron.bridge.peft.lora import LoRA  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from vlm_cp_hooks.value_head import ValueHead, value_head  # noqa: E402

from vlm_cp.logprobs import next_token_logprobs, output_processor  # noqa: E402
from vlm_cp.losses import TokenLoss, emit_default  # noqa: E402
from vlm_cp.plan import SequencePlan  # noqa: E402
from vlm_cp.values import shifted_values, value_loss  # noqa: E402

ALL, SPLIT = ((0, 1, 2, 3, 4, 5),), ((0, 1), (2,), (3, 4), (5,))


def targets(plan: SequencePlan, seed: int) -> dict[str, Tensor]:
    """Returns, old values and a mask of tokens, the same for a sample wherever it is packed."""

    def streams(draw: Callable[[torch.Generator, int], Tensor], salt: int) -> Tensor:
        samples = [draw(torch.Generator().manual_seed(salt + n), n) for n in plan.lengths]
        return plan.pack(samples, 0)[None]

    normal = lambda g, n: torch.randn(n, generator=g)  # noqa: E731
    return {
        "returns": streams(normal, seed),
        "old_values": streams(normal, seed + 10**6),
        "loss_mask": streams(lambda g, n: torch.rand(n, generator=g) < 0.5, seed + 2 * 10**6),
    }


def train(run: Any, path: str, output_loss: Callable[..., TokenLoss], count_of: Callable[..., int], inputs: Any) -> Any:
    """One step with this loss of (engine, output, batch); (chunks, gradients by HF name)."""
    use_cpu()
    bridge, provider, chunks = bridge_runs.build(run, path)
    engine = bridge_runs.MegatronEngine(chunks, spec=bridge_runs.VLMSpec.from_bridge(provider))
    spec = bridge_runs.spec_of(run.family)
    batches = [bridge_runs.make_batch(run, part, spec) for part in run.micro_batches]
    count = sum(count_of(batch) for batch in batches)

    def forward_step(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        output = chunk(**engine.inputs(batch, chunk), **inputs(engine, batch))

        def loss_function(output: Tensor) -> Any:
            loss = output_loss(engine, output, batch)
            return emit_default(loss, global_count=count, num_microbatches=len(batches), dp_size=1)

        return output, loss_function

    provider.finalize_model_grads_func = finalize_model_grads
    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=chunks,
        num_microbatches=len(batches),
        seq_length=batches[0].plan.total_tokens,
        micro_batch_size=1,
    )
    return chunks, bridge_runs.exported_gradients(bridge, chunks)


def critic_step(rank: int, run: Any, path: str) -> tuple[list[Tensor], dict[str, Tensor], list[str]]:
    values: list[Tensor] = []

    def loss(engine: Any, output: Tensor, batch: Any) -> TokenLoss:
        group = engine.model.chunks[0].pg_collection.cp
        values.extend(x.detach() for x in shifted_values(output, batch.plan, group=group))
        return TokenLoss(*value_loss(output, batch.plan, cp_rank=engine.cp_rank, clip=0.2, **targets(batch.plan, 7)))

    def count(batch: Any) -> int:
        mask = targets(batch.plan, 7)["loss_mask"]
        return int((mask[0] & (batch.plan.token_index > 0)).sum())

    chunks, gradients = train(run, path, loss, count, lambda *_: {})
    heads = [name for chunk in chunks for name, m in chunk.named_modules() if isinstance(m, ValueHead)]
    return values, gradients, heads


def policy_step(rank: int, run: Any, path: str, without_logits: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    kept: list[Tensor] = []

    def options(engine: Any, batch: Any) -> dict[str, Any]:
        return {
            "cp_rank": engine.cp_rank,
            "tp_group": engine.model.chunks[0].pg_collection.tp,
            "vocab_size": 300,
            "temperature": 0.7,
        }

    def loss(engine: Any, output: Tensor, batch: Any) -> TokenLoss:
        if without_logits:
            found = output[0]
        else:
            found = next_token_logprobs(output, batch.input_ids, batch.plan, **options(engine, batch))
        kept.append(found.detach())
        return TokenLoss(-found.where(found.isfinite(), 0).sum(), 1)

    def inputs(engine: Any, batch: Any) -> dict[str, Any]:
        if not without_logits:
            return {}
        return {"output_processor": output_processor(batch.input_ids, batch.plan, **options(engine, batch))}

    _, gradients = train(run, path, loss, lambda batch: sum(batch.plan.lengths), inputs)
    return kept, gradients


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-20))
        assert error < tolerance, f"{name}: {error}"


HOOKS = (*bridge_runs.Run(family="qwen3_vl").hooks, value_head(std=0.3))
LAYOUTS = {
    "cp2-four-micro-batches": {"cp": 2, "micro_batches": SPLIT},
    "tp2sp-cp2": {"tp": 2, "cp": 2},
    "pp2-cp2": {"pp": 2, "cp": 2},
}


def test_b21_b22_vlm_critic_equals_one_rank(checkpoint: Callable[[str], str]) -> None:
    family = "qwen3_vl"
    run = partial(bridge_runs.Run, family=family, hooks=HOOKS)
    ((expected, gradients, heads),) = run_ranks(1, critic_step, run(micro_batches=ALL), checkpoint(family))
    assert heads == ["module.language_model.output_layer"]
    assert gradients["lm_head.weight"].shape == (1, 64)
    assert gradients["lm_head.weight"].norm() > 0
    for name, layout in LAYOUTS.items():
        case = run(**{"micro_batches": ALL, **layout})
        results = run_ranks(case.world, critic_step, case, checkpoint(family))
        last = [values for values, _, _ in results if values]
        assert len(last) == case.world // case.pp, name
        for values in last:
            for x, y in zip(values, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=5e-5)
        assert_gradients(results[0][1], gradients)


def test_logprobs_without_logits_equal_those_of_logits(checkpoint: Callable[[str], str]) -> None:
    """Bridge's `output_processor` at TP 2 with sequence parallelism x CP 2, padded vocabulary."""
    run = bridge_runs.Run(family="qwen3_vl", tp=2, cp=2)
    results = [run_ranks(run.world, policy_step, run, checkpoint("qwen3_vl"), fused) for fused in (False, True)]
    for (a, gradients_a), (b, gradients_b) in zip(*results, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=2e-5)
        assert_gradients(gradients_b, gradients_a)


def critic_after_hooks(rank: int, path: str, lora_first: bool) -> dict[str, Any]:
    """What the head is like beside Bridge's LoRA, and after Bridge loads HF weights into the finished critic."""
    use_cpu()
    lora = LoRA(target_modules=["linear_qkv"], dim=2)
    head = value_head(std=0.3)
    hooks = (lora, head) if lora_first else (head, lora)
    _, _, chunks = bridge_runs.build(bridge_runs.Run(family="qwen3_vl", hooks=hooks), path)
    weight = chunks[0].module.language_model.output_layer.weight
    before, trainable = weight.detach().clone(), {n for n, p in chunks[0].named_parameters() if p.requires_grad}
    plain, _, critics = bridge_runs.build(bridge_runs.Run(family="qwen3_vl", hooks=(head,)), path)
    body = {n: p.detach().clone() for n, p in critics[0].named_parameters()}
    with torch.no_grad():
        for p in critics[0].parameters():
            p.fill_(7)
    plain.load_hf_weights(critics)
    return {
        "head_trains": [n for n in trainable if ".adapter." not in n],
        "adapters": any(".adapter." in n for n in trainable),
        "drawn": torch.equal(before, body["module.language_model.output_layer.weight"]),
        "reloaded": {n for n, p in critics[0].named_parameters() if not torch.equal(p, body[n])},
    }


@pytest.mark.parametrize("lora_first", [True, False])
def test_b22_head_beside_lora_and_after_loading_hf_weights(lora_first: bool, checkpoint: Callable[[str], str]) -> None:
    (facts,) = run_ranks(1, critic_after_hooks, checkpoint("qwen3_vl"), lora_first)
    assert facts["head_trains"] == ["module.language_model.output_layer.weight"]
    assert facts["adapters"]
    assert facts["drawn"]
    assert facts["reloaded"] == {"module.language_model.output_layer.weight"}  # the head alone was left as it was
