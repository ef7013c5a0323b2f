"""A model whose decode steps are recorded and repeated computes what it computes step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor

from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.interface import Kernels
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.models.config import parse_config
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.presets import preset_config
from whalepod.models.weights import DummyWeights

NUM_REQUESTS = 3


def compute_each_time(key: Hashable, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
    return compute()


class Steps:
    """A model, its cache, and a batch whose tensors stay where they are."""

    def __init__(self, kernels: Kernels, preset: str, dtype: torch.dtype) -> None:
        config = parse_config(preset_config(preset))
        weights = DummyWeights(config, dtype=dtype, seed=0)
        self.model = DeepseekV3(
            config, weights, kernels, max_positions=64, absorbed_max_query_tokens=64
        )
        self.cache = LatentCache(
            num_layers=config.num_layers, num_blocks=NUM_REQUESTS, row_width=config.cache_row_width,
            dtype=dtype, device="cpu",
        )  # fmt: skip
        self.batch = ForwardBatch(
            token_ids_T=torch.zeros(NUM_REQUESTS, dtype=torch.int64),
            positions_T=torch.zeros(NUM_REQUESTS, dtype=torch.int64),
            slots_T=torch.zeros(NUM_REQUESTS, dtype=torch.int64),
            query_start_B1=torch.arange(NUM_REQUESTS + 1, dtype=torch.int32),
            context_lens_B=torch.zeros(NUM_REQUESTS, dtype=torch.int32),
            block_tables_BM=torch.arange(NUM_REQUESTS, dtype=torch.int32)[:, None],
            max_query_tokens=1,
        )

    def step(self, position: int) -> Tensor:
        batch = self.batch
        generator = torch.Generator().manual_seed(position)
        batch.token_ids_T.copy_(torch.randint(0, 100, (NUM_REQUESTS,), generator=generator))
        batch.positions_T.fill_(position)
        batch.slots_T.copy_(torch.arange(NUM_REQUESTS) * 64 + position)
        batch.context_lens_B.fill_(position + 1)
        return self.model.forward(batch, self.cache)


@pytest.mark.parametrize("preset", ["v3-nano", "v2-nano"])
@pytest.mark.parametrize(
    ("is_int8", "dtype"),
    [(False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)],
)
def test_replayed_steps_give_the_same_bits(is_int8: bool, dtype: torch.dtype, preset: str) -> None:
    repeated = Steps(CpuKernels(num_threads=2, is_int8=is_int8), preset, dtype)
    eager = CpuKernels(num_threads=1, is_int8=is_int8)
    eager.replay = compute_each_time  # type: ignore[method-assign]
    expected = Steps(eager, preset, dtype)
    for position in range(6):
        assert torch.equal(repeated.step(position), expected.step(position)), position
    assert torch.equal(repeated.cache.rows_LPBC, expected.cache.rows_LPBC)
