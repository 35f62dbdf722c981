"""The README's example runs as it stands, and its table cites results that exist and say what it says."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from vlm_cp.subject import Subject

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _example(rank, code):
    subject = Subject.demo("qwen3_vl")
    names = {
        "model": subject.model,
        "samples": [sample.inputs for sample in subject.samples],
        "pad_token_id": subject.pad_token_id,
        "group": dist.group.WORLD,
        "rank": rank,
    }
    exec(code, names)
    return [x.detach() for x in names["per_sample"]], subject.model.lm_head.weight.grad


def test_the_example_runs_and_its_ranks_agree():
    code = re.search(r"over gloo or NCCL:\n+```python\n(.*?)```", README, re.S).group(1)
    (first, gradient), (second, other) = run_ranks(2, _example, code)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert torch.equal(gradient, other)
    assert [len(x) for x in first] == [98, 31, 117, 139, 175, 172]


RESULTS = {
    file: json.loads((ROOT / file).read_text())
    for file in sorted(set(re.findall(r"\((benchmarks/results/[^)]+\.json)\)", README)))
}


@pytest.mark.parametrize("file", RESULTS)
def test_cited_results_say_how_they_were_made(file):
    assert RESULTS[file]["versions"]["torch"].startswith("2.11.0")
    assert RESULTS[file]["command"]


@pytest.mark.parametrize(("name", "sizes"), [("2xcpu_2026-11-30", (2, 3, 4)), ("1xh200_2026-12-01", (2,))])
def test_the_support_table_says_what_the_embedded_engines_results_show(name, sizes):
    rows = RESULTS[f"benchmarks/results/parity-hf_{name}.json"]["rows"]
    assert all(row["passed"] for row in rows)
    assert {(r["family"], r["cp"], r["attention"]) for r in rows} == {
        (family, cp, method)
        for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
        for cp in sizes
        for method in ("all_gather", "all_to_all")
    }


CLAIMS = [
    *[("qwen3_vl", name) for name in ("index", "cp2", "cp2-all_gather", "cp2-a2a", "cp2-sharded", "cp2-recompute")],
    *[("qwen3_vl", name) for name in ("tp2", "tp2 against cp2", "pp2", "pp2-fixed", "hf", "hf-cp2")],
    ("qwen3_vl_moe", "cp2"),
    ("qwen3", "cp2"),
    ("qwen3_vl_2b", "cp2"),
]


@pytest.mark.parametrize(("family", "layout"), CLAIMS, ids="/".join)
def test_the_support_table_says_what_the_gpu_result_shows(family, layout):
    rows = RESULTS["benchmarks/results/parity_2xh200_2026-11-30.json"]["rows"]
    found = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert found
    assert all(row["passed"] for row in found)


def test_the_support_table_says_what_the_gpu_tests_showed():
    rows = RESULTS["benchmarks/results/gpu-tests_1xh200_2026-12-01.json"]["rows"]
    failed = {row["test"] for row in rows if not row["passed"] and "skipped" not in row}
    assert {name.split("[")[0] for name in failed} == {"test_rl::test_b21_vlm_critic_equals_one_process"}
    assert len(failed) == 3
    assert sum(row["passed"] for row in rows) == 5


def test_bit_equal_log_probabilities_are_claimed_where_they_were_seen():
    rows = RESULTS["benchmarks/results/parity_2xh200_2026-11-30.json"]["rows"]
    for layout in ("cp2-a2a", "cp2-all_gather"):
        assert [row["logprob_max_abs"] for row in rows if row["layout"] == layout] == [0.0]


def _rows(name, **chosen):
    rows = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    return [row for row in rows if chosen.items() <= row.items()]


def test_the_speed_table_says_what_was_measured():
    def cells(start):
        (line,) = [line for line in README.splitlines() if line.startswith(f"| {start}")]
        return line

    (tower,) = _rows("tower_1xh200_2026-12-01.json", part="forward")
    for arm in ("stock", "hook_fused"):
        assert f"{tower['arms'][arm]['ms']:.0f} ms" in cells("Qwen3-VL vision tower, forward, 98,304 patches")
    (tower,) = _rows("tower_1xh200_2026-12-01.json", part="forward_backward")
    for arm in ("stock", "hook_fused"):
        assert f"{tower['arms'][arm]['ms']:.0f} ms" in cells("the same, forward and backward | stock Bridge")
    syncs = {row["arm"]: row["total"] for row in _rows("tower-one-kernel_1xh200_2026-12-01.json", part="host_syncs")}
    assert (syncs["stock"], syncs["hook"]) == (487, 0)
    for hardware, start in (("2xcpu", "positions of 33k tokens with 256 images"), ("1xh200", "the same, ids on a GPU")):
        best = {row["arm"]: row["best_ms"] for row in _rows(f"mrope_{hardware}_2026-12-01.json", tokens=33024)}
        for text in (
            f"Bridge {best['bridge']:.0f} ms",
            f"transformers {best['transformers']:.0f} ms",
            f"{best['vlm_cp']:.2f} ms",
        ):
            assert text in cells(start)
    for samples, start, digits in ((256, "pack and shard 256 rows", 1), (8, "pack and shard 8 rows of 4096", 2)):
        found = _rows("pack_1xh200_2026-12-01.json", part="pack_and_shard", samples=samples)
        best = {row["arm"]: row["best_ms"] for row in found if row["width"] in (512, 4096)}
        for arm, name in (("skyrl", "SkyRL"), ("verl", "verl"), ("nemo_rl", "NeMo-RL")):
            assert f"{name} {best[arm]:.{digits}f} ms" in cells(start)
        assert f"| {best['vlm_cp']:.2f} ms |" in cells(start)
    for part, start in (
        ("logprobs_forward", "logprobs of 8192 x 151,936 logits, forward |"),
        ("logprobs_forward_backward", "the same, forward and backward | verl"),
        ("with_entropy_forward_backward", "with entropy, forward and backward"),
        ("from_hidden_forward_backward", "from hidden states, forward and backward"),
    ):
        (own,) = _rows("logprobs_1xh200_2026-12-01.json", part=part, arm="vlm_cp")
        memory = own["peak_mib"]
        assert f"{own['ms']:.1f} ms, {f'{memory} MiB' if memory < 1024 else f'{memory / 1024:.1f} GiB'}" in cells(start)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
