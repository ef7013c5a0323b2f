"""The matcher of a text that only its reasoning's end is asked of."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray


class Unconstrained:
    """A `Matcher` that allows every token."""

    def __init__(self, vocab_size: int) -> None:
        self._all_V = np.ones(vocab_size, np.bool_)

    def consume(self, token_id: int) -> bool:
        return True

    def allowed(self) -> NDArray[np.bool_]:
        return self._all_V

    def copy(self) -> Self:
        return self  # there is no place to be at
