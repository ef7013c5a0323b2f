"""Machine code of compiled loops, kept beside the source and renewed when any source changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

from whalepod.kernels.cpu import simd


def _digest_sources() -> str:
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), Path(simd.__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES = _digest_sources()


class _SourceCache(FunctionCache):
    """Numba looks only at the file of the function itself, and would keep code that inlined an
    older version of another file."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        key: Any = super()
        return (*key._index_key(signature, codegen), _SOURCES)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call; it runs without the interpreter's lock."""
    dispatcher: Any = njit(nogil=True)(function)
    cache: Any = _SourceCache
    dispatcher._cache = cache(function)
    return dispatcher
