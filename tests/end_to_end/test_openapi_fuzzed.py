"""schemathesis: what the OpenAPI document allows, and what it forbids, gets a described answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.conftest import write_tokenizer
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import serving
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

FUZZER = "from schemathesis.cli import schemathesis; schemathesis()"
CHECKS = (
    *("not_a_server_error", "status_code_conformance"),
    *("response_schema_conformance", "content_type_conformance"),
)
TIMEOUT_S = 900


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [4, pytest.param(100, marks=pytest.mark.long)])
def test_no_answer_is_a_server_error_or_undocumented(tmp_path: Path, num_examples: int) -> None:
    tokenizer = TextTokenizer.from_folder(write_tokenizer(tmp_path))
    app = create_app(GatewayConfig(served_model_name=("tiny",)), FakeEngine(tokenizer), tokenizer)
    with serving(app) as port:
        done = subprocess.run(
            [
                *(sys.executable, "-c", FUZZER, "run", f"http://127.0.0.1:{port}/openapi.json"),
                *("--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)),
                *("--max-examples", str(num_examples), "--seed", "1", "--no-color"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    assert done.returncode == 0, done.stdout + done.stderr
    num_operations = sum(len(operations) for operations in app.openapi()["paths"].values())
    assert f"{num_operations} selected / {num_operations} total" in done.stdout
