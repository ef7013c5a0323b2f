"""What is in the repository is what is installed."""

from __future__ import annotations

import pkgutil
import tomllib
from pathlib import Path

import whalepod

ROOT = Path(__file__).resolve().parent.parent


def listed_packages() -> set[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return set(settings["tool"]["setuptools"]["packages"])


NOT_SHIPPED = {
    "whalepod.tools.measure",
    "whalepod.tools.peers",
    "whalepod.tools.size",
    "whalepod.tools.tiny",
    "whalepod.tools.tiny.data",
}
"""Tools for those who work on whalepod."""


def test_every_package_is_listed_and_so_enters_the_wheel() -> None:
    folders = {
        "whalepod." + ".".join(init.parent.relative_to(ROOT).parts)
        for init in ROOT.glob("[a-z]*/**/__init__.py")
        if not {"build", "tests", ".venv"} & set(init.relative_to(ROOT).parts)
    }
    assert folders | {"whalepod"} == listed_packages() | NOT_SHIPPED
    assert not NOT_SHIPPED & listed_packages()


def test_the_root_holds_no_module_but_the_package_itself() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_public_names_are_exactly_all() -> None:
    assert set(whalepod.__all__) == {"Engine", "SamplingParams", "__version__"}
    assert all(hasattr(whalepod, name) for name in whalepod.__all__)


def test_importing_every_module_works() -> None:
    names = [m.name for m in pkgutil.walk_packages(whalepod.__path__, "whalepod.")]
    ours = [n for n in names if not n.startswith(("whalepod.tests", "whalepod.build"))]
    for name in ours:
        __import__(name)
    assert "whalepod.server.build" in ours
