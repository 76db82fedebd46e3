"""How a command ends: the exit codes, and what is said of an error. No traceback unless asked for.

0 done and verified          3 the model cannot be captured, or the target cannot run it
1 internal error             4 exported, but verification failed or the runtime is missing
2 usage or config            5 accuracy or latency below the asked limit          130 interrupted
"""

import sys
import traceback
from difflib import get_close_matches
from enum import IntEnum

from scalepoint import distributed, errors
from scalepoint.cli.output import say, shorten, show_json, write
from scalepoint.support.formatting import visible


class Code(IntEnum):
    DONE = 0
    INTERNAL = 1
    USAGE = 2
    MODEL = 3
    UNVERIFIED = 4
    LIMIT = 5
    INTERRUPTED = 130


_CAPTURE_HINT = (
    "check the shapes and types of the example inputs; --leave NAME calls a submodule as it is, unlooked into"
)
_DATA_HINT = "check the data: shapes, types and number of inputs as the model takes them"
_STRICT_HINT = "name the layers in the config (overrides with weight: float), or leave --strict away"

# The first that fits counts. What to do, where the message alone may not say it.
EXIT_CODES_BY_ERROR: tuple[tuple[type[Exception], Code, str], ...] = (
    (errors.CaptureError, Code.MODEL, _CAPTURE_HINT),
    (errors.CoverageError, Code.MODEL, _STRICT_HINT),
    (errors.TargetError, Code.MODEL, "`scalepoint targets` lists what each target can run"),
    (errors.ExportError, Code.MODEL, "try another target, or leave the named layer float in the config"),
    (
        errors.VerificationError,
        Code.UNVERIFIED,
        "`scalepoint doctor` shows the runtimes; the files stay for inspection",
    ),
    (errors.GraphError, Code.INTERNAL, "this is our fault: please report it with the text of --debug"),
    (errors.CalibrationError, Code.USAGE, _DATA_HINT),
    (errors.NonFiniteError, Code.USAGE, "mend the data or the model; --on-nan skip leaves such batches out"),
    (errors.ConfigError, Code.USAGE, "`scalepoint config schema` lists every key"),
    (errors.DocumentError, Code.USAGE, "`scalepoint init` writes a config to start from"),
    (errors.StoreError, Code.USAGE, ""),
    (errors.RankError, Code.INTERNAL, "start the same command again with --resume, with as many ranks as you like"),
    (errors.ScalepointError, Code.USAGE, ""),
)


def usage_error(message: str) -> errors.UsageError:
    """An error of the one who calls."""
    return errors.UsageError(message)


def report_error(error: Exception, command: str, *, is_json: bool, is_debug: bool) -> Code:
    """Say what went wrong, and with which code to end."""
    if isinstance(error, errors.RankError) and not distributed.is_main():
        with distributed.single_process():  # every rank reports it: rank 0 may be the one that has died
            return report_error(error, command, is_json=is_json, is_debug=is_debug)
    code, label, message, way_out = classify_error(error)
    if is_debug:
        say("".join(traceback.format_exception(error)))
    return _print_error(code, label, message, way_out, command, is_json)


def _print_error(code: Code, label: str, message: str, way_out: str, command: str, is_json: bool) -> Code:
    message = shorten(message)
    say(f"error {label}: {message}", style="red")
    if way_out:
        say(f"way out: {way_out}")
    if is_json:
        about = {"code": label, "message": message, "way_out": way_out}
        show_json(command, {"exit_code": int(code), "error": about})
    return code


def classify_error(error: Exception) -> tuple[Code, str, str, str]:
    for kind, code, way_out in EXIT_CODES_BY_ERROR:
        if isinstance(error, kind) and isinstance(error, errors.ScalepointError):
            return code, error.code, str(error.args[0]) if error.args else type(error).__name__, way_out
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return (
            Code.USAGE,
            errors.StoreError.code,
            f"{where}{error.strerror or error}",
            "check the path, its rights and the disk",
        )
    if isinstance(error, MemoryError):
        return (
            Code.USAGE,
            "SP-M001",
            "out of memory",
            "smaller batches (--batch-size), fewer (--max-batches), or a larger machine",
        )
    text = f"{type(error).__name__}: {error}"
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, errors.BatchNote)]
    if notes:  # the model on the user's data
        return Code.USAGE, errors.CalibrationError.code, f"{text} ({', '.join(reversed(notes))})", _DATA_HINT
    return (
        Code.INTERNAL,
        "SP-0001",
        text,
        "this is our fault: please report it with `--debug` and `scalepoint doctor --json`",
    )


def report_usage_error(error: Exception, command: str, *, is_json: bool) -> Code:
    """An unknown command or option, or a value that is none, in our own words."""
    if type(error).__name__ == "NoArgsIsHelpError":  # its text, the help, was shown while it was made
        return Code.USAGE
    message = visible(_suggest_option(error))
    way_out = f"{getattr(getattr(error, 'ctx', None), 'command_path', 'scalepoint')} --help"
    return _print_error(Code.USAGE, errors.UsageError.code, message, way_out, command, is_json)


def _suggest_option(error: Exception) -> str:
    """The parser's message; for an unknown option with the nearest one."""
    given, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or context is None:
        return str(getattr(error, "format_message", lambda: str(error))())
    known = [name for each in context.command.params for name in each.opts if name.startswith("--")]
    close = get_close_matches(given, known, n=1)
    return f"No such option: {given}." + (f" Did you mean {close[0]!r}?" if close else "")


def report_interrupt(done: str = "") -> Code:
    say(f"interrupted{': ' + done if done else ''}", style="yellow")
    return Code.INTERRUPTED


def flush_and_exit_code(code: int) -> int:
    """Nothing is left for Python to flush, and to fail at, after the end."""
    for stream in (sys.stdout, sys.stderr):
        write(stream, "")
    return code
