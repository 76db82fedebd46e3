"""The command line. torch is imported only by commands that need it."""

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command in sys.argv and exit. Entry point of the program `scalepoint`."""
    try:
        from scalepoint.cli.app import run  # noqa: PLC0415  # inside try: Ctrl-C can also come during this import

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        os._exit(code)  # output is flushed already; the shutdown of torch can take seconds
    sys.exit(code)


__all__ = ["main"]
