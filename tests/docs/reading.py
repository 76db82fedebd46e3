"""Child program that runs the Python blocks of a page. blocks.py starts it, and sends and receives lines of JSON.

It imports nothing of scalepoint and prepares nothing: a page must contain everything that its blocks need.
"""

import contextlib
import io
import json
import os
import sys
import traceback
import types


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries print to stdout, which would mix with the answers
    reader = types.ModuleType("__main__")
    sys.modules["__main__"] = reader
    for line in sys.stdin:
        block = json.loads(line)
        reader.__file__ = block["path"]
        print(json.dumps(_run(block, vars(reader))), file=answers, flush=True)


def _run(block: dict[str, str], namespace: dict[str, object]) -> dict[str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(block["source"], block["path"], "exec", dont_inherit=True), namespace)  # noqa: S102  # code of our own pages
        except Exception:
            return {"failed": traceback.format_exc()}
    return {"printed": printed.getvalue()}


main()
