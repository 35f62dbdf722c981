"""Finds where CP=n leaves CP=1: the first module whose output differs, the tokens and the image it happened in, and why.

Both sides are run again with forward hooks. First the blocks are compared in the order in which they finish, then the
parts of the first block that differs. Before the text model its inputs are compared (ids, positions, embeddings,
deepstack rows), since most faults of a cut lie there and show only layers later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlm_cp.attention import AttentionMethod
from vlm_cp.batch import PackedBatch
from vlm_cp.launch import rank_device, run_ranks
from vlm_cp.subject import Candidate, Numerics, Subject

Cause = Literal[
    "vision",
    "partition",
    "positions",
    "media_rows",
    "deepstack",
    "attention",
    "state",
    "module",
    "labels",
    "gradients",
    "engine",
]

_LIKELY: dict[Cause, str] = {
    "vision": "the tower saw other patches or grids: media split or ordered differently on some rank",
    "partition": "the ids of a rank are not the plan's: another cut than the per-sample zigzag, or a second cut of a shard",
    "positions": "mRoPE positions differ: computed on the shard instead of the full stream, or not restarted at a sample",
    "media_rows": "feature rows stand in other placeholders: image and video rows exchanged, or counted on the shard",
    "deepstack": "deepstack rows are not cut like the tokens: the same rows must serve every level",
    "attention": "tokens see other keys: a sample attends to another one, or the cut broke the causal order",
    "state": "a layer's state runs over another order or passes from sample to sample: it needs whole samples in natural order",
    "module": "this module's own arithmetic differs",
    "labels": "logits agree and log-probabilities do not: targets were rolled inside the shard or across samples",
    "engine": "this engine is not traced; the same weights through --engine hf tell a wrong cut from a wrong model",
    "gradients": "the forward agrees and gradients do not: an exchange's backward sums or slices wrongly, or a gradient sum is missing",
}

_IDS, _POSITIONS, _EMBEDS, _DEEPSTACK = "input_ids", "position_ids", "inputs_embeds", "deepstack"
_INPUT_CAUSES: dict[str, Cause] = {
    _IDS: "partition",
    _POSITIONS: "positions",
    _EMBEDS: "media_rows",
    _DEEPSTACK: "deepstack",
}
_VISION = "model.visual"

Records = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Divergence:
    """module: a module's name, or an input of the text model. sample, first_token, last_token: where the first difference
    lies, in tokens of its sample; item: the image or video there. tokens: how many tokens differ in the whole batch."""

    module: str
    cause: Cause
    likely: str
    sample: int | None
    first_token: int | None
    last_token: int | None
    tokens: int
    item: str | None
    max_abs: float


def first_divergence(
    cp: int,
    subject: Subject,
    attention: AttentionMethod,
    device: str,
    numerics: Numerics,
    candidate: type[Candidate],
    *,
    logprob_deltas: Sequence[Tensor],
    logprob_bound: float,
) -> Divergence:
    """Where CP=`cp` first differs from transformers' CP=1. logprob_deltas: B tensors [L_i], found minus expected."""
    batch = subject.batch(cp)
    job = (batch, subject, attention, device, numerics, candidate)
    blocks = [*_blocks(subject.model.get_submodule(_VISION), _VISION)]
    blocks += [*_blocks(subject.model.get_submodule("model.language_model"), "model.language_model"), "lm_head"]
    found = _first_difference(blocks, *job)
    if found is not None and found.module in blocks:
        parts = [
            f"{found.module}.{name}" for name, _ in subject.model.get_submodule(found.module).named_modules() if name
        ]
        found = _first_difference(parts, *job) or found
    if found is not None:
        return found
    deltas = torch.cat(list(logprob_deltas)).abs()
    worst = float(deltas.max())
    cause: Cause = "gradients" if worst <= logprob_bound else "labels"
    return _divergence("log-probabilities", cause, deltas > logprob_bound, worst, batch)


