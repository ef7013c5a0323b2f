"""Who drafts with the checkpoint's modules, and what a drafter needs of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from whalepod.models.batch import ForwardBatch, TokenSpan
from whalepod.models.cache import LatentCache
from whalepod.mtp.tail import KnownEnd, Tail


class DraftModel(Protocol):
    """One module; `MtpModule` is it."""

    def write_rows(
        self,
        token_ids_T: Tensor,
        previous_hidden_TH: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cache: LatentCache,
    ) -> None: ...

    def forward(
        self, previous_hidden_TH: Tensor, batch: ForwardBatch, cache: LatentCache
    ) -> Tensor: ...

    def end(self, previous_hidden_TH: Tensor, tail: Tail, cache: LatentCache) -> Tensor: ...

    def guess(self, previous_hidden_TH: Tensor, tail: Tail, cache: LatentCache) -> None: ...

    def join(self) -> None: ...

    def logits(self, hidden_BH: Tensor) -> Tensor: ...


class BatchSource(Protocol):
    """Turns spans into tensors that live until the next call."""

    def build(self, rows: Sequence[TokenSpan]) -> ForwardBatch: ...


class StepSpan(TokenSpan, Protocol):
    """Tokens of one sequence in a step, of which the last `num_drafts` are guesses."""

    @property
    def num_drafts(self) -> int: ...


Choose = Callable[[Tensor, Sequence[int], Sequence[Sequence[int]]], list[int]]
"""(logits [B, V], numbers of the texts that they belong to, drafts of these so far) -> one draft
for each row."""


class Drafter(Protocol):
    """Owns the states that are kept between steps; the modules' rows are layers of the cache.

    A step calls `note_forward`, `draft` and `keep`. What `keep` changes is all that outlives the
    step, so that one that failed before it can be run again.
    """

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence that ended."""
        ...

    def note_preempted(self, sequence_id: int) -> None:
        """Note that a sequence lost its cache rows."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy what belongs to a full block beside its rows."""
        ...

    def note_forward(
        self, spans: Sequence[StepSpan], batch: ForwardBatch, hidden_TH: Tensor
    ) -> None:
        """Store rows of a step's tokens, `hidden_TH` being the model's states.

        `batch` may be overwritten, as by `BatchSource.build`.
        """
        ...

    def draft(
        self, texts: Sequence[KnownEnd], choose: Choose, num_passes: int = 0
    ) -> list[list[int]]:
        """Guess what follows each text of the step, one full pass for each token.

        Passes up to `num_passes`, which other ranks may run, are joined without tokens.
        """
        ...

    def keep(self, texts: Sequence[KnownEnd]) -> None:
        """Keep the states of each text's last true token. A repeated step keeps them again."""
        ...

    def join(self, num_passes: int) -> None:
        """Take part in what other ranks do with their tokens, `num_passes` passes of `draft`
        included, without tokens of this one."""
        ...
