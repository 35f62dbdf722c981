"""Case e: log-probabilities of local logits, time and memory above the logits, against other frameworks' functions.

    python -m benchmarks.run --case logprobs --skyrl-logprobs FILE --verl-logprobs FILE --nemo-rl-logprobs FILE

FILE is that project's own file (benchmarks/peers.py says which); without one the peer is left out. One GPU: a vocabulary
group of one rank. Parts: logprobs alone, with the entropy, and from hidden states through the output layer, each forward
without grad and forward with backward. Peers that take a chunk size get --peer-chunk. Every arm's values and gradients are
compared with float32 log_softmax of the same logits before it is timed; one that differs is refused.

SkyRL's and verl's entropies are computed in the dtype of the logits: they also run on a float32 copy, made inside the call.
`peak_mib` is what a call held at most above its inputs, results and gradients included; `logits_mib` is the logits' size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from megatron.core import parallel_state
from torch import Tensor

from benchmarks import peers
from benchmarks.models import start
from benchmarks.peers import Ranks
from benchmarks.results_file import KEYS, ResultsFile
from benchmarks.timing import Sample, once, summary
from vlm_cp.logprobs import (
    CHUNK_SIZE,
    HIDDEN_CHUNK_SIZE,
    next_token_logprobs,
    next_token_logprobs_and_entropy,
    next_token_logprobs_from_hidden,
)
from vlm_cp.plan import SequencePlan

# Relative to float32: results are of magnitude 10; gradients are rounded to bfloat16 at the end, once.
VALUES, GRADIENT = 1e-4, 4e-3
PARTS = ("logprobs", "with_entropy", "from_hidden")
Call = Callable[..., tuple[Tensor, ...]]  # the part's inputs -> its results, [T] each


@dataclass(frozen=True)
class Arm:
    """overwrites: its backward takes the memory of the logits."""

    call: Call
    overwrites: bool = False


@dataclass(frozen=True, kw_only=True)
class Problem:
    """ids [1, T] of one sample; hidden [T, H] and weight [V, H], whose product the logits [T, V] are."""

    plan: SequencePlan
    ids: Tensor
    hidden: Tensor
    weight: Tensor
    logits: Tensor

    @classmethod
    def make(cls, tokens: int, vocab: int, width: int, device: torch.device) -> Problem:
        generator = torch.Generator(device).manual_seed(tokens)
        make = partial(torch.randn, generator=generator, device=device)
        hidden, weight = make(tokens, width).bfloat16(), (make(vocab, width) * 2 / width**0.5).bfloat16()
        ids = torch.randint(vocab, (1, tokens), generator=generator, device=device)
        plan = SequencePlan.from_lengths([tokens]).to(device)
        return cls(plan=plan, ids=ids, hidden=hidden, weight=weight, logits=hidden @ weight.t())

    @property
    def targets(self) -> Tensor:
        """int64 [1, T], the last of which is nobody's."""
        return self.ids.roll(-1)

    def inputs(self, part: str) -> tuple[Tensor, ...]:
        return (self.hidden, self.weight) if part == "from_hidden" else (self.logits,)

    def truth(self, part: str, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The part's results, and gradients of its inputs when results weigh `weights`; chunk by chunk, in float32."""
        values = [torch.empty_like(w) for w in weights]
        of_logits = torch.empty_like(self.logits)
        for rows in torch.arange(len(self.logits), device=self.logits.device).split(512):
            x = self.logits[rows].float().requires_grad_()
            table = x.log_softmax(1)
            found = [table.gather(1, self.targets[0, rows, None])[:, 0], -(table.exp() * table).sum(1)][: len(weights)]
            (gradient,) = torch.autograd.grad(found, x, [w[rows] for w in weights])
            of_logits[rows] = gradient.to(of_logits.dtype)
            for out, value in zip(values, found, strict=True):
                out[rows] = value.detach()
        if part != "from_hidden":
            return values, [of_logits]
        return values, [of_logits @ self.weight, of_logits.t() @ self.hidden]


def own_arms(part: str, problem: Problem, chunks: Sequence[int]) -> dict[str, Arm]:
    known = {"input_ids": problem.ids, "plan": problem.plan, "cp_rank": 0}

    def logits(x: Tensor, **options: Any) -> tuple[Tensor, ...]:
        if part == "with_entropy":
            return next_token_logprobs_and_entropy(x[None], **known, **options)
        return (next_token_logprobs(x[None], **known, **options),)

    def hidden(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return (next_token_logprobs_from_hidden(x[None], weight, **known, **options),)

    call = hidden if part == "from_hidden" else logits
    arms = {"vlm_cp": Arm(call)} | {f"vlm_cp_chunk{n}": Arm(partial(call, chunk_size=n)) for n in chunks}
    if part != "from_hidden":
        arms["vlm_cp_inplace"] = Arm(partial(logits, inplace_backward=True), overwrites=True)
    return arms


def peer_arms(args: argparse.Namespace, part: str, problem: Problem) -> dict[str, Arm]:
    """The peers' functions as their trainers call them; each gets targets of its own, since some are written to."""
    vocab, chunk, group = len(problem.weight), args.peer_chunk, dist.group.WORLD
    whole, seen = (0, vocab), lambda: problem.targets.clone()
    ranks = Ranks(tp_size=1, cp_size=1, cp_rank=0)

    def skyrl(*names: str) -> SimpleNamespace:
        return peers.load(args.skyrl_logprobs, names, ranks, dist=dist)

    def nemo_rl(*names: str) -> SimpleNamespace:
        return peers.load(args.nemo_rl_logprobs, names, ranks)

    def verl(*names: str) -> SimpleNamespace:
        return peers.load(args.verl_logprobs, names, ranks, dist=dist)

    def whole_and_chunked(module: SimpleNamespace, name: str) -> dict[str, Arm]:
        one, many = module.DistributedLogprob, module.ChunkedDistributedLogprob
        return {
            name: Arm(lambda x: (one.apply(x[None], seen(), *whole, group)[0],)),
            f"{name}_chunked": Arm(lambda x: (many.apply(x[None], seen(), *whole, chunk, group)[0],)),
        }

    arms: dict[str, Arm] = {}
    if part == "logprobs":
        names = "DistributedLogprob", "ChunkedDistributedLogprob"
        if args.skyrl_logprobs:
            arms |= whole_and_chunked(skyrl(*names), "skyrl")
        if args.nemo_rl_logprobs:
            arms |= whole_and_chunked(nemo_rl(*names), "nemo_rl")
        if args.verl_logprobs:
            of_verl = verl("vocab_parallel_log_probs_from_logits").vocab_parallel_log_probs_from_logits
            arms["verl"] = Arm(lambda x: (of_verl(x, problem.targets[0]),))
    elif part == "with_entropy":
        if args.skyrl_logprobs:
            s = skyrl("ChunkedDistributedLogprob", "_VocabParallelEntropy")

            def pair(x: Tensor) -> tuple[Tensor, Tensor]:
                entropies = [s._VocabParallelEntropy.apply(y) for y in x.split(chunk)]
                return s.ChunkedDistributedLogprob.apply(x[None], seen(), *whole, chunk, group)[0], torch.cat(entropies)

            arms |= {"skyrl_chunked": Arm(pair), "skyrl_chunked_from_float32": Arm(lambda x: pair(x.float()))}
        if args.nemo_rl_logprobs:
            n = nemo_rl("ChunkedDistributedLogprob", "ChunkedDistributedEntropy")
            arms["nemo_rl_chunked"] = Arm(
                lambda x: (
                    n.ChunkedDistributedLogprob.apply(x[None], seen(), *whole, chunk, group)[0],
                    -n.ChunkedDistributedEntropy.apply(x[None], chunk, group)[0],
                )
            )
        if args.verl_logprobs:
            v = verl("vocab_parallel_log_probs_from_logits", "vocab_parallel_entropy")

            def both(x: Tensor) -> tuple[Tensor, Tensor]:
                kept = x.clone()  # as verl does: both functions write over what they are given
                entropies = v.vocab_parallel_entropy(x)
                return v.vocab_parallel_log_probs_from_logits(kept, problem.targets[0]), entropies

            arms |= {"verl": Arm(both), "verl_from_float32": Arm(lambda x: both(x.float()))}
    else:
        if args.skyrl_logprobs:
            fused = skyrl("FusedLinearChunkedDistributedLogprob").FusedLinearChunkedDistributedLogprob
            arms["skyrl"] = Arm(lambda x, w: (fused.apply(x[None], w, seen(), *whole, chunk, group)[0],))
        if args.nemo_rl_logprobs:
            fusion = nemo_rl("ChunkedDistributedHiddenStatesToLogprobs").ChunkedDistributedHiddenStatesToLogprobs
            arms["nemo_rl"] = Arm(lambda x, w: (fusion.apply(x[:, None], seen(), w, *whole, chunk, group)[0],))
    return arms


class Case:
    """One part at one size: its inputs are copied anew before every call, for one that overwrites them."""

    def __init__(self, part: str, problem: Problem) -> None:
        self.part, self.problem = part, problem
        self.sources = problem.inputs(part)
        self.copies = [x.clone().requires_grad_() for x in self.sources]
        generator = torch.Generator(problem.ids.device).manual_seed(1)
        results = 2 if part == "with_entropy" else 1
        shape, device = (len(problem.logits),), problem.ids.device
        self.weights = [torch.randn(shape, generator=generator, device=device) for _ in range(results)]
        for weight in self.weights:
            weight[-1] = 0  # the last token has no successor

    def prepare(self) -> None:
        with torch.no_grad():
            for copy, source in zip(self.copies, self.sources, strict=True):
                copy.copy_(source)

    def forward(self, arm: Arm) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return arm.call(*self.copies)

    def forward_backward(self, arm: Arm) -> tuple[Tensor, ...]:
        found = arm.call(*self.copies)
        return torch.autograd.grad(
            found, self.copies, [w.to(x.dtype) for w, x in zip(self.weights, found, strict=True)]
        )

    def fault(self, arm: Arm, truth: tuple[list[Tensor], list[Tensor]]) -> str | None:
        """In what the arm differs from the truth."""
        self.prepare()
        values, gradients = truth
        for name, own, true in zip(("logprobs", "entropies"), self.forward(arm), values, strict=False):
            error = float((own[:-1].float() - true[:-1]).abs().max())
            if not error < VALUES:
                return f"{name} are off by {error:.1e}"
        for own, true in zip(self.forward_backward(arm), gradients, strict=True):
            error = _relative(own, true)
            if not error < GRADIENT:
                return f"a gradient is off by {error:.1e} of its norm"
        return None

    def measure(self, arms: dict[str, Arm], direction: str, rounds: int) -> dict[str, dict[str, Any]]:
        run = {"forward": self.forward, "forward_backward": self.forward_backward}[direction]
        samples: dict[str, list[Sample]] = {name: [] for name in arms}
        for number in range(-1, rounds):
            for name, arm in arms.items():
                self.prepare()
                held = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
                ms, host, cpu, peak = once(partial(run, arm))
                if number >= 0:
                    samples[name].append((ms, host, cpu, peak - held))
        found: dict[str, dict[str, Any]] = {}
        for name, taken in samples.items():
            row = summary(taken)
            del row["peak_gib"]
            found[name] = row | {"peak_mib": round(max(peak for *_, peak in taken) * 1024)}
        return found


def _relative(own: Tensor, true: Tensor) -> float:
    """|own - true| / |true|, chunk by chunk."""
    pairs = zip(own.flatten().split(2**26), true.flatten().split(2**26), strict=True)
    sums = torch.stack(
        [torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()]) for a, b in pairs]
    )
    difference, size = sums.double().sum(0).tolist()
    return (difference / size) ** 0.5


