"""One training step of an installed Bridge model on gloo ranks, as a framework would run it: provider, pre-wrap hooks, mcore's
DDP and schedule, `finalize_model_grads`. Gradients come back under their HF names, whatever the parallel layout was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bridge_on_cpu import use_cpu
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from vlm_cp_hooks import keep_deepstack_gradients, keep_default_loss_scaling, register

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.collate import pack_samples
from vlm_cp.demo.conversations import demo_conversations, encode
from vlm_cp.demo.models import INITIALIZER_RANGE, tiny_config, tiny_model
from vlm_cp.demo.processor import build_processor
from vlm_cp.engines.megatron import ForwardStep, MegatronEngine
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import VLMSpec

VOCABULARY = 320  # divisible by any tp_size here
LAYERS = 4  # two a pipeline stage, deepstack on the first


class TokenLoss(NamedTuple):
    local_sum: Tensor
    local_count: Tensor


def emit_default(
    loss: TokenLoss, *, global_count: int, num_microbatches: int, dp_size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """mcore multiplies by cp and divides by the micro-batches, DDP divides by dp * cp."""
    return loss.local_sum * (num_microbatches * dp_size / global_count), {"loss_sum": loss.local_sum.detach().clone()}


def emit_per_token(loss: TokenLoss) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron adds up sums and counts, and divides once."""
    return loss.local_sum.clone(), loss.local_count.int(), {"loss_sum": loss.local_sum.detach().clone()}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One configuration; hooks are registered in their order, after Bridge's own hook that loads the weights."""

    family: str
    cp: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    layout: Any = "full"
    emitter: str = "default"
    hooks: Sequence[Callable[..., Any]] = (keep_default_loss_scaling, keep_deepstack_gradients)
    provider: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    sample_multiple: int = 1
    total_tokens: int | None = None
    with_labels: bool | None = None  # let the model compute the loss; None: where tp splits the vocabulary
    micro_batches: Sequence[Sequence[int]] = ((0, 1, 2), (3, 4), (5, 1))  # indices of demo_conversations()
    step_before: Sequence[Sequence[int]] = ()  # micro-batches of an earlier step; its gradients are dropped
    calls: Sequence[int] = ()  # micro-batches of each schedule call; only the last one finalizes. One call without it
    no_sync: bool = True  # False: leave `no_sync_func` unset where reduction is overlapped
    after_build: Callable[[list[Any], Any], Any] | None = None  # (chunks, provider) -> note
    checked: bool = True  # False: go round the engine's check of the emitter, to see what it prevents

    @property
    def world(self) -> int:
        return self.cp * self.tp * self.pp * self.dp

    @property
    def labels(self) -> bool:
        return self.tp > 1 if self.with_labels is None else self.with_labels

    @property
    def alignment(self) -> Alignment:
        return Alignment(
            cp_size=self.cp, tp_size=self.tp, sequence_parallel=self.tp > 1, sample_multiple=self.sample_multiple
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out: logprobs of every micro-batch's slots that are scored, HF-named gradients, and `after_build`'s value."""

    logprobs: list[Tensor]
    gradients: dict[str, Tensor]
    note: Any

    @property
    def gradient_norm(self) -> float:
        return float(torch.cat([g.flatten() for g in self.gradients.values()]).double().norm())

    def worst_gradient(self, other: Result) -> tuple[float, str]:
        """The largest relative difference of one parameter's gradient, and its name."""
        assert self.gradients.keys() == other.gradients.keys()
        pairs = ((relative(g, other.gradients[name]), name) for name, g in self.gradients.items())
        return max(pairs)

    def worst_logprob(self, other: Result) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(self.logprobs, other.logprobs, strict=True))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def save_checkpoint(family: str, folder: Path) -> str:
    """A tiny transformers model with fixed random weights, saved once; every layout loads these."""
    tokenizer = processor().tokenizer
    if family in ("qwen3_5", "qwen3_5_mtp"):
        model = tiny_model("qwen3_5", tokenizer, vocab_size=VOCABULARY, linear_num_key_heads=4)
    elif family == "qwen3_vl":
        model = tiny_model(family, tokenizer, vocab_size=VOCABULARY, num_hidden_layers=LAYERS)
    else:
        model = _random(*(_moe_config(family) if family.endswith("_moe") else _text_config()))
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    if family == "qwen3_5_mtp":
        _add_mtp(folder)
    return str(folder)


