"""RuntimeSession: a file in a child process that answers many calls, for example those of a user's metric."""

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
    """A file that is loaded in its runtime until `close`. Threads may share it; they wait for each other.

    Args:
        runtime: The runtime.
        path: The file.
        threads: Threads of the runtime; 0 lets the runtime choose.
        seconds: Time limit of one call.
        memory: Memory limit in bytes; the memory of the machine by default.
        options: Further options of the child program.
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
        if not runtime.is_installed:
            raise VerificationError(describe_missing(runtime).message)
        check_threads(threads)
        self.runtime, self.path, self.seconds, self.memory = runtime, path, seconds, memory or total_memory()
        self._where = f"{path} in {runtime.name}"
        self._child, self._owner, self._is_broken = Child(runtime), os.getpid(), False
        # Runs when it is called, when this object is deleted, or when Python exits; the first of them closes the child.
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
        """Run the file. Return its outputs in the order of the file."""
        return self._request(prefix_input_names(feeds))

    def generate(self, tokens: Sequence[int], count: int) -> tuple[list[int], float, float]:
        """Generate `count` tokens greedily. Return them, the seconds for the prompt and for the generation."""
        # The child generates instead of running the file once if the arrays are called like this (child_loop.py).
        generated, prefill_seconds, decode_seconds = self._request(
            {"tokens": np.asarray(tokens), "count": np.asarray(count)}
        )
        return generated.tolist(), float(prefill_seconds), float(decode_seconds)

    def _request(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        buffer = io.BytesIO()
        np.savez(buffer, **dict[str, Any](arrays))
        frame = buffer.getvalue()
        with self._exchange():  # a frame is its size in 8 bytes, then an .npz file
            self._child.send(len(frame).to_bytes(8, "little") + frame)
            size = int.from_bytes(self._read(8), "little")
            answer = self._read(size)
        with np.load(io.BytesIO(answer), allow_pickle=False) as file:
            return [file[str(index)] for index in range(len(file.files))]

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Context for one request and its answer: one thread at a time, within the time limit.

        If an exchange does not end (Ctrl-C, time limit), its answer may still arrive and would be read as the answer to
        the next request. So the child is killed, and later calls are refused.
        """
        if os.getpid() != self._owner:  # after fork() two processes share the pipe and would mix up their answers
            raise VerificationError(f"{self._where} was opened in another process: open it again in this process")
        with self._child.lock:
            if not self.close.alive:
                raise VerificationError(f"{self._where} is closed: open it again")
            if self._is_broken:
                raise VerificationError(f"{self._where} cannot be used, an earlier call did not end: open it again")
            self._is_broken = True  # until the exchange ends
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

    def _check_complete(self, data: bytes, is_complete: bool) -> bytes:
        """Return the data, or raise an error that says why the child stopped before it was complete."""
        if is_complete:
            return data
        exit_code = self._child.wait()
        if self._child.is_late:
            raise VerificationError(f"{self._where}: {Status.TIMEOUT.value}: no answer within {self.seconds:.0f} s")
        answer = describe_exit(self.runtime, exit_code, self._child.errors(), self.memory)
        raise VerificationError(f"{self._where}: {answer.status.value}: {answer.message}")
