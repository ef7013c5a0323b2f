from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import whalepod
from tests.tools.closed_pipe import run_without_reader
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.config import EngineConfig, GatewayConfig
from whalepod.tools import cli
from whalepod.tools.flags import parse_number

LEAN_START = """
import sys
from whalepod.tools.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "fastapi", "numba", "numpy", "zmq", "httpx2"}
heavy |= {"whalepod.tools.bench", "whalepod.tools.bench.engine"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert len(ours := [name for name in sys.modules if name.startswith("whalepod")]) < 40, ours
sys.exit(code)
"""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"]])
def test_version_and_help_import_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAN_START, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert whalepod.__version__ in done.stdout or "Usage: whalepod" in done.stdout


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, GatewayConfig]]:
    """Collects what `whalepod serve` would start."""
    started: list[tuple[EngineConfig, GatewayConfig]] = []

    def remember(engine: EngineConfig, gateway: GatewayConfig, plan: NodePlan | None) -> int:
        assert plan is None, "one machine"
        started.append((engine, gateway))
        return 0

    monkeypatch.setattr("whalepod.tools.serve.serve", remember)
    return started


Served = list[tuple[EngineConfig, GatewayConfig]]


def test_serve_without_flags_is_the_default_configuration(served: Served) -> None:
    assert cli.main(["serve"]) == 0
    assert served == [(EngineConfig(), GatewayConfig())]


def test_every_kind_of_flag_reaches_its_field(served: Served) -> None:
    arguments = (
        "serve some/model --kv-cache-memory 2G --max-model-len 25.6k --dtype bfloat16 "
        "--no-enable-prefix-caching --api-key one --api-key two --ready-timeout 2.5 "
        "--batch-invariant --revision abc"
    )
    assert cli.main(arguments.split()) == 0
    engine, gateway = served[0]
    assert engine.source.model == "some/model"
    assert engine.source.dtype == "bf16"
    assert engine.source.revision == "abc"
    assert engine.device.kv_cache_memory_bytes == 2 * 2**30
    assert engine.device.batch_invariant
    assert engine.scheduler.max_model_len == 25_600
    assert not engine.scheduler.enable_prefix_caching
    assert gateway.api_key == ("one", "two")
    assert gateway.ready_timeout_s == 2.5


def test_a_flag_of_both_processes_reaches_both(served: Served) -> None:
    assert cli.main(["serve", "--enable-test-hooks"]) == 0
    engine, gateway = served[0]
    assert engine.enable_test_hooks
    assert gateway.enable_test_hooks


def test_command_line_beats_environment_beats_file(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'port = 1\nseed = 1\nmax_num_seqs = 3\nkv-cache-memory = "512M"\n'
        'enable_prefix_caching = false\nserved-model-name = ["a", "b"]\n'
    )
    monkeypatch.setenv("WHALEPOD_PORT", "2")
    monkeypatch.setenv("WHALEPOD_SEED", "2")
    assert cli.main(["serve", "--config", str(file), "--port", "3"]) == 0
    engine, gateway = served[0]
    assert (gateway.port, engine.source.seed, engine.scheduler.max_num_seqs) == (3, 2, 3)
    assert engine.device.kv_cache_memory_bytes == 512 * 2**20
    assert not engine.scheduler.enable_prefix_caching
    assert gateway.served_model_name == ("a", "b")


def test_switches_and_lists_come_from_the_environment_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHALEPOD_BATCH_INVARIANT", "1")
    monkeypatch.setenv("WHALEPOD_ENABLE_PREFIX_CACHING", "false")
    monkeypatch.setenv("WHALEPOD_API_KEY", "one two")
    assert cli.main(["serve"]) == 0
    engine, gateway = served[0]
    assert engine.device.batch_invariant
    assert not engine.scheduler.enable_prefix_caching
    assert gateway.api_key == ("one", "two")


