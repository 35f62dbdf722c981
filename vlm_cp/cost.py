"""FLOPs, memory traffic and bytes sent of a packed batch on every CP rank, and what a sample costs in text tokens.

Everything is counted on padded lengths: padding is computed like text. One multiply-add is 2 FLOPs. Symbols, per layer:

    h  hidden size     i  MLP width     q = heads * head_dim     k = key/value heads * head_dim     n  patches of a frame
    C  chunk of the gated delta rule; dk, dv its head sizes; Kd = key heads * dk, Vd = value heads * dv

A token of a text layer: projections 2h(q + 2k) + 2qh, with an output gate 2hq more; the gated MLP's three matrices 6hi.
The head: 2hV. A query attends to everything up to itself, two products of 2q for each pair: 4q * pairs, and of a sample of
P tokens, rank r of c owns chunks r and 2c-1-r of P/2c, whose pairs add up to the same number whatever r is.
A patch of a vision layer: 8h^2 (query, key, value, output) + 4hi, or 6hi where the MLP is gated; attention inside its frame
4hn, inside a window of n patches likewise. A merger joins m^2 patches: 2(m^2 h)^2 + 2 m^2 h * out a row.
A token of a gated delta net: projections 2h(2Kd + 2Vd + 2 value heads) + 2 Vd h, convolution 2(2Kd + Vd) * kernel, and by
chunks a value head's K K^T, Q K^T and T K (6C dk), T V and A V (4C dv), three products with the state (6 dk dv), and the
triangular solve (2C^2/3). Megatron exchanges its heads over the CP ranks, so that it costs each rank 1/c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import TextSpec, TowerSpec, VLMSpec

VisionWork = Literal["replicated", "shared"]

_BYTES = 2  # bf16 activations and weights
_DELTA_CHUNK = 64  # flash-linear-attention's and transformers'


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a training step runs, from which the passes over each part follow.

    recompute: every layer's forward, not the head's, runs once more in the backward (Bridge's recompute_granularity "full").
    train_vision: False for a frozen tower, which runs forward only.
    """

    backward: bool = True
    recompute: bool = False
    train_vision: bool = True

    @property
    def head(self) -> float:
        """Passes over the head: the backward makes two products for each of the forward, by inputs and by weights."""
        return 3.0 if self.backward else 1.0

    @property
    def layers(self) -> float:
        """Passes over the layers' matrix products."""
        return self.head + (self.backward and self.recompute)

    @property
    def attention(self) -> float:
        """Passes over attention: a flash backward makes five products where the forward makes two."""
        return 1 + (2.5 + self.recompute if self.backward else 0)

    def vision(self) -> Step:
        """The step as the tower sees it."""
        return self if self.train_vision else Step(backward=False)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """FLOP/s of each part, whole layers with their unfused element-wise kernels, so that FLOPs alone give the time.

    Defaults: one NVIDIA H200, bf16, stock Megatron-Bridge 0.6.2, the Qwen3-VL 2B shape with full recompute. They are the
    solution of four measured CP=1 steps of 32768 tokens (text 1109 ms, one long sample 2022, images 2586, skewed 2735; the
    gradient all-reduce's 26 ms subtracted); at CP=2 they predict the measured steps within 8 % (tests/test_cost.py).
    """

    text: float = 452e12
    attention: float = 531e12
    vision: float = 247e12
    vision_attention: float = 415e12


@dataclass(frozen=True, kw_only=True)
class Work:
    """flops; memory_bytes: what the kernels read and write at least; sent_bytes: what leaves this rank for the others."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    sent_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
        )

    def __mul__(self, factor: float) -> Work:
        return Work(
            flops=self.flops * factor,
            memory_bytes=self.memory_bytes * factor,
            sent_bytes=self.sent_bytes * factor,
        )


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """One rank's share of a batch. text and vision: all that grows with tokens and patches; the rest is attention."""

    tokens: int
    text: Work
    attention: Work
    vision: Work
    vision_attention: Work

    @property
    def flops(self) -> float:
        return self.text.flops + self.attention.flops + self.vision.flops + self.vision_attention.flops

    def seconds(self, rates: Rates | None = None) -> float:
        """Time at these rates; the exchange between ranks counts as hidden behind the arithmetic."""
        rates = rates or Rates()
        return (
            self.text.flops / rates.text
            + self.attention.flops / rates.attention
            + self.vision.flops / rates.vision
            + self.vision_attention.flops / rates.vision_attention
        )


