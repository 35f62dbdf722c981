"""`vlm-cp doctor`: the verdict on given versions, and that its table says what the package itself asks for."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from vlm_cp import doctor
from vlm_cp.doctor import PARTS, diagnose

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

# The GPU host that the results were measured on.
GPU_HOST: dict[str, str | None] = {
    "python": "3.12.11",
    "torch": "2.11.0+cu130",
    "torchvision": "0.26.0",
    "transformers": "5.12.1",
    "pillow": "13.0.0",
    "numpy": "2.5.5",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "einops": "0.8.2",
    "omegaconf": "2.4.0",
    "transformer-engine": "2.20.2",
    "flash-linear-attention": "0.4.2",
    "CUDA device": "2",
    "CUDA": "13.0",
    "cuDNN": "9.19.0",
    "NCCL": "2.28.9",
    "cuDNN of the system": None,
}


def not_ok(found: dict[str, str | None], engine: Any, family: str = "qwen3_vl") -> dict[str, str]:
    return {f.name: f.status for f in diagnose(found, engine=engine, family=family) if f.status in ("off", "check")}


@pytest.mark.parametrize("engine", ["hf", "bridge"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_the_measured_host_is_healthy(engine: Any, family: str) -> None:
    assert not_ok(GPU_HOST, engine, family) == {}


@pytest.mark.parametrize(
    ("changed", "engine", "family", "expected"),
    [
        pytest.param({"python": "3.13.1"}, "hf", "qwen3_vl", {"python": "off"}, id="python-3.13"),
        pytest.param({"torchvision": None}, "hf", "qwen3_vl", {"torchvision": "off"}, id="no-torchvision"),
        pytest.param({"transformers": "5.13.0"}, "hf", "qwen3_vl", {"transformers": "off"}, id="newer-transformers"),
        pytest.param({"torch": "2.12.0.dev20260101+cu130"}, "hf", "qwen3_vl", {"torch": "off"}, id="torch-nightly"),
        pytest.param({"megatron-core": "0.19.1"}, "bridge", "qwen3_vl", {"megatron-core": "off"}, id="older-mcore"),
        pytest.param({"megatron-core": "0.19.1"}, "hf", "qwen3_vl", {}, id="hf-does-not-need-mcore"),
        pytest.param({"transformer-engine": None}, "bridge", "qwen3_vl", {"transformer-engine": "off"}, id="no-te"),
        pytest.param({"CUDA device": "0"}, "bridge", "qwen3_vl", {"CUDA device": "off"}, id="no-gpu"),
        pytest.param({"CUDA device": "0", "CUDA": None, "cuDNN": None}, "hf", "qwen3_vl", {}, id="hf-runs-on-the-cpu"),
        pytest.param({"flash-linear-attention": None}, "bridge", "qwen3_vl", {}, id="no-fla-for-qwen3"),
        pytest.param(
            {"flash-linear-attention": None},
            "bridge",
            "qwen3_5",
            {"flash-linear-attention": "off"},
            id="no-fla-for-qwen3.5",
        ),
        pytest.param(
            {"cuDNN of the system": "9.14.0"}, "bridge", "qwen3_vl", {"cuDNN of the system": "check"}, id="two-cudnns"
        ),
        pytest.param({"cuDNN of the system": "9.19.0"}, "bridge", "qwen3_vl", {}, id="one-cudnn"),
        pytest.param({"cuDNN of the system": "9.14.0"}, "hf", "qwen3_vl", {}, id="hf-does-not-load-cudnn-twice"),
    ],
)
def test_what_is_off(changed: dict[str, str | None], engine: Any, family: str, expected: dict[str, str]) -> None:
    assert not_ok(GPU_HOST | changed, engine, family) == expected


def test_the_table_has_the_ranges_of_the_package() -> None:
    asked = [*PYPROJECT["dependencies"], *PYPROJECT["optional-dependencies"]["megatron"]]
    table = {part.name: part.supported for part in PARTS} | {"python": PYPROJECT["requires-python"]}
    for requirement in map(Requirement, asked):
        if requirement.name in table:
            assert set(table[requirement.name].split(",")) == set(str(requirement.specifier).split(","))
    needed = {Requirement(text).name for text in asked} - set(table)
    assert needed <= {"packaging", "rich", "jinja2"}
    assert next(part.supported for part in PARTS if part.name == "python") == PYPROJECT["requires-python"]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(words)


def test_the_exit_code_and_the_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: GPU_HOST | {"transformer-engine": "2.19.0"})
    assert doctor.run(arguments()) == 0
    assert "everything that is needed is there" in capsys.readouterr().out
    assert doctor.run(arguments("--engine", "bridge")) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "transformer-engine must be >=2.20.2,<2.21, got 2.19.0; packed context-parallel attention runs in it, "
        "and megatron-bridge does not import without it" in said
    )
    assert "everything that is needed" not in said
    assert doctor.run(arguments("--engine", "bridge", "--json")) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert [part["name"] for part in result["parts"] if part["status"] == "off"] == ["transformer-engine"]


def test_this_machine_can_be_probed(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.probe().keys() == GPU_HOST.keys()
    code = doctor.run(arguments("--json"))
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if result["ok"] else 1)
    by_name = {part["name"]: part for part in result["parts"]}
    assert by_name["torch"]["status"] == by_name["python"]["status"] == "ok"
