"""CP=1 against CP=n of the same weights inside Megatron-Bridge: its provider, DDP, schedule and `finalize_model_grads`.

One start of cp * tp ranks computes all of it, since importing the stack takes half a minute: CP=1 (every rank the same
batch), CP=1 with vlm_cp's attention in Transformer Engine's place and CP=1 with the samples in another order (the floor),
and CP=n. Everything is loaded from one checkpoint, since random weights differ between parallel layouts.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import comm
from vlm_cp.batch import PackedBatch, unpack
from vlm_cp.launch import rank_device, run_ranks
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.losses import TokenLoss, emit_per_token
from vlm_cp.parity import Bound, Difference, ParityReport
from vlm_cp.spec import VLMSpec
from vlm_cp.subject import Outcome, Subject
from vlm_cp.trace import Divergence, unlocated_divergence

# Heads of the sizes that Transformer Engine's kernels take, a vocabulary that TP can cut; otherwise as small as the demo.
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
_TEXT: dict[str, Any] = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
_VISION = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 2}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {**_TEXT, "head_dim": 64, "rope_parameters": {**_ROPE, "mrope_section": [12, 10, 10]}},
    "qwen3_5": {
        **_TEXT,
        "head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 4,
        "rope_parameters": {**_ROPE, "mrope_section": [6, 5, 5], "partial_rotary_factor": 0.25},
    },
}

_RUNS = ("reference", "kernel", "order", "candidate")


def run_bridge_parity(
    subject: Subject,
    *,
    cp: int,
    tp: int = 1,
    device: str = "cuda",
    bound: Bound | None = None,
    prepare: Callable[[], None] | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> ParityReport:
    """Compares CP=`cp` with CP=1 in Megatron-Bridge, both at this tp (with sequence parallelism above 1).

    device: "cuda" needs cp * tp devices, "cuda:0" one, shared over gloo; both Transformer Engine. prepare: called on every rank before Megatron is imported
    (the tests replace what needs a GPU, or a GPU a rank). bound, progress: as in `run_parity`.
    """
    progress(f"Megatron-Bridge on {cp * tp} ranks: CP=1 three times, then CP={cp}")
    with tempfile.TemporaryDirectory() as folder:
        model: Any = subject.model
        model.save_pretrained(folder)
        lighter = replace(subject, model=torch.nn.Module())
        job = (lighter, folder, cp, tp, device, prepare)
        runs: dict[str, tuple[Outcome, float]] = run_ranks(cp * tp, _run_rank, *job, device=device, timeout=900)[0]
    reference, found = runs["reference"][0], runs["candidate"][0]
    floors = {name: Difference.between(runs[name][0], reference) for name in ("kernel", "order")}
    tolerance = bound or Bound.from_floors(list(floors.values()))
    difference = Difference.between(found, reference)
    where: Divergence | None = None
    if not tolerance.holds(difference):
        deltas = [x - y for x, y in zip(found.logprobs, reference.logprobs, strict=True)]
        where = unlocated_divergence(deltas, tolerance.logprob_max_abs, subject.batch(cp, tp))
    return ParityReport(
        subject=subject,
        engine="bridge",
        device=device,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        cp=cp,
        tp=tp,
        attention=_comm_type(device),
        difference=difference,
        floors=floors,
        tolerance=tolerance,
        passed=where is None,
        first_divergence=where,
        seconds={name: seconds for name, (_, seconds) in runs.items()},
        reference=reference,
        candidate=found,
    )


def bridge_subject(family: str, *, dtype: torch.dtype, seed: int = 0) -> Subject:
    """`Subject.demo` in sizes that Transformer Engine takes; a family that Bridge cannot cut over CP is refused."""
    if family not in _SIZES:
        raise ValueError(
            f"family must be one of {', '.join(_SIZES)} for the bridge engine, got {family!r}; "
            "Megatron-Bridge's model of it does not cut the stream (see families/capability.py)"
        )
    return Subject.demo(family, dtype=dtype, seed=seed, vision=_VISION, **_SIZES[family])


def _run_rank(
    rank: int, subject: Subject, folder: str, cp: int, tp: int, device: str, prepare: Callable[[], None] | None
) -> dict[str, tuple[Outcome, float]] | None:
    if prepare is not None:
        prepare()
    runs: dict[str, tuple[Outcome, float]] = {}
    for name in _RUNS:
        begin = perf_counter()
        samples = list(subject.samples)[::-1] if name == "order" else subject.samples
        size = cp if name == "candidate" else 1
        outcome = _run(replace(subject, samples=samples), Path(folder), size, tp, device, other_kernel=name == "kernel")
        if name == "order":
            outcome = Outcome(list(outcome.logprobs)[::-1], outcome.loss, outcome.gradients)
        runs[name] = outcome, perf_counter() - begin
        if device != "cpu":
            gc.collect()  # the model is in reference cycles, and its memory is needed for the next one
    return runs if rank == 0 else None


def _run(subject: Subject, folder: Path, cp: int, tp: int, device: str, *, other_kernel: bool) -> Outcome:
    """One training step on one micro-batch; every rank returns the whole outcome."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from vlm_cp.engines.megatron import MegatronEngine

    provider = _provider(folder, cp, tp, device, other_kernel)
    chunks = _built(provider, device)
    engine = MegatronEngine(chunks, spec=VLMSpec.from_bridge(provider))
    batch = subject.batch(cp, tp).to(rank_device(device, dist.get_rank()))
    kept: list[Tensor] = []

    def loss_fn(logits: Tensor, batch: PackedBatch) -> TokenLoss:
        logprobs = next_token_logprobs(
            logits, batch.input_ids, batch.plan, cp_rank=engine.cp_rank, tp_group=engine.tp_group if tp > 1 else None
        )
        kept.append(logprobs.detach())
        return TokenLoss(-logprobs.sum(), batch.plan.shard(batch.plan.scored, engine.cp_rank).sum())

    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=engine.forward_step(emit_per_token, loss_fn),
        data_iterator=iter([batch]),
        model=chunks,
        num_microbatches=1,
        seq_length=batch.plan.total_tokens,
        micro_batch_size=1,
    )
    logprobs = [x.cpu() for x in unpack(kept[0], batch.plan, group=engine.cp_group)]
    gradients = _gradients(chunks[0], comm.group_rank(engine.tp_group), tp)
    loss = -sum(float(x.double().sum()) for x in logprobs) / subject.targets
    parallel_state.destroy_model_parallel()
    return Outcome(logprobs, loss, gradients)


