"""A Python that has loaded what takes long, and forks a process for each that asks. Started by `tests.warm`.

It ends with the one that started it, and a process with the one that asked for it.
"""

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
import types
import warnings
from contextlib import suppress
from typing import Any


def load(program: str) -> None:
    """What the program of a runtime's child imports; without one, what most do, and what the first capture does."""
    import onnx  # noqa: F401

    if program:
        runpy.run_path(program)
        return
    import torch
    from torch.onnx._internal.exporter import _core  # noqa: F401

    import scalepoint.pipeline.deploy  # noqa: F401

    torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),))


def serve(listening: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each that asks: it returns in the forked process, with what was asked and its three streams."""
    chosen = selectors.DefaultSelector()
    chosen.register(listening, selectors.EVENT_READ)
    chosen.register(0, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by what tells the end of the process
    while True:
        for key, _ in chosen.select():
            if key.fd == 0:
                sys.exit()
            elif key.fd in running:
                process, asker = running.pop(key.fd)
                chosen.unregister(key.fd)
                os.close(key.fd)
                chosen.unregister(asker)
                _, status = os.waitpid(process, 0)
                _tell(asker, os.waitstatus_to_exitcode(status))
                asker.close()
            elif key.data is not None:
                os.kill(key.data, signal.SIGKILL)  # nobody waits for it any more
            else:
                asker, _ = listening.accept()
                asked, streams, _, _ = socket.recv_fds(asker, 1 << 20, 3)
                process = os.fork()
                if not process:
                    chosen.close()
                    listening.close()
                    asker.close()
                    return json.loads(asked), streams
                for stream in streams:
                    os.close(stream)
                ended = os.pidfd_open(process)
                running[ended] = process, asker
                chosen.register(ended, selectors.EVENT_READ)
                chosen.register(asker, selectors.EVENT_READ, process)
                _tell(asker, process)


def _tell(asker: socket.socket, number: int) -> None:
    with suppress(OSError):  # it was killed
        asker.send(str(number).encode())


def become(asked: dict[str, Any], streams: list[int]) -> None:
    """The process that was asked for."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115  # open as long as it lives
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler if asked["interrupts"] else signal.SIG_IGN)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    flag = asked["arguments"].pop(0) if asked["arguments"][0] in ("-I", "-P") else None
    kind, *sys.argv = asked["arguments"]
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:1] = {None: [asked["folder"], *places], "-P": places, "-I": []}[flag]
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec", dont_inherit=True), vars(main))  # noqa: S102  # as `python -c`
    else:
        sys.argv.insert(0, kind)
        runpy.run_path(kind, run_name="__main__")


def end_of(asked: dict[str, Any], streams: list[int]) -> int:
    """Its exit code; what is left to do at the end is done, but nothing is taken apart that ends anyway."""
    code: Any = 0
    try:
        become(asked, streams)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return int(code or 0)


with warnings.catch_warnings(action="ignore"):
    load(sys.argv[1])
gc.freeze()
os._exit(end_of(*serve(socket.socket(fileno=int(sys.argv[2])))))
