"""Every command with invalid input: the exit code, a helpful message, and no partly written files."""

import json
from pathlib import Path

import pytest

from scalepoint.cli.app import COMMANDS
from scalepoint.cli.exit_codes import Code

NET = (  # a model and its data
    "nets:net",
    "--data",
    "nets:batches",
)
USAGE, MODEL = Code.USAGE, Code.MODEL
# command, kind of error, arguments ({out} is an output folder of deploy), exit code, part of the message
CASES = (
    ("deploy", "missing file", ["nets:net", "--data", "nowhere.npz"], USAGE, "there is no such file"),
    ("deploy", "wrong shape", ["nets:Net", "--data", "nets:wrong_shape"], MODEL, "5 channels"),
    ("deploy", "unlike the example", ["nets:net", "--data", "nets:wrong_shape"], USAGE, "captured with x (*, 3, 8, 8)"),
    ("deploy", "misspelt key", ["-c", "misspelt.yaml"], USAGE, "did you mean 'target'?"),
    ("deploy", "misspelt flag", [*NET, "--evaluat", "nets:score"], USAGE, "Did you mean '--evaluate'?"),
    ("deploy", "unknown target", [*NET, "--target", "tensort"], USAGE, "did you mean 'tensorrt'?"),
    ("deploy", "no capture", ["nets:Branching", "--data", "nets:batches"], MODEL, "--leave"),
    ("deploy", "unknown submodule", [*NET, "--leave", "haed"], USAGE, "did you mean 'head'?"),
    ("deploy", "a type that the target lacks", [*NET, "--float-dtype", "float16"], MODEL, "in float32"),
    ("deploy", "the same, dry", [*NET, "--float-dtype", "float16", "--dry-run"], MODEL, "in float32"),
    ("deploy", "nothing to quantize", ["nets:Idle", "--data", "nets:batches"], MODEL, "nothing of this model"),
    ("deploy", "nothing, in a dry run", ["nets:Idle", "--data", "nets:batches", "--dry-run"], MODEL, "nothing of this"),
    ("deploy", "no metric, dry", [*NET, "--evaluate", "nets:scor", "--dry-run"], USAGE, "did you mean 'score'?"),
    ("deploy", "NaN in the data", ["nets:net", "--data", "nets:batches_with_nan"], USAGE, "--on-nan skip"),
    ("deploy", "a metric of NaN", [*NET, "--evaluate", "nets:nan_metric"], USAGE, "evaluate returned NaN for"),
    ("deploy", "no number", [*NET, "--evaluate", "nets:metric_without_result"], USAGE, "must return one number"),
    ("deploy", "unknown policy", [*NET, "--on-nan", "skp"], USAGE, "--on-nan: must be 'error' or 'skip', got 'skp'"),
    ("deploy", "wrong number", ["nets:net", "--data", "photos", "--size", "8", "--mean", "a"], USAGE, "mean"),
    ("deploy", "metric that fails", [*NET, "--evaluate", "nets:failing_metric"], USAGE, "no labels"),
    ("deploy", "a target by its brand", [*NET, "--target", "OpenVINO"], USAGE, "did you mean 'openvino'?"),
    ("deploy", "of language models", [*NET, "--cache", "int8"], USAGE, "--cache is for checkpoints of language"),
    ("deploy", "of pictures", [*NET, "--mean", "0.5,0.5,0.5"], USAGE, "--mean is for data that is a folder of"),
    ("deploy", "of libraries", [*NET, "--random"], USAGE, "--random is for timm:NAME"),
    ("deploy", "of no checkpoint", ["{out}", "--target", "gguf", "--smoke"], USAGE, "--smoke cannot be used with"),
    ("deploy", "not used", ["{out}", "--target", "gguf", "--threads", "2"], USAGE, "--threads cannot be used with"),
    ("deploy", "not used", ["{out}", "--target", "gguf", "--on-nan", "skip"], USAGE, "--on-nan cannot be used with"),
    ("sweep", "no grid", [], USAGE, "no grid:"),
    ("sweep", "missing file", ["-c", "nowhere.yaml"], USAGE, "nowhere.yaml"),
    ("sweep", "misspelt key", ["-c", "misspelt.yaml"], USAGE, "did you mean 'target'?"),
    ("inspect", "missing file", ["nets:net", "--data", "nowhere.npz"], USAGE, "there is no such file"),
    ("inspect", "wrong shape", ["nets:Net", "--shape", "1,5,8,8"], MODEL, "5 channels"),
    ("inspect", "misspelt key", ["nets:net", "-c", "misspelt.yaml"], USAGE, "did you mean 'target'?"),
    ("inspect", "unknown target", ["nets:net", "--target", "tensort"], USAGE, "did you mean 'tensorrt'?"),
    ("inspect", "no capture", ["nets:Branching", "--shape", "2,3,8,8"], MODEL, "--leave"),
    ("inspect", "unknown submodule", ["nets:net", "--leave", "haed"], USAGE, "did you mean 'head'?"),
    ("verify", "missing file", ["nowhere", *NET], USAGE, "scalepoint deploy"),
    ("verify", "no such file", ["missing.onnx"], USAGE, "'missing.onnx': there is no such file or folder"),
    ("compare", "no such folder", ["nosuch"], USAGE, "'nosuch': there is no such file or folder"),
    ("compare", "no such second", ["{out}", "nosuch"], USAGE, "'nosuch' is not a folder"),
    ("verify", "wrong shape", ["{out}", "nets:Net", "--data", "nets:wrong_shape"], MODEL, "5 channels"),
    ("verify", "misspelt key", ["{out}", "-c", "misspelt.yaml"], USAGE, "did you mean 'target'?"),
    ("verify", "unknown runtime", ["{out}", *NET, "--runtime", "onxruntime"], USAGE, "onnxruntime"),
    ("verify", "no capture", ["{out}", "nets:Branching", "--data", "nets:batches"], MODEL, "--leave"),
    ("verify", "another model", ["{out}", "nets:Other", "--data", "nets:batches"], USAGE, "not the float model"),
    ("compare", "missing file", ["nowhere", *NET], USAGE, "scalepoint deploy"),
    ("compare", "wrong shape", ["{out}", "nets:Net", "--data", "nets:wrong_shape"], MODEL, "5 channels"),
    ("compare", "misspelt key", ["{out}", "-c", "misspelt.yaml"], USAGE, "did you mean 'target'?"),
    ("compare", "misspelt flag", ["{out}", *NET, "--max-batch", "1"], USAGE, "Did you mean '--max-batches'?"),
    ("compare", "no capture", ["{out}", "nets:Branching", "--data", "nets:batches"], MODEL, "--leave"),
    ("check", "missing file", ["nowhere.onnx"], USAGE, "there is no such file"),
    ("check", "no model", ["broken.onnx"], USAGE, "broken.onnx"),
    ("check", "misspelt flag", ["{out}/model.onnx", "--targt", "tensorrt"], USAGE, "Did you mean '--target'?"),
    ("check", "unknown target", ["{out}/model.onnx", "--target", "tensort"], USAGE, "did you mean 'tensorrt'?"),
    ("check", "not an .onnx", ["nets.py"], USAGE, "not an .onnx file"),
    ("bench", "missing file", ["nowhere.onnx", "{out}/model.onnx"], USAGE, "there is no such file"),
    ("bench", "wrong shape", ["{out}/model.onnx", "other.onnx"], Code.UNVERIFIED, "onnxruntime"),
    ("bench", "misspelt flag", ["{out}/model.onnx", "{out}/model.onnx", "--thread", "1"], USAGE, "'--threads'"),
    ("bench", "unknown runtime", ["{out}/model.onnx", "{out}/model.onnx", "--runtime", "ort"], USAGE, "onnxruntime"),
    ("bench", "no model", ["broken.onnx", "broken.onnx"], USAGE, "not an ONNX"),
    ("bench", "no second model", ["{out}/model.onnx", "broken.onnx"], USAGE, "broken.onnx is not an ONNX"),
    ("bench", "half a model", ["half.onnx", "{out}/model.onnx"], USAGE, "half.onnx is not an ONNX"),
    ("bench", "half a second model", ["{out}/model.onnx", "half.onnx"], USAGE, "half.onnx is not an ONNX"),
    ("gate", "missing file", ["nowhere"], USAGE, "scalepoint deploy"),
    ("gate", "misspelt flag", ["{out}", "--max-siz", "1MB"], USAGE, "'--max-size'"),
    ("gate", "no size", ["{out}", "--max-size", "small"], USAGE, "small"),
    ("sign", "missing file", ["nowhere", "--key", "nowhere.pem"], USAGE, "scalepoint deploy"),
    ("sign", "missing key", ["{out}", "--key", "nowhere.pem"], USAGE, "nowhere.pem: there is no such file"),
    ("sign", "misspelt flag", ["{out}", "--kye", "key.pem"], USAGE, "'--key'"),
    ("verify", "missing signature", ["{out}", "--signature", "public.pem"], USAGE, "scalepoint sign"),
    ("cache", "misspelt flag", ["--cler"], USAGE, "'--clear'"),
    ("cache", "too much", ["now"], USAGE, "unexpected extra argument"),
    ("report", "missing file", ["nowhere"], USAGE, "scalepoint deploy"),
    ("report", "no report", ["broken.json"], USAGE, "the report has schema"),
    ("report", "misspelt flag", ["{out}", "--htm", "a.html"], USAGE, "'--html'"),
    ("report", "a file that is there", ["{out}", "--html", "nets.py"], USAGE, "--force"),
    ("report", "wrong number", ["{out}", "--rows", "0"], USAGE, "0"),
    ("targets", "misspelt flag", ["--jsn"], USAGE, "'--json'"),
    ("targets", "unknown target", ["onnxruntim"], USAGE, "did you mean 'onnxruntime'?"),
    ("doctor", "misspelt flag", ["--jsn"], USAGE, "'--json'"),
    ("doctor", "too much", ["now"], USAGE, "unexpected extra argument"),
    ("init", "a file for a folder", ["nets.py"], USAGE, "is a file"),
    ("init", "misspelt flag", ["--jsn"], USAGE, "'--json'"),
)  # fmt: skip


