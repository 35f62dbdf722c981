import json
import re

import pytest

from vlm_cp import report as report_module
from vlm_cp.cli import main
from vlm_cp.demo.models import tiny_model
from vlm_cp.demo.processor import build_processor
from vlm_cp.parity import Bound, run_parity
from vlm_cp.report import print_report, write_html, write_json
from vlm_cp.subject import Candidate, Subject


def test_parity_writes_what_it_is_asked_to(tmp_path, capsys):
    json_file, html_file = tmp_path / "p.json", tmp_path / "p.html"
    code = main(["parity", "--family", "qwen2_5_vl", "--cp", "2", "--json", str(json_file), "--html", str(html_file)])
    assert code == 0
    assert "equal within the measured floor" in capsys.readouterr().out
    result = json.loads(json_file.read_text())
    assert result["passed"] is True
    assert result["rows"][0]["family"] == "qwen2_5_vl"
    assert result["versions"]["torch"]
    assert result["command"].startswith("vlm-cp parity --family qwen2_5_vl")
    page = html_file.read_text()
    assert page.count("data:image/jpeg;base64,") == 10  # five images, and five temporal patches of two videos
    assert not re.search(r'(src|href)="(?!data:)', page)  # needs nothing else
    assert "A rocket leaves its pad" in page.replace("</span>", "").replace("\n", "") or "rocket" in page


def test_a_saved_checkpoint_with_its_processor(tmp_path, capsys):
    processor = build_processor("qwen3_5")
    tiny_model("qwen3_5", processor.tokenizer).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert main(["parity", "--model", str(tmp_path)]) == 0
    assert "qwen3_5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["parity", "--model", "Qwen/Qwen3-VL-2B-Instruct"],
            "model must be a folder with a config.json, got Qwen/Qwen3-VL-2B-Instruct; a hub's name is not looked up",
        ),
        (["parity", "--cp", "0"], "--cp and --tp must be at least 1, got 0 and 1; there would be no rank to run on"),
        (["parity", "--tp", "2"], "--tp must be 1 for the hf engine, got 2; transformers' layers are not split"),
        (
            ["parity", "--engine", "bridge"],
            "--device must be cuda for the bridge engine, got cpu; its layers are Transformer Engine's, and its sum of gradients",
        ),
        (
            ["parity", "--engine", "bridge", "--device", "cuda"],
            "--dtype must be bfloat16 for the bridge engine, got float32; Transformer Engine has no other attention",
        ),
        (
            ["parity", "--engine", "bridge", "--device", "cuda", "--dtype", "bfloat16", "--cp", "2", "--tp", "2"],
            "--device cuda must find 4 devices, got 0; ranks would share one",
        ),
        (["parity", "--device", "cuda:0"], "--device cuda:0 must find 1 devices, got 0; ranks would share one"),
        (
            ["parity", "--family", "qwen3_vl", "--cp", "3", "--attention", "all_to_all"],
            "attention heads must be divisible by cp_size 3 for all_to_all, got 4 query and 2 key/value heads",
        ),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert words in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", [["parity", "--family", "llava"], ["parity", "--cp", "two"], ["train"], []])
def test_argparse_errors_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    capsys.readouterr()


def test_plan_and_doctor_are_wired(tmp_path, capsys):
    sizes = tmp_path / "sizes.jsonl"
    sizes.write_text('{"length": 40, "images": [[1, 8, 8]]}\n{"length": 7}\n')
    assert main(["plan", str(sizes), "--cp", "2"]) == 0
    assert "2 samples, 47 tokens" in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "none.jsonl"), "--cp", "2"]) == 2
    assert main(["doctor"]) == 0
    assert "everything that is needed is there" in capsys.readouterr().out


class DeepstackOff(Candidate):
    def __init__(self, *args):
        super().__init__(*args)
        original = self.engine.encode
        self.engine.encode = lambda batch: type(r := original(batch))(r.main, tuple(x.roll(1, 0) for x in r.levels))


def test_a_red_report_says_where_and_why(tmp_path):
    from rich.console import Console

    report = run_parity(Subject.demo("qwen3_vl"), cp=2, candidate=DeepstackOff)
    console = Console(record=True, width=160)
    print_report(report, console)
    text = console.export_text()
    assert "NOT EQUAL" in text
    assert "first difference: deepstack.0 (deepstack)" in text
    assert 'sample 0 ("launch"), tokens 7 to 30, image 0; ' in text
    write_html(report, tmp_path / "p.html", "command")
    page = (tmp_path / "p.html").read_text()
    assert "not equal" in page
    assert "<code>deepstack.0</code>" in page
    write_json(report, tmp_path / "p.json", "command")
    row = json.loads((tmp_path / "p.json").read_text())["rows"][0]
    assert row["first_divergence"]["cause"] == "deepstack"
    assert row["passed"] is False


def test_exit_code_1_when_not_equal(monkeypatch, capsys):
    subject = Subject.demo("qwen3_vl")
    red = run_parity(subject, cp=2, bound=Bound(0.0, 0.0, 0.0))
    monkeypatch.setattr("vlm_cp.cli.run_parity", lambda *args, **kwargs: red)
    assert main(["parity"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_owners_on_the_page_are_the_plans():
    subject = Subject.demo("qwen3_vl")
    batch = subject.batch(3)
    owners = report_module._owners(batch)
    for rank in range(3):
        assert bool((owners[batch.plan.local_index(rank)] == rank).all())
