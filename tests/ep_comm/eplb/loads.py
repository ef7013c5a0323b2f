"""Expert loads with topics that change over time, from a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from whalepod.ep_comm.eplb.trace import TraceRecord

TOKENS_PER_RECORD = 20_000


def shifting_loads(
    seed: int,
    *,
    num_layers: int = 4,
    num_experts: int = 64,
    num_records: int = 24,
    shift_every: int = 6,
) -> Iterator[TraceRecord]:
    """Yield loads of Zipf(0.7) topics: each prefers other experts, and every `shift_every` records
    the mixture of topics changes."""
    random = np.random.default_rng(seed)
    ranked = np.arange(1, num_experts + 1) ** -0.7
    topics = np.stack([[random.permutation(ranked) for _ in range(num_layers)] for _ in range(5)])
    mixture = random.dirichlet(np.full(5, 0.5))
    for number in range(num_records):
        if number % shift_every == 0:
            mixture = random.dirichlet(np.full(5, 0.5))
        expected_LE = np.einsum("t,tle->le", mixture, topics)
        share_LE = expected_LE / expected_LE.sum(axis=1, keepdims=True)
        loads_LE = np.stack([random.multinomial(TOKENS_PER_RECORD, p) for p in share_LE])
        yield TraceRecord(100 * (number + 1), 100, loads_LE)