def rank_costs(
    plan: SequencePlan,
    grids: Tensor | None = None,
    *,
    text: TextSpec,
    spec: VLMSpec,
    vision: VisionWork = "replicated",
    step: Step | None = None,
) -> tuple[RankCost, ...]:
    """What every CP rank computes of one packed batch, in rank order.

    grids: [M, 3], (t, h, w) in patches of all images and videos (`MediaTable.grids`); None for text.
    vision: "replicated", every rank runs the whole tower; "shared", each the same share of it (`assign_vision` comes within
    3 % of that).
    """
    _check_vision(vision)
    step, size = step or Step(), plan.cp_size
    token = _text_token(text, step)
    weights = Work(memory_bytes=_BYTES * _text_weights(text)) * step.layers
    sent = Work(sent_bytes=_delta_exchange(text) * (size - 1) / size) * step.layers
    tower, tower_attention = vision_work(grids, spec)
    if vision == "shared":
        tower, tower_attention = tower * (1 / size), tower_attention * (1 / size)
        rows = 0 if grids is None else int(grids.prod(1).sum()) // spec.spatial_merge_size**2
        features = rows * spec.tower.out_hidden_size * (1 + spec.deepstack_levels) * _BYTES
        tower += Work(sent_bytes=features / size * (size - 1))
    sees = step.vision()
    costs: list[RankCost] = []
    for rank in range(size):
        pairs = int((plan.token_index[plan.local_index(rank)] + 1).sum())
        costs.append(
            RankCost(
                tokens=plan.local_tokens,
                text=(token + sent) * plan.local_tokens + weights,
                attention=_attention(text, pairs, plan) * step.attention,
                vision=tower * sees.layers,
                vision_attention=tower_attention * sees.attention,
            )
        )
    return tuple(costs)


