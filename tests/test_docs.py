"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "GLOSSARY.md",
    "docs/expert-balance.md",
    "docs/several-machines.md",
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_folder_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`([\w/.-]+\.(?:py|md|toml|yaml)|[\w/]+/)`", text)
    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    files = [path for top in tops for path in (top, *top.rglob("*"))]
    places = {f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in files}
    missing = [name for name in named if not any(p.endswith("/" + name) for p in places)]
    assert missing == []


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/README.md"])
def test_every_link_between_documents_leads_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text(encoding="utf-8"))
    folder = (ROOT / document).parent
    assert [link for link in links if not (folder / link).exists()] == []
