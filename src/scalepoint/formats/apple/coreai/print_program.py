"""Child program: print the program of a Core AI package as text. It imports nothing of scalepoint."""

import os
import sys


def main() -> None:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the compiler may print to stdout
    from coreai.authoring.asset import AIModelAsset  # noqa: PLC0415

    output.write(str(AIModelAsset.load(sys.argv[1]).program))
    output.flush()
    os._exit(0)  # coreai 1.0.0b3 may abort while Python shuts down


if __name__ == "__main__":
    main()
