"""Machine code of numba kept for the next process, and renewed when any source changes."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
)

logger = logging.getLogger(__name__)

_KERNELS = Path(__file__).parents[1]


class CompileCache(FunctionCache):
    """Numba's cache of machine code, stamped with all sources that a function may inline.

    These are the files of its own folder and all of `kernels`. Numba looks only at
    the file of the function itself, and would keep code that inlined an older version of another
    file. It also keeps one index per function: of two processes that compile it for two dtypes at
    once, each can leave the other's code under its own name. So there is an index per function,
    signature and machine here; every process that writes it writes the same.
    """

    def __init__(self, function: Callable[..., Any], folder: Path | None = None) -> None:
        """folder: None takes numba's choice, beside the sources or in NUMBA_CACHE_DIR."""
        self._stamp = _digest_sources(Path(function.__code__.co_filename).parent)
        if folder is None:
            super().__init__(function)
            return
        self._name, self._py_func = repr(function), function
        self._impl = _PlacedCode(function, folder, self._stamp)
        self._cache_path = self._impl.locator.get_cache_path()
        self.enable()

    def _load_overload(self, signature: Any, target_context: Any) -> Any:
        self._choose_files(signature, target_context.codegen())
        try:
            return super()._load_overload(signature, target_context)
        except OSError:  # saving says why
            return None

    def _save_overload(self, signature: Any, data: Any) -> None:
        self._choose_files(signature, data.codegen)
        try:
            super()._save_overload(signature, data)
        except OSError as error:
            logger.warning(
                "compiled kernels cannot be kept in %s (%s): each start compiles them again",
                self._cache_path, error.strerror,
            )  # fmt: skip

    def _choose_files(self, signature: Any, codegen: Any) -> None:
        key = repr(self._index_key(signature, codegen)).encode()
        name = f"{self._impl.filename_base}-{hashlib.sha256(key).hexdigest()[:16]}"
        self._cache_file = IndexDataCacheFile(self._cache_path, name, self._stamp)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call; it runs without the interpreter's lock."""
    dispatcher: Any = njit(nogil=True)(function)
    try:
        dispatcher._cache = CompileCache(function)
    except RuntimeError as error:  # no folder can be written, NUMBA_CACHE_DIR neither
        logger.warning("%s: each start compiles it again", error)
    return dispatcher


class _Place(_CacheLocator):
    """Where numba's cache keeps the code of one function."""

    def __init__(self, function: Callable[..., Any], folder: Path, stamp: str) -> None:
        source = function.__code__.co_filename
        self._folder = str(folder / self.get_suitable_cache_subpath(source))
        self._line = function.__code__.co_firstlineno
        self._stamp = stamp

    def get_cache_path(self) -> str:
        return self._folder

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return str(self._line)


class _PlacedCode(CompileResultCacheImpl):
    """What numba's cache keeps of a compiled function, in a folder of our choice."""

    def __init__(self, function: Callable[..., Any], folder: Path, stamp: str) -> None:
        self._locator = _Place(function, folder, stamp)  # numba's own would look for one
        name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))


@functools.cache
def _digest_sources(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted({*folder.glob("*.py"), *_KERNELS.rglob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()
