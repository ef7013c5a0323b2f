"""The multi-token-prediction module against transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.models.oracle import OracleWeights, Sequences, make_model, make_oracle, random_ids
from whalepod.kernels.reference import ReferenceKernels
from whalepod.models.cache import LatentCache
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.mtp.module import MtpModule

NUM_LAYERS = 3


def make_mtp_oracle(oracle: PreTrainedModel, seed: int = 0) -> MtpModel:
    """Build transformers' module on top of `oracle`, with random weights of a useful scale."""
    mtp = MtpModel(oracle, 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in mtp.layers.state_dict().values():
            if tensor.dim() == 1:
                tensor.normal_(1.0, 0.1, generator=generator)
            else:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
    return mtp.eval()


class MtpOracleWeights(OracleWeights):
    """The module's tensors under DeepSeek's names."""

    def __init__(self, oracle: PreTrainedModel, mtp: MtpModel) -> None:
        super().__init__(oracle)
        for name, tensor in mtp.layers[0].state_dict().items():
            name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            self._add(f"model.layers.{NUM_LAYERS}.{name}", tensor)


@torch.no_grad()
def oracle_hidden(oracle: PreTrainedModel, mtp: MtpModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return the main model's hidden states and the module's, for t[1:] after h[:-1]."""
    main = oracle.model(torch.tensor([ids]), use_cache=False).last_hidden_state
    embedded = mtp.embed_tokens(torch.tensor([ids[1:]]))
    positions = torch.arange(len(ids) - 1)[None]
    mask = torch.full((len(ids) - 1, len(ids) - 1), -torch.inf).triu(1)[None, None]
    rotary = mtp.rotary_emb(embedded, positions)
    hidden = mtp.layers[0](embedded, main[:, :-1], rotary, mask, positions, None)
    return main[0], hidden[0]


def make_pair() -> tuple[PreTrainedModel, MtpModel, DeepseekV3, MtpModule]:
    oracle = make_oracle(num_nextn_predict_layers=1)
    mtp = make_mtp_oracle(oracle)
    model = make_model(oracle, ReferenceKernels())
    module = MtpModule(model, MtpOracleWeights(oracle, mtp), ReferenceKernels())
    return oracle, mtp, model, module


def with_mtp_layer(sequences: Sequences) -> Sequences:
    rows = sequences.cache.rows_LPBC
    sequences.cache = LatentCache(
        num_layers=NUM_LAYERS + 1,
        num_blocks=rows.shape[1],
        row_width=rows.shape[3],
        dtype=rows.dtype,
        device="cpu",
    )
    sequences.cache.rows_LPBC.fill_(torch.nan)
    return sequences


@pytest.mark.parametrize("length", [2, 64, 65, 130])
def test_guesses_equal_transformers(length: int) -> None:
    oracle, mtp, model, module = make_pair()
    ids = random_ids(length, 96)
    main, expected = oracle_hidden(oracle, mtp, ids)
    sequences = with_mtp_layer(Sequences(model, [ids]))
    batch = sequences._batch([length])
    before = torch.cat([torch.zeros_like(main[:1]), main[:-1]])

    hidden = module.forward(before, batch, sequences.cache)

    torch.testing.assert_close(hidden[1:], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        model.logits(hidden[1:]), mtp._project_to_logits(expected), atol=1e-4, rtol=1e-4
    )


def test_rows_written_without_attention_serve_a_later_guess() -> None:
    oracle, mtp, model, module = make_pair()
    ids = random_ids(100, 96)
    main, expected = oracle_hidden(oracle, mtp, ids)
    before = torch.cat([torch.zeros_like(main[:1]), main[:-1]])
    sequences = with_mtp_layer(Sequences(model, [ids]))
    known = sequences._batch([99])
    # slot 0 keeps its NaN: it is masked
    module.write_rows(
        known.token_ids_T[1:],
        before[1:99],
        known.positions_T[1:],
        known.slots_T[1:],
        sequences.cache,
    )
    sequences.num_computed = [99]

    hidden = module.forward(before[99:], sequences._batch([1]), sequences.cache)

    torch.testing.assert_close(hidden[0], expected[-1], atol=1e-4, rtol=0)
