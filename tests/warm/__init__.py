"""Processes for tests that are not about how Python starts: forked from one that has torch loaded.

    subprocess.run([*warm(), "-m", "scalepoint.cli", "doctor"])     in the place of sys.executable

A process of its own it is, with its folder, environment, streams, signals and end; only that the seconds of
`import torch` are spent once for all of them. It takes `-c`, `-m` or a file, after `-I` or `-P`, and has nothing of
the tests loaded. Other flags of Python, PYTHONHASHSEED, PYTHONIOENCODING and what is loaded when need a Python of the
usual kind, which this is where processes cannot be watched by a file descriptor (not Linux).
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
    """What stands before the arguments; with the program of a runtime's child, it has loaded that and not torch."""
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    return [sys.executable, "-I", "-S", str(HERE / "client.py"), _server(program)]


@cache
def _server(program: str) -> str:
    """Where it listens: one for all tests of this process, started for the first that asks."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    place = f"{folder.name}/socket"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(place)
    listening.listen()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, str(HERE / "server.py"), program, str(listening.fileno())]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, cwd=HERE, pass_fds=[listening.fileno()])
    listening.close()

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return place
