"""The benchmarks that need no GPU run on tiny cases: what they compare, what they refuse, and what they write."""

from __future__ import annotations

import json
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from megatron_import import megatron_may_warn

# As a framework might have written it: Megatron's global state, a class of this file, a function of another one.
PEER = """
from somewhere import round_up  # not installed
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams


class Chunks:
    def __init__(self, length):
        self.size = length // (2 * mpu.get_context_parallel_world_size())

    def of(self, row):
        rank, last = mpu.get_context_parallel_rank(), 2 * mpu.get_context_parallel_world_size() - 1
        return [row[k * self.size : (k + 1) * self.size] for k in (rank, last - rank)]


def preprocess_packed_seqs(input_ids: NotImported, attention_mask) -> NotImported:
    step = mpu.get_tensor_model_parallel_world_size() * mpu.get_context_parallel_world_size() * 2
    pieces = []
    for row, mask in zip(input_ids, attention_mask):
        length = -(-int(mask.sum()) // step) * step
        padded = torch.zeros(length, dtype=row.dtype)
        padded[: int(mask.sum())] = row[mask]
        pieces += Chunks(length).of(padded)
    return torch.cat(pieces)[None], PackedSeqParams(qkv_format="thd")


def postprocess_packed_seqs(output, params, attention_mask, batch_size, seq_len):
    rows = output.new_zeros(batch_size, seq_len)
    rows[attention_mask] = output[0]
    return rows
"""


@pytest.fixture(scope="module")
def benchmark_modules() -> dict[str, ModuleType]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ModuleNotFoundError)
    with megatron_may_warn():
        return {name: import_module(f"benchmarks.{name}") for name in ("mrope", "pack", "peers")}


@pytest.fixture
def peer(tmp_path):
    file = tmp_path / "peer.py"
    file.write_text(PEER)
    return file


def run_pack(modules, monkeypatch, tmp_path, *options: Any) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(modules["pack"], "CASES", ((3, 32),))
    out = tmp_path / "pack.json"
    code = modules["pack"].main(["--rounds", "1", "--json", str(out), *map(str, options)])
    return code, json.loads(out.read_text())


def test_positions_of_all_three_agree_and_are_timed(benchmark_modules):
    import_module("bridge_on_cpu")  # skips where Bridge is not installed
    mrope = benchmark_modules["mrope"]
    with megatron_may_warn():
        for grids in ([(1, 8, 8)], [(3, 8, 8)]):
            rows = mrope.case(256, 2, grids, device="cpu", rounds=1)
            assert [row["arm"] for row in rows] == ["vlm_cp", "bridge", "transformers"]
            assert all(row["ms"] > 0 and row["media"] == 2 * grids[0][0] for row in rows)


def test_packing_beside_a_peer(benchmark_modules, monkeypatch, tmp_path, peer):
    code, found = run_pack(
        benchmark_modules, monkeypatch, tmp_path, "--verl-pack", peer, "--peer-versions", "verl=abc123,skyrl=def"
    )
    assert code == 0
    assert [(row["part"], row["arm"]) for row in found["rows"]] == [
        ("pack_and_shard", "vlm_cp"),
        ("pack_and_shard", "verl"),
        ("unpack", "vlm_cp"),
        ("unpack", "verl"),
    ]
    assert {"verl": "abc123", "skyrl": "def"}.items() <= found["versions"].items()


def test_a_results_file_names_no_folder(benchmark_modules, monkeypatch, tmp_path, peer):
    monkeypatch.setattr("sys.argv", ["run.py", "--verl-pack", str(peer)])
    _, found = run_pack(benchmark_modules, monkeypatch, tmp_path, "--verl-pack", peer)
    assert found["command"].endswith("--verl-pack peer.py")
    assert str(tmp_path) not in json.dumps(found)


def test_a_peer_that_differs_is_not_timed(benchmark_modules, monkeypatch, tmp_path, peer):
    peer.write_text(PEER.replace("(rank, last - rank)", "(last - rank, rank)"))
    code, found = run_pack(benchmark_modules, monkeypatch, tmp_path, "--verl-pack", peer)
    assert code == 1
    first = found["rows"][0]
    assert (first["arm"], first["refused"]) == ("verl", "the result differs from vlm_cp's")
    assert "ms" not in first


def test_a_file_of_another_version_is_refused(benchmark_modules, peer):
    peers = benchmark_modules["peers"]
    ranks = peers.Ranks(tp_size=1, cp_size=1, cp_rank=0)
    message = "peer.py must define pack_sequences, unpack, got another version of it; nothing could be compared"
    with pytest.raises(ValueError, match=f"^{message}$"):
        peers.load(peer, ["preprocess_packed_seqs", "pack_sequences", "unpack"], ranks)


def test_arms_are_compared_by_the_threads_own_time_on_a_cpu():
    from benchmarks.timing import beside, summary

    found = {"vlm_cp": summary([(2.0, 2.0, 1.0, 0), (9.0, 9.0, 2.0, 0)]), "peer": summary([(3.0, 3.0, 3.0, 0)])}
    assert [(x["arm"], x["best_ms"], x["vlm_cp_is_faster"]) for x in beside(found, "cpu")] == [
        ("vlm_cp", 1.0, 1.0),
        ("peer", 3.0, 3.0),
    ]
    assert [(x["best_ms"], x["vlm_cp_is_faster"]) for x in beside(found, "cuda")] == [(2.0, 1.0), (3.0, 1.5)]
    assert found["vlm_cp"]["ms"] == 5.5