def test_every_command_is_in_the_table() -> None:
    assert {case[0] for case in CASES} == {name for _, name, _ in COMMANDS}
    kinds = {name: {case[1] for case in CASES if case[0] == name} for _, name, _ in COMMANDS}
    assert all(len(kinds[name]) >= 5 for name in ("deploy", "inspect", "verify", "compare", "check", "bench", "report"))


@pytest.mark.parametrize(
    ("command", "kind", "arguments", "code", "message"), CASES, ids=[" ".join(case[:2]) for case in CASES]
)
def test_invalid_input_is_refused_with_a_helpful_message(
    call, here, deployed, command, kind, arguments, code, message
) -> None:
    _write_broken_files(here, (deployed.folder / "out" / "model.onnx").read_bytes())
    before = _files(here)
    arguments = [argument.replace("{out}", str(deployed.folder / "out")) for argument in arguments]
    exit_code, out, err = call(command, *arguments, "--json")
    text = " ".join(err.split())
    assert exit_code == code, text
    assert message in text
    assert "Traceback" not in err
    assert err.startswith("error SP-") or "\nerror SP-" in err
    assert json.loads(out)["exit_code"] == code
    assert _files(here) - before <= {Path("out"), Path("out/.scalepoint")} | _resumable_files(here)


def _resumable_files(here: Path) -> set[Path]:
    """Return the cached files of a run that failed at the metric. They allow to resume it; none is partly written."""
    cached = {path for path in _files(here) if path.parts[:2] == ("out", ".scalepoint")}
    assert not any(path.name.startswith(".tmp-") for path in cached)
    return cached


def _files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def _write_broken_files(here: Path, model: bytes) -> None:
    import onnx
    from PIL import Image

    (here / "misspelt.yaml").write_text("model: nets:net\ndata: nets:batches\ntargt: onnxruntime\n")
    (here / "broken.onnx").write_bytes(b"not onnx at all")
    (here / "half.onnx").write_bytes(model[: len(model) // 2])
    (here / "broken.json").write_text("{}")
    (here / "photos").mkdir()
    Image.new("RGB", (9, 9)).save(here / "photos" / "a.png")
    shape = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 7])
    end = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 7])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [shape], [end])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, here / "other.onnx")
