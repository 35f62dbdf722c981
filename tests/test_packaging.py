"""sdist -> wheel -> a clean environment: what users install is whole."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_two_packages_and_their_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"vlm_cp", "vlm_cp_hooks"}
    assert {"vlm_cp/report.html.j2", "vlm_cp/demo/assets/coffee.jpg", "vlm_cp/demo/assets/CREDITS.md"} <= set(names)


def test_it_imports_from_a_clean_environment(wheel, tmp_path):
    """Only this wheel is installed there; what it depends on is seen through a path file, where no editable install counts."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = tmp_path / "bin" / "python"
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    zipfile.ZipFile(wheel).extractall(site)
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    code = (
        "import vlm_cp, vlm_cp_hooks, vlm_cp.cli; from vlm_cp.demo.conversations import photo;"
        "print(photo('coffee').size, vlm_cp.__file__, vlm_cp_hooks.__file__)"
    )
    run = subprocess.run([str(python), "-P", "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "(360, 240)" in run.stdout
    assert run.stdout.count(str(tmp_path)) == 2
