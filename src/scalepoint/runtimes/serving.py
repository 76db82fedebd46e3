"""A file in a child process that stays, to be called again and again: what a user's metric judges."""

import io
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from scalepoint.errors import VerificationError
from scalepoint.runtimes.process import (
    TIMEOUT_SECONDS,
    Child,
    Status,
    describe_exit,
    describe_missing,
    prefix_input_names,
    total_memory,
)
from scalepoint.runtimes.runtime import Runtime
from scalepoint.support.cpu import check_threads


class RuntimeSession:
    """A file in its runtime until `close`; `seconds` limits one call, `options` are the runtime's own.

    Several threads may call it: the child answers one request at a time.
    """

    def __init__(
        self,
        runtime: Runtime,
        path: Path,
        *,
        threads: int = 0,
        seconds: float = TIMEOUT_SECONDS,
        memory: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if not runtime.is_here:
            raise VerificationError(describe_missing(runtime).message)
        check_threads(threads)
        self.runtime, self.path, self.seconds, self.memory = runtime, path, seconds, memory or total_memory()
        self._where = f"{path} in {runtime.name}"
        self._child, self._owner, self._is_broken = Child(runtime), os.getpid(), False
        self.close = weakref.finalize(self, self._child.close)
        request = {
            "task": "serve",
            "path": str(path),
            "options": {"threads": threads, **(options or {})},
            "memory": self.memory,
        }
        with self._exchange():
            self._child.send(json.dumps(request).encode() + b"\n")
            line = self._child.output.readline()
            answer = self._check_complete(line, line.endswith(b"\n"))
        self.inputs: list[str] = json.loads(answer)["inputs"]

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs in the file's order."""
        return self._request(prefix_input_names(feeds))

    def generate(self, tokens: Sequence[int], count: int) -> tuple[list[int], float, float]:
        """So many tokens that a language model goes on with, the seconds for the given ones and for the others."""
        made, prefill, decode = self._request({"tokens": np.asarray(tokens), "count": np.asarray(count)})
        return made.tolist(), float(prefill), float(decode)

    def _request(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        buffer = io.BytesIO()
        np.savez(buffer, **dict[str, Any](arrays))
        frame = buffer.getvalue()
        with self._exchange():
            self._child.send(len(frame).to_bytes(8, "little") + frame)
            size = int.from_bytes(self._read(8), "little")
            answer = self._read(size)
        with np.load(io.BytesIO(answer), allow_pickle=False) as file:
            return [file[str(index)] for index in range(len(file.files))]

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """One request and its answer, for one thread at a time and within the time of a call.

        After an exchange that did not end (Ctrl-C, a time limit), the next answer in the pipe would be the answer to
        this request: the child is killed, and later calls are refused.
        """
        if os.getpid() != self._owner:  # two processes that share a pipe would get each other's answers
            raise VerificationError(f"{self._where}: it was opened in another process: open it again in this one")
        with self._child.lock:
            if not self.close.alive:
                raise VerificationError(f"{self._where}: it is closed")
            if self._is_broken:
                raise VerificationError(f"{self._where}: an earlier call did not end: open it again")
            self._is_broken = True
            try:
                with self._child.within(self.seconds):
                    yield
                self._is_broken = False
            finally:
                if self._is_broken:
                    self._child.kill()

    def _read(self, size: int) -> bytes:
        data = self._child.output.read(size)
        return self._check_complete(data, len(data) == size)

    def _check_complete(self, data: bytes, is_whole: bool) -> bytes:
        """What came; an error that says why it ends early."""
        if is_whole:
            return data
        code = self._child.wait()
        if self._child.is_late:
            raise VerificationError(f"{self._where}: {Status.TIMEOUT.value}: no answer within {self.seconds:.0f} s")
        answer = describe_exit(self.runtime, code, self._child.errors(), self.memory)
        raise VerificationError(f"{self._where}: {answer.status.value}: {answer.message}")
