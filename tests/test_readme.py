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


@pytest.mark.parametrize("file", re.findall(r"\((benchmarks/results/[^)]+\.json)\)", README))
def test_cited_results_exist_and_passed(file):
    result = json.loads((ROOT / file).read_text())
    assert result["versions"]["torch"] == "2.11.0"
    assert result["command"]
    assert all(row.get("passed", True) for row in result["rows"])


def test_the_support_table_says_what_the_cpu_result_shows():
    rows = json.loads((ROOT / "benchmarks/results/parity-hf_2xcpu_2026-11-30.json").read_text())["rows"]
    assert {(r["family"], r["cp"], r["attention"]) for r in rows} == {
        (family, cp, method)
        for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
        for cp in (2, 3, 4)
        for method in ("all_gather", "all_to_all")
    }


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
