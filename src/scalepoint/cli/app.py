"""The commands by name, with their help."""

import os
import sys
import warnings
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

import scalepoint
from scalepoint.cli import beginning, deploying, files, inspecting, machine, proving, sweeping
from scalepoint.cli.ending import Code, fail, flushed, interrupted, misused
from scalepoint.cli.screen import NARROW, abandon, prepare, say, show
from scalepoint.errors import ScalepointWarning
from scalepoint.support.interrupts import remembering_interrupts

_MISUSE: Any = typer.BadParameter.__mro__[2]  # ClickException, under whichever name typer brings it
EXIT_CODES = (
    "Exit codes: 0 done and verified; 1 internal error; 2 usage or config; 3 the model cannot be captured or the "
    "target cannot run it; 4 verification failed or the runtime is missing; 5 accuracy or latency below the asked "
    "limit; 130 interrupted."
)


def examples(*lines: str) -> str:
    """Blank lines between: the help keeps them apart."""
    return "\n\n".join(("Examples:", *(f"  {line}" for line in lines)))


# typer's panels cut option names off on a narrow screen, and need letters that not every locale has
_WIDTH = get_terminal_size().columns
_HAS_PANELS = _WIDTH >= NARROW and "utf" in str(getattr(sys.stdout, "encoding", "")).lower()

app = typer.Typer(
    name="scalepoint",
    rich_markup_mode="rich" if _HAS_PANELS else None,
    help="A trained PyTorch model in, a quantized one that is really deployed out.",
    epilog=examples(
        "scalepoint init",
        "scalepoint deploy deploy:model --data deploy:data --target onnxruntime -o out/ --trust",
        "scalepoint report out/",
    )
    + f"\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], **({} if _HAS_PANELS else {"terminal_width": _WIDTH})},
)
config = typer.Typer(rich_markup_mode=app.rich_markup_mode, help="Config files.", no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        show(f"scalepoint {scalepoint.__version__}")
        raise typer.Exit


@app.callback()
def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass


COMMANDS = (
    (
        deploying.deploy,
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
        sweeping.sweep,
        "sweep",
        (
            "scalepoint sweep -c sweep.yaml -o sweep/ --trust",
            "scalepoint sweep -c sweep.yaml -o sweep/ --trust --resume",
        ),
    ),
    (
        proving.verify,
        "verify",
        ("scalepoint verify out/", "scalepoint verify out/ mypackage.models:resnet --data calibration.npz"),
    ),
    (
        inspecting.inspect,
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
        proving.compare,
        "compare",
        (
            "scalepoint compare before/ after/",
            "scalepoint compare out/ mypackage.models:resnet --data calibration.npz",
        ),
    ),
    (machine.targets, "targets", ("scalepoint targets", "scalepoint targets tensorrt", "scalepoint targets --json")),
    (machine.doctor, "doctor", ("scalepoint doctor",)),
    (beginning.init, "init", ("scalepoint init", "scalepoint init new-folder/")),
)
for _command, _name, _examples in COMMANDS:
    app.command(_name, help=" ".join(str(_command.__doc__).split()), epilog=examples(*_examples))(_command)
config.command("schema", epilog=examples("scalepoint config schema > scalepoint.schema.json"))(beginning.schema)
app.add_typer(config, name="config")


def run(arguments: list[str]) -> int:
    """One command; returns its exit code."""
    prepare()
    is_json, is_debug = "--json" in arguments, "--debug" in arguments
    name = next((each for each in arguments if not each.startswith("-")), "scalepoint")
    with warnings.catch_warnings(), remembering_interrupts():
        _quiet_warnings(is_debug)
        try:
            code = app(arguments, standalone_mode=False, prog_name="scalepoint")
            if code == Code.INTERRUPTED and not isinstance(code, Code):  # typer's, without a word
                code = interrupted()
        except _MISUSE as error:
            code = misused(error, name, is_json=is_json)
        except typer.Abort:
            code = interrupted()
        except BrokenPipeError:
            code = _unread()
        except KeyboardInterrupt:
            code = interrupted()
        except SystemExit as ended:  # by typer: completion is done, or the reader of the help has gone
            code = ended.code if "_SCALEPOINT_COMPLETE" in os.environ else _unread()
        except Exception as error:
            code = fail(error, name, is_json=is_json, is_debug=is_debug)
    return flushed(int(code or 0))


def _unread() -> Code:
    abandon(sys.stdout)
    return Code.DONE


def _quiet_warnings(is_debug: bool) -> None:
    """Our own warnings in one line each, once; those of other packages only when debugging."""
    if is_debug:
        return
    warnings.simplefilter("ignore")
    warnings.simplefilter("once", ScalepointWarning)
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", style="yellow")
