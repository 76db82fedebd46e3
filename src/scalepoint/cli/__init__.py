"""The command line. Nothing here imports torch until a command needs it."""

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """The entry point `scalepoint`."""
    try:
        from scalepoint.cli.app import run  # noqa: PLC0415  # so that Ctrl-C while loading is caught too

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        os._exit(code)  # all is said and flushed; taking torch down in order may take seconds
    sys.exit(code)


__all__ = ["main"]
