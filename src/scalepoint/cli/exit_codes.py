"""Exit codes of commands, and the messages of errors. Tracebacks are shown only with --debug.

0 done and verified          3 the model cannot be captured, or the target cannot run it
1 internal error             4 exported, but verification failed or the runtime is missing
2 usage or config            5 accuracy, speed or size outside given limits       130 interrupted
"""

import sys
import traceback
from difflib import get_close_matches
from enum import IntEnum
from typing import NamedTuple

from scalepoint import distributed, errors
from scalepoint.cli.output import say, shorten, show_json, write
from scalepoint.support.formatting import escape_unprintable


class Code(IntEnum):
    """Exit code of a command."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    MODEL = 3
    UNVERIFIED = 4
    LIMIT = 5
    INTERRUPTED = 130


_CAPTURE_HINT = (
    "check the shapes and types of the example inputs; --leave NAME calls a submodule without capturing its inside"
)
_DATA_HINT = "check the data: its shapes, types and number of inputs must be those of the model"
_STRICT_HINT = "name the layers in the config (overrides with weight: float), or omit --strict"

# Exit code and hint by type of error; the first matching row counts. The hint is "" if the message says what to do.
EXIT_CODES_BY_ERROR: tuple[tuple[type[Exception], Code, str], ...] = (
    (errors.CaptureError, Code.MODEL, _CAPTURE_HINT),
    (errors.OnnxReadError, Code.MODEL, "the guide docs/guides/onnx-file.md lists what is read"),
    (errors.CoverageError, Code.MODEL, _STRICT_HINT),
    (errors.TargetError, Code.MODEL, "`scalepoint targets` lists what each target can run"),
    (errors.ExportError, Code.MODEL, "try another target, or leave the named layer float in the config"),
    (
        errors.VerificationError,
        Code.UNVERIFIED,
        "`scalepoint doctor` shows the runtimes; the files stay for inspection",
    ),
    (errors.GraphError, Code.INTERNAL, "this is an error in scalepoint: please report it with the output of --debug"),
    (errors.CalibrationError, Code.USAGE, _DATA_HINT),
    (errors.NonFiniteError, Code.USAGE, "correct the data or the model; --on-nan skip leaves such batches out"),
    (errors.ConfigError, Code.USAGE, "`scalepoint config schema` lists every key"),
    (errors.DocumentError, Code.USAGE, "`scalepoint init` writes a config to start from"),
    (errors.StoreError, Code.USAGE, ""),
    (errors.RankError, Code.INTERNAL, "start the same command again with --resume; the number of ranks may differ"),
    (errors.ScalepointError, Code.USAGE, ""),
)


def report_error(error: Exception, command: str, *, is_json: bool, is_debug: bool) -> Code:
    """Print an error and return the exit code."""
    if isinstance(error, errors.RankError) and not distributed.is_main():
        with distributed.single_process():  # every rank prints it, because rank 0 may be the rank that died
            return report_error(error, command, is_json=is_json, is_debug=is_debug)
    info = classify_error(error)
    if is_debug:
        say("".join(traceback.format_exception(error)))
    return _print_error(info, command, is_json=is_json)


class ErrorInfo(NamedTuple):
    """What the command line prints about an error."""

    exit_code: Code
    error_code: str
    message: str
    hint: str


def _print_error(info: ErrorInfo, command: str, *, is_json: bool) -> Code:
    message = shorten(info.message)
    say(f"error {info.error_code}: {message}", style="red")
    if info.hint:
        say(f"hint: {info.hint}")
    if is_json:
        fields = {"code": info.error_code, "message": message, "way_out": info.hint}
        show_json(command, {"exit_code": int(info.exit_code), "error": fields})
    return info.exit_code


def classify_error(error: Exception) -> ErrorInfo:
    """Find exit code, error code, message and hint of an error."""
    for kind, code, hint in EXIT_CODES_BY_ERROR:
        if isinstance(error, kind) and isinstance(error, errors.ScalepointError):
            message = str(error.args[0]) if error.args else type(error).__name__
            return ErrorInfo(code, error.code, message, hint)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return ErrorInfo(
            Code.USAGE,
            errors.StoreError.code,
            f"{where}{error.strerror or error}",
            "check the path, its permissions and the free space of the disk",
        )
    if isinstance(error, MemoryError):
        return ErrorInfo(
            Code.USAGE,
            "SP-M001",
            "out of memory",
            "use smaller batches (--batch-size), fewer batches (--max-batches), or a larger machine",
        )
    text = f"{type(error).__name__}: {error}"
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, errors.BatchNote)]
    if notes:  # the model failed on a batch of the user's data
        return ErrorInfo(Code.USAGE, errors.CalibrationError.code, f"{text} ({', '.join(reversed(notes))})", _DATA_HINT)
    return ErrorInfo(
        Code.INTERNAL,
        "SP-0001",
        text,
        "this is an error in scalepoint: please report it with the output of `--debug` and `scalepoint doctor --json`",
    )


def report_usage_error(error: Exception, command: str, *, is_json: bool) -> Code:
    """Print an error of the argument parser: an unknown command or option, or an invalid value."""
    if type(error).__name__ == "NoArgsIsHelpError":  # typer has already printed the help
        return Code.USAGE
    message = escape_unprintable(_suggest_option(error))
    hint = f"{getattr(getattr(error, 'ctx', None), 'command_path', 'scalepoint')} --help"
    return _print_error(ErrorInfo(Code.USAGE, errors.UsageError.code, message, hint), command, is_json=is_json)


def _suggest_option(error: Exception) -> str:
    """Return the message of the parser. For an unknown option it names the nearest option."""
    option, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or context is None:
        return str(getattr(error, "format_message", lambda: str(error))())
    options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    close = get_close_matches(option, options, n=1)
    return f"No such option: {option}." + (f" Did you mean {close[0]!r}?" if close else "")


def report_interrupt(status: str = "") -> Code:
    """Print that the command was interrupted, and what is finished so far."""
    say(f"interrupted{': ' + status if status else ''}", style="yellow")
    return Code.INTERRUPTED


def flush_and_exit_code(code: int) -> int:
    """Flush stdout and stderr here: a failing flush at the exit of Python would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        write(stream, "")
    return code