def test_a_wrong_environment_variable_is_named(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WHALEPOD_PORT", "http")
    assert cli.main(["serve"]) == 2
    assert "WHALEPOD_PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("max_model_lenn = 1", "unknown key 'max_model_lenn'; the nearest is 'max-model-len'"),
        ("port = ", "cannot be read as TOML"),
        ("port = {a = 1}", "port must be a value or a list of values"),
        ('port = "many"', "'many' is not a whole number"),
    ],
)
def test_a_wrong_config_file_is_a_usage_error_that_names_it(
    served: Served,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str,
    fragment: str,
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content)
    assert cli.main(["serve", "--config", str(file)]) == 2
    assert fragment in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["serve", "--prot", "1"], "Unknown option: --prot. Did you mean --port?"),
        (["serve", "--port", "x"], "'x' is not a whole number"),
        (["serve", "--port", "99999"], "port must be in 0..65535, got 99999"),
        (["serve", "--max-model-len", "1.5"], "which is not a whole number"),
        (["serve", "--dtype", "int3"], "'int3' is not one of auto, bf16, fp32"),
        (["serve", "--max-num-seqs", "4k"], "max_num_batched_tokens (512)"),
        (["serve", "--host", "0.0.0.0", "--enable-test-hooks"], "loopback"),
        (["serve", "a", "b"], "unexpected argument 'b' (see `whalepod serve --help`)"),
        (["srve"], 'Did you mean "serve"?'),
        (["complete"], "requires an argument"),
        (["bench", "serve", "--slo", "speed:1"], "slo must be like ttft:500,tpot:50"),
        (["bench", "serve", "--concurrency", "1,x"], "concurrency must be like 16 or 1,4,16"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(
    served: Served, capsys: pytest.CaptureFixture[str], arguments: list[str], fragment: str
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert fragment in error
    assert len(error.splitlines()) == 1
    assert not served


def test_debug_shows_the_traceback_of_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        cli.main(["replay", "/nonexistent/journal", "--debug"])


def test_a_reader_may_leave_before_the_end_of_the_output() -> None:
    program = "import sys; from whalepod.tools.cli import main; sys.exit(main(['flags']))"
    assert run_without_reader(program) == (0, "")


def test_an_error_is_one_sentence_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "/nonexistent/journal"]) == 1
    assert capsys.readouterr().err == (
        "whalepod: /nonexistent/journal: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("25.6k", 25_600), ("1K", 1024), ("512M", 2**29), ("2GiB", 2**31), ("1_000", 1000)],
)
def test_numbers_may_have_a_scale(text: str, number: int) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "0x10", "2X", "nan"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_number(text)


VLLM_FLAGS = [
    "model",
    "revision",
    "dtype",
    "load-format",
    "seed",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "enable-prefix-caching",
    "host",
    "port",
    "api-key",
    "served-model-name",
    "chat-template",
]
OUR_FLAGS = [
    "kernels",
    "device",
    "num-threads",
    "batch-invariant",
    "kv-cache-memory",
    "record",
    "enable-test-hooks",
    "max-num-queued-reqs",
    "expert-parallel-size",
    "all2all-backend",
    "num-nodes",
    "node-rank",
    "master-address",
    "master-port",
    "rendezvous-timeout",
]


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, NodePlan]]:
    """Collects what `whalepod worker` would start."""
    started: list[tuple[EngineConfig, NodePlan]] = []

    def remember(engine: EngineConfig, plan: NodePlan) -> int:
        started.append((engine, plan))
        return 0

    monkeypatch.setattr("whalepod.tools.serve.work", remember)
    return started


MACHINES = ["tiny", "--ep", "4", "--num-nodes", "2", "--master-address", "10.0.0.1"]


def test_a_worker_takes_the_flags_of_serve(worked: list[tuple[EngineConfig, NodePlan]]) -> None:
    assert cli.main(["worker", *MACHINES, "--node-rank", "1", "--max-num-seqs", "9"]) == 0
    ((engine, plan),) = worked
    assert engine.scheduler.max_num_seqs == 9
    assert list(plan.ranks) == [2, 3]


def test_under_torchrun_the_same_command_serves_on_rank_0_and_works_on_others(
    served: Served, worked: list[tuple[EngineConfig, NodePlan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["serve", "--ep", "2"]) == 0
    ((_, plan),) = worked
    assert list(plan.ranks) == [1]
    assert served == []


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["worker", "tiny"], "a worker is one of several machines", 2),
        (["worker", *MACHINES], "and not the first", 2),
        (["worker", *MACHINES, "--node-rank", "2"], "node_rank (2) must be in 0..1", 2),
        (["serve", "--num-nodes", "2", "--ep", "2"], "needs --master-address", 1),
        (["serve", *MACHINES[:2], "3", *MACHINES[3:]], "cannot be spread over 2 machines", 1),
    ],
)
def test_machines_that_do_not_fit_together_are_one_sentence(
    arguments: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_serve_keeps_its_flags_and_each_has_a_help_text() -> None:
    flags: dict[str, Any] = cli.serve_flags()
    names = {flag.name for flag in flags.values()}
    assert {*VLLM_FLAGS, *OUR_FLAGS} - names == set()
    assert [flag.name for flag in flags.values() if not flag.help] == []
