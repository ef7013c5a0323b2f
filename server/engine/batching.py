"""Turns the rows of a plan into the tensors of a forward pass, on buffers that live on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch, TokenSpan

MAX_LAYOUTS = 64
"""Shapes of a step whose views of the buffers are kept."""
FEW_TOKENS = 8
"""Rows of at most this many tokens are written one by one: quicker than whole arrays."""


class BatchBuilder:
    """Owns the host buffers of a step's `ForwardBatch`; the next `build` overwrites them.

    Steps of equal shape get the same views, and a block table is written only where another one
    was before: a step of decoding changes little of the one before it.
    """

    def __init__(self, *, max_tokens: int, max_rows: int, max_model_len: int) -> None:
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._max_blocks = -(-max_model_len // BLOCK_TOKENS)
        self._tokens, self._positions, self._slots = np.zeros((3, max_tokens), dtype=np.int64)
        self._starts = np.zeros(max_rows + 1, dtype=np.int32)
        self._lengths = np.zeros(max_rows, dtype=np.int32)
        self._tables = np.zeros(max_rows * self._max_blocks, dtype=np.int32)
        self._ramp = np.arange(max_model_len, dtype=np.int64)
        self._batches: OrderedDict[tuple[int, int, int, int], ForwardBatch] = OrderedDict()
        self._width = 0
        self._written: list[Sequence[int]] = []
        """The block table in each row of the buffer, which holds rows of `_width`."""

    def build(self, rows: Sequence[TokenSpan]) -> ForwardBatch:
        """Return the batch of rows, in their order. Its tensors are views of the buffers."""
        num_rows = len(rows)
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        self._write_tables([row.block_ids for row in rows])
        num_tokens = max_query_tokens = 0
        for b, row in enumerate(rows):
            end = self._fill(b, row, num_tokens)
            max_query_tokens = max(max_query_tokens, end - num_tokens)
            num_tokens = self._starts[b + 1] = end
            self._lengths[b] = row.start + len(row.token_ids)
        return self._batch(num_tokens, num_rows, self._width, max_query_tokens)

    def _batch(
        self, num_tokens: int, num_rows: int, width: int, max_query_tokens: int
    ) -> ForwardBatch:
        """Return the views of a layout, those of an earlier step if it had the same."""
        layout = (num_tokens, num_rows, width, max_query_tokens)
        batch = self._batches.get(layout)
        if batch is not None:
            return batch
        tables_BM = self._tables[: num_rows * width].reshape(num_rows, width)
        batch = self._batches[layout] = ForwardBatch(
            token_ids_T=torch.from_numpy(self._tokens[:num_tokens]),
            positions_T=torch.from_numpy(self._positions[:num_tokens]),
            slots_T=torch.from_numpy(self._slots[:num_tokens]),
            query_start_B1=torch.from_numpy(self._starts[: num_rows + 1]),
            context_lens_B=torch.from_numpy(self._lengths[:num_rows]),
            block_tables_BM=torch.from_numpy(tables_BM),
            max_query_tokens=max_query_tokens,
        )
        if len(self._batches) > MAX_LAYOUTS:
            self._batches.popitem(last=False)
        return batch

    def _write_tables(self, tables: list[Sequence[int]]) -> None:
        """Write the block tables that are not there yet.

        A table that is an immutable tuple changes only when its sequence gains a block, and a long
        one takes longer to write than all the rest of a step.
        """
        width, written = max(map(len, tables)), self._written
        if width != self._width:
            self._width = width
            written.clear()
        for b, table in enumerate(tables):
            if b < len(written) and written[b] is table and isinstance(table, tuple):
                continue
            self._tables[b * width : b * width + len(table)] = table
            written[b : b + 1] = [table]

    def _fill(self, b: int, row: TokenSpan, begin: int) -> int:
        """Write tokens, positions and slots of a row at `begin`; return where the next begins."""
        start, end = row.start, begin + len(row.token_ids)
        assert end <= self._max_tokens, (end, self._max_tokens)
        if end - begin <= FEW_TOKENS:
            for i, token_id in enumerate(row.token_ids):
                block, offset = divmod(start + i, BLOCK_TOKENS)
                self._tokens[begin + i] = token_id
                self._positions[begin + i] = start + i
                self._slots[begin + i] = row.block_ids[block] * BLOCK_TOKENS + offset
            return end
        blocks = self._tables[b * self._width : (b + 1) * self._width].astype(np.int64)
        positions = self._ramp[start : start + end - begin]
        self._tokens[begin:end] = row.token_ids
        self._positions[begin:end] = positions
        self._slots[begin:end] = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS
        self._slots[begin:end] += positions % BLOCK_TOKENS
        return end
