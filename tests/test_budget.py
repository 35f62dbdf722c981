"""`vlm-cp plan`: the file's grammar, the numbers, and one sentence for what it cannot read."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vlm_cp import budget
from vlm_cp.alignment import Alignment
from vlm_cp.budget import QWEN3_VL_2B, Row, read_rows
from vlm_cp.cost import rank_costs
from vlm_cp.demo.models import tiny_config
from vlm_cp.demo.processor import build_tokenizer
from vlm_cp.plan import SequencePlan

TEXT, SPEC = QWEN3_VL_2B


def run(file: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    budget.add_arguments(parser)
    return budget.run(parser.parse_args([str(file), *words]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.jsonl"
    path.write_text('{"length": 3000, "images": [[1, 64, 64]], "videos": [[2, 16, 16]]}\n\n37\n{"length": 500}\n')
    return path


def test_rows_are_numbers_or_objects(file: Path) -> None:
    assert read_rows(file.read_text().splitlines(), SPEC) == [
        Row(length=3000, grids=((1, 64, 64), (2, 16, 16))),
        Row(length=37),
        Row(length=500),
    ]


def test_one_micro_batch_costs_what_its_plan_costs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--cp", "4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    plan = SequencePlan.from_lengths([3000, 37, 500], alignment=Alignment(cp_size=4))
    costs = rank_costs(plan, torch.tensor([[1, 64, 64], [2, 16, 16]]), text=TEXT, spec=SPEC)
    assert found["micro_batches"] == [[0, 1, 2]]
    assert (found["samples"], found["tokens"], found["padded_tokens"]) == (3, 3537, plan.total_tokens)
    assert found["padding_waste"] == pytest.approx(1 - 3537 / 3544, rel=1e-12)
    assert len(found["ranks"]) == 4
    for rank, cost in zip(found["ranks"], costs, strict=True):
        assert rank["tokens"] == cost.tokens == 886
        assert (rank["text_flops"], rank["attention_flops"]) == (cost.text.flops, cost.attention.flops)
        assert rank["vision_flops"] == cost.vision.flops + cost.vision_attention.flops
        assert rank["sent_bytes"] == cost.attention.sent_bytes > 0
        assert rank["seconds"] == cost.seconds()
    # A replicated tower is paid four times over.
    single = rank_costs(
        SequencePlan.from_lengths([3000, 37, 500]), torch.tensor([[1, 64, 64], [2, 16, 16]]), text=TEXT, spec=SPEC
    )
    assert found["efficiency"] == pytest.approx(single[0].seconds() / (4 * costs[0].seconds()), rel=1e-12)
    assert found["step_seconds"] == costs[0].seconds()


def test_bins_are_dealt_to_data_parallel_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sizes.jsonl"
    path.write_text("\n".join(str(100 * i) for i in range(1, 12)))
    assert run(path, "--cp", "2", "--dp", "2", "--capacity", "2400", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(i for bin_ in found["micro_batches"] for i in bin_) == list(range(11))
    assert len(found["micro_batches"]) % 2 == 0
    both = sum(rank["seconds"] for rank in found["ranks"]) / 2
    assert both / 2 <= found["step_seconds"] < both


def test_the_layout_and_the_step_count(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*words: str) -> float:
        assert run(file, "--json", *words) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["padded_tokens"] % 512 == 0 or "--fp8" not in words
        return found["step_seconds"]

    plain = seconds("--cp", "2")
    assert seconds("--cp", "2", "--vision", "shared") < plain
    assert seconds("--cp", "2", "--recompute") > plain
    assert seconds("--cp", "2", "--frozen-tower") < plain
    assert seconds("--cp", "2", "--tp", "2", "--sequence-parallel", "--fp8", "blockwise") > plain


def test_a_models_own_shape(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config("qwen3_5", build_tokenizer()).save_pretrained(tmp_path)
    assert run(file, "--json", "--model", str(tmp_path)) == 0
    tiny = json.loads(capsys.readouterr().out)
    assert tiny["model"] == str(tmp_path)
    assert run(file, "--json") == 0
    assert tiny["step_seconds"] < json.loads(capsys.readouterr().out)["step_seconds"] / 1000


def test_the_table_says_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--cp", "2") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 samples, 3,537 tokens, padded to 3,540: 0.1% padding, in 1 micro-batch" in said
    assert "sizes.jsonl · the Qwen3-VL 2B shape · CP=2 · vision replicated" in said
    assert said.count("1,770") == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(
            "{", "line 2 must be JSON, got '{' (Expecting property name enclosed in double quotes)", id="not-json"
        ),
        pytest.param('"12"', "line 2 must have a length of at least 1 token, got '12'", id="a-string"),
        pytest.param("0", "line 2 must have a length of at least 1 token, got 0", id="zero"),
        pytest.param("true", "line 2 must have a length of at least 1 token, got True", id="a-truth-value"),
        pytest.param('{"images": []}', "line 2 must have a length of at least 1 token, got None", id="no-length"),
        pytest.param(
            '{"length": 9, "image": []}', "line 2 must have the keys images, length, videos only, got 'image'", id="key"
        ),
        pytest.param(
            '{"length": 9, "images": [[1, 3, 4]]}',
            "line 2 must have grids [t, h, w] in patches, h and w multiples of 2, got [1, 3, 4]",
            id="odd-grid",
        ),
        pytest.param(
            '{"length": 9, "images": 5}',
            "line 2 must have lists of grids [t, h, w], got 5 and []",
            id="a-number-of-images",
        ),
        pytest.param(
            '{"length": 9, "images": [[4, 4]]}',
            "line 2 must have grids [t, h, w] in patches, h and w multiples of 2, got [4, 4]",
            id="two-numbers",
        ),
        pytest.param(
            '{"length": 9, "videos": [[4, 4, 4]]}',
            "line 2 must count its media's 16 placeholders in its length, got 9",
            id="placeholders-not-counted",
        ),
    ],
)
def test_a_bad_line_is_one_sentence(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "sizes.jsonl"
    path.write_text(f"12\n{line}\n")
    message += "; its cost would be another sample's"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(path)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        pytest.param(
            "\n", (), "the file must hold at least one sample, got none; there is nothing to plan", id="empty"
        ),
        pytest.param(
            "12",
            ("--dp", "2"),
            "--dp 2 must come with --capacity, got none; there would be one micro-batch for all ranks",
            id="dp-without-capacity",
        ),
        pytest.param(
            "12", ("--dp", "0"), "--dp must be at least 1, got 0; there would be no rank to run on", id="dp-0"
        ),
        pytest.param(
            "12",
            ("--cp", "0"),
            "cp_size must be an int of at least 1, got 0; no padding rule follows from it",
            id="cp-0",
        ),
        pytest.param(
            "12",
            ("--model", "no/such/model"),
            "--model must be a folder or config.json on this machine, got no/such/model; no model hub is asked",
            id="no-model",
        ),
    ],
)
def test_bad_options_are_one_sentence(tmp_path: Path, content: str, words: Any, message: str) -> None:
    path = tmp_path / "sizes.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(path, *words)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^FILE must be a readable text file, got .*gone.jsonl: .*No such file"):
        run(tmp_path / "gone.jsonl")
