"""``compiled``: numba's decorator with a cache on disk that can be rebuilt or done without, but never ends a run."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import config
from numba.core.caching import FunctionCache, IndexDataCacheFile

logger = logging.getLogger("tagc")

_warned: list[str] = []  # one warning in a process, however many functions meet the same disk


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Compile a function on its first call, to run without the interpreter lock; ``options`` are those of ``njit``.

    The machine code is kept beside the source, or in ``NUMBA_CACHE_DIR``. An entry that cannot be read is discarded and
    compiled again; where nothing can be written, each process compiles for itself. Either is one warning a process.
    """

    def decorate(function: Any) -> Any:
        dispatcher = njit(nogil=True, **options)(function)
        if hasattr(dispatcher, "enable_caching"):  # not with NUMBA_DISABLE_JIT
            try:
                dispatcher._cache = _Cache(function)
            except (RuntimeError, OSError) as error:  # neither that folder nor the user's cache can be written
                beside = os.path.join(os.path.dirname(function.__code__.co_filename), "__pycache__")
                _warn(getattr(config, "CACHE_DIR", "") or beside, error)
        return dispatcher

    return decorate


class _Damaged(Exception):
    """The bytes of an entry are not those that were written."""


class _CheckedFile(IndexDataCacheFile):
    """Entries that say what they are.

    numba names its files by number. An index that was written for a data file that was not (a full disk) would
    otherwise give the machine code of an older source, and a damaged block inside the machine code would be run.
    """

    def save(self, key: Any, data: Any) -> None:
        content = pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)
        super().save(key, (self._source_stamp, key, hashlib.sha256(content).digest(), content))

    def load(self, key: Any) -> Any:
        entry = super().load(key)
        if entry is None:
            return None
        stamp, entry_key, digest, content = entry
        if (stamp, entry_key) != (self._source_stamp, key):
            return None
        if hashlib.sha256(content).digest() != digest:
            raise _Damaged("an entry's checksum does not match")
        return pickle.loads(content)


class _Cache(FunctionCache):
    """numba's cache of one function; what goes wrong with the disk is reported and costs no more than the cache."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _CheckedFile(
            self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling random bytes can raise nearly anything
            self._discard(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except (OSError, EOFError, pickle.PickleError) as error:
            self._discard(error)

    def _discard(self, error: Exception) -> None:
        """Forget all entries of this function; the data files are overwritten by and by."""
        _warn(self._cache_path, error)
        try:
            os.unlink(self._cache_file._index_path)
        except FileNotFoundError:
            pass
        except OSError:
            self.disable()  # it stays as it is: no more tries


def _warn(folder: str, error: Exception) -> None:
    if not _warned:
        _warned.append(folder)
        logger.warning(
            "the cache of compiled code in %s cannot be used in full (%s: %s); what is missing is compiled again, "
            "which takes a while. If this comes back, check space and rights there, or set NUMBA_CACHE_DIR",
            folder,
            type(error).__name__,
            error,
        )
