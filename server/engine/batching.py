"""Turns the rows of a plan into the tensors of a forward pass, on buffers that live on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch, TokenSpan


class BatchBuilder:
    """Owns the host buffers of a step's `ForwardBatch`; the next `build` overwrites them."""

    def __init__(self, *, max_tokens: int, max_rows: int, max_model_len: int) -> None:
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._max_blocks = -(-max_model_len // BLOCK_TOKENS)
        self._tokens, self._positions, self._slots = np.zeros((3, max_tokens), dtype=np.int64)
        self._starts = np.zeros(max_rows + 1, dtype=np.int32)
        self._lengths = np.zeros(max_rows, dtype=np.int32)
        self._tables = np.zeros(max_rows * self._max_blocks, dtype=np.int32)
        self._ramp = np.arange(max_model_len, dtype=np.int64)
        self._known: dict[int, tuple[Sequence[int], NDArray[np.int32]]] = {}

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence that ended."""
        self._known.pop(sequence_id, None)

    def build(self, rows: Sequence[TokenSpan]) -> ForwardBatch:
        """Return the batch of rows, in their order. Its tensors are views of the buffers."""
        num_rows = len(rows)
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        block_ids = [self._block_ids(row) for row in rows]
        width = max(len(ids) for ids in block_ids)
        tables_BM = self._tables[: num_rows * width].reshape(num_rows, width)
        num_tokens = 0
        for b, (row, ids) in enumerate(zip(rows, block_ids, strict=True)):
            tables_BM[b, : len(ids)] = ids
            num_tokens = self._fill(row, ids, num_tokens)
            self._starts[b + 1] = num_tokens
            self._lengths[b] = row.start + len(row.token_ids)
        return ForwardBatch(
            token_ids_T=torch.from_numpy(self._tokens[:num_tokens]),
            positions_T=torch.from_numpy(self._positions[:num_tokens]),
            slots_T=torch.from_numpy(self._slots[:num_tokens]),
            query_start_B1=torch.from_numpy(self._starts[: num_rows + 1]),
            context_lens_B=torch.from_numpy(self._lengths[:num_rows]),
            block_tables_BM=torch.from_numpy(tables_BM),
            max_query_tokens=max(len(row.token_ids) for row in rows),
        )

    def _fill(self, row: TokenSpan, ids: NDArray[np.int32], begin: int) -> int:
        """Write tokens, positions and slots of a row at `begin`; return where the next begins."""
        start, end = row.start, begin + len(row.token_ids)
        assert end <= self._max_tokens, (end, self._max_tokens)
        if end == begin + 1:
            self._tokens[begin] = row.token_ids[0]
            self._positions[begin] = start
            self._slots[begin] = int(ids[start // BLOCK_TOKENS]) * BLOCK_TOKENS + (
                start % BLOCK_TOKENS
            )
            return end
        positions = self._ramp[start : start + end - begin]
        self._tokens[begin:end] = row.token_ids
        self._positions[begin:end] = positions
        self._slots[begin:end] = ids[positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
        self._slots[begin:end] += positions % BLOCK_TOKENS
        return end

    def _block_ids(self, row: TokenSpan) -> NDArray[np.int32]:
        """Return the row's block table as an array, kept until the scheduler hands out another.

        A table is an immutable tuple that changes only when the sequence gains a block, so
        converting it every step would be most of the work of a long sequence.
        """
        known = self._known.get(row.sequence_id)
        if known is not None and known[0] is row.block_ids:
            return known[1]
        ids = np.array(row.block_ids, dtype=np.int32)
        if isinstance(row.block_ids, tuple):
            self._known[row.sequence_id] = (row.block_ids, ids)
        return ids
