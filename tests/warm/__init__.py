"""Starts Python subprocesses of tests quickly: forks them from a process that has imported torch.

    subprocess.run([*warm(), "-m", "scalepoint.cli", "doctor"])     instead of sys.executable

The process has its own folder, environment, streams, signals and exit code. It accepts `-c`, `-m` or a file, after `-I`
or `-P`, and no module of the tests is loaded. Tests of other Python flags, PYTHONHASHSEED, PYTHONIOENCODING and import
order need sys.executable. Without pidfd_open (not Linux) `warm()` returns sys.executable.
"""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def warm(program: str = "") -> list[str]:
    """Return the command before the arguments.

    Args:
        program: Path of the child program of a runtime: the process then has its imports loaded instead of torch.
    """
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    return [sys.executable, "-I", "-S", str(HERE / "client.py"), _server(program)]


@cache
def _server(program: str) -> str:
    """Start the server once per process, and return its address."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address = f"{folder.name}/socket"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, str(HERE / "server.py"), program, str(listener.fileno())]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, cwd=HERE, pass_fds=[listener.fileno()])
    listener.close()

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return address
