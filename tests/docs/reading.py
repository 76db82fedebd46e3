"""The Python in which a page is read: blocks come in as lines of JSON, what each printed goes out. Started by `blocks`.

Nothing of ours is imported here, and nothing is made ready: what a block needs, its page must say.
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
    os.dup2(2, 1)  # what a library writes there by itself is not an answer
    reader = types.ModuleType("__main__")
    sys.modules["__main__"] = reader
    for line in sys.stdin:
        block = json.loads(line)
        reader.__file__ = block["path"]
        print(json.dumps(_run(block, vars(reader))), file=answers, flush=True)


def _run(block: dict[str, str], namespace: dict[str, object]) -> dict[str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(block["source"], block["path"], "exec", dont_inherit=True), namespace)  # noqa: S102  # the page's
        except Exception:
            return {"failed": traceback.format_exc()}
    return {"printed": printed.getvalue()}


main()
