"""A server that has imported slow modules and forks a process for each request. Started by `tests.warm`.

It exits when the process that started it closes its stdin. A forked process is killed when its client exits.
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
    """Import the modules of the child program of a runtime, or, without a program, torch and those of a capture."""
    import onnx  # noqa: F401

    if program:
        runpy.run_path(program)
        return
    import torch
    from torch.onnx._internal.exporter import _core  # noqa: F401

    import scalepoint.pipeline.deploy  # noqa: F401

    torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),))


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. Returns in the forked process, with the request and its three streams."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                sys.exit()
            elif key.fd in running:
                process, client = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                selector.unregister(client)
                _, status = os.waitpid(process, 0)
                _send_number(client, os.waitstatus_to_exitcode(status))
                client.close()
            elif key.data is not None:
                os.kill(key.data, signal.SIGKILL)  # the client has exited
            else:
                client, _ = listener.accept()
                request, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
                process = os.fork()
                if not process:
                    selector.close()
                    listener.close()
                    client.close()
                    return json.loads(request), streams
                for stream in streams:
                    os.close(stream)
                descriptor = os.pidfd_open(process)
                running[descriptor] = process, client
                selector.register(descriptor, selectors.EVENT_READ)
                selector.register(client, selectors.EVENT_READ, process)
                _send_number(client, process)


def _send_number(client: socket.socket, number: int) -> None:
    with suppress(OSError):  # the client was killed
        client.send(str(number).encode())


def run_request(request: dict[str, Any], streams: list[int]) -> None:
    """Run the requested program in this process."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115  # open until the process exits
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler if request["interrupts"] else signal.SIG_IGN)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    flag = request["arguments"].pop(0) if request["arguments"][0] in ("-I", "-P") else None
    kind, *sys.argv = request["arguments"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = {None: [request["folder"], *paths], "-P": paths, "-I": []}[flag]
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec", dont_inherit=True), vars(main))  # noqa: S102  # like `python -c`
    else:
        sys.argv.insert(0, kind)
        runpy.run_path(kind, run_name="__main__")


def run_and_get_exit_code(request: dict[str, Any], streams: list[int]) -> int:
    """Run the program and its atexit functions, and return the exit code. Skips the shutdown of the interpreter."""
    code: Any = 0
    try:
        run_request(request, streams)
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
os._exit(run_and_get_exit_code(*serve(socket.socket(fileno=int(sys.argv[2])))))
