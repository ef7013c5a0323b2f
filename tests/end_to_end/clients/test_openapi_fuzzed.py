"""schemathesis: what the OpenAPI document allows, and what it forbids, gets a described answer."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.end_to_end.clients.pages import INSTALLED
from tests.gateway.conftest import write_tokenizer
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import serving
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.gateway.tokenizer import TextTokenizer

CHECKS = (
    *("not_a_server_error", "status_code_conformance"),
    *("response_schema_conformance", "content_type_conformance"),
)
TIMEOUT_S = 900


def test_no_answer_is_a_server_error_or_undocumented(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(write_tokenizer(tmp_path))
    config = GatewayConfig(served_model_name=("tiny",))
    with serving(create_app(config, FakeEngine(tokenizer), tokenizer)) as port:
        done = subprocess.run(
            [
                str(INSTALLED / "clients" / "bin" / "schemathesis"),
                *("run", f"http://127.0.0.1:{port}/openapi.json"),
                *("--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)),
                *("--max-examples", "40", "--seed", "1", "--no-color"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    assert done.returncode == 0, done.stdout
    assert "18 selected / 18 total" in done.stdout
