"""Requests a process from the server, forwards signals to it, and exits like it."""

import json
import os
import signal
import socket
import sys


def main() -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(sys.argv[1])
    handled_signals = [
        number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN
    ]
    request = {
        "arguments": sys.argv[2:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "interrupts": signal.SIGINT in handled_signals,
    }
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    process = int(server.recv(32))
    for number in handled_signals:
        signal.signal(number, lambda received, _: os.kill(process, received))
    code = int(server.recv(32))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
