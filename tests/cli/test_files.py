"""A real deployment in a child process, and the commands that work on what it wrote."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalepoint.cli.exit_codes import Code
from scalepoint.cli.load_objects import ObjectLoader
from scalepoint.cli.metadata import with_metadata
from scalepoint.options import DeployConfig


def test_deploy_makes_a_verified_file_with_its_report(deployed) -> None:
    assert deployed.returncode == 0, deployed.stderr
    found = json.loads(deployed.stdout)
    assert (found["schema"], found["command"], found["exit_code"]) == (1, "deploy", 0)
    assert found["verification"]["holds"] is True
    assert found["score"] == found["float_score"] == 0.5
    out = deployed.folder / "out"
    assert {"model.onnx", "float.onnx", "report.html", "report.json", "config.yaml"} <= {
        path.name for path in out.iterdir()
    }
    assert (deployed.folder / found["path"]).is_file()
    assert any("scalepoint bench" in each for each in found["next"])
    assert "Traceback" not in deployed.stderr


def test_the_config_that_was_kept_runs_again(call, made) -> None:
    code, out, err = call("deploy", "-c", made / "config.yaml", "--dry-run", "--json")
    assert code == 0, err
    assert {row["state"] for row in json.loads(out)["coverage"]} == {"quantized"}
    assert call("deploy", "-c", made / "config.yaml")[0] == Code.USAGE  # the folder is full


def test_the_cpu_of_a_file_is_an_option_and_a_key(call, here) -> None:
    (here / "own.yaml").write_text("model: nets:net\ndata: nets:same\ncpu: vnni\n")
    for name, given in (("file", ["-c", "own.yaml"]), ("flag", ["-c", "own.yaml", "--cpu", "avx2"])):
        code, _, err = call("deploy", *given, "-o", name, "--smoke", "--allow-departure")
        assert code == 0, err
    assert [DeployConfig.from_file(here / name / "config.yaml").cpu for name in ("file", "flag")] == ["vnni", "avx2"]
    code, _, err = call("deploy", "-c", "own.yaml", "--cpu", "avx3", "-o", "none")
    assert (code, "--cpu" in err, "avx2" in err) == (Code.USAGE, True, True)
    assert call("deploy", "-c", "own.yaml", "--target", "tensorrt", "-o", "none")[0] == Code.USAGE


def test_a_missing_runtime_is_told_before_the_model_is_made(call, here, monkeypatch) -> None:
    from scalepoint.runtimes import Runtime

    monkeypatch.setattr(Runtime, "is_installed", False)
    code, _, err = call("deploy", "nets:sleeping", "--data", "nets:same")
    assert (code, "is not installed" in err) == (Code.UNVERIFIED, True), err
    assert not (here / "started").exists()


def test_report_shows_writes_and_overwrites_nothing(call, made, tmp_path) -> None:
    code, out, err = call("report", made)
    assert code == 0
    assert "Verified" in out or "Slower" in out
    assert "report.html" in err
    page = tmp_path / "page.html"
    assert call("report", made, "--html", page)[0] == 0
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert call("report", made, "--html", page)[0] == Code.USAGE
    assert call("report", made, "--html", page, "--force")[0] == 0
    code, out, _ = call("report", made / "report.json", "--json")
    assert (code, json.loads(out)["report"]["target"]) == (0, "onnxruntime")


def test_a_report_that_is_none_is_refused(call, here) -> None:
    (here / "report.json").write_text("{")
    (here / "binary.json").write_bytes(b"\xff\xfe\x00")
    for given in (".", "binary.json", "nowhere", "nets.py"):
        code, _, err = call("report", given)
        assert code == Code.USAGE
        assert "report" in err


def test_verify_runs_the_file_again(call, made) -> None:
    code, out, _ = call("verify", made, "nets:net", "--data", "nets:batches", "--json")
    assert code == 0
    assert json.loads(out)["holds"] is True
    code, out, _ = call("verify", made, "-c", made / "config.yaml")
    assert (code, "agreement" in out) == (0, True)


def test_compare_ranks_the_layers_by_the_column_it_says(call, made, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call("compare", made, "nets:net", "--data", "nets:batches", "--max-batches", "2", "--json")
    found = json.loads(out)
    assert (code, found["batches"]) == (0, 2)
    own = [row["local_sqnr_db"] for row in found["layers"]]
    assert own == sorted(own)
    assert {row["name"] for row in found["layers"]} >= {"conv", "head"}
    code, out, _ = call("compare", made, "nets:net", "--data", "nets:same")
    assert (code, "own dB" in out, "worst own error first" in out) == (0, True, True)
    again = json.loads(call("compare", made, "nets:net", "--data", "nets:same", "--json")[1])
    printed = [line.split()[0] for line in out.splitlines()[1 : 1 + len(own)]]
    assert printed == [row["name"] for row in again["layers"]]


@pytest.mark.parametrize("command", ["verify", "compare"])
def test_verify_and_compare_say_what_they_lack(call, command) -> None:
    for arguments, message in (
        (["nowhere", "nets:net"], "scalepoint deploy"),
        (["out.onnx", "nets:net"], "scalepoint deploy"),
        (["nowhere", "model.pt"], ""),
    ):
        code, _, err = call(command, *arguments)
        assert code == Code.USAGE
        assert message in " ".join(err.split())


def test_verify_needs_the_model_and_inputs_of_the_same_kind(call, made) -> None:
    manifest = made / "quantized" / "scalepoint.json"
    with_graph = manifest.read_text()
    sealed = json.loads(with_graph)
    del sealed["manifest"]["graph"]
    body = json.dumps(sealed["manifest"], sort_keys=True)
    manifest.write_text(json.dumps({**sealed, "sha256": hashlib.sha256(body.encode()).hexdigest()}))
    code, _, err = call("verify", made)
    manifest.write_text(with_graph)
    assert (code, "config.yaml" in err) == (Code.USAGE, True)
    code, _, err = call("verify", made, "nets:Net")
    assert (code, "--data" in err) == (Code.USAGE, True)
    code, _, _ = call("verify", made, "nets:Other", "--data", "nets:batches")
    assert code == Code.USAGE


def test_check_applies_the_rules_of_a_compiler(call, made) -> None:
    code, out, err = call("check", made / "model.onnx", "--json")
    found = json.loads(out)
    assert code == Code.MODEL  # uint8 is not for TensorRT
    assert {"rule", "severity", "node", "why", "way_out"} <= set(found["findings"][0])
    assert "refuse" in err
    code, out, _ = call("check", made / "model.onnx", "--target-version", "10.9")
    assert (code, "R01 error" in out) == (Code.MODEL, True)
    assert call("check", made / "float.onnx")[0] == 0
    assert call("check", made / "model.onnx", "--target-version", "ten")[0] == Code.USAGE


def test_bench_measures_two_files(call, made) -> None:
    code, out, _ = call("bench", made / "float.onnx", made / "model.onnx", "--json", "--min-ratio", "0.0001")
    assert code == 0
    assert json.loads(out)["ratio"] > 0
    layers = json.loads(out)["layers"]
    assert all({"name", "seconds", "float_seconds", "kernels", "float_kernels"} == set(each) for each in layers)
    assert any(each["seconds"] and each["float_seconds"] for each in layers)
    code, out, err = call("bench", made / "float.onnx", made / "model.onnx", "--min-ratio", "1000")
    assert code == Code.LIMIT
    assert "x the speed of float.onnx" in " ".join(out.split())
    assert "slowest layer" in out
    assert "asked for" in err


def test_the_printed_command_measures_the_same_files_with_the_same_inputs(call, deployed, monkeypatch) -> None:
    monkeypatch.chdir(deployed.folder)
    done = json.loads(deployed.stdout)
    (command,) = [each.partition(": ")[2] for each in done["next"] if "scalepoint bench" in each]
    latency = done["verification"]["latency"]
    _, out, err = call(*shlex.split(command)[1:], "--json")
    found = json.loads(out)
    assert Path(found["files"][0]).name == latency["baseline_file"]
    assert found["files"][1] == done["verification"]["path"]
    assert (found["shapes"], found["threads"]) == (latency["shapes"], latency["threads"])
    assert found["shapes"] == {"x": [2, 3, 8, 8]}  # as the data has it, not the batch of 1 that a free axis would get
    assert "inputs.safetensors" in err
    assert any(each["seconds"] and each["float_seconds"] for each in found["layers"])


def test_bench_measures_other_files_and_sizes_with_random_inputs(call, made, tmp_path) -> None:
    files = (made / "float.onnx", made / "model.onnx")
    assert json.loads(call("bench", *files, "--batches", "3", "--json")[1])["shapes"] == {"x": [3, 3, 8, 8]}
    for file in files:
        shutil.copy(file, tmp_path)
    (tmp_path / "inputs.safetensors").write_bytes(b"not safetensors at all")
    copies = [tmp_path / file.name for file in files]
    code, _, err = call("bench", *copies)
    assert (code != 0, "inputs.safetensors" in err, "Traceback" in err) == (True, True, False)
    (tmp_path / "inputs.safetensors").unlink()
    assert json.loads(call("bench", *copies, "--json")[1])["shapes"] == {"x": [1, 3, 8, 8]}


def test_bench_tells_samples_a_second_at_each_batch_and_number_of_threads(call, made) -> None:
    files = (made / "float.onnx", made / "model.onnx")
    code, out, _ = call("bench", *files, "--batches", "1,4", "--threads", "1, 2", "--json")
    found = json.loads(out)["throughput"]
    assert code == 0
    assert [(each["batch"], each["threads"]) for each in found] == [(1, 1), (4, 1), (1, 2), (4, 2)]
    assert all(each["per_second"][1] / each["per_second"][0] == pytest.approx(each["ratio"]) for each in found)
    code, out, _ = call("bench", *files, "--batches", "4")
    assert (code, "a second" in out) == (0, False)  # one batch is told as ever
    assert "4x3x" in "".join(out.split())


def test_bench_refuses_batches_that_are_none(call, made) -> None:
    for given in ("1,x", "0", "1,,2", "-1"):
        code, _, err = call("bench", made / "float.onnx", made / "model.onnx", f"--batches={given}")
        assert (code, "as 1,8,32" in " ".join(err.split())) == (Code.USAGE, True), given


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "nowhere.onnx"],
        ["check", "nets.py"],
        ["check", "broken.onnx"],
        ["bench", "nowhere.onnx", "broken.onnx"],
        ["bench", "broken.onnx", "broken.onnx"],
        ["bench", "broken.onnx", "broken.onnx", "--runtime", "onxruntime"],
    ],
    ids=" ".join,
)
def test_files_that_are_none_are_refused(call, here, arguments) -> None:
    (here / "broken.onnx").write_bytes(b"not onnx at all")
    code, _, err = call(*arguments)
    assert code in (Code.USAGE, Code.MODEL, Code.UNVERIFIED), err
    assert "Traceback" not in err


def test_compare_of_two_runs_shows_what_differs(call, made, tmp_path) -> None:
    shutil.copytree(made, tmp_path / "other")
    config = tmp_path / "other" / "config.yaml"
    config.write_text(config.read_text().replace("max_drop: 0.1", "max_drop: 0.2"))
    code, out, err = call("compare", made, tmp_path / "other", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [(each["key"], each["first"], each["second"]) for each in found["settings"]] == [("max_drop", 0.1, 0.2)]
    assert {each["mood"] for each in found["numbers"]} == {"same"}
    code, out, _ = call("compare", made, tmp_path / "other")
    assert (code, "max_drop" in out) == (0, True)
    code, _, err = call("compare", made, tmp_path / "other", "--data", "nets:batches")
    assert (code, "not for two runs" in err) == (Code.USAGE, True)
    code, _, err = call("compare", made, tmp_path)
    assert (code, "is not a run" in err) == (Code.USAGE, True)


@pytest.mark.slow
def test_the_script_beside_the_file_makes_the_same_bytes(deployed) -> None:
    out = deployed.folder / "out"
    done = subprocess.run(
        [sys.executable, str(out / "reproduce.py"), "twin"],
        cwd=deployed.folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    twin = deployed.folder / "twin"
    assert (twin / "model.onnx").read_bytes() == (out / "model.onnx").read_bytes()
    assert (twin / "log.txt").is_file()
    shutil.rmtree(twin)


def test_verify_of_a_file_that_departs_writes_the_layer_that_does(call, made, tmp_path) -> None:
    import onnx

    shutil.copytree(made, tmp_path / "other")
    path = tmp_path / "other" / "model.onnx"
    proto = onnx.load(path)
    scale = next(each for each in proto.graph.initializer if each.name.endswith("conv.scale"))
    scale.CopyFrom(onnx.numpy_helper.from_array(4 * onnx.numpy_helper.to_array(scale), scale.name))
    onnx.save(proto, path)
    code, _, err = call("verify", tmp_path / "other", "--json")
    assert code == Code.UNVERIFIED
    assert "run.py" in "".join(err.split())
    assert (tmp_path / "other" / "failing" / "model.onnx").is_file()


def test_inspect_of_a_file_shows_what_it_says_of_itself(call, made) -> None:
    code, out, _ = call("inspect", made / "model.onnx")
    assert code == 0
    for said in ("input x", "float32 *x3x8x8", "scalepoint.version", '{"batches": 3, "samples": 6}', "onnxruntime"):
        assert said in out
    document = json.loads(call("inspect", made / "model.onnx", "--json")[1])
    assert document["metadata"]["scalepoint.calibration"] == {"batches": 3, "samples": 6}
    assert "others wrote it" in call("inspect", made / "float.onnx")[1]
    assert call("inspect", made / "gone.onnx")[0] == 2


def test_what_a_file_keeps_comes_from_a_file_and_from_how_pictures_are_made(here) -> None:
    (here / "said.yaml").write_text("labels: [cat, dog]\n")
    settings = DeployConfig(metadata="said.yaml", size=32, mean=(0.5,), std=(0.25,))
    found = with_metadata(settings, ObjectLoader(here)).metadata
    assert found == {"labels": ["cat", "dog"], "preprocessing": {"size": 32, "mean": (0.5,), "std": (0.25,)}}
    (here / "net").mkdir()
    (here / "net" / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    of_folder = DeployConfig(model="hf:net", metadata={"preprocessing": "mine"})
    assert with_metadata(of_folder, ObjectLoader(here)).metadata == {"preprocessing": "mine"}
    bare = of_folder.updated({"metadata": None})
    assert with_metadata(bare, ObjectLoader(here)).metadata == {"preprocessing": {"image_mean": [0.5]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("- a", "not list"), ("a: [", "cannot be read"), ("abc", "not str")],
)
def test_metadata_that_is_none_is_refused_before_the_run(call, here, text, message) -> None:
    if text is not None:
        (here / "said.yaml").write_text(text)
    code, _, err = call("deploy", "nets:net", "--data", "nets:same", "--metadata", "said.yaml")
    assert code == 2
    assert message in " ".join(err.split())
    assert not (here / "out").exists()