def unlocated_divergence(deltas: Sequence[Tensor], bound: float, batch: PackedBatch) -> Divergence:
    """Which tokens differ, for an engine that is not traced module by module. deltas: B tensors [L_i], found minus expected."""
    joined = torch.cat(list(deltas)).abs()
    differs = ~(joined <= bound)
    cause: Cause = "engine" if bool(differs.any()) else "gradients"
    return _divergence("log-probabilities", cause, differs, float(joined.max()), batch)


def _first_difference(
    names: list[str],
    batch: PackedBatch,
    subject: Subject,
    attention: AttentionMethod,
    device: str,
    numerics: Numerics,
    candidate: type[Candidate],
) -> Divergence | None:
    expected = _trace_samples(subject, names, rank_device(device, 0), numerics)
    job = (names, subject, attention, device, numerics, candidate)
    ranks = run_ranks(batch.plan.cp_size, _trace_rank, *job, device=device, timeout=600)
    for name, reference in expected.items():
        found = _joined(name, ranks, batch)
        if found is None or found.shape != reference.shape:
            continue  # a part that works on another layout than tokens, such as a natural-order layer's projections
        error = (found.double() - reference.double()).abs().reshape(len(reference), -1).amax(1)
        # A fault moves outputs by far more than the square root of the rounding error, noise by far less.
        limit = torch.finfo(reference.dtype).eps ** 0.5 if reference.is_floating_point() else 0.0
        differs = ~(error <= limit * float(reference.double().abs().max()))
        if bool(differs.any()):
            return _divergence(name, _cause(name), differs, float(error.max()), batch)
    return None


def _cause(name: str) -> Cause:
    if name.split(".")[0] in _INPUT_CAUSES:
        return _INPUT_CAUSES[name.split(".")[0]]
    if name.startswith(_VISION):
        return "vision"
    if ".linear_attn" in name:
        return "state"
    return "attention" if name.endswith(("self_attn", "self_attn.o_proj")) else "module"


def _divergence(name: str, cause: Cause, differs: Tensor, max_abs: float, batch: PackedBatch) -> Divergence:
    """differs: bool, over real tokens in stream order, or over the tower's rows for vision modules."""
    media, plan = batch.media, batch.plan
    if cause == "vision":
        rows_each = len(differs) // max(1, len(media.row_slots))  # merge_size ** 2 before the merger, 1 after it
        row = int(differs.nonzero()[0, 0]) // max(1, rows_each)
        item = int(media.item_of_row()[row])
        return Divergence(
            name,
            cause,
            _LIKELY[cause],
            int(media.samples[item]),
            None,
            None,
            int(differs.sum()),
            media.name(item),
            max_abs,
        )
    if not bool(differs.any()):
        return Divergence(name, cause, _LIKELY[cause], None, None, None, 0, None, max_abs)
    slots = plan.real_index[differs]
    sample = int(plan.sample_index[slots[0]])
    tokens = plan.token_index[slots[plan.sample_index[slots] == sample]]
    row = int(media.slot_rows()[slots[0]])
    item = media.name(int(media.item_of_row()[row])) if row >= 0 else None
    return Divergence(name, cause, _LIKELY[cause], sample, int(tokens[0]), int(tokens[-1]), len(slots), item, max_abs)


def _blocks(root: nn.Module, prefix: str) -> Iterator[str]:
    """Children, and the elements of child lists: the level at which a model reads as a chain."""
    for name, child in root.named_children():
        if isinstance(child, nn.ModuleList):
            yield from (f"{prefix}.{name}.{index}" for index in range(len(child)))
        else:
            yield f"{prefix}.{name}"


