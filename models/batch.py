"""What one forward pass computes, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class TokenSpan(Protocol):
    """Tokens of one sequence in a step: `token_ids[i]` sits at position `start + i`.

    `block_ids` covers at least `start + len(token_ids)` tokens.
    """

    @property
    def sequence_id(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Tokens of all requests of a step, one after the other.

    token_ids_T      [T]      int64
    positions_T      [T]      int64, position in the request's own text
    slots_T          [T]      int64, block * 64 + offset: where the token's cache row goes
    query_start_B1   [B + 1]  int32, request b owns tokens start[b] .. start[b + 1]
    context_lens_B   [B]      int32, tokens in the cache after this step
    block_tables_BM  [B, M]   int32, physical blocks; entries past the context may be garbage
    max_query_tokens          the most tokens of one request, known on the host
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_start_B1: Tensor
    context_lens_B: Tensor
    block_tables_BM: Tensor
    max_query_tokens: int
    num_tokens: int = field(init=False)
    _places: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = (
            self.token_ids_T, self.positions_T, self.slots_T, self.query_start_B1,
            self.context_lens_B, self.block_tables_BM,
        )  # fmt: skip
        addresses = [tensor.data_ptr() for tensor in tensors]
        places = (*addresses, *self.token_ids_T.shape, *self.block_tables_BM.shape)
        object.__setattr__(self, "num_tokens", len(self.token_ids_T))
        object.__setattr__(self, "_places", places)

    def places(self) -> tuple[int, ...]:
        """Return what tells batches apart that lie elsewhere or have other shapes, values aside."""
        return self._places
