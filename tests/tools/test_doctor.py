from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whalepod.models.config import parse_config
from whalepod.models.presets import PRESETS, preset_config
from whalepod.tools import cli
from whalepod.tools.machine import cpu_features, is_port_free
from whalepod.tools.sizing import fit, kv_bytes_per_token, measure

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}


def test_deepseek_v3_has_its_published_sizes() -> None:
    config = parse_config(DEEPSEEK_V3)
    sizes = measure(config)
    assert round(sizes.parameters / 1e9) == 671
    assert round(sizes.active_parameters / 1e9) == 37
    copies = 2 * 129280 * 7168  # the checkpoint's MTP layer repeats embedding and head
    assert round((sizes.mtp_parameters + copies) / 1e9, 1) == 13.5
    assert kv_bytes_per_token(config, 2, with_mtp=False) == 70_272
    assert sizes.kv_bytes_per_token["bf16"] == 71_424
    assert sizes.weights_bytes["bf16"] > 1.9 * sizes.weights_bytes["fp8"]


def test_int8_weights_take_the_bytes_that_the_kernels_pack_them_into() -> None:
    torch = pytest.importorskip("torch")
    from whalepod.kernels.cpu import CpuKernels

    packed = CpuKernels(num_threads=1, is_int8=True).pack_linear(torch.zeros(64, 128))
    config = parse_config(preset_config("v3-mini"))
    sizes, embedding = measure(config), 32768 * 1024
    num_layers = config.num_layers + config.num_mtp_layers
    exact = num_layers * (config.q_lora_rank + config.cache_row_width) * config.hidden_size
    values = (sizes.weights_bytes["bf16"] - 2 * embedding) / 2  # norms and routers hardly count

    assert packed.tensor.numel() * packed.tensor.itemsize == 64 * 128 * 34 / 32
    expected = (values - exact) * 34 / 32 + 2 * exact
    assert sizes.weights_bytes["int8"] - 2 * embedding == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("preset", ["v3-nano", "v2-nano", "v3-mini"])
def test_parameters_are_those_of_the_model_in_transformers(preset: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
    )

    raw = preset_config(preset)
    is_v3 = raw["model_type"] == "deepseek_v3"
    config_class = DeepseekV3Config if is_v3 else DeepseekV2Config
    model_class = DeepseekV3ForCausalLM if is_v3 else DeepseekV2ForCausalLM
    with torch.device("meta"):
        model = model_class(config_class(**raw))
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    expected = sum(t.numel() for t in [*model.parameters(), *biases.values()])
    assert measure(parse_config(raw)).parameters == expected


def test_what_fits_is_rounded_down_to_blocks_and_up_to_sequences() -> None:
    sizes = measure(parse_config(preset_config("v3-nano")))
    per_token = sizes.kv_bytes_per_token["bf16"]
    memory = sizes.weights_bytes["bf16"] + per_token * 64 * 10 + per_token
    room = fit(sizes, "bf16", memory, max_model_len=65, reserve=0.0)
    assert room.num_tokens == 640
    assert room.max_concurrency == 5  # two blocks each
    assert room.kv_cache_bytes == per_token * 641
    short = fit(sizes, "bf16", 1000, max_model_len=65, reserve=0.0)
    assert (short.num_tokens, short.max_concurrency) == (0, 0)
    assert short.kv_cache_bytes == 1000 - sizes.weights_bytes["bf16"]


def test_doctor_reports_a_config_file_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    flags = ["--memory", "1128G", "--max-model-len", "32K", "--json"]
    assert cli.main(["doctor", str(path), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    by_dtype = {fit["dtype"]: fit for fit in report["model"]["fits"]}
    assert report["model"]["kv_bytes_per_token_without_mtp"] == 70_272
    assert by_dtype["fp8"]["num_tokens"] > 1_000_000
    assert by_dtype["bf16"]["num_tokens"] == 0
    assert report["machine"]["num_cores"] >= 1
    assert report["problems"] == []


def test_doctor_says_that_a_model_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert cli.main(["doctor", str(tmp_path), "--memory", "100G"]) == 1
    out = capsys.readouterr().out
    assert "parameters  671,026,419,200 + 11,610,068,224 in MTP layers" in out
    assert "PROBLEM:" in out
    assert "does not fit: its weights take 637.8 GiB at the least, the memory is 100.0 GiB" in out


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{", "is not a config.json"),
        ("[1]", "is not a config.json: it holds a list"),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ('{"model_type": "deepseek_v3"}', "is missing"),
    ],
)
def test_doctor_refuses_a_broken_config_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, fragment: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert cli.main(["doctor", str(path)]) == 1
    error = capsys.readouterr().err
    assert fragment in error
    assert len(error.splitlines()) == 1


def test_doctor_refuses_a_length_over_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "v3-nano", "--max-model-len", "1M"]) == 1
    assert "max_model_len (1048576) is over the model's limit of" in capsys.readouterr().err


def test_doctor_names_what_a_model_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "no-such-model"]) == 1
    assert "no folder, config.json, preset" in capsys.readouterr().err


def test_doctor_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from whalepod.tools.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", next(iter(PRESETS)), "--memory", "64G"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_listening_port_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_port_free("127.0.0.1", port)
    assert is_port_free("127.0.0.1", port)


def test_cpu_features_are_read_by_name() -> None:
    assert cpu_features("flags\t\t: fpu avx2 amx_bf16x avx512_bf16\n") == ("avx2", "avx512_bf16")
    assert cpu_features("Features\t: asimd i8mm\n") == ("asimd", "i8mm")
    assert cpu_features("") == ()