def sample_costs(
    lengths: Sequence[int],
    grids: Sequence[Tensor | None],
    *,
    alignment: Alignment,
    text: TextSpec,
    spec: VLMSpec,
    vision: VisionWork = "replicated",
    step: Step | None = None,
    rates: Rates | None = None,
) -> list[float]:
    """Each sample's time on a rank, in the time that one text token takes there without attention: what `bin_samples` fills by.

    lengths: tokens before padding. grids: each sample's images and videos, [*, 3]. A cost is at least the padded length, so
    that a bin within a capacity holds no more padded tokens than that either. At cp_size c a replicated tower counts c-fold,
    since text is cut by c and the tower is not.
    """
    if len(lengths) != len(grids):
        raise ValueError(
            f"grids must have one entry a sample, {len(lengths)} in all, got {len(grids)}; media would be charged to other samples"
        )
    _check_vision(vision)
    step, rates = step or Step(), rates or Rates()
    token_seconds = _text_token(text, step).flops / rates.text
    costs: list[float] = []
    for length, own in zip(lengths, grids, strict=True):
        padded = -(-length // alignment.sequence_multiple) * alignment.sequence_multiple
        pairs = padded * (padded + 1) // 2
        seconds = 4 * text.num_heads * text.head_dim * _attending(text) * pairs * step.attention / rates.attention
        tower, tower_attention = vision_work(own, spec)
        copies, sees = (alignment.cp_size if vision == "replicated" else 1), step.vision()
        seconds += copies * tower.flops * sees.layers / rates.vision
        seconds += copies * tower_attention.flops * sees.attention / rates.vision_attention
        costs.append(padded + seconds / token_seconds)
    return costs


def vision_work(grids: Tensor | None, spec: VLMSpec) -> tuple[Work, Work]:
    """One forward pass of the tower over these grids [M, 3]: what grows with patches, and attention."""
    if grids is None or not len(grids):
        return Work(), Work()
    tower, merge = spec.tower, spec.spatial_merge_size**2
    hidden, out = tower.hidden_size, tower.out_hidden_size
    pixels = 3 * tower.temporal_patch_size * tower.patch_size**2
    matrices = 3 if tower.gated_mlp else 2
    mlp = hidden * tower.intermediate_size
    layer = 8 * hidden**2 + 2 * matrices * mlp
    merger = 2 * merge * hidden**2 + 2 * hidden * out
    levels = 1 + spec.deepstack_levels
    flops = 2 * pixels * hidden + tower.depth * layer + levels * merger
    # Read and written once a kernel: norms 4h, residuals 6h, qkv 4h, rope 4h, projection 2h; the MLP's products and activation.
    widths = tower.depth * (20 * hidden + (2 * hidden + (2 * matrices - 1) * tower.intermediate_size))
    widths += pixels + 4 * hidden + levels * (6 * hidden + out / merge)
    weights = pixels * hidden + tower.depth * (4 * hidden**2 + matrices * mlp)
    weights += levels * ((merge * hidden) ** 2 + merge * hidden * out)
    patches = int(grids.prod(1).sum())
    pairs = frame_pairs(grids, spec)
    dense = Work(flops=flops * patches, memory_bytes=(widths * patches + weights) * _BYTES)
    return dense, Work(flops=4 * hidden * pairs, memory_bytes=4 * hidden * patches * tower.depth * _BYTES)


def frame_pairs(grids: Tensor, spec: VLMSpec) -> int:
    """Pairs of patches that attend to each other, over all layers: whole frames, or windows where the layer has them."""
    frames, height, width = grids.long().unbind(1)
    whole = int((frames * (height * width) ** 2).sum())
    tower = spec.tower
    if tower.window_size is None:
        return tower.depth * whole
    side = _window_side(tower, spec.spatial_merge_size)
    # A window takes `side` patches of a side, the last what is left: the squares of both sides' pieces multiply.
    rows, columns = ((x // side) * side**2 + (x % side) ** 2 for x in (height, width))
    full = len(tower.full_attention_layers)
    return full * whole + (tower.depth - full) * int((frames * rows * columns).sum())


def _check_vision(vision: str) -> None:
    if vision not in get_args(VisionWork):
        raise ValueError(
            f"vision must be one of {', '.join(get_args(VisionWork))}, got {vision!r}; the tower would be charged once or cp-fold by accident"
        )


def _window_side(tower: TowerSpec, merge: int) -> int:
    """Patches along a window: whole merged patches, as transformers and Bridge cut them."""
    assert tower.window_size is not None
    return tower.window_size // merge // tower.patch_size * merge


def _attending(text: TextSpec) -> int:
    return text.num_layers - (text.delta_net.num_layers if text.delta_net is not None else 0)


def _attention(text: TextSpec, pairs: int, plan: SequencePlan) -> Work:
    """Softmax attention of one rank, one forward pass: its own queries against the whole stream's keys and values."""
    queries, keys = text.num_heads * text.head_dim, 2 * text.num_key_value_heads * text.head_dim
    return Work(
        flops=4 * queries * pairs,
        memory_bytes=(2 * queries * plan.local_tokens + keys * plan.total_tokens) * _BYTES,
        sent_bytes=keys * plan.local_tokens * (plan.cp_size - 1) * _BYTES,
    ) * _attending(text)


def _text_token(text: TextSpec, step: Step) -> Work:
    """One token's passes through all layers and the head, without softmax attention and the weights' own traffic."""
    hidden, inner = text.hidden_size, text.intermediate_size
    queries, keys = text.num_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    gate = queries if text.gated_attention else 0
    attending = Work(
        flops=2 * hidden * (queries + gate + 2 * keys) + 2 * queries * hidden,
        memory_bytes=(hidden + queries + gate + 2 * keys + 2 * (queries + keys) + 3 * gate + queries + hidden) * _BYTES,
    )
    # Two norms 4h, two residuals 6h, gate and up h + 2i, activation 3i, down i + h.
    mlp = Work(flops=6 * hidden * inner, memory_bytes=(12 * hidden + 6 * inner) * _BYTES)
    head = Work(flops=2 * hidden * text.vocab_size, memory_bytes=(hidden + 2 * text.vocab_size) * _BYTES)
    layers = attending * _attending(text) + mlp * text.num_layers + _delta_token(text)
    return layers * step.layers + head * step.head


def _delta_token(text: TextSpec) -> Work:
    """One token's forward pass through the gated delta nets, without their MLPs."""
    if text.delta_net is None:
        return Work()
    net, hidden, chunk = text.delta_net, text.hidden_size, _DELTA_CHUNK
    keys, values = net.key_heads * net.key_head_dim, net.value_heads * net.value_head_dim
    mixed = 2 * keys + values
    projections = 2 * hidden * (mixed + values + 2 * net.value_heads) + 2 * values * hidden
    within = 6 * chunk * net.key_head_dim + 4 * chunk * net.value_head_dim + 2 * chunk**2 / 3
    across = 6 * net.key_head_dim * net.value_head_dim
    flops = projections + 2 * mixed * net.conv_kernel + net.value_heads * (within + across)
    # Projections 2h + mixed + 2 Vd, convolution 2 mixed, the rule mixed + Vd, gated norm 3 Vd, output Vd.
    widths = 2 * hidden + 4 * mixed + 7 * values
    return Work(flops=flops, memory_bytes=widths * _BYTES) * net.num_layers


def _delta_exchange(text: TextSpec) -> float:
    """Bytes of a token's heads that change ranks, over all layers: queries, keys, values, gates there, outputs back."""
    if (net := text.delta_net) is None:
        return 0.0
    keys, values = net.key_heads * net.key_head_dim, net.value_heads * net.value_head_dim
    return (2 * keys + 3 * values + 2 * net.value_heads) * _BYTES * net.num_layers


def _text_weights(text: TextSpec) -> int:
    """Weights that one pass reads; every CP rank reads all of them."""
    hidden, queries = text.hidden_size, text.num_heads * text.head_dim
    attending = hidden * (2 * queries + 2 * text.num_key_value_heads * text.head_dim)
    attending += hidden * queries if text.gated_attention else 0
    total = attending * _attending(text) + 3 * hidden * text.intermediate_size * text.num_layers
    if (net := text.delta_net) is not None:
        keys, values = net.key_heads * net.key_head_dim, net.value_heads * net.value_head_dim
        total += hidden * (2 * keys + 3 * values + 2 * net.value_heads) * net.num_layers
    return total + hidden * text.vocab_size
