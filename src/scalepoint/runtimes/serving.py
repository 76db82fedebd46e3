"""A file in a child process that stays, to be called again and again: what a user's metric judges."""

import io
import json
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from scalepoint.errors import VerificationError
from scalepoint.processor import check_threads, child_environment
from scalepoint.runtimes.process import SECONDS, Status, all_memory, command, ended, missing, named
from scalepoint.runtimes.runtime import Runtime


class Served:
    """A file in its runtime until `close`; `seconds` limits one call, `options` are the runtime's own."""

    def __init__(
        self,
        runtime: Runtime,
        path: Path,
        *,
        threads: int = 0,
        seconds: float = SECONDS,
        memory: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if not runtime.is_here:
            raise VerificationError(missing(runtime).message)
        check_threads(threads)
        self.runtime, self.path, self.seconds, self.memory = runtime, path, seconds, memory or all_memory()
        self.is_late = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the child lives
        self._child = subprocess.Popen(  # noqa: S603  # our own file, no shell
            command(runtime),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment(),
        )
        self.close = weakref.finalize(self, _end, self._child, self._errors)
        request = {
            "task": "serve",
            "path": str(path),
            "options": {"threads": threads, **(options or {})},
            "memory": self.memory,
        }
        with self._watched():
            self._send(json.dumps(request).encode() + b"\n")
            answer = self._or_why(self._pipe.readline())
        self.inputs: list[str] = json.loads(answer)["inputs"]

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs in the file's order."""
        return self._answered(named(feeds))

    def generate(self, tokens: Sequence[int], count: int) -> tuple[list[int], float, float]:
        """So many tokens that a language model goes on with, the seconds for the given ones and for the others."""
        made, prefill, decode = self._answered({"tokens": np.asarray(tokens), "count": np.asarray(count)})
        return made.tolist(), float(prefill), float(decode)

    def _answered(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        buffer = io.BytesIO()
        np.savez(buffer, **dict[str, Any](arrays))
        frame = buffer.getvalue()
        with self._watched():
            self._send(len(frame).to_bytes(8, "little") + frame)
            size = int.from_bytes(self._or_why(self._pipe.read(8)), "little")
            answer = self._or_why(self._pipe.read(size))
        with np.load(io.BytesIO(answer), allow_pickle=False) as file:
            return [file[str(index)] for index in range(len(file.files))]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A child that hangs is ended, which its pipe then tells."""
        timer = threading.Timer(self.seconds, self._too_late)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _too_late(self) -> None:
        self.is_late = True
        self._child.kill()

    def _send(self, data: bytes) -> None:
        assert self._child.stdin is not None  # noqa: S101  # it is a pipe
        with suppress(BrokenPipeError, ValueError):  # then nothing comes back, and what it said does
            self._child.stdin.write(data)
            self._child.stdin.flush()

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._child.stdout is not None  # noqa: S101
        return self._child.stdout

    def _or_why(self, found: bytes) -> bytes:
        """What came; an error that says why nothing did."""
        if found:
            return found
        where, code = f"{self.path} in {self.runtime.name}", self._child.wait()
        if self.is_late:
            raise VerificationError(f"{where}: {Status.TIMEOUT.value}: no answer within {self.seconds:.0f} s")
        self._errors.seek(0)
        answer = ended(self.runtime, code, self._errors.read().decode(errors="replace"), self.memory)
        raise VerificationError(f"{where}: {answer.status.value}: {answer.message}")


def _end(child: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
    """No more requests end it; whoever does not heed that is killed."""
    for pipe in (child.stdin, child.stdout, errors):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    try:
        child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
