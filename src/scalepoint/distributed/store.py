"""The key-value store of the default group (TCPStore or another store of torch), shared by all ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scalepoint.errors import RankError


class GroupStore:
    """The store of the default group. Errors of torch become RankErrors."""

    def __init__(self) -> None:
        from scalepoint.compat.torch_names import default_store  # noqa: PLC0415  # imports torch

        self._store: Any = default_store()
        # The store outlives ranks that torchrun restarts: each attempt has its own keys.
        self._prefix = f"scalepoint/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def set(self, key: str, value: str | bytes) -> None:
        with _translated_errors():
            self._store.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        with _translated_errors():
            value: bytes = self._store.get(self._full(key))
        return value

    def has(self, key: str) -> bool:
        with _translated_errors():
            return bool(self._store.check([self._full(key)]))

    def delete(self, key: str) -> None:
        with _translated_errors():
            self._store.delete_key(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Translate the errors of torch's stores, which are RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            "the store of the group cannot be reached, because its process (rank 0 or torchrun) has exited. "
            "Start all ranks again with resume: finished work is kept"
        ) from error