def _provider(folder: Path, cp: int, tp: int, device: str, other_kernel: bool) -> Any:
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import finalize_model_grads

    from vlm_cp.engines.core_attention import use_torch_attention
    from vlm_cp.engines.deepstack import keep_deepstack_gradient
    from vlm_cp.engines.preflight import unwrap

    bridge: Any = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    half = device != "cpu"
    settings: dict[str, Any] = {
        "context_parallel_size": cp,
        "cp_comm_type": _comm_type(device),
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "calculate_per_token_loss": True,
        "bf16": half,
        "params_dtype": torch.bfloat16 if half else torch.float32,
        "moe_token_dispatcher_type": "alltoall",
        "gradient_accumulation_fusion": False,  # needs APEX
        "perform_initialization": False,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    provider.finalize_model_grads_func = finalize_model_grads
    provider.initialize_model_parallel(seed=1 if half else None)

    def repair(chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            keep_deepstack_gradient(unwrap(chunk))
        return use_torch_attention(chunks) if other_kernel else chunks

    provider.register_pre_wrap_hook(repair)
    return provider


def _comm_type(device: str) -> str:
    """Ranks that share a device talk over gloo, which sends no CUDA tensor from one rank to another: no ring."""
    return "all_gather" if device.startswith("cuda:") else "p2p"


def _built(provider: Any, device: str) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return provider.provide_distributed_model(ddp_config=ddp, use_cpu_initialization=device == "cpu")


def _gradients(chunk: Any, tp_rank: int, tp: int) -> dict[str, Tensor]:
    """Every parameter's gradient by name; over TP, each rank's share of it under a name of its own."""
    own: dict[str, Tensor] = {
        name if tp == 1 else f"{name} of TP rank {tp_rank}": p.main_grad.float().cpu()
        for name, p in chunk.named_parameters()
        if p.requires_grad
    }
    if tp == 1:
        return own
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {name: gradient for part in found for name, gradient in part.items()}
