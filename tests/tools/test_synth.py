"""Synthetic checkpoints have the promised sizes and load in transformers as they are."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from whalepod.models.config import load_config, parse_config
from whalepod.models.layout import checkpoint_tensors
from whalepod.models.presets import PRESETS, preset_config, smaller
from whalepod.models.synthetic import SynthesisError, plan_tensors, synthesize
from whalepod.models.synthetic_tokenizer import train_tokenizer
from whalepod.tools.synth import SynthConfig, synth

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


BENCHMARK_MODEL = transformers.DeepseekV3Config(
    vocab_size=32768,
    hidden_size=1024,
    intermediate_size=2816,
    moe_intermediate_size=256,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=16,
    n_shared_experts=1,
    n_routed_experts=64,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    first_k_dense_replace=1,
    q_lora_rank=384,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=8192,
    rope_interleave=True,
)
"""The model that the published CPU comparison with other engines was measured on."""


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize("v3-nano", tmp_path_factory.mktemp("synth") / "nano")


@pytest.mark.parametrize("preset", ["v3-nano", "v2-nano"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shard_bytes", [200_000, 1 << 30])
def test_transformers_loads_every_weight(
    tmp_path: Path, preset: str, dtype: Any, shard_bytes: int
) -> None:
    folder = synthesize(preset, tmp_path / "out", dtype=dtype, shard_bytes=shard_bytes)
    family = {
        "v3-nano": transformers.DeepseekV3ForCausalLM,
        "v2-nano": transformers.DeepseekV2ForCausalLM,
    }[preset]

    model, info = family.from_pretrained(folder, dtype="auto", output_loading_info=True)

    assert info["missing_keys"] == set()
    # transformers loads the MTP layer only when asked to
    assert all(name.startswith("model.layers.3.") for name in info["unexpected_keys"])
    assert not info["mismatched_keys"]
    assert model.dtype is {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    stored = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    weights = model.state_dict()
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert torch.equal(weights[name], stored[name])
    with torch.inference_mode():
        logits = model(torch.arange(20).view(1, -1)).logits.float()
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3  # neither flat nor saturated


def test_transformers_auto_classes_load_config_and_tokenizer(nano: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(nano)
    tokenizer = transformers.AutoTokenizer.from_pretrained(nano)

    assert config.topk_group == 2
    assert config.num_nextn_predict_layers == 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert len(tokenizer) == 512


def test_the_router_of_random_weights_uses_every_expert(nano: Path) -> None:
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(nano, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    model.model.layers[1].mlp.gate.register_forward_hook(
        lambda module, args, output: chosen.append(output[2])
    )
    with torch.inference_mode():
        model(torch.arange(256).view(1, -1))
    used = set(chosen[0].flatten().tolist())

    assert used == set(range(8))


def test_nano_is_small_with_every_dimension_a_multiple_of_32(nano: Path) -> None:
    assert (nano / "model.safetensors").stat().st_size < 2.1e6
    for name, shape in checkpoint_tensors(load_config(nano)):
        if "mlp.gate." not in name:
            assert all(size % 32 == 0 for size in shape), (name, shape)


def num_parameters(raw: dict[str, Any]) -> int:
    return sum(math.prod(shape) for _, shape in checkpoint_tensors(parse_config(raw)))


def test_mini_is_the_benchmark_model(tmp_path: Path) -> None:
    folder = synthesize("v3-mini", tmp_path / "out", with_weights=False)
    loaded = transformers.AutoConfig.from_pretrained(folder).to_dict()
    expected = BENCHMARK_MODEL.to_dict()
    ignored = {"architectures", "dtype", "pad_token_id", "num_nextn_predict_layers"}
    ignored |= {"name_or_path", "_name_or_path", "transformers_version"}
    assert {k: loaded[k] for k in expected.keys() - ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }


def test_mini_has_as_many_parameters_as_the_benchmark_model() -> None:
    config = parse_config(preset_config("v3-mini"))

    assert (config.vocab_size, config.hidden_size, config.num_layers) == (32768, 1024, 12)
    assert (config.num_heads, config.q_lora_rank, config.kv_lora_rank) == (16, 384, 512)
    assert config.num_mtp_layers == 0
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(BENCHMARK_MODEL)
    stored = [p for p in (*model.parameters(), *model.buffers()) if p.numel() != 32]  # inv_freq
    assert num_parameters(preset_config("v3-mini")) == sum(p.numel() for p in stored)


@pytest.mark.parametrize(
    ("preset", "changes", "billions"),
    [
        ("v2-lite", {}, 15.7),
        ("v3-layer", {"num_hidden_layers": 61, "first_k_dense_replace": 3}, 671.0),
        ("v3-layer", {}, 13.9),
    ],
)
def test_real_widths_give_the_published_number_of_parameters(
    preset: str, changes: dict[str, Any], billions: float
) -> None:
    raw = preset_config(preset, overrides=changes)

    assert num_parameters(raw) / 1e9 == pytest.approx(billions, abs=0.06)


def test_layers_and_experts_can_be_cut(tmp_path: Path) -> None:
    smallest = smaller("v3-nano", num_layers=1, num_experts=4)
    folder = synthesize("v3-nano", tmp_path / "out", overrides=smallest)

    config = load_config(folder)
    assert (config.num_layers, config.num_dense_layers) == (1, 0)
    assert config.gate is not None
    assert config.gate.num_experts == 4
    assert transformers.DeepseekV3ForCausalLM.from_pretrained(folder) is not None


def test_overrides_replace_keys_of_the_config(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}

    folder = synthesize("v3-nano", tmp_path / "out", overrides={"rope_scaling": yarn})

    assert load_config(folder).rope.factor == 4
    transformers.DeepseekV3ForCausalLM.from_pretrained(folder)


def test_the_config_has_the_keys_of_deepseeks_own_files(nano: Path) -> None:
    raw = json.loads((nano / "config.json").read_text())

    assert raw["model_type"] == "deepseek_v3"
    wanted = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_theta": 10000,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    assert {key: raw[key] for key in wanted} == wanted


def test_fp8_sizes_are_planned_as_they_are_written(tmp_path: Path) -> None:
    folder = synthesize("v3-nano", tmp_path / "out", dtype="fp8")

    stored = load_file(folder / "model.safetensors")
    plan = plan_tensors(load_config(folder), "fp8")
    assert {name for tensor in plan for name in tensor.stored_names} == set(stored)
    assert sum(tensor.num_bytes for tensor in plan) == sum(t.nbytes for t in stored.values())


def test_shards_respect_the_limit_and_are_all_in_the_index(tmp_path: Path) -> None:
    folder = synthesize("v3-nano", tmp_path / "out", shard_bytes=200_000)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [path.name for path in shards]
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    tensors = {name: path for path in shards for name in load_file(path)}
    assert {name: path.name for name, path in tensors.items()} == index["weight_map"]
    sizes = [sum(t.nbytes for t in load_file(path).values()) for path in shards]
    assert max(sizes) <= 200_000
    assert index["metadata"]["total_size"] == sum(sizes)


def test_the_same_seed_gives_the_same_files(nano: Path, tmp_path: Path) -> None:
    again = synthesize("v3-nano", tmp_path / "again")
    other = synthesize("v3-nano", tmp_path / "other", seed=1)

    for path in nano.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    assert (other / "model.safetensors").read_bytes() != (nano / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (nano / "tokenizer.json").read_bytes()


# -- tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [512, 8192])
def test_any_text_survives_encoding(vocab_size: int) -> None:
    tokenizer = train_tokenizer(vocab_size)
    text = "Hello, the world!\n  naïve 12345 你好 😀\t\x00 {}"

    ids = tokenizer.encode(text, add_special_tokens=False).ids

    assert tokenizer.get_vocab_size() == vocab_size
    assert tokenizer.decode(ids) == text
    assert max(tokenizer.encode(bytes(range(128)).decode()).ids) < vocab_size


def test_common_words_are_single_tokens_of_the_large_vocabulary() -> None:
    tokenizer = train_tokenizer(8192)

    assert len(tokenizer.encode(" the world is a good place", add_special_tokens=False).ids) == 6


def test_a_vocabulary_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 100; a synthetic tokenizer has 272 to"):
        train_tokenizer(100)


def test_markup_is_one_token_and_stays_in_decoded_text(nano: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(nano)
    text = "<｜tool▁calls▁begin｜><think></think><｜tool▁sep｜>"

    ids = tokenizer.encode(text, add_special_tokens=False)

    assert len(ids) == 4
    assert tokenizer.decode([*ids, 1], skip_special_tokens=True) == text


def test_prompts_start_with_the_begin_token(nano: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(nano)

    assert tokenizer.encode("hi")[0] == 0
    assert 0 not in tokenizer.encode("hi", add_special_tokens=False)


def test_the_chat_template_writes_deepseeks_format(nano: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(nano)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "tool", "content": "3"},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Bye"},
    ]

    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert text == (
        f"{BOS}Be brief.\n\nBe kind.<｜User｜>Hi<｜Assistant｜>Hello{EOS}"
        "<｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜User｜>Bye<｜Assistant｜>"
    )


# -- bad input --------------------------------------------------------------------------------


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()

    with pytest.raises(SynthesisError, match="exists and is not an empty folder"):
        synthesize("v3-nano", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_full_disk_is_foreseen(tmp_path: Path) -> None:
    with pytest.raises(SynthesisError, match=r"takes \d+ bytes, .* left; cut layers or experts"):
        synthesize("v3-nano", tmp_path / "out", overrides={"vocab_size": 1 << 50})
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    for name, age_s in (("old", 9000), ("new", 0)):
        partial = tmp_path / f"nano.partial-{name}"
        partial.mkdir()
        (partial / "config.json").write_text("{}")
        for path in (partial / "config.json", partial):
            os.utime(path, (time.time() - age_s,) * 2)

    synthesize("v3-nano", tmp_path / "nano", with_weights=False)

    assert {path.name for path in tmp_path.iterdir()} == {"nano", "nano.partial-new"}


def test_nothing_is_left_after_a_failure(tmp_path: Path) -> None:
    def fail(written: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize("v3-nano", tmp_path / "out", progress=fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "v3-giant"}, "there is no preset 'v3-giant'; presets are v3-nano"),
        ({"shape": "v3-nano", "layers": 0}, "at least one layer, got 0"),
        ({"shape": "v3-nano", "experts": 7}, "num_experts (7) must be a multiple of num_groups"),
    ],
)
def test_the_command_fails_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], message: str
) -> None:
    code = synth(SynthConfig(out=tmp_path / "out", **arguments))

    stderr = capsys.readouterr().err
    assert code == 1
    assert message in stderr
    assert stderr.count("\n") == 1


def test_the_command_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SynthConfig(shape="v2-nano", out=tmp_path / "out", dtype="fp8", layers=2)
    assert synth(config) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert load_config(tmp_path / "out").fp8 is not None


def test_every_preset_makes_a_model() -> None:
    assert {parse_config(preset_config(preset)).model_type for preset in PRESETS} == {
        "deepseek_v2",
        "deepseek_v3",
    }
