"""The page's files, how they are served, and the JSON behind its board."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import whalepod
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import chat, error_of
from whalepod.scheduler.stats import Stats
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.routes_page import FOLDER, page_files
from whalepod.server.tokenizer import TextTokenizer

OWN_FILES = sorted(name for name in page_files() if not name.startswith("vendor/"))
VENDORED = sorted(name for name in page_files() if re.fullmatch(r"vendor/[^/]+", name))


@pytest.fixture
def guarded(engine: FakeEngine, tokenizer: TextTokenizer) -> Iterator[TestClient]:
    config = GatewayConfig(served_model_name=("tiny",), api_key=("one",))
    with TestClient(create_app(config, engine, tokenizer)) as client:
        yield client


def test_the_page_may_ask_no_other_host(client: TestClient) -> None:
    for path in ("/", "/page/app.js"):
        policy = client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        sources = set(re.sub(r"[\w-]+-(src|uri|action|ancestors)", "", policy).split())
        assert sources - {";"} <= {"'none'", "'none';", "'self'", "'self';", "data:", "data:;"}


@pytest.mark.parametrize("name", OWN_FILES)
def test_no_file_of_ours_names_another_host(name: str) -> None:
    text = page_files()[name].body.decode()

    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "style=" not in re.sub(r"style=\$\{\{", "", text), "the policy forbids inline styles"


@pytest.mark.parametrize("name", sorted(page_files()))
def test_every_file_is_served_with_its_type(client: TestClient, name: str) -> None:
    response = client.get(f"/page/{name}")

    types = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
    types |= {"svg": "image/svg+xml", "txt": "text/plain"}
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] == types[name.rpartition(".")[2]]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.content == (FOLDER / name).read_bytes()


def test_every_referenced_file_exists() -> None:
    html = page_files()["index.html"].body.decode()
    references = re.findall(r'(?:href|src)="page/([^"]+)"', html)
    for name in (n for n in OWN_FILES if n.endswith(".js")):
        imports = re.findall(r'from "\./([^"]+)"', page_files()[name].body.decode())
        references += imports
    assert {"app.js", "style.css", "vendor/htm-preact.js", "vendor/marked.js"} <= set(references)
    assert set(references) <= set(page_files())


def test_nothing_is_shipped_that_nothing_loads() -> None:
    text = "".join(page_files()[name].body.decode() for name in OWN_FILES)
    for name in (*OWN_FILES, *VENDORED):
        assert name == "index.html" or f"/{name}" in text, name


@pytest.mark.parametrize("name", VENDORED)
def test_every_vendored_file_has_its_licence(name: str) -> None:
    table = page_files()["vendor/licences/README.txt"].body.decode()
    (row,) = [line for line in table.splitlines() if line.startswith(Path(name).name)]

    licences = re.findall(r"\((\w+\.txt)\)", row)
    assert licences
    for licence in licences:
        assert len(page_files()[f"vendor/licences/{licence}"].body) > 500


def test_a_page_that_has_not_changed_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/")
    tag = first.headers["etag"]
    again = client.get("/", headers={"If-None-Match": f'"other", W/{tag}'})
    changed = client.get("/", headers={"If-None-Match": '"other"'})

    assert first.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert (changed.status_code, changed.content) == (200, first.content)


@pytest.mark.parametrize(
    "path",
    [
        "../openapi.py", "..%2f..%2fopenapi.py", "%2e%2e/%2e%2e/openapi.py", "/etc/passwd",
        "%2fetc%2fpasswd", "vendor", "vendor/", "..\\..\\openapi.py", "app.js%00", "",
    ],
)  # fmt: skip
def test_only_files_of_the_page_can_be_named(client: TestClient, path: str) -> None:
    sent = client.build_request("GET", "/page/x")
    sent.url = sent.url.copy_with(raw_path=f"/page/{path}".encode())

    assert error_of(client.send(sent), 404)["code"] == "not_found"


def test_the_page_opens_without_a_key_but_its_numbers_do_not(guarded: TestClient) -> None:
    assert guarded.get("/").status_code == 200
    assert guarded.get("/page/app.js").status_code == 200
    assert error_of(guarded.get("/cluster"), 401)["code"] == "invalid_api_key"
    assert error_of(guarded.get("/page"), 401)["code"] == "invalid_api_key"
    assert guarded.get("/cluster", headers={"Authorization": "Bearer one"}).status_code == 200


def test_every_static_file_is_package_data() -> None:
    root = Path(whalepod.__file__).parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["whalepod.server.gateway"]
    gateway = FOLDER.parent.parent
    packed = {path for pattern in patterns for path in gateway.glob(pattern)}

    assert {FOLDER / name for name in page_files()} <= packed


def test_the_board_has_facts_counters_and_latencies(client: TestClient, engine: FakeEngine) -> None:
    engine.stats = Stats(num_running=3, num_blocks=10, num_owned_blocks=4, generation_tokens=7)
    chat(client, n=2)
    client.get("/v1/models/nope")
    board = client.get("/cluster").json()

    assert board["models"] == ["tiny"]
    assert board["engine"]["max_model_len"] == engine.info.max_model_len
    assert board["engine"]["failure"] is None
    assert board["stats"]["num_owned_blocks"] == 4
    assert [(rank["rank"], rank["num_running"]) for rank in board["ranks"]] == [(0, 3)]
    assert board["finished"] == {"stop": 2}
    assert board["errors"] == {"model_not_found": 1}
    first = board["latency_s"]["time_to_first_token"]
    assert first["bounds_s"][-1] is None
    assert first["bounds_s"][:-1] == sorted(first["bounds_s"][:-1])
    assert len(first["counts"]) == len(first["bounds_s"])
    assert first["counts"][-1] == 1
    assert board["latency_s"]["inter_token"]["counts"][-1] > 2
    assert (board["speculation"], board["experts"]) == (None, None)


def test_the_board_clock_runs(client: TestClient) -> None:
    times_s = [client.get("/cluster").json()["time_s"] for _ in range(3)]
    assert times_s == sorted(set(times_s))


def test_the_board_shows_accepted_drafts_by_position(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.stats = Stats(num_drafts=10, num_accepted_by_position=(8, 5))
    assert client.get("/cluster").json()["speculation"] == {
        "num_drafts": 10,
        "accepted_by_position": [8, 5],
    }
    engine.stats = replace(engine.stats, num_drafts=0)
    assert client.get("/cluster").json()["speculation"] is None


def test_a_lost_engine_is_named_on_the_board(client: TestClient, engine: FakeEngine) -> None:
    engine.failure = "out of memory"
    assert client.get("/cluster").json()["engine"]["failure"] == "out of memory"