def rows_of(args: argparse.Namespace, part: str, problem: Problem) -> list[dict[str, Any]]:
    arms = own_arms(part, problem, args.chunks) | peer_arms(args, part, problem)
    case = Case(part, problem)
    about = {"tokens": len(problem.logits), "vocab": len(problem.weight), "device": problem.ids.device.type}
    about |= {"logits_mib": round(problem.logits.nbytes / 2**20)}
    chunk = HIDDEN_CHUNK_SIZE if part == "from_hidden" else CHUNK_SIZE
    about |= {"chunk_mib": round(chunk * len(problem.weight) * 4 / 2**20), "peer_chunk": args.peer_chunk}
    truth = problem.truth(part, case.weights)
    refused: list[dict[str, Any]] = []
    for name, arm in list(arms.items()):
        try:
            fault = case.fault(arm, truth)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"[:300]
        if fault:
            del arms[name]
            refused.append({**about, "part": part, "arm": name, "refused": fault})
    del truth
    rows: list[dict[str, Any]] = []
    for direction in ("forward", "forward_backward"):
        timed = {n: a for n, a in arms.items() if direction == "forward_backward" or not a.overwrites}
        found = case.measure(timed, direction, args.rounds)
        ours = found.get("vlm_cp", {}).get("ms")
        for name, row in found.items():
            faster = {} if ours is None else {"vlm_cp_is_faster": round(row["ms"] / ours, 2)}
            rows.append({**about, "part": f"{part}_{direction}", "arm": name, **row, **faster})
    return rows + refused


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run --case logprobs", description=__doc__.splitlines()[0])
    peers.add_options(parser, "logprobs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", help="slots of this rank, comma-separated; 8192,16384 on a GPU, 96 without")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--chunks", default="", help="further chunk sizes of this package, comma-separated")
    parser.add_argument(
        "--peer-chunk", type=int, default=1024, help="SkyRL's default; NeMo-RL's recipes say 4096 or none"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="results file; the one of today without it")
    args = parser.parse_args(arguments)
    args.chunks = [int(n) for n in args.chunks.split(",") if n]
    device = start(args.device)
    parallel_state.initialize_model_parallel()  # verl's function asks Megatron for the group
    small = device.type == "cpu"
    vocab, width = (512, 32) if small else (151936, 2048)
    file = ResultsFile("logprobs", args.json, keys=KEYS["logprobs"], more_versions=args.peer_versions)
    for tokens in map(int, (args.tokens or ("96" if small else "8192,16384")).split(",")):
        problem = Problem.make(tokens, vocab, width, device)
        for part in args.parts.split(","):
            file.add(rows_of(args, part, problem))
        del problem
    return 0 if not any("refused" in row and row["arm"].startswith("vlm_cp") for row in file.rows) else 1
