"""`whalepod serve` as a user starts it: two processes, from a folder to an answer."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from whalepod.models.synthetic import synthesize
from whalepod.server.config import GatewayConfig
from whalepod.server.errors import StartupError
from whalepod.server.messages import EngineInfo
from whalepod.tools.start_report import (
    base_url,
    check_files_for_chats,
    parsers_of,
    start_report,
)

PROGRAM = "import sys; from whalepod.tools.cli import main; sys.exit(main(sys.argv[1:]))"
START_S = 120
R1_TEMPLATE = """{% for m in messages %}{{ (m.content or '').split('</think>')[-1] -}}
{% for c in m.tool_calls or [] %}{{ 'function<｜tool▁sep｜>' + c.function.name -}}
{{ c.function.arguments }}{% endfor %}{% endfor %}"""

INFO = EngineInfo(
    model_type="deepseek_v3",
    dtype="float32",
    kernels="cpu",
    max_model_len=4096,
    vocab_size=512,
    num_blocks=100,
    block_tokens=64,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    weights_bytes=3 << 30,
    kv_bytes_per_token=1024,
    load_seconds=1.25,
)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize("v3-nano", tmp_path_factory.mktemp("models") / "nano", dtype="fp32")


@pytest.fixture
def server(nano: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(str(nano), "--port", "0", "--max-num-seqs", "4", "--max-model-len", "256")
    yield process
    process.kill()
    process.communicate()


@pytest.mark.ranks
def test_serve_answers_at_the_address_of_its_report_and_stops_on_ctrl_c(
    server: subprocess.Popen[str],
) -> None:
    assert server.stdout is not None
    report = ""
    while "Try:" not in report:  # ends by itself: a server that fails closes its stdout
        line = server.stdout.readline()
        assert line, server.communicate()
        report += line
    match = re.search(r"http://127\.0\.0\.1:\d+", report)
    assert match is not None
    body = json.dumps({"model": "nano", "prompt": "a b", "max_tokens": 3, "ignore_eos": True})
    request = urllib.request.Request(
        f"{match[0]}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with _open_when_listening(request) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 3
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=60)
    assert server.returncode == 0


def _open_when_listening(request: urllib.request.Request) -> urllib.request.addinfourl:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            return urllib.request.urlopen(request, timeout=60)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
    raise AssertionError("the server never listened")


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["/nonexistent"], "'/nonexistent' is no model"),
        (["MODEL", "--max-model-len", "1M"], "max_model_len (1048576) is over the model's"),
        (["MODEL", "--kv-cache-memory", "1K"], "--kv-cache-memory"),
        (["MODEL", "--reasoning-parser", "nobody"], "--reasoning-parser must be one of auto"),
    ],
)
def test_what_cannot_be_served_is_one_sentence_and_exit_code_1(
    nano: Path, flags: list[str], fragment: str
) -> None:
    flags = [str(nano) if flag == "MODEL" else flag for flag in flags]
    process = start(*flags, "--port", "0")
    out, err = process.communicate(timeout=START_S)
    assert process.returncode == 1, err
    last = err.splitlines()[-1]
    assert last.startswith("whalepod: ")
    assert fragment in last
    assert "Traceback" not in err
    assert out == ""


def test_a_port_in_use_is_found_before_anything_is_loaded(nano: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(str(nano), "--port", str(port))
        _, err = process.communicate(timeout=START_S)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in err
    assert "loading" not in err


def test_a_parser_that_does_not_fit_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": R1_TEMPLATE}))

    named = parsers_of(GatewayConfig(tool_call_parser="deepseek_v3"), tmp_path)
    assert named is not None
    assert named.startswith("deepseek_r1; the chat template leaves tools out")
    with pytest.raises(StartupError, match="does not fit this checkpoint"):
        parsers_of(GatewayConfig(tool_call_parser="deepseek_v31"), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}{{ tools }}")  # wins
    assert parsers_of(GatewayConfig(), tmp_path) == "none (answers are plain text)"
    assert parsers_of(GatewayConfig(), tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("file", "text", "fragment"),
    [
        ("generation_config.json", '{"top_p": 7}', "top_p must be in 0..1, got 7"),
        ("tokenizer_config.json", "{", "the chat template cannot be read"),
    ],
)
def test_N024_files_for_chats_are_read_before_the_weights(
    tmp_path: Path, file: str, text: str, fragment: str
) -> None:
    (tmp_path / file).write_text(text)

    with pytest.raises(StartupError, match=fragment):
        check_files_for_chats(GatewayConfig(), tmp_path)


def test_N024_a_checkpoint_may_ask_for_the_likeliest_token(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0}')

    check_files_for_chats(GatewayConfig(), tmp_path)


def test_the_report_says_what_fits_and_gives_a_command_to_paste() -> None:
    gateway = GatewayConfig(host="0.0.0.0", port=80, served_model_name=("m",), api_key=("k",))
    report = start_report(gateway, INFO, "deepseek_v31")
    for fragment in (
        "m (deepseek_v3), float32, 3.0 GiB",
        "100 blocks of 64 = 6,400 tokens, 6.2 MiB",
        "drafts    off",
        "parsers   deepseek_v31",
        "64 requests; the cache holds 1.6 of 4,096 tokens",
        "curl http://127.0.0.1:80/v1/chat/completions -H 'Authorization: Bearer YOUR_KEY'",
    ):
        assert fragment in report
    assert len(report.splitlines()) < 24
    assert "/v1/completions" in start_report(gateway, INFO, None)


def test_an_ipv6_address_has_brackets_in_its_url() -> None:
    assert base_url(GatewayConfig(host="::", port=8)) == "http://[::1]:8"
