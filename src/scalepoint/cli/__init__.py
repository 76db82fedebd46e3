"""The command line. Nothing here imports torch until a command needs it."""

import sys


def main() -> None:
    """The entry point `scalepoint`."""
    try:
        from scalepoint.cli.app import run  # noqa: PLC0415  # so that Ctrl-C while loading is caught too

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


__all__ = ["main"]
