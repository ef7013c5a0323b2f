"""Takes the commands out of a how-to page and runs them against a server."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
INSTALLED = ROOT / ".venv-clients"
"""Where `make test-clients` installs: a virtual environment a list of requirements, and npm's."""
REQUIREMENTS = ROOT / "constraints"
ADDRESS_OF_PAGES = "http://127.0.0.1:8000"
TIMEOUT_S = 240
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language, in order."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return [code for found, code in _BLOCK.findall(text) if found == language]


class Reader:
    """Follows a page: types what it says, at a server elsewhere than the page's."""

    def __init__(self, address: str, home: Path) -> None:
        self._address, self.home = address, home

    def run_python(self, page: str, requirements: str = "clients") -> list[str]:
        """Run all Python of a page as one program; return the lines that it prints."""
        return self.run_program("\n".join(blocks(page, "python")), requirements)

    def run_program(self, code: str, requirements: str = "clients") -> list[str]:
        """Run a program with the packages of one list of requirements."""
        python = INSTALLED / requirements / "bin" / "python"
        return self._run([str(python), "-W", "error::SyntaxWarning", "-c"], code)

    def run_shell(self, page: str) -> list[str]:
        """Run the shell commands of a page behind its first block, which installs."""
        commands = "\n".join(blocks(page, "sh")[1:])
        return self._run(["bash", "-euo", "pipefail", "-c"], commands)

    def _run(self, command: Sequence[str], code: str) -> list[str]:
        here = code.replace(ADDRESS_OF_PAGES, self._address)
        done = subprocess.run(
            [*command, here],
            cwd=self.home,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout.splitlines()

    def _environment(self) -> dict[str, str]:
        """Return variables that name no key, and a proxy that lets nothing out."""
        nowhere = "http://127.0.0.1:9"
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), nowhere)
        return {
            "HOME": str(self.home),
            "PATH": f"{INSTALLED / 'node_modules' / '.bin'}:{os.environ['PATH']}",
            "LANG": "C.UTF-8",
            "no_proxy": "127.0.0.1",
            **proxies,
        }


def installed_packages(page: str) -> list[str]:
    """Return the packages that a page tells its reader to install."""
    install, *_ = blocks(page, "sh")
    found = re.search(r"^(?:pip install|npm install --global) (.+)$", install, re.MULTILINE)
    assert found, install
    return found[1].replace('"', "").split()