def _trace_samples(subject: Subject, names: list[str], device: str, numerics: Numerics) -> dict[str, Tensor]:
    """transformers on each sample alone: text outputs [N, ...] over real tokens, tower outputs [rows, ...], images first."""
    model = subject.model.to(device)
    records: list[tuple[bool, Records]] = []
    for sample in subject.samples:
        inputs = {key: value.to(device) for key, value in sample.inputs.items()}
        with torch.no_grad(), numerics(), _recorded(model, names) as found:
            model(**inputs, use_cache=False)
        length = inputs["input_ids"].numel()
        # Text alone gets no positions from transformers; its text model then counts tokens.
        found.setdefault(_POSITIONS, [torch.arange(length).expand(3, 1, length)])
        for level in range(subject.spec.deepstack_levels):
            found.setdefault(f"{_DEEPSTACK}.{level}", [torch.zeros_like(found[_EMBEDS][0])])
        records.append(("pixel_values" in inputs, found))
    joined: dict[str, Tensor] = {}
    for name in sorted(dict.fromkeys(name for _, found in records for name in found), key=_stage):
        if name.startswith(_VISION):
            outputs = [found[name][0] for has_images, found in records if has_images and name in found]
            outputs += [x for has_images, found in records for x in found.get(name, [])[int(has_images) :]]
        else:
            outputs = [_tokens(name, found[name][0]) for _, found in records if name in found]
        if len({x.shape[1:] for x in outputs}) == 1:  # not tables that have another axis first
            joined[name] = torch.cat(outputs)
    return joined


def _stage(name: str) -> int:
    """The tower comes first, then the text model's inputs, then its modules, each in the order in which they finished."""
    inputs = list(_INPUT_CAUSES)
    head = name.split(".")[0]
    return inputs.index(head) + 1 if head in inputs else 0 if name.startswith(_VISION) else len(inputs) + 1


def _trace_rank(
    rank: int,
    names: list[str],
    subject: Subject,
    attention: AttentionMethod,
    device: str,
    numerics: Numerics,
    candidate: type[Candidate],
) -> Records:
    home = rank_device(device, rank)
    model = subject.model.to(home)
    run = candidate(model, subject.spec, dist.group.WORLD, attention)
    with run.engine, torch.no_grad(), numerics(), _recorded(model, names) as found:
        run.logits(subject.batch(dist.get_world_size()).to(home))
    return found


def _joined(name: str, ranks: Sequence[Mapping[str, list[Tensor]]], batch: PackedBatch) -> Tensor | None:
    """The candidate's output laid out as the reference's; None when some rank has none, or not one row a token."""
    if any(name not in found for found in ranks):
        return None
    if name.startswith(_VISION):
        return ranks[0][name][0]
    shards = [_tokens(name, found[name][0]) for found in ranks]
    if any(len(shard) != batch.plan.local_tokens for shard in shards):
        return None
    return batch.plan.unshard(shards)[batch.plan.real_index]


def _tokens(name: str, x: Tensor) -> Tensor:
    """[tokens, ...] from what was recorded: [1, tokens, ...], and [3, 1, tokens] for positions."""
    return x[:, 0].T if name == _POSITIONS else x[0]


@contextmanager
def _recorded(model: nn.Module, names: list[str]) -> Generator[Records]:
    """Records the text model's inputs and the outputs of the named modules, in the order in which they finish."""
    records: Records = {}

    def keep(name: str, value: Any) -> None:
        while isinstance(value, tuple | list):
            value = value[0]
        value = getattr(value, "pooler_output", getattr(value, "last_hidden_state", value))
        if isinstance(value, Tensor):
            records.setdefault(name, []).append(value.detach().cpu())

    def keep_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        embeds: Tensor = kwargs["inputs_embeds"]
        if kwargs.get("position_ids") is not None:
            keep(_POSITIONS, kwargs["position_ids"][-3:])
        keep(_EMBEDS, embeds)
        for level, rows in enumerate(kwargs.get("deepstack_visual_embeds") or ()):
            keep(
                f"{_DEEPSTACK}.{level}",
                torch.zeros_like(embeds).masked_scatter(kwargs["visual_pos_masks"][..., None], rows),
            )

    def keep_ids(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        keep(_IDS, args[0])

    text: Any = model.get_submodule("model.language_model")
    handles = [
        text.embed_tokens.register_forward_pre_hook(keep_ids),
        text.register_forward_pre_hook(keep_inputs, with_kwargs=True),
    ]
    for name in names:
        handles.append(model.get_submodule(name).register_forward_hook(partial(_keep_output, keep, name)))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _keep_output(keep: Callable[[str, Any], None], name: str, module: nn.Module, args: Any, output: Any) -> None:
    keep(name, output)
