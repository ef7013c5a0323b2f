"""The training model: its fast paths equal transformers' own, its checkpoint is DeepSeek's."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3ForCausalLM

from whalepod.tools.tiny import model as tiny_model, train
from whalepod.tools.tiny.optimizer import MasterOptimizer


@pytest.fixture(scope="module")
def model() -> tiny_model.TinyModel:
    torch.manual_seed(0)
    made = tiny_model.TinyModel()
    for moe in made.moe_layers():
        moe.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    return made.eval()


@pytest.fixture(scope="module")
def folder(model: tiny_model.TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.save_checkpoint(model, folder)
    return folder


IDS = torch.randint(0, 1536, (2, 45), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_fast_paths_give_transformers_hidden(model: tiny_model.TinyModel) -> None:
    fast = model.hidden(IDS)
    model.trunk.set_attn_implementation("eager")
    model.trunk.set_experts_implementation("eager")
    plain = model.hidden(IDS)
    model.trunk.set_attn_implementation("tiny_causal")
    model.trunk.set_experts_implementation("tiny_padded")

    assert float((fast - plain).abs().max()) < 1e-4 * float(plain.abs().max())


def test_config_holds_deepseeks_keys_alone(folder: Path) -> None:
    """transformers completes the dictionary that it is given, in place."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "rope_theta" not in config["rope_scaling"]


@torch.no_grad()
def test_saved_checkpoint_loads_back_and_in_transformers(
    model: tiny_model.TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = rf"model\.layers\.{tiny_model.NUM_LAYERS}.*"
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [pattern])
    own = tiny_model.load_checkpoint(folder)
    theirs = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    ours, hidden = own.hidden(IDS), theirs.model(IDS).last_hidden_state
    assert torch.allclose(ours, hidden, atol=1e-5)
    assert not torch.allclose(ours, model.hidden(IDS), atol=1e-5)  # bf16 on disk
    assert own.mtp_hidden(IDS, ours).shape == (2, 44, 256)


def test_checkpoint_has_deepseeks_names(folder: Path) -> None:
    names = load_file(folder / "model.safetensors").keys()
    prefix = f"model.layers.{tiny_model.NUM_LAYERS}."

    assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} >= {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.experts.15.gate_proj.weight",
        "mlp.shared_experts.down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
    }
    assert (folder / "model.safetensors").stat().st_size < 24 * 2**20


def test_a_missing_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        tiny_model.load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"hidden_size": 256', '"hidden_size": 64'))
    with pytest.raises(ValueError, match="other sizes \\(hidden_size\\)"):
        tiny_model.load_checkpoint(tmp_path)


def test_balance_raises_the_bias_of_idle_experts(model: tiny_model.TinyModel) -> None:
    moe = next(iter(model.moe_layers()))
    model.hidden(IDS)
    before = moe.gate.e_score_correction_bias.clone()
    moe.experts.num_rows_E = torch.tensor([16, 0] + [8] * 14)

    tiny_model.balance(model, 0.5)

    change = moe.gate.e_score_correction_bias - before
    assert torch.allclose(change, torch.tensor([-0.5, 0.5] + [0.0] * 14), atol=1e-6)


@torch.no_grad()
def test_an_untrained_model_already_looks_where_copying_needs_it() -> None:
    torch.manual_seed(0)
    trunk = tiny_model.TinyModel().trunk
    trunk.set_attn_implementation("eager")
    text = torch.randint(20, 1536, (40,))
    ids = torch.cat([text, text]).unsqueeze(0)
    back, match = trunk.model(ids, output_attentions=True, use_cache=False).attentions[:2]

    row = torch.arange(3, 80)
    for head in range(3):
        assert float(back[0, head, row, row - head - 1].mean()) > 0.7
    repeat = torch.arange(42, 79)  # at the second "t", look at what followed the first
    assert float(match[0, 1, repeat, repeat - 39].mean()) > 0.5


def test_optimizer_lowers_the_loss_and_skips_frozen_weights() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, bias=False)
    frozen = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    optimizer = MasterOptimizer([("w", layer.weight), ("f", frozen)])
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    losses = []
    for _ in range(20):
        loss = (layer(x) - y).square().mean()
        torch.autograd.backward(loss)
        optimizer.step(0.02)
        losses.append(float(loss.detach()))

    assert losses[-1] < losses[0]
    assert torch.equal(frozen, torch.ones(4, 4))


def test_a_resumed_optimizer_goes_on_as_the_first_would_have() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    first, second = (MasterOptimizer([("w", layer.weight)]) for layer in layers)

    def step(layer: torch.nn.Linear, optimizer: MasterOptimizer) -> None:
        torch.autograd.backward((layer(x) - y).square().mean())
        optimizer.step(0.02)

    step(layers[0], first)
    second.load({name: tensor.clone() for name, tensor in first.state().items()})
    for layer, optimizer in zip(layers, (first, second), strict=True):
        step(layer, optimizer)
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_learning_rate_warms_up_holds_and_falls() -> None:
    config = train.TrainConfig(out=Path("unused"))

    rates = [train.learning_rate(config, step, share) for step, share in
             ((0, 0.0), (1_000, 0.3), (1_000, 0.75), (1_000, 1.0))]  # fmt: skip

    assert rates[0] < rates[1] == config.learning_rate
    assert rates[1] > rates[2] > rates[3] > 0


def test_rows_are_padded_to_few_lengths_and_weighted_by_author() -> None:
    batch = train.make_batch([([5, 6, 7], [0.0, 1.0, 1.0]), ([8], [0.3])], 32, pad=2)

    assert batch.ids.shape == batch.weights.shape == (2, 32)
    assert batch.ids[1, :2].tolist() == [8, 2]
    assert float(batch.weights.sum()) == pytest.approx(2.3)
    assert batch.num_tokens == 4
    assert train.padded_length(33) == 48
