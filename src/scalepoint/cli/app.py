"""The table of commands, and `run`, which runs one of them and returns its exit code."""

import os
import sys
import warnings
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

import scalepoint
from scalepoint.cli import deploy, files, init, inspect, setup_commands, sweep, verify
from scalepoint.cli.exit_codes import Code, flush_and_exit_code, report_error, report_interrupt, report_usage_error
from scalepoint.cli.output import NARROW_WIDTH, discard_output, prepare_streams, say, show
from scalepoint.errors import ScalepointWarning
from scalepoint.support.interrupts import interrupts_remembered

# The base class of usage errors, picked by name: typer raises that of click, or of the copy of click inside typer.
_USAGE_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_COMPLETION_VARIABLE = "_SCALEPOINT_COMPLETE"  # set by the shell while typer prints completions
EXIT_CODES = (
    "Exit codes: 0 done and verified; 1 internal error; 2 usage or config; 3 the model cannot be captured or the "
    "target cannot run it; 4 verification failed or the runtime is missing; 5 accuracy, speed or size outside the "
    "given limits; 130 interrupted."
)


def format_examples(*lines: str) -> str:
    """Return the examples of a help text. Blank lines keep typer from joining them into one paragraph."""
    return "\n\n".join(("Examples:", *(f"  {line}" for line in lines)))


# typer's panels cut off option names on a narrow screen, and they need characters that not every locale has.
_WIDTH = get_terminal_size().columns
_HAS_PANELS = _WIDTH >= NARROW_WIDTH and "utf" in str(getattr(sys.stdout, "encoding", "")).lower()

app = typer.Typer(
    name="scalepoint",
    rich_markup_mode="rich" if _HAS_PANELS else None,
    help="Quantize a trained PyTorch model for a target runtime, write the file, and verify it in that runtime.",
    epilog=format_examples(
        "scalepoint init",
        "scalepoint deploy deploy:model --data deploy:data --target onnxruntime -o out/ --trust",
        "scalepoint report out/",
    )
    + f"\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], **({} if _HAS_PANELS else {"terminal_width": _WIDTH})},
)
config = typer.Typer(rich_markup_mode=app.rich_markup_mode, help="Commands for config files.", no_args_is_help=True)


def _show_version(is_set: bool) -> None:
    """Callback of --version. It is eager, so typer calls it before a command is needed."""
    if is_set:
        show(f"scalepoint {scalepoint.__version__}")
        raise typer.Exit


@app.callback()
def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# function, name on the command line, examples of its help text
COMMANDS = (
    (
        deploy.deploy,
        "deploy",
        (
            "scalepoint deploy mypackage.models:resnet --data calibration.npz -o out/",
            "scalepoint deploy timm:resnet18 -d photos/ --size 224 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225",
            "scalepoint deploy nets:net --data nets:batches --evaluate nets:accuracy --max-drop 0.5 --trust",
            "scalepoint deploy -c scalepoint.yaml --trust --dry-run",
            "scalepoint deploy -c scalepoint.yaml --trust --smoke",
            "scalepoint deploy -c scalepoint.yaml --trust --resume",
        ),
    ),
    (
        sweep.sweep,
        "sweep",
        (
            "scalepoint sweep -c sweep.yaml -o sweep/ --trust",
            "scalepoint sweep -c sweep.yaml -o sweep/ --trust --resume",
        ),
    ),
    (
        verify.verify,
        "verify",
        ("scalepoint verify out/", "scalepoint verify out/ mypackage.models:resnet --data calibration.npz"),
    ),
    (
        inspect.inspect,
        "inspect",
        (
            "scalepoint inspect mypackage.models:resnet --shape 1,3,224,224",
            "scalepoint inspect nets:net --target tensorrt --trust --json",
            "scalepoint inspect out/model.onnx",
        ),
    ),
    (files.check, "check", ("scalepoint check model.onnx --target tensorrt --target-version 10.9",)),
    (files.bench, "bench", ("scalepoint bench out/float.onnx out/model.onnx --threads 2 --min-ratio 1.5",)),
    (files.report, "report", ("scalepoint report out/", "scalepoint report out/ --html page.html")),
    (
        files.gate,
        "gate",
        ("scalepoint gate out/ --max-drop 0.5 --min-speed 1.5 --max-size 30MB", "scalepoint gate out/ --json"),
    ),
    (files.sign, "sign", ("scalepoint sign out/ --key key.pem", "scalepoint verify out/ --signature public.pem")),
    (
        verify.compare,
        "compare",
        ("scalepoint compare before/ after/", "scalepoint compare out/ mypackage.models:resnet --data calibration.npz"),
    ),
    (
        setup_commands.targets,
        "targets",
        ("scalepoint targets", "scalepoint targets tensorrt", "scalepoint targets --json"),
    ),
    (setup_commands.cache, "cache", ("scalepoint cache", "scalepoint cache --clear")),
    (setup_commands.doctor, "doctor", ("scalepoint doctor",)),
    (init.init, "init", ("scalepoint init", "scalepoint init new-folder/")),
)
for _command, _name, _examples in COMMANDS:
    app.command(_name, help=" ".join(str(_command.__doc__).split()), epilog=format_examples(*_examples))(_command)
config.command("schema", epilog=format_examples("scalepoint config schema > scalepoint.schema.json"))(init.schema)
app.add_typer(config, name="config")


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. All exceptions become messages on stderr."""
    prepare_streams()
    is_json, is_debug = "--json" in arguments, "--debug" in arguments
    name = next((argument for argument in arguments if not argument.startswith("-")), "scalepoint")
    with warnings.catch_warnings(), interrupts_remembered():
        _quiet_warnings(is_debug)
        try:
            code = app(arguments, standalone_mode=False, prog_name="scalepoint")
            # Our commands return a Code and have printed a message. After Ctrl-C typer returns a plain 130 without one.
            if code == Code.INTERRUPTED and not isinstance(code, Code):
                code = report_interrupt()
        except _USAGE_ERROR as error:
            code = report_usage_error(error, name, is_json=is_json)
        except typer.Abort:
            code = report_interrupt()
        except BrokenPipeError:
            code = _ignore_closed_pipe()
        except KeyboardInterrupt:
            code = report_interrupt()
        except SystemExit as exit_:  # only typer raises it
            code = _code_of_typer_exit(exit_)
        except Exception as error:
            code = report_error(error, name, is_json=is_json, is_debug=is_debug)
    return flush_and_exit_code(int(code or 0))


def _code_of_typer_exit(exit_: SystemExit) -> Any:
    if _COMPLETION_VARIABLE in os.environ:  # the completions are printed
        return exit_.code
    return _ignore_closed_pipe()  # the reader of the help closed the pipe


def _ignore_closed_pipe() -> Code:
    discard_output(sys.stdout)
    return Code.DONE


def _quiet_warnings(is_debug: bool) -> None:
    """Show warnings of scalepoint once and on one line each. Other warnings are shown only with --debug."""
    if is_debug:
        return
    warnings.simplefilter("ignore")
    warnings.simplefilter("once", ScalepointWarning)
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", style="yellow")
