"""The README's example on Megatron-Bridge, run as it stands there: register the hooks, build, one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_on_cpu import use_cpu
from bridge_runs import Run, TokenLoss, configure, emit_default, make_batch, spec_of
from megatron.bridge import AutoBridge
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from ranks import run_ranks

from vlm_cp.logprobs import next_token_logprobs

EXAMPLE = """\
register(provider, keep_default_loss_scaling, keep_deepstack_gradients)
engine = MegatronEngine(provider.provide_distributed_model(ddp_config=ddp), spec=VLMSpec.from_bridge(provider))
get_forward_backward_func()(forward_step_func=engine.forward_step(emitter, loss_fn), data_iterator=batches, model=engine.chunks, **sizes)
"""
IMPORTS = """\
from vlm_cp.engines.megatron import MegatronEngine
from vlm_cp.spec import VLMSpec
from vlm_cp_hooks import keep_deepstack_gradients, keep_default_loss_scaling, register
"""


def _score(engine: Any, batch: Any) -> float:
    """A forward-only pass that collects what the loss function makes of the output, as for old log-probabilities."""

    def logprobs(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return next_token_logprobs(logits, batch.input_ids, batch.plan, cp_rank=engine.cp_rank)

    with torch.no_grad():
        (collected,) = get_forward_backward_func()(
            forward_step_func=engine.forward_step(None, logprobs),
            data_iterator=iter([batch]),
            model=engine.chunks,
            num_microbatches=1,
            seq_length=batch.plan.total_tokens,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
        direct = logprobs(engine(batch), batch)
    return float((collected - direct).abs().max())


def _step(rank: int, path: str) -> tuple[float, float]:
    use_cpu()
    run = Run(family="qwen3_vl", cp=2)
    provider = configure(run, AutoBridge.from_hf_pretrained(path))
    provider.provide_distributed_model = partial(provider.provide_distributed_model, use_cpu_initialization=True)
    batch = make_batch(run, [0, 1], spec_of("qwen3_vl"))

    def loss_fn(logits: torch.Tensor, batch: Any) -> TokenLoss:
        mask = batch.plan.shard(batch.plan.scored, names["engine"].cp_rank)
        return TokenLoss(logits[0].logsumexp(-1)[mask].sum(), mask.sum())

    names: dict[str, Any] = {
        "provider": provider,
        "ddp": DistributedDataParallelConfig(),
        "emitter": partial(emit_default, global_count=batch.plan.lengths[0], num_microbatches=1, dp_size=1),
        "loss_fn": loss_fn,
        "batches": iter([batch]),
        "sizes": {"num_microbatches": 1, "seq_length": batch.plan.total_tokens, "micro_batch_size": 1},
        "get_forward_backward_func": get_forward_backward_func,
    }
    exec(IMPORTS + EXAMPLE, names)
    engine = names["engine"]
    return sum(float(p.main_grad.norm()) for chunk in engine.chunks for p in chunk.parameters()), _score(engine, batch)


def test_the_example_runs_a_step(checkpoint: Callable[[str], str]) -> None:
    for norm, difference in run_ranks(2, _step, checkpoint("qwen3_vl")):
        assert norm > 0
        assert difference == 0


def test_the_readme_shows_it() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    if not readme:
        pytest.skip("README.md is empty")
    assert EXAMPLE in readme
