"""Items -> rows of the results file: runs a layout, compares it with its family's CP=1, and judges it by the tolerance table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import layouts
import models
import torch
import torch.distributed as dist
from layouts import Layout
from step import Model, Outcome, text_spec
from tolerances import judged
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from vlm_cp.alignment import Alignment
from vlm_cp.engines.hf import HFEngine
from vlm_cp.logprobs import next_token_logprobs
from vlm_cp.plan import SequencePlan


class Bench:
    """Runs items; keeps each family's CP=1 outcomes and noise floors on rank 0 between them."""

    def __init__(self, work: Path, device: torch.device) -> None:
        self.work, self.device = work, device
        self.references: dict[tuple[str, str], Outcome] = {}
        self.floors: dict[str, float] = {}
        self.kept: dict[str, Outcome] = {}

    def run(self, family: str, name: str) -> list[dict[str, Any]]:
        if name == "index":
            return [self._index()]
        if name.startswith("hf"):
            self._need(family, "cp1", "floor-kernel")
            return [self._embedded(family, 2 if name.endswith("cp2") else 1)]
        if name != "cp1":
            self._need(family, "cp1", *(["floor-kernel"] if not name.startswith("floor") else []))
        if name == "tp2" and "cp2" not in self.kept:
            self._layout(family, "cp2")
        return self._layout(family, name)

    def _need(self, family: str, *names: str) -> None:
        """After a restart the reference and the floor are measured again."""
        for name in names:
            case = layouts.FAMILIES[family][name].cases[-1]
            known = (family, case) in self.references if name == "cp1" else family in self.floors
            if not known:
                self._layout(family, name)

    def _checkpoint(self, family: str) -> str:
        folder = self.work / "checkpoints" / family
        if dist.get_rank() == 0 and not (folder / "config.json").exists():
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            models.save_checkpoint(family, folder, self.device, dtype)
        dist.barrier()
        return str(folder)

    def _layout(self, family: str, name: str) -> list[dict[str, Any]]:
        layout = layouts.FAMILIES[family][name]
        model = Model(family, layout, self._checkpoint(family), self.device)
        rows: list[dict[str, Any]] = []
        for case in layout.cases:
            export = family == "qwen3_vl" and case == layout.cases[-1]
            row: dict[str, Any] = {}
            reference = self.references.get((family, case))
            if name == "cp1":  # run twice: its row says what a repetition alone changes
                reference = model.step(case, export=False)
            outcome = model.step(case, export=export)
            if (
                outcome.routing is not None
                and name != "cp1"
                and reference is not None
                and reference.routing is not None
            ):
                row["routing_flips"] = _flips(outcome.routing, reference.routing)
                outcome = model.step(case, export=False, replay=reference.routing)
            if name == "cp1":
                self.references[family, case] = outcome
            assert reference is not None
            rows.append({**self._row(family, name, layout, case, outcome, reference), **row})
            if name == "floor-kernel":  # the last case holds the batches of all others
                self.floors[family] = rows[-1]["logprob_mean_abs"]
            if family == "qwen3_vl":
                self.kept[name] = outcome
        model.close()
        if name == "tp2":
            rows.append(self._against(family, "tp2", "cp2", layout))
        return rows

    def _against(self, family: str, name: str, other: str, layout: Layout) -> dict[str, Any]:
        """A row of one layout against another one instead of CP=1."""
        row = self._row(family, name, layout, "mixed", self.kept[name], self.kept[other])
        return {**row, "layout": f"{name} against {other}"}

    def _row(
        self, family: str, name: str, layout: Layout, case: str, outcome: Outcome, reference: Outcome
    ) -> dict[str, Any]:
        same_names = layout.tp == layout.pp == 1
        mine, theirs = (
            (outcome.gradients, reference.gradients) if same_names else (outcome.exported, reference.exported)
        )
        assert mine is not None
        assert theirs is not None
        return {
            "family": family,
            "engine": "bridge",
            "layout": name,
            "case": case,
            "cp": layout.cp,
            "tp": layout.tp,
            "pp": layout.pp,
            "tokens": outcome.tokens,
            "samples": outcome.samples,
            **self._judged(name, family, outcome.logprobs, reference.logprobs, _gradients(mine, theirs)),
        }

    def _judged(
        self, name: str, family: str, mine: list[Tensor], theirs: list[Tensor], gradients: dict[str, Any]
    ) -> dict[str, Any]:
        difference = torch.cat([(a - b).abs() for a, b in zip(mine, theirs, strict=True)])
        row = {
            "family": family,
            "device": self.device.type,
            "dtype": "bfloat16" if self.device.type == "cuda" else "float32",
            "logprob_max_abs": float(difference.max()),
            "logprob_mean_abs": float(difference.mean()),
            **gradients,
            "first_divergence": None,
        }
        return {**row, **judged(row, name, self.floors.get(family))}

    def _embedded(self, family: str, cp_size: int) -> dict[str, Any]:
        """The same weights in transformers' model through `HFEngine`, on one rank or cut over both; logprobs only."""
        model = AutoModelForImageTextToText.from_pretrained(self._checkpoint(family), dtype="auto").to(self.device)
        # Bridge's mergers use the tower's own activation, the tanh form of GELU; transformers' use the exact one.
        for merger in [m for m in model.model.visual.modules() if hasattr(m, "act_fn") and hasattr(m, "linear_fc2")]:
            merger.act_fn = nn.GELU(approximate="tanh")
        spec = text_spec()
        group = dist.group.WORLD if cp_size > 1 else None
        rank = dist.get_rank() if cp_size > 1 else 0
        logprobs: list[Tensor] = []
        tokens = 0
        with HFEngine(model, spec=spec, cp_group=group) as engine, torch.no_grad():
            for batch in models.case_batches("mixed", family, spec, Alignment(cp_size=cp_size)):
                batch = batch.to(self.device)
                local = next_token_logprobs(engine(batch), batch.input_ids, batch.plan, cp_rank=rank)
                stream, plan = batch.plan.gather(local, group).cpu(), batch.plan.to("cpu")
                logprobs += [stream[(plan.sample_index == b) & plan.scored] for b in range(len(plan.lengths))]
                tokens += sum(plan.lengths)
        name = "hf" if cp_size == 1 else "hf-cp2"
        verdict = self._judged(name, family, logprobs, self.references[family, "mixed"].logprobs, {})
        sizes = {"cp": cp_size, "tp": 1, "pp": 1, "tokens": tokens, "samples": len(logprobs)}
        return {"family": family, "engine": "hf", "layout": name, "case": "mixed", **sizes, **verdict}

    def _index(self) -> dict[str, Any]:
        """`plan.local_index` against Transformer Engine's `thd_get_partitioned_indices`, for ragged lengths and every rank."""
        from megatron.core.utils import tex

        wrong = 0
        cases = [([519, 256, 822], c) for c in (2, 4, 8)] + [([1], 2), ([7, 1, 64, 3], 4), ([32768, 5], 8)]
        for lengths, size in cases:
            plan = SequencePlan.from_lengths(lengths, alignment=Alignment(cp_size=size)).to(self.device)
            for rank in range(size):
                theirs = tex.thd_get_partitioned_indices(plan.cu_seqlens_padded, plan.total_tokens, size, rank)
                wrong += int((theirs.long() != plan.local_index(rank)).sum())
        return {
            "family": "qwen3_vl",
            "engine": "bridge",
            "layout": "index",
            "case": "local_index equals thd_get_partitioned_indices",
            "device": self.device.type,
            "slots_that_differ": wrong,
            "passed": wrong == 0,
        }


def _gradients(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The ratio of the norms, and every parameter's relative difference."""
    assert mine.keys() == theirs.keys()
    relative: dict[str, float] = {}
    for name, gradient in theirs.items():
        difference, norm = float((mine[name] - gradient).norm()), float(gradient.norm())
        relative[name] = difference / norm if norm else (0.0 if difference == 0 else float("inf"))
    norms = [sum(float(g.norm()) ** 2 for g in grads.values()) ** 0.5 for grads in (mine, theirs)]
    return {
        "grad_norm_ratio": norms[0] / norms[1],
        "grad_max_rel": max(relative.values()),
        "grad_worst": max(relative, key=lambda name: relative[name]),
        "parameters": {name: float(f"{value:.2e}") for name, value in relative.items()},
    }


def _flips(mine: list[Tensor], theirs: list[Tensor]) -> dict[str, int]:
    """Slots whose set of experts differs, over all routers, and how many there are."""
    changed = sum(
        int((a.sort(-1).values != b.sort(-1).values).any(-1).sum()) for a, b in zip(mine, theirs, strict=True)
    )
    return {"changed": changed, "of": sum(len(x) for x in theirs)}
