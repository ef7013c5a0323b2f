"""What a wheel holds, and what its command line can do without the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "serve",
    "worker",
    "chat",
    "complete",
    "ps",
    "doctor",
    "synth",
    "bench",
    "eplb",
    "replay",
)
LIST_COMMANDS = """
import whalepod
from whalepod.tools.cli import make_app
assert whalepod.__file__.startswith({site!r}), whalepod.__file__
print(*make_app(), *make_app()["bench"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, with the setuptools that is installed here."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(
            f"setuptools {setuptools.__version__} is too old for this project: make install"
        )
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    left_out = shutil.ignore_patterns(".*", "tests", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=left_out)
    build = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_what_serves_and_nothing_that_trains_or_compares(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.rsplit("/", 1)[0] for name in names if name.startswith("whalepod/tools")}
    assert folders == {"whalepod/tools", "whalepod/tools/bench", "whalepod/tools/eplb"}
    assert {"whalepod/models/tiny/model.safetensors", "whalepod/py.typed"} <= set(names)
    assert any(name.startswith("whalepod/server/gateway/static/page/") for name in names)
    assert not [name for name in names if name.startswith(("whalepod/tests", "tests", "deploy"))]


def test_commands_of_the_wheel_need_no_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = LIST_COMMANDS.format(site=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}){script}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    listed = done.stdout.split()
    assert set(listed) >= set(COMMANDS)
    assert {"decode", "prefill"} <= set(listed)
    assert not {"peers", "quality", "ep", "ranks"} & set(listed)
