"""The command line: exit codes, output streams, error messages, and terminals of all kinds."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import scalepoint
from scalepoint import DeployConfig, errors
from scalepoint.cli.app import COMMANDS
from scalepoint.cli.deploy import deploy as deploy_command
from scalepoint.cli.exit_codes import Code, report_error
from scalepoint.targets.local_times import LocalTimes
from scalepoint.targets.measurement_cache import add_measurements, measurements_path
from scalepoint.verification import Benchmark
from tests.cli.conftest import child
from tests.warm import warm

HEAVY_PACKAGES = ("torch", "numpy", "onnx", "onnxruntime", "PIL")
NAMES = [name for _, name, _ in COMMANDS]


def test_help_of_every_command_loads_no_heavy_package() -> None:
    program = (
        "import sys, json\n"
        "from scalepoint.cli.app import run\n"
        f"codes = [run([*name.split(), '--help']) for name in {['', *NAMES, 'config', 'config schema']!r}]\n"
        f"heavy = [name for name in {HEAVY_PACKAGES!r} if name in sys.modules]\n"
        "sys.stderr.write(json.dumps([codes, heavy, len(sys.modules)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    codes, heavy, count = json.loads(done.stderr)
    assert set(codes) == {0}
    assert heavy == []
    assert count < 500
    assert done.stdout.count("Examples:") == len(NAMES) + 2
    assert "Exit codes: 0" in done.stdout


def test_a_call_without_a_command_shows_the_help_and_is_a_usage_error(call) -> None:
    code, out, _ = call()
    assert code == Code.USAGE
    assert "deploy" in out


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (["deply"], "Did you mean 'deploy'?"),
        (["deploy", "--targt", "x"], "Did you mean '--target'?"),
        (["bench", "a.onnx"], "Missing argument"),
        (["deploy", "--max-trials", "many"], "'--max-trials': Input should be a valid integer"),
        (["deploy", "--threads", "0"], "0"),
        (["deploy", "nets:net", "--data", "nets:batches", "--target", "onxruntime"], "did you mean 'onnxruntime'?"),
        (["deploy", "nets:nett", "--data", "nets:batches"], "did you mean 'net'?"),
        (["deploy", "netz:net", "--data", "nets:batches"], "did you mean 'nets'?"),
        (["check", "exists.onnx", "--target", "tensorr"], "did you mean 'tensorrt'?"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_unknown_names_get_the_nearest_one(call, here, arguments, suggested) -> None:
    (here / "exists.onnx").write_bytes(b"")
    code, out, err = call(*arguments, "--json")
    assert code == Code.USAGE
    assert suggested in " ".join(err.split())
    document = json.loads(out)
    assert document["exit_code"] == code
    assert document["error"]["code"].startswith("SP-")
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["model.pt", "model.pt2", "model.pth", "model.pkl"])
def test_pickle_files_are_refused_and_not_opened(call, here, name) -> None:
    (here / name).write_bytes(b"anything")
    for arguments in ([name, "--data", "nets:batches"], ["nets:net", "--data", name]):
        code, _, err = call("deploy", *arguments)
        assert code == Code.USAGE
        assert "never opened" in err
        assert "package.module:function" in " ".join(err.split())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nets", "is not package.module:name"),
        ("nets:", "is not package.module:name"),
        ("nets:net()", "is not package.module:name"),
        ("nets:number", "must be a model or a function"),
        ("nets:score", "missing 1 required positional argument"),
        ("nets:batches", "got a generator"),
        ("nets:exits", "ended the process"),
        ("nets:raises_error", r"no \x1b[31mweights"),
        ("bad:net", "SyntaxError"),
    ],
)
def test_an_invalid_model_is_reported_in_a_few_lines(call, here, model, message) -> None:
    (here / "bad.py").write_text("def net(:\n")
    code, out, err = call("inspect", model)
    assert code == Code.USAGE
    assert out == ""
    assert message in " ".join(err.split())
    assert "\x1b" not in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 12


def test_the_line_in_the_users_code_is_named_and_debug_shows_the_traceback(call) -> None:
    _, _, err = call("inspect", "nets:raises_error")
    assert "nets.py, line" in " ".join(err.split())
    code, _, err = call("inspect", "nets:raises_error", "--debug")
    assert code == Code.USAGE
    assert "Traceback" in err


def test_a_model_that_cannot_be_captured_ends_with_3(call) -> None:
    code, _, err = call("inspect", "nets:Branching", "--shape", "2,3,8,8")
    assert code == Code.MODEL
    assert "SP-G001" in err
    assert "--leave" in err
    code, _, err = call("deploy", "nets:Net", "--data", "nets:wrong_shape", "--dry-run")
    assert code == Code.MODEL
    assert "5 channels" in " ".join(err.split())


def test_a_folder_that_is_not_empty_is_refused_before_any_work(call, here) -> None:
    (here / "out").mkdir()
    (here / "out" / "mine.txt").write_text("keep")
    for more in ([], ["-o", "out"]):
        code, _, err = call("deploy", "nets:raises_error", "--data", "nets:batches", *more)
        assert code == Code.USAGE
        assert "--force" in err
        assert "weights" not in err
    code, _, err = call("deploy", "nets:net", "--data", "nets:batches", "-o", "nets.py")
    assert (code, "is a file" in err) == (Code.USAGE, True)
    assert [path.name for path in (here / "out").iterdir()] == ["mine.txt"]


def test_a_refusal_does_not_load_torch(here) -> None:
    (here / "out").mkdir()
    (here / "out" / "mine.txt").touch()
    program = (
        "import sys\nfrom scalepoint.cli.app import run\n"
        "code = run(['deploy', 'nets:net', '--data', 'nets:batches', '-o', 'out'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == Code.USAGE, done.stderr


def test_a_dry_run_shows_the_plan_and_writes_nothing(call, here) -> None:
    before = sorted(here.iterdir())
    code, out, err = call("deploy", "nets:net", "--data", "nets:batches", "--dry-run")
    assert code == 0
    assert "conv" in out
    assert "quantized" in out
    assert "nothing was written" in err
    assert [path for path in sorted(here.iterdir()) if path.name != "__pycache__"] == before


def test_leave_applies_in_a_dry_run(call) -> None:
    code, out, _ = call("deploy", "nets:net", "--data", "nets:batches", "--dry-run", "--leave", "head", "--json")
    assert code == 0
    states = {row["name"]: row["state"] for row in json.loads(out)["coverage"]}
    assert states.get("conv") == "quantized"
    assert states.get("head") != "quantized"


def test_inspect_needs_no_data(call) -> None:
    code, out, _ = call("inspect", "nets:instance", "--shape", "1,3,8,8", "--target", "tensorrt", "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["command"]) == (0, 1, "inspect")
    assert {row["name"] for row in document["coverage"]} == {"conv", "head"}
    assert call("inspect", "nets:Net", "--shape", "1,x")[0] == Code.USAGE
    assert call("inspect", "nets:Net", "--shape", "1,0,3")[0] == Code.USAGE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targt: onnxruntime", "config.yaml:1:1: there is no key 'targt': did you mean 'target'?"),
        (
            "model: nets:net\nquantization: {activaton: float}",
            "config.yaml:2:16: quantization: there is no key 'activaton': did you mean 'activation'?",
        ),
        ("max_trials: many", "config.yaml:1:13: max_trials: must be a whole number, got 'many'"),
        ("threads: 2\nmax_trials: 0", "config.yaml:2:13: max_trials: must be at least 1, got 0"),
        ("strict: 7", "config.yaml:1:9: strict: must be true or false, got 7"),
        ("float_dtype: half", "config.yaml:1:14: float_dtype: must be 'float32', 'float16' or 'bfloat16', got 'half'"),
        (
            "quantization:\n  weight:\n    n_bit: 4",
            "config.yaml:3:5: quantization.weight: there is no key 'n_bit': did you mean 'n_bits'?",
        ),
        (
            "quantization:\n  overrides:\n    - name: head\n      weight: {n_bits: four}",
            "config.yaml:4:24: quantization.overrides[0].weight.n_bits: must be a whole number, got 'four'",
        ),
        (
            "quantization:\n  smooth_quant: {alpha: lots}",
            "config.yaml:2:25: quantization.smooth_quant.alpha: must be a number, got 'lots', or must be 'search'",
        ),
        ("- a list", "a mapping of keys"),
        ("{", "config.yaml: not valid YAML"),
        ("target: nowhere\nmodel: nets:net\ndata: nets:batches", "no target 'nowhere'"),
        ("model: nets:net", "--data"),
        ("data: nets:batches", "no model:"),
        ("model: nets:net\ndata: nets:batches\nmax_drop: 1", "--evaluate"),
        ("budget: {size: 0.2, bits: 4}", "a budget must be one of size, bits and speed, got size and bits"),
        ("budget: {weight: 4}", "weight"),
        ("choices: [int4, int9]", "'int9' is not a weight format"),
    ],
)
def test_an_invalid_config_ends_with_2(call, here, text, message) -> None:
    (here / "config.yaml").write_text(text)
    code, _, err = call("deploy", "-c", "config.yaml")
    assert code == Code.USAGE
    assert message in " ".join(err.split())
    assert "pydantic" not in err.replace("Pydantic", "pydantic")
    assert "validation error" not in err
    assert not (here / "out").exists()


def test_a_missing_config_ends_with_2(call) -> None:
    code, _, err = call("deploy", "-c", "nowhere.yaml")
    assert code == Code.USAGE
    assert "nowhere.yaml" in err


class _Deployment:
    """Replacement for the result of scalepoint.deploy."""

    def __init__(self, *, status="ok", holds=True, score=None, float_score=None, verified=True, speed=1.5) -> None:
        self.path, self.float_path = Path("out/model.onnx"), Path("out/float.onnx")
        self.score, self.float_score = score, float_score
        self.drop = None if score is None else float_score - score
        self.coverage = SimpleNamespace(to_list=list)
        self.report = SimpleNamespace(
            table=lambda verbose: "the table", summary=list, next_steps=list, reproduction=None, findings=None
        )
        state = SimpleNamespace(value=status)
        fields = {"sqnr": float("inf"), "name": "\x1b[31m"}
        self.verification = SimpleNamespace(
            status=state,
            holds=holds,
            is_refuted=not holds and status != "not verified here",
            differences=(),
            runtime="onnxruntime",
            message="gone",
            sqnr=12.0,
            bound=30.0,
            latency=Benchmark(ratio=speed, seconds=(speed, 1.0), threads=1, repeats=50, runtime="onnxruntime"),
            to_dict=lambda: fields,
        )
        if not verified:
            self.verification = None


@pytest.mark.parametrize(
    ("result_fields", "arguments", "code"),
    [
        ({}, [], Code.DONE),
        ({"verified": False}, [], Code.DONE),
        ({"status": "unavailable", "holds": False}, [], Code.UNVERIFIED),
        ({"status": "not verified here", "holds": False}, [], Code.DONE),
        ({"status": "crashed", "holds": False}, ["--allow-departure"], Code.UNVERIFIED),
        ({"holds": False}, [], Code.UNVERIFIED),
        ({"holds": False}, ["--allow-departure"], Code.DONE),
        ({"score": 0.5, "float_score": 0.9}, ["--max-drop", "0.1"], Code.LIMIT),
        ({"score": float("nan"), "float_score": 0.9}, ["--max-drop", "0.1"], Code.LIMIT),
        ({"score": 0.85, "float_score": 0.9}, ["--max-drop", "0.1"], Code.DONE),
        ({"speed": 1.1}, ["--min-speed", "1.2"], Code.LIMIT),
        ({"speed": 1.2}, ["--min-speed", "1.2"], Code.DONE),
    ],
)
def test_the_exit_code_depends_on_the_limits(call, here, monkeypatch, result_fields, arguments, code) -> None:
    (here / "out").mkdir()
    options = {}

    def deploy(*_, **keywords):
        options.update(keywords)
        return _Deployment(**result_fields)

    monkeypatch.setattr(scalepoint, "deploy", deploy, raising=False)
    command = ["deploy", "nets:net", "--data", "nets:batches", "--evaluate", "nets:score", "-o", "out", *arguments]
    exit_code, out, err = call(*command, "--force", "--quiet", "--json")
    result = json.loads(out)
    assert exit_code == code == result["exit_code"]
    is_verified = result_fields.get("verified", True) and result_fields.get("status") != "not verified here"
    assert bool(result["why"]) == (code != 0 or not is_verified)
    assert ("failed:" in err) == (code != 0)
    assert "\x1b" not in out
    exit_code, out, _ = call(*command, "--force")
    assert (exit_code, "the table" in out) == (code, True)
    assert options["evaluate"](None) == 0.5


def test_flags_override_the_config(call, here, monkeypatch) -> None:
    received = {}

    def deploy(model, inputs, data, **options):
        received.update(options, batch_counts=[len(list(data)), len(list(data))])
        options["output"].mkdir()
        return _Deployment()

    monkeypatch.setattr(scalepoint, "deploy", deploy, raising=False)
    (here / "c.yaml").write_text("model: nets:Net\ndata: nets:batches\nthreads: 2\nmax_trials: 4\noutput: result\n")
    flags = ("--max-batches", "2", "--threads", "3", "--strict", "--leave", "head", "--choices", "int4,int8")
    assert call("deploy", "-c", "c.yaml", *flags)[0] == 0
    assert (received["max_batches"], received["batch_counts"]) == (2, [3, 3])
    assert (received["threads"], received["max_trials"], received["strict"], received["leave"]) == (
        3,
        4,
        True,
        ("head",),
    )
    assert received["choices"] == ("int4", "int8")


def test_the_written_config_contains_the_flags_and_can_be_deployed_again(call, here) -> None:
    (here / "c.yaml").write_text("model: nets:Net\ndata: nets:batches\nthreads: 2\nmax_trials: 4\noutput: result\n")
    flags = ("--max-batches", "2", "--threads", "3", "--leave", "head", "--choices", "int4,int8")
    code, _, err = call("deploy", "-c", "c.yaml", *flags, "--smoke")
    assert code == 0, err
    for output in ("result", "again"):
        config = DeployConfig.from_file(here / output / "config.yaml")
        assert (config.model, config.data, config.root) == ("nets:Net", "nets:batches", "..")
        assert (config.threads, config.max_trials, config.max_batches) == (3, 4, 2)
        assert (config.leave, config.choices, config.output) == (("head",), ("int4", "int8"), output)
        assert config.allow_departure is False
        text = (here / output / "config.yaml").read_text()
        assert "batch_size:" in text
        assert not any(f"{key}:" in text for key in ("judge", "length", "samples", "memory"))  # of language models
        code, _, err = call("deploy", "-c", "result/config.yaml", "-o", "again", "--smoke", "--force")
        assert code == 0, err


OUTPUT_FLAGS = {"context", "config", "trust", "dry_run", "quiet", "verbose", "json", "debug"}
NAMES_OF_OBJECTS = {
    "model",
    "weights",
    "random",
    "data",
    "root",
    "batch_size",
    "size",
    "mean",
    "std",
}  # Python passes objects instead
RUN_FLAGS = {"smoke", "resume", "force"}  # for one run, not in a config
FLAGS_OF_ONE_COMMAND = {
    "max_size",
    "allow_unverified",
    "clear",
    "folder",
    "path",
    "first",
    "second",
    "name",
    "shape",
    "html",
    "rows",
    "target_version",
    "min_ratio",
    "ask",
    "batches",
    "key",
    "signature",
}


def test_flags_keywords_and_config_keys_have_the_same_names() -> None:
    from scalepoint import DeployConfig, deploy, deploy_checkpoint

    flags = set(inspect.signature(deploy_command).parameters)
    keys = set(DeployConfig.model_fields) - {"quantization"}  # the keyword is called config
    keywords = {
        name for name, value in inspect.signature(deploy).parameters.items() if value.kind == value.KEYWORD_ONLY
    }
    assert flags - OUTPUT_FLAGS - RUN_FLAGS == keys
    checkpoint_keywords = set(inspect.signature(deploy_checkpoint).parameters) - {"source", "verify"} - NAMES_OF_OBJECTS
    assert (
        keys - NAMES_OF_OBJECTS
        == (keywords | checkpoint_keywords) - {"config", "kwargs", "progress", "callback", "command"} - RUN_FLAGS
    )
    assert flags >= RUN_FLAGS
    assert keywords >= RUN_FLAGS


@pytest.mark.parametrize(("command", "name"), [(command, name) for command, name, _ in COMMANDS], ids=NAMES)
def test_an_option_has_one_name_in_all_commands(command, name) -> None:
    known = set(inspect.signature(deploy_command).parameters) | FLAGS_OF_ONE_COMMAND | {"runtime"}
    assert set(inspect.signature(command).parameters) <= known
    function = {"bench": "benchmark", "report": "", "targets": "", "doctor": "", "init": "", "cache": ""}.get(
        name, name
    )
    if function:
        shared = {"target", "runtime", "threads", "leave", "max_batches"} & set(inspect.signature(command).parameters)
        assert shared <= set(inspect.signature(getattr(scalepoint, function)).parameters)


@pytest.mark.parametrize(
    "kind", [value for value in vars(errors).values() if inspect.isclass(value) and hasattr(value, "code")]
)
def test_every_error_has_an_exit_code(kind, capsys) -> None:
    code = report_error(kind("a [bold]name[/bold] \x1b[31m"), "deploy", is_json=True, is_debug=False)
    out, err = capsys.readouterr()
    assert code in (Code.INTERNAL, Code.USAGE, Code.MODEL, Code.UNVERIFIED)
    assert (code == Code.INTERNAL) == (kind in (errors.GraphError, errors.RankError))
    assert kind.code in err
    assert "[bold]name[/bold]" in err
    assert "\x1b" not in err + out
    assert json.loads(out)["exit_code"] == code


def test_an_internal_error_ends_with_1_and_asks_for_a_report(call, monkeypatch) -> None:
    monkeypatch.setattr(scalepoint, "inspect", lambda *_, **__: 1 / 0, raising=False)
    code, _, err = call("inspect", "nets:net")
    assert code == Code.INTERNAL
    assert "ZeroDivisionError" in err
    assert "doctor" in err
    assert "Traceback" not in err
    monkeypatch.setattr(scalepoint, "inspect", lambda *_, **__: [][10**4 * "x"], raising=False)
    assert len(call("inspect", "nets:net")[2]) < 3000


def _restore_interrupts() -> None:
    """Handle Ctrl-C: a shell lets background processes and their children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_deployment(here: Path, marker: str, *arguments: str) -> tuple[int, str, str]:
    """Start a deployment and send Ctrl-C when the marker file exists."""
    process = subprocess.Popen(
        [*warm(), "-m", "scalepoint.cli", "deploy", "nets:net", "--trust", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_restore_interrupts,  # noqa: PLW1509  # there are no threads here
    )
    end = time.monotonic() + 300  # a machine may be busy
    while not (here / marker).exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, " ".join(err.split())


def test_ctrl_c_ends_with_130_and_leaves_nothing(here) -> None:
    code, out, err = interrupt_deployment(here, "started", "--data", "nets:sleeping")
    assert (code, out) == (Code.INTERRUPTED, "")
    assert "interrupted: nothing was written" in err
    assert "Traceback" not in err
    assert not (here / "out").exists()


def test_a_run_can_be_resumed_after_ctrl_c(call, here) -> None:
    flags = ("--data", "nets:fixed_batches", "--evaluate", "nets:slow_metric")
    code, out, err = interrupt_deployment(here, "judging", *flags)
    assert (code, out) == (Code.INTERRUPTED, "")
    assert "trial-0 quantized" in err
    assert "trial-0 verified; the same command with --resume" in err
    assert not [path for path in (here / "out").rglob("*") if path.name.startswith(".tmp-")]
    assert [path.name for path in (here / "out").iterdir()] == [".scalepoint"]
    code, _, err = call("deploy", "nets:net", *flags, "--resume")
    assert code == 0, err
    assert "exporting: from the cache" in err
    assert "warning" not in err
    assert (here / "out" / "model.onnx").is_file()
    assert not (here / "out" / ".scalepoint").exists()


def test_ctrl_c_in_any_other_command_ends_with_130(call, monkeypatch) -> None:
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(scalepoint, "inspect", interrupt, raising=False)
    code, out, err = call("inspect", "nets:net")
    assert (code, out, err.split()) == (Code.INTERRUPTED, "", ["interrupted"])


def test_the_current_folder_is_importable_only_for_a_named_module(here) -> None:
    (here / "rich.py").write_text("raise SystemExit('run from the folder')")
    program = (
        "import sys; sys.path[:] = [folder for folder in sys.path if folder]; from scalepoint.cli import main; main()"
    )
    for arguments, code in ((["--version"], 0), (["check", "nowhere.onnx"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, cwd=here
        )
        assert done.returncode == code, done.stderr


def test_an_interrupted_deployment_lists_the_finished_stages(call, here, monkeypatch) -> None:
    def deploy(*_, output, **__):
        (output / ".scalepoint").mkdir(parents=True, exist_ok=True)
        (output / ".scalepoint" / "journal.json").write_text(journal)
        raise KeyboardInterrupt

    journal = '{"stages": {"trial-0 quantized": {"marks": {}, "result": {}, "files": {}}}}'

    monkeypatch.setattr(scalepoint, "deploy", deploy, raising=False)
    code, _, err = call("deploy", "nets:net", "--data", "nets:batches")
    assert code == Code.INTERRUPTED
    assert "trial-0 quantized" in err
    assert "--resume" in err
    code, _, err = call("deploy", "nets:net", "--data", "nets:batches")
    assert (code, "--resume" in err) == (Code.USAGE, True)
    journal = "{"
    code, _, err = call("deploy", "nets:net", "--data", "nets:batches", "--resume")
    assert (code, "nothing was written" in err) == (Code.INTERRUPTED, True)


def test_resume_needs_something_to_resume(call, here) -> None:
    (here / "out").mkdir()
    (here / "out" / "model.onnx").touch()
    code, _, err = call("deploy", "nets:net", "--data", "nets:batches", "--resume")
    assert (code, "no unfinished run" in " ".join(err.split())) == (Code.USAGE, True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("config schema | true", 0),
        ("--help | true", 0),
        ("--version >&-", 0),
        ("--version >&- 2>&-", 0),
        ("deply 2>&-", 2),
    ],
)
def test_a_closed_output_stream_is_not_an_error(line, code, tmp_path) -> None:
    line = f"set -o pipefail; {sys.executable} -m scalepoint.cli {line}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, cwd=tmp_path)  # noqa: S607
    assert done.stderr == ""
    assert done.returncode == code


def test_output_fits_into_forty_columns_without_colour_in_ascii(call, here, monkeypatch) -> None:
    for command in (["doctor"], ["deploy", "--help"]):
        done = child(*command, COLUMNS="40", NO_COLOR="1", PYTHONIOENCODING="ascii", TERM="dumb", cwd=here)
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 40
        assert "\\u" not in done.stdout
        assert "\x1b" not in done.stdout
    assert "--allow-departure" in done.stdout
    monkeypatch.setenv("COLUMNS", "40")
    for command in (
        ["targets"],
        ["report", "nowhere"],
        ["inspect", "nets:net"],
        ["deploy", "nets:nothing", "-d", "nets:batches"],
    ):
        _, out, err = call(*command)
        assert all(len(line) <= 40 for line in (out + err).splitlines())


def test_on_a_narrow_screen_the_cells_of_a_row_are_lines_below_its_name(call, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = call("targets")
    first, *lines = out[: out.index("openvino")].splitlines()
    assert first == "onnxruntime"
    assert len(lines) > 3  # one cell needs two lines
    assert all(line.startswith("  ") for line in lines)


def test_control_characters_in_names_are_escaped_in_any_locale(here) -> None:
    names = "héad", "\N{PILE OF POO}", "\u202etxet"
    lines = [f"net.add_module({name!r}, nn.Linear(16, 16))" for name in names[:2]]
    (here / "odd.py").write_text("from torch import nn\nnet = nn.Sequential()\n" + "\n".join(lines), encoding="utf-8")
    done = child("inspect", "odd:net", PYTHONIOENCODING="ascii", cwd=here)
    assert done.returncode in (0, 3)
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()
    done = child("inspect", f"odd:{names[2]}", cwd=here, python=warm())
    assert done.returncode == Code.USAGE
    assert "\\u202e" in done.stderr


def test_commands_run_without_a_home_and_a_user_name(here) -> None:
    """As in a container whose user has only a number."""
    program = (
        "import pwd, sys\n"
        "def unknown(number): raise KeyError(number)\n"
        "pwd.getpwuid = unknown\n"
        "from scalepoint.cli.app import run\n"
        "sys.exit(run(['doctor', '--json']) or run(['inspect', 'nets:net', '--trust', '--json']))"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME")
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=here,
        env={**environment, "LC_ALL": "C"},
    )
    assert done.returncode == 0, done.stderr


def test_targets_are_listed(call) -> None:
    from scalepoint.targets import list_targets

    code, out, _ = call("targets", "--json")
    rows = json.loads(out)["targets"]
    assert code == 0
    assert [row["name"] for row in rows] == [*list_targets(), *list_targets(language=True)]
    assert "onnxruntime" in call("targets")[1]


@pytest.mark.parametrize(
    "name", ["onnxruntime", "openvino", "tensorrt", "executorch", "litert", "coreml", "coreai", "reference"]
)
def test_a_target_is_described_completely(call, name: str) -> None:
    from scalepoint.targets import find_target

    target = find_target(name)
    code, out, _ = call("targets", name, "--json")
    sections = {section["title"]: section for section in json.loads(out)["sections"]}
    assert code == 0
    assert [row[0] for row in sections["Patterns"]["rows"]] == list(target.pattern_names)
    assert [row[2] for row in sections["Patterns"]["rows"]] == [
        ", ".join(point.value for point in pattern.qdq_points) or f"none: {pattern.why_float or 'stays float'}"
        for pattern in target.patterns
    ]
    assert len(sections["Accepts"]["rows"]) == len(target.accepts)
    assert ("Left float" in sections) == bool(target.rules)
    assert ("Static checks" in sections) == (name == "tensorrt")
    code, out, _ = call("targets", name)
    assert code == 0
    assert "LinearReLUPattern" in out


def test_every_field_of_a_target_is_described() -> None:
    """A new field of Target must be added to describe_target."""
    from dataclasses import fields
    from inspect import getsource

    from scalepoint.targets import Target, describe_target

    missing = [field.name for field in fields(Target) if f"target.{field.name}" not in getsource(describe_target)]
    assert missing == ["name", "summary"]  # the title


def test_an_unknown_target_is_a_usage_error_with_the_nearest_name(call) -> None:
    code, _, err = call("targets", "tensort")
    assert code == 2
    assert "did you mean 'tensorrt'" in err


def test_doctor_reports_what_is_missing_and_how_to_install_it(call, monkeypatch) -> None:
    code, out, _ = call("doctor", "--json")
    lines = {line["name"]: line for line in json.loads(out)["lines"]}
    assert code == 0
    assert lines["torch"]["state"] == "ok"
    assert {"scalepoint", "int8 instructions", "disk here", "onnxruntime", "openvino"} <= set(lines)
    monkeypatch.setattr(
        "scalepoint.cli.setup_commands.find_spec", lambda name: None if name == "onnxruntime" else object()
    )
    code, out, err = call("doctor")
    assert code == Code.UNVERIFIED
    assert "pip install onnxruntime" in " ".join(out.split())
    assert "failed" in err


def test_cache_shows_and_deletes_the_measurements(call, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SCALEPOINT_CACHE", str(tmp_path / "measured"))
    path = measurements_path("onnxruntime", "1.0", threads=2)
    add_measurements(path, LocalTimes({"a": (1.0, 2.0)}), ("a network", (0,), 1.5))
    note = tmp_path / "measured" / "note.txt"
    note.write_text("of the user")
    code, out, _ = call("cache", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["folder"] == str(tmp_path / "measured")
    assert [(row["file"], row["layers"], row["networks"]) for row in result["files"]] == [(path.name, 1, 1)]
    assert "1 files deleted from" in call("cache", "--clear")[1]
    assert not path.exists()
    assert note.exists()
    assert json.loads(call("cache", "--json")[1])["files"] == []


def test_doctor_lists_every_optional_package_with_its_extra(call, monkeypatch) -> None:
    extras = metadata("scalepoint").get_all("Provides-Extra")
    monkeypatch.setattr("scalepoint.cli.setup_commands.find_spec", lambda name: None)
    lines = {line["name"]: line for line in json.loads(call("doctor", "--json")[1])["lines"]}
    optional = {name: line["way_out"] for name, line in lines.items() if "(optional)" in line["detail"]}
    assert {"openvino", "transformers", "compressed-tensors", "onnxruntime-genai", "gguf"} <= set(optional)
    hints = [
        re.fullmatch(r"pip install (?:'scalepoint\[(\w+)\]'|pillow)|npm install .*", hint) for hint in optional.values()
    ]
    assert all(hints), optional
    assert {match[1] for match in hints if match[1]} <= set(extras)


def test_init_writes_a_config_for_deploy_and_overwrites_nothing(call, here) -> None:
    from scalepoint.options import DeployConfig

    code, out, err = call("init", "new")
    assert code == 0
    assert out.split() == ["new/scalepoint.yaml", "new/deploy.py"]
    assert "--dry-run" in err
    config = (here / "new" / "scalepoint.yaml").read_text()
    assert DeployConfig.from_file(here / "new" / "scalepoint.yaml").model == "deploy:model"
    assert all(f"\n{name}:" in config for name in DeployConfig.model_fields)
    (here / "new" / "scalepoint.yaml").unlink()
    (here / "new" / "deploy.py").write_text("mine")
    assert call("init", "new")[0] == Code.USAGE
    assert (here / "new" / "deploy.py").read_text() == "mine"
    assert not (here / "new" / "scalepoint.yaml").exists()
    assert call("init", "nets.py")[0] == Code.USAGE


def test_the_files_of_init_can_be_deployed(call, here) -> None:
    assert call("init")[0] == 0
    code, out, _ = call("deploy", "-c", "scalepoint.yaml", "--dry-run")
    assert code == 0
    quantized, float_for_speed = re.search(r"\b(\d) quantized", out), re.search(r"\b(\d) left float for speed", out)
    assert quantized is not None
    assert int(quantized[1]) >= 2  # the first layer, with three channels, is not faster in int8 on every CPU
    assert int(quantized[1]) + (int(float_for_speed[1]) if float_for_speed else 0) == 3


def test_the_schema_has_every_key(call) -> None:
    from scalepoint.options import DeployConfig

    code, out, _ = call("config", "schema")
    assert code == 0
    assert set(json.loads(out)["properties"]) == set(DeployConfig.model_fields)


@pytest.mark.parametrize(
    ("variables", "suggestions"),
    [
        ({"COMP_WORDS": "scalepoint de", "COMP_CWORD": "1"}, ["deploy"]),
        ({"COMP_WORDS": "scalepoint deploy --res", "COMP_CWORD": "2"}, ["--resume"]),
        ({"COMP_WORDS": "scalepoint inspect --le", "COMP_CWORD": "2"}, ["--leave"]),
    ],
    ids=["command", "flag", "flag of inspect"],
)
def test_shell_completion_suggests_commands_and_flags(variables, suggestions) -> None:
    done = child(_SCALEPOINT_COMPLETE="complete_bash", **variables)
    assert (done.returncode, done.stdout.split()) == (0, suggestions)
    words = variables["COMP_WORDS"]
    done = child(_SCALEPOINT_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words)
    assert suggestions[0] in done.stdout


def test_the_version_is_the_packages() -> None:
    done = child("--version")
    assert (done.returncode, done.stdout) == (0, f"scalepoint {scalepoint.__version__}\n")


def test_modules_that_a_config_names_are_searched_next_to_it(call, here) -> None:
    project = here / "project"
    project.mkdir()
    (project / "mine.py").write_text((here / "nets.py").read_text())
    (project / "c.yaml").write_text("model: mine:net\ndata: mine:batches\n")
    sys.modules.pop("mine", None)
    code, out, err = call("deploy", "-c", "project/c.yaml", "--dry-run", "--json")
    assert (code, json.loads(out)["exit_code"]) == (0, 0), err
    sys.modules.pop("mine", None)
    sys.path[:] = [folder for folder in sys.path if folder != str(project)]
    code, _, err = call("inspect", "mine:net")  # the current folder does not contain it
    assert (code, "no module 'mine'" in " ".join(err.split())) == (Code.USAGE, True)
    assert call("inspect", "mine:net", "--root", "project", "--json")[0] == 0


def test_data_that_a_config_names_is_searched_next_to_it(call, here) -> None:
    import numpy as np

    (here / "project").mkdir()
    np.savez(here / "project" / "calibration.npz", x=np.zeros((4, 3, 8, 8), dtype=np.float32))
    (here / "project" / "c.yaml").write_text("model: nets:net\ndata: calibration.npz\n")
    assert call("deploy", "-c", "project/c.yaml", "--dry-run", "--json")[0] == 0


def test_a_file_runs_only_with_trust(call, here) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "my net.py").write_text("from beside import make\nprint('run')\n")
    (here / "sub" / "beside.py").write_text("from nets import net as make\n")
    code, out, err = call("inspect", "sub/my net.py:make", trust=False)
    assert (code, "--trust" in err, "run" in out) == (Code.USAGE, True, False)
    code, out, _ = call("inspect", "sub/my net.py:make", "--trust")
    assert (code, "conv" in out) == (0, True)
    code, _, err = call("inspect", "sub/other.py:make", "--trust")
    assert (code, "there is no file sub/other.py" in " ".join(err.split())) == (Code.USAGE, True)


def test_inspect_notes_that_the_input_sizes_are_unknown(call) -> None:
    code, out, err = call("inspect", "nets:Net", "--json")
    assert (code, json.loads(out)["has_sizes"], "--shape" in err) == (0, False, True)
    code, out, err = call("inspect", "nets:Net", "--shape", "1,3,8,8", "--json")
    assert (code, json.loads(out)["has_sizes"], "--shape" in err) == (0, True, False)


LOCAL = "from pathlib import Path\nPath('ran').touch()\nfrom nets import net as make, batches, score\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "local:make"),
        ("inspect", "local.py:make"),
        ("inspect", "./local.py:make"),
        ("inspect", "package.inner:make"),
        ("inspect", "plain.inner:make"),
        ("inspect", "torch.nn:ReLU", "--data", "local:batches"),
        ("inspect", "helper:make", "--root", "project"),
        ("deploy", "-c", "project/named.yaml", "--dry-run"),
        ("deploy", "-c", "project/file.yaml", "--dry-run"),
        ("deploy", "torch.nn:ReLU", "-d", "local:batches", "--evaluate", "local:score"),
        ("sweep", "-c", "project/grid.yaml"),
    ],
    ids=" ".join,
)
def test_code_of_the_current_folder_or_the_config_folder_always_needs_trust(call, here, arguments) -> None:
    files = ("local.py", "package/__init__.py", "package/inner.py", "plain/inner.py", "project/helper.py")
    for name in files:
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(LOCAL)
    (here / "project" / "named.yaml").write_text("model: helper:make\ndata: helper:batches\n")
    (here / "project" / "file.yaml").write_text("model: helper.py:make\ndata: helper.py:batches\n")
    (here / "project" / "grid.yaml").write_text("model: helper:make\ndata: helper:batches\ngrid: {seed: [0, 1]}\n")
    code, _, err = call(*arguments, trust=False)
    text = " ".join(err.split())
    assert (code, "add --trust" in text, (here / "ran").exists()) == (Code.USAGE, True, False), text
    assert "or name" not in text  # no other way is suggested


def test_installed_code_needs_no_trust_next_to_a_folder_of_the_same_name(call, here) -> None:
    (here / "torch").mkdir()  # without __init__.py it is no module
    assert call("inspect", "torch.nn:ReLU", "--shape", "1,4", trust=False)[0] == 0
    code, out, _ = call("inspect", "local:make", "--trust", trust=False)
    assert (code, out) == (Code.USAGE, "")


def test_the_reproduction_command_writes_the_same_file(deployed, tmp_path) -> None:
    import shlex

    out = deployed.folder / "out"
    command = shlex.split(json.loads((out / "report.json").read_text())["reproduction"]["command"])
    assert command[0] == "scalepoint"
    done = child(*command[1:], cwd=tmp_path)  # from an unrelated folder
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (out / "model.onnx").read_bytes()


def test_after_a_search_the_reproduction_command_needs_no_search(call, here) -> None:
    metric = ("--evaluate", "nets:score_of_float", "--max-drop", "0.1", "--max-trials", "2")
    code, _, err = call("deploy", "nets:net", "--data", "nets:fixed_batches", *metric, "-o", "result")
    assert code == Code.LIMIT, err  # no file is good enough
    config, best = (DeployConfig.from_file(here / "result" / name) for name in ("config.yaml", "kept.yaml"))
    assert (config.max_drop, best.max_drop) == (0.1, None)
    report = json.loads((here / "result" / "report.json").read_text())
    assert len(report["trials"]) == 2
    assert best.quantization.to_dict() == report["config"]
    assert str(here / "result" / "kept.yaml") in report["reproduction"]["command"]
    assert "kept.yaml" in (here / "result" / "reproduce.py").read_text()


def test_a_budget_is_written_to_the_config_and_reproduction_needs_no_budget(call, here) -> None:
    flags = ("--data", "nets:fixed_batches", "--budget", "bits=4.5", "--choices", "int4,float", "--allow-departure")
    code, _, err = call("deploy", "nets:net", *flags, "-o", "result", "--smoke")
    assert code == 0, err
    config, best = (DeployConfig.from_file(here / "result" / name) for name in ("config.yaml", "kept.yaml"))
    assert (str(config.budget), config.choices, best.budget) == ("bits=4.5", ("int4", "float"), None)
    assert {override.name for override in best.quantization.overrides} == {"conv", "head"}
    assert config.quantization.overrides == ()
    assert config.allow_departure


@pytest.mark.parametrize("budget", ["small", "size=2", "size=none", "speed=0.5", "bits=4,size=0.2"])
def test_an_invalid_budget_ends_with_2(call, budget) -> None:
    code, _, err = call("deploy", "nets:net", "--data", "nets:batches", "--budget", budget)
    assert code == Code.USAGE
    assert "--budget" in err
