"""What may import what: read from the sources, so that an arrow the wrong way is caught before it is a habit."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vlm_cp"

# A module may import only what stands before it. Packages count as one.
ORDER = (
    "alignment spec comm row_mask launch plan media batch cost packing mrope vision vision_layout cut_attention tower attention "
    "vocab_parallel logprobs values loss_contract losses metrics chat collate families engines demo subject trace parity "
    "bridge_parity report budget doctor cli"
).split()


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def arrows(path):
    """Layers of vlm_cp that a file imports."""
    names = [name.split(".") for name in imported(path) if name.split(".")[0] == "vlm_cp"]
    return {parts[1] for parts in names if len(parts) > 1 and parts[1] in ORDER}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path):
    layer = layer_of(path)
    assert layer in ORDER
    allowed = set(ORDER[: ORDER.index(layer)]) | ({layer} if path.parent != PACKAGE else set())
    assert arrows(path) <= allowed
    assert not any(name.startswith(("vlm_cp_hooks", "hooks", "tests")) for name in imported(path))


def test_a_wrong_arrow_would_be_seen(tmp_path):
    file = tmp_path / "plan.py"
    file.write_text("def f():\n    from vlm_cp import attention\n    import vlm_cp.parity\n")
    assert arrows(file) == {"attention", "parity"}


def test_the_two_engines_do_not_know_each_other():
    """Their files may share packed parameters and the like, but neither reaches the other: one needs no Megatron."""
    reached = {"hf": {"hf"}, "megatron": {"megatron"}}
    for found in reached.values():
        todo = list(found)
        while todo:
            names = {
                n.split(".")[2]
                for n in imported(PACKAGE / "engines" / f"{todo.pop()}.py")
                if n.startswith("vlm_cp.engines.")
            }
            todo += names - found
            found |= names
    assert "megatron" not in reached["hf"]
    assert "hf" not in reached["megatron"]
    assert not any(
        name.split(".")[0] == "megatron"
        for file in reached["hf"]
        for name in imported(PACKAGE / "engines" / f"{file}.py")
    )


def loads(code, *names):
    """Which of `names` a fresh interpreter holds after running `code`."""
    check = f"{code}\nimport sys\nprint([n for n in {names!r} if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT)
    return ast.literal_eval(run.stdout.splitlines()[-1])


HEAVY = ("transformers", "megatron", "transformer_engine", "rich", "jinja2", "PIL")


def test_import_loads_torch_only():
    assert loads("import vlm_cp", *HEAVY) == []


def test_that_test_can_fail():
    assert "transformers" in loads("import vlm_cp, vlm_cp.engines.hf", *HEAVY)


def test_sizes():
    """House rules: no file over 350 lines, no function over 60, no global statement, no environment read in the library."""
    for path in [*modules(), *(ROOT / "hooks").rglob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"
            assert not isinstance(node, ast.Global), path
        if layer_of(path) != "cli" if path.is_relative_to(PACKAGE) else False:
            assert "os.environ" not in text, path
