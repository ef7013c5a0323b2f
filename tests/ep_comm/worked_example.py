"""Two ranks, four experts, two choices, expert e computes (e + 1) x: all results written out.

Rows are named (source rank, token).
"""

from __future__ import annotations

import torch

NUM_RANKS, NUM_EXPERTS, TOP_K, MAX_TOKENS = 2, 4, 2, 4
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS

IDS = [
    torch.tensor([[0, 2], [1, 0], [3, -1]]),
    torch.tensor([[2, 3], [0, 1]]),
]
WEIGHTS = [
    torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]),
    torch.tensor([[0.6, 0.4], [0.5, 0.5]]),
]

TOKENS_PER_RANK = [[2, 2], [1, 1]]
TOKENS_PER_EXPERT = [[2, 1, 1, 1], [1, 1, 1, 1]]
IS_TOKEN_IN_RANK = [[[1, 1], [1, 0], [0, 1]], [[0, 1], [1, 0]]]

ROWS_PER_TOKEN = [[(0, 0), (0, 1), (1, 1)], [(0, 0), (0, 2), (1, 0)]]
IDS_PER_TOKEN = [[[0, -1], [1, 0], [0, 1]], [[-1, 0], [1, -1], [0, 1]]]
WEIGHTS_PER_TOKEN = [
    [[0.5, 0.0], [0.25, 0.75], [0.5, 0.5]],
    [[0.0, 0.5], [1.0, 0.0], [0.6, 0.4]],
]
EXPERT_COUNTS = [[3, 2], [2, 2]]
FIRST_ROWS = [[0, 3], [0, 2]]

SOURCE_INFO = [[[0, 1, 1], [1, 1]], [[0, 0], [2, 0]]]
RANGES = [[[(0, 2), (2, 1)], [(0, 1), (1, 1)]], [[(0, 1), (1, 1)], [(0, 1), (1, 1)]]]

COMBINED_FACTORS = [[2.0, 1.25, 4.0], [3.4, 1.5]]
NUM_RANKS_HIT = [[2.0, 1.0, 1.0], [1.0, 1.0]]


def inputs_of(rank: int, hidden: int) -> torch.Tensor:
    """Return x `[T, hidden]` of a rank: (1 + 10 rank + token) in every channel."""
    tokens = torch.arange(len(IDS[rank]), dtype=torch.float32)
    return (1 + 10 * rank + tokens)[:, None].repeat(1, hidden)