def _add_mtp(folder: Path) -> None:
    """One multi-token-prediction layer, which transformers' class lacks: the last text layer's weights under MTP's names."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    last = f"model.language_model.layers.{LAYERS - 1}."
    added = {
        "mtp.layers.0." + name.removeprefix(last): x.clone() for name, x in weights.items() if name.startswith(last)
    }
    norm = weights["model.language_model.norm.weight"]
    eye = torch.eye(len(norm))
    added |= {f"mtp.{name}.weight": norm.clone() for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    save_file({**weights, **added, "mtp.fc.weight": torch.cat([eye, eye], 1)}, file, {"format": "pt"})


def _moe_config(family: str) -> tuple[Any, Any]:
    """The dense family's sizes with four experts."""
    classes = {
        "qwen3_vl_moe": (Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, {"num_hidden_layers": LAYERS}),
        "qwen3_5_moe": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, {"linear_num_key_heads": 4}),
    }
    model_class, config_class, sizes = classes[family]
    dense = tiny_config(family.removesuffix("_moe"), processor().tokenizer, vocab_size=VOCABULARY, **sizes)
    text, vision = (
        {k: v for k, v in c.to_dict().items() if k != "model_type"} for c in (dense.text_config, dense.vision_config)
    )
    text.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    text.update(decoder_sparse_step=1, mlp_only_layers=[])
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: getattr(dense, name) for name in names}
    return model_class, config_class(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def _text_config() -> tuple[Any, Any]:
    text = tiny_config(
        "qwen3_vl", processor().tokenizer, vocab_size=VOCABULARY, num_hidden_layers=LAYERS
    ).text_config.to_dict()
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    config = Qwen3Config(
        **{name: text[name] for name in sizes},
        vocab_size=VOCABULARY,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM, config


def _random(model_class: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class._from_config(config, dtype=torch.float32)


@cache
def processor() -> Any:
    return build_processor("qwen3_vl", longest_edge=64 * 64)


@cache
def samples() -> list[Mapping[str, Tensor]]:
    return [encode(processor(), conversation).inputs for conversation in demo_conversations()]


def make_batch(run: Run, indices: Sequence[int], spec: VLMSpec) -> PackedBatch:
    """The chosen conversations, packed; for a text model only their ids, every one of which is then text."""
    chosen = [samples()[i] for i in indices]
    if run.family == "qwen3":
        ids = [s["input_ids"][0] for s in chosen]
        chosen = [{"input_ids": x, "placeholder_mask": torch.zeros_like(x)} for x in ids]
    return pack_samples(chosen, alignment=run.alignment, spec=spec, pad_token_id=0, total_tokens=run.total_tokens)


def spec_of(family: str) -> VLMSpec:
    return VLMSpec.from_hf_config(
        tiny_config("qwen3_5" if family.startswith("qwen3_5") else "qwen3_vl", processor().tokenizer)
    )


def configure(run: Run, bridge: Any) -> Any:
    """A finalized provider for this layout in fp32, with Megatron's groups set up."""
    provider = bridge.to_megatron_provider(load_weights=True)
    settings: dict[str, Any] = {
        "context_parallel_size": run.cp,
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "sequence_parallel": run.tp > 1,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "bf16": False,
        "variable_seq_lengths": run.pp > 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": False,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,  # the fused one rounds the logits' gradient to bfloat16
        "perform_initialization": False,
        "freeze_language_model": False,  # the MoE provider's own defaults train the projection only
        "freeze_vision_model": False,
    }
    for name, value in {**settings, **run.provider}.items():
        setattr(provider, name, value)
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():  # a rank may build several models of one layout
        provider.initialize_model_parallel(seed=None)
    return provider


def build(run: Run, path: str) -> tuple[Any, Any, list[Any]]:
    """(bridge, provider, wrapped chunks) on this rank, the way a framework builds them."""
    bridge = AutoBridge.from_hf_pretrained(path)
    provider = configure(run, bridge)
    register(provider, *run.hooks)
    ddp = DistributedDataParallelConfig(**run.ddp)
    chunks = provider.provide_distributed_model(ddp_config=ddp, use_cpu_initialization=True)
    if ddp.overlap_grad_reduce and run.no_sync:  # as Megatron's training loops do
        provider.no_sync_func = chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    return bridge, provider, chunks


def step(rank: int, run: Run, path: str) -> dict[str, Any]:
    """This rank's part of a step over all micro-batches; rank order is Megatron's: tp, cp, dp, pp."""
    use_cpu()
    torch.manual_seed(0)  # what hooks add (LoRA) starts alike on every rank and in every layout
    bridge, provider, chunks = build(run, path)
    note = run.after_build(chunks, provider) if run.after_build else None
    engine = MegatronEngine(
        chunks, spec=None if run.family == "qwen3" else VLMSpec.from_bridge(provider), layout=run.layout
    )
    dp_rank = dist.get_rank(engine.model.chunks[0].pg_collection.dp)
    before, every = (
        [make_batch(run, indices, spec_of(run.family)) for indices in chosen]
        for chosen in (run.step_before, run.micro_batches)
    )
    own = every[dp_rank :: run.dp]
    kept: list[Tensor] = []

    def loss_fn(output: Tensor, batch: PackedBatch) -> TokenLoss:
        mask = batch.plan.shard(batch.plan.scored, engine.cp_rank)
        if run.labels:  # the model's own loss, also over a split vocabulary
            logprobs = (-output[0]).where(mask, 0.0)
        else:
            logprobs = next_token_logprobs(output, batch.input_ids, batch.plan, cp_rank=engine.cp_rank)
        kept.append(logprobs.detach().clone())
        return TokenLoss(-logprobs.sum(), mask.sum())

    count = sum(int(batch.plan.scored.sum()) for batch in every)
    make_step = engine.forward_step if run.checked else partial(ForwardStep, engine)

    def call(batches: Sequence[PackedBatch], *, finalize: bool = True) -> None:
        emitters = {
            "default": partial(emit_default, global_count=count, num_microbatches=len(batches), dp_size=run.dp),
            "per_token": emit_per_token,
        }
        provider.finalize_model_grads_func = finalize_model_grads if finalize else None
        get_forward_backward_func()(
            forward_step_func=make_step(emitters[run.emitter], loss_fn, with_labels=run.labels),
            data_iterator=iter(batches),
            model=chunks,
            num_microbatches=len(batches),
            seq_length=batches[0].plan.total_tokens,
            micro_batch_size=1,
        )

    if before:
        call(before[dp_rank :: run.dp])
        kept.clear()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    ends = list(accumulate(run.calls or [len(own)]))
    for start, end in zip([0, *ends], ends, strict=False):
        call(own[start:end], finalize=end == len(own))
    return {
        "logprobs": kept,
        "plans": [batch.plan for batch in own],
        "place": (dp_rank, engine.cp_rank),
        "gradients": exported_gradients(bridge, chunks),
        "note": note,
    }


def exported_gradients(bridge: Any, chunks: Sequence[Any]) -> dict[str, Tensor]:
    """HF name -> whole gradient: Bridge's own export, run on gradients in the parameters' place. Adapters keep their names."""
    adapters: dict[str, Tensor] = {}
    for chunk in chunks:
        _join_optimizer_shards(chunk)
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if ".adapter." in name and gradient is not None:
                adapters[name] = gradient.clone()
            parameter.data.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    exported = bridge.export_hf_weights(chunks, cpu=True, show_progress=False)
    return adapters or {name: x.clone() for name, x in exported}


def _join_optimizer_shards(chunk: Any) -> None:
    """With the distributed optimizer each rank holds the reduced gradient of its own shard of every bucket."""
    if chunk.ddp_config.use_distributed_optimizer:
        for buffer in chunk.buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def execute(run: Run, path: str) -> Result:
    """Runs the step on `run.world` ranks and joins what they hold."""
    ranks = run_ranks(run.world, step, run, path)
    last = {r["place"]: r for r in ranks if r["logprobs"]}
    logprobs: list[Tensor] = []
    for i in range(len(run.micro_batches)):
        shards = [last[i % run.dp, cp_rank]["logprobs"][i // run.dp] for cp_rank in range(run.cp)]
        plan: SequencePlan = last[i % run.dp, 0]["plans"][i // run.dp]
        logprobs.append(plan.unshard(shards)[plan.scored])
    return Result(logprobs=logprobs, gradients=ranks[0]["gradients"], note=ranks[0]["note"])
