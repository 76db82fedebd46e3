"""A deployment in a child process, and the commands that work on its output folder."""

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
from scalepoint.cli.inspect import is_model_file
from scalepoint.cli.load_objects import ObjectLoader
from scalepoint.cli.metadata import with_metadata
from scalepoint.formats import find_format, list_formats
from scalepoint.options import DeployConfig


def test_deploy_writes_a_verified_file_with_a_report(deployed) -> None:
    assert deployed.returncode == 0, deployed.stderr
    result = json.loads(deployed.stdout)
    assert (result["schema"], result["command"], result["exit_code"]) == (1, "deploy", 0)
    assert result["verification"]["holds"] is True
    assert result["score"] == result["float_score"] == 0.5
    out = deployed.folder / "out"
    assert {"model.onnx", "float.onnx", "report.html", "report.json", "config.yaml"} <= {
        path.name for path in out.iterdir()
    }
    assert (deployed.folder / result["path"]).is_file()
    assert any("scalepoint bench" in step for step in result["next"])
    assert "Traceback" not in deployed.stderr


def test_files_of_every_format_are_recognized_by_their_suffix() -> None:
    files = [f"out/model{find_format(name).suffix}" for name in list_formats()]
    assert {".onnx", ".pte", ".tflite", ".mlpackage", ".aimodel"} <= {Path(file).suffix for file in files}
    assert all(map(is_model_file, [*files, "MODEL.ONNX"]))
    assert not any(
        map(is_model_file, [None, "nets:net", "nets.py:net", "package.module:net", "timm:resnet50.a1", "folder"])
    )


def test_the_written_config_can_be_deployed_again(call, output_folder) -> None:
    code, out, err = call("deploy", "-c", output_folder / "config.yaml", "--dry-run", "--json")
    assert code == 0, err
    assert {row["state"] for row in json.loads(out)["coverage"]} == {"quantized"}
    assert call("deploy", "-c", output_folder / "config.yaml")[0] == Code.USAGE  # the folder is not empty


def test_the_cpu_is_a_flag_and_a_config_key(call, here) -> None:
    (here / "vnni.yaml").write_text("model: nets:net\ndata: nets:fixed_batches\ncpu: vnni\n")
    for name, arguments in (("file", ["-c", "vnni.yaml"]), ("flag", ["-c", "vnni.yaml", "--cpu", "avx2"])):
        code, _, err = call("deploy", *arguments, "-o", name, "--smoke", "--allow-departure")
        assert code == 0, err
    assert [DeployConfig.from_file(here / name / "config.yaml").cpu for name in ("file", "flag")] == ["vnni", "avx2"]
    code, _, err = call("deploy", "-c", "vnni.yaml", "--cpu", "avx3", "-o", "none")
    assert (code, "--cpu" in err, "avx2" in err) == (Code.USAGE, True, True)
    assert call("deploy", "-c", "vnni.yaml", "--target", "tensorrt", "-o", "none")[0] == Code.USAGE


def test_a_missing_runtime_is_reported_before_the_model_is_loaded(call, here, monkeypatch) -> None:
    from scalepoint.runtimes import Runtime

    monkeypatch.setattr(Runtime, "is_installed", False)
    code, _, err = call("deploy", "nets:sleeping", "--data", "nets:fixed_batches")
    assert (code, "is not installed" in err) == (Code.UNVERIFIED, True), err
    assert not (here / "started").exists()


def test_report_is_shown_and_written_without_overwriting_files(call, output_folder, tmp_path) -> None:
    code, out, err = call("report", output_folder)
    assert code == 0
    assert "Verified" in out or "Slower" in out
    assert "report.html" in err
    page = tmp_path / "page.html"
    assert call("report", output_folder, "--html", page)[0] == 0
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert call("report", output_folder, "--html", page)[0] == Code.USAGE
    assert call("report", output_folder, "--html", page, "--force")[0] == 0
    code, out, _ = call("report", output_folder / "report.json", "--json")
    assert (code, json.loads(out)["report"]["target"]) == (0, "onnxruntime")


def test_a_file_that_is_not_a_report_is_refused(call, here) -> None:
    (here / "report.json").write_text("{")
    (here / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (".", "binary.json", "nowhere", "nets.py"):
        code, _, err = call("report", path)
        assert code == Code.USAGE
        assert "report" in err


def test_verify_runs_the_file_again(call, output_folder) -> None:
    code, out, _ = call("verify", output_folder, "nets:net", "--data", "nets:batches", "--json")
    assert code == 0
    assert json.loads(out)["holds"] is True
    code, out, _ = call("verify", output_folder, "-c", output_folder / "config.yaml")
    assert (code, "agreement" in out) == (0, True)


def test_compare_sorts_the_layers_by_their_own_error(call, output_folder, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call("compare", output_folder, "nets:net", "--data", "nets:batches", "--max-batches", "2", "--json")
    result = json.loads(out)
    assert (code, result["batches"]) == (0, 2)
    own_errors = [row["local_sqnr_db"] for row in result["layers"]]
    assert own_errors == sorted(own_errors)
    assert {row["name"] for row in result["layers"]} >= {"conv", "head"}
    code, out, _ = call("compare", output_folder, "nets:net", "--data", "nets:fixed_batches")
    assert (code, "own dB" in out, "worst own error first" in out) == (0, True, True)
    again = json.loads(call("compare", output_folder, "nets:net", "--data", "nets:fixed_batches", "--json")[1])
    printed = [line.split()[0] for line in out.splitlines()[1 : 1 + len(own_errors)]]
    assert printed == [row["name"] for row in again["layers"]]


@pytest.mark.parametrize("command", ["verify", "compare"])
def test_verify_and_compare_name_the_missing_folder(call, command) -> None:
    for arguments, message in (
        (["nowhere", "nets:net"], "scalepoint deploy"),
        (["out.onnx", "nets:net"], "scalepoint deploy"),
        (["nowhere", "model.pt"], ""),
    ):
        code, _, err = call(command, *arguments)
        assert code == Code.USAGE
        assert message in " ".join(err.split())


def test_verify_of_a_folder_without_a_graph_needs_the_model_and_inputs(call, output_folder) -> None:
    manifest = output_folder / "quantized" / "scalepoint.json"
    with_graph = manifest.read_text()
    sealed = json.loads(with_graph)
    del sealed["manifest"]["graph"]
    body = json.dumps(sealed["manifest"], sort_keys=True)
    manifest.write_text(json.dumps({**sealed, "sha256": hashlib.sha256(body.encode()).hexdigest()}))
    code, _, err = call("verify", output_folder)
    manifest.write_text(with_graph)
    assert (code, "config.yaml" in err) == (Code.USAGE, True)
    code, _, err = call("verify", output_folder, "nets:Net")
    assert (code, "--data" in err) == (Code.USAGE, True)
    code, _, _ = call("verify", output_folder, "nets:Other", "--data", "nets:batches")
    assert code == Code.USAGE


def test_check_applies_the_rules_of_tensorrt(call, output_folder) -> None:
    code, out, err = call("check", output_folder / "model.onnx", "--json")
    result = json.loads(out)
    assert code == Code.MODEL  # TensorRT does not support uint8
    assert {"rule", "severity", "node", "why", "way_out"} <= set(result["findings"][0])
    assert "refuse" in err
    code, out, _ = call("check", output_folder / "model.onnx", "--target-version", "10.9")
    assert (code, "R01 error" in out) == (Code.MODEL, True)
    assert call("check", output_folder / "float.onnx")[0] == 0
    assert call("check", output_folder / "model.onnx", "--target-version", "ten")[0] == Code.USAGE


def test_bench_measures_two_files(call, output_folder) -> None:
    code, out, _ = call(
        "bench", output_folder / "float.onnx", output_folder / "model.onnx", "--json", "--min-ratio", "0.0001"
    )
    assert code == 0
    assert json.loads(out)["ratio"] > 0
    layers = json.loads(out)["layers"]
    assert all({"name", "seconds", "float_seconds", "kernels", "float_kernels"} == set(layer) for layer in layers)
    assert any(layer["seconds"] and layer["float_seconds"] for layer in layers)
    code, out, err = call("bench", output_folder / "float.onnx", output_folder / "model.onnx", "--min-ratio", "1000")
    assert code == Code.LIMIT
    assert "x the speed of float.onnx" in " ".join(out.split())
    assert "slowest layer" in out
    assert "--min-ratio" in err


def test_the_printed_bench_command_repeats_the_measurement(call, deployed, monkeypatch) -> None:
    monkeypatch.chdir(deployed.folder)
    done = json.loads(deployed.stdout)
    (command,) = [step.partition(": ")[2] for step in done["next"] if "scalepoint bench" in step]
    latency = done["verification"]["latency"]
    _, out, err = call(*shlex.split(command)[1:], "--json")
    result = json.loads(out)
    assert Path(result["files"][0]).name == latency["baseline_file"]
    assert result["files"][1] == done["verification"]["path"]
    assert (result["shapes"], result["threads"]) == (latency["shapes"], latency["threads"])
    assert result["shapes"] == {"x": [2, 3, 8, 8]}  # the batch of the data; random inputs would have a batch of 1
    assert "inputs.safetensors" in err
    assert any(layer["seconds"] and layer["float_seconds"] for layer in result["layers"])


def test_bench_uses_random_inputs_for_other_files_and_sizes(call, output_folder, tmp_path) -> None:
    files = (output_folder / "float.onnx", output_folder / "model.onnx")
    assert json.loads(call("bench", *files, "--batches", "3", "--json")[1])["shapes"] == {"x": [3, 3, 8, 8]}
    for file in files:
        shutil.copy(file, tmp_path)
    (tmp_path / "inputs.safetensors").write_bytes(b"not safetensors at all")
    copies = [tmp_path / file.name for file in files]
    code, _, err = call("bench", *copies)
    assert (code != 0, "inputs.safetensors" in err, "Traceback" in err) == (True, True, False)
    (tmp_path / "inputs.safetensors").unlink()
    assert json.loads(call("bench", *copies, "--json")[1])["shapes"] == {"x": [1, 3, 8, 8]}


def test_bench_shows_samples_per_second_for_each_batch_size_and_number_of_threads(call, output_folder) -> None:
    files = (output_folder / "float.onnx", output_folder / "model.onnx")
    code, out, _ = call("bench", *files, "--batches", "1,4", "--threads", "1, 2", "--json")
    result = json.loads(out)["throughput"]
    assert code == 0
    assert [(row["batch"], row["threads"]) for row in result] == [(1, 1), (4, 1), (1, 2), (4, 2)]
    assert all(row["per_second"][1] / row["per_second"][0] == pytest.approx(row["ratio"]) for row in result)
    code, out, _ = call("bench", *files, "--batches", "4")
    assert (code, "per second" in out) == (0, False)  # one batch size has no table
    assert "4x3x" in "".join(out.split())


def test_bench_refuses_invalid_batch_sizes(call, output_folder) -> None:
    for text in ("1,x", "0", "1,,2", "-1"):
        code, _, err = call("bench", output_folder / "float.onnx", output_folder / "model.onnx", f"--batches={text}")
        assert (code, "such as 1,8,32" in " ".join(err.split())) == (Code.USAGE, True), text


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
def test_files_that_are_no_models_are_refused(call, here, arguments) -> None:
    (here / "broken.onnx").write_bytes(b"not onnx at all")
    code, _, err = call(*arguments)
    assert code in (Code.USAGE, Code.MODEL, Code.UNVERIFIED), err
    assert "Traceback" not in err


def test_compare_of_two_runs_shows_the_differences(call, output_folder, tmp_path) -> None:
    shutil.copytree(output_folder, tmp_path / "other")
    config = tmp_path / "other" / "config.yaml"
    config.write_text(config.read_text().replace("max_drop: 0.1", "max_drop: 0.2"))
    code, out, err = call("compare", output_folder, tmp_path / "other", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert [(row["key"], row["first"], row["second"]) for row in result["settings"]] == [("max_drop", 0.1, 0.2)]
    assert {row["mood"] for row in result["numbers"]} == {"same"}
    code, out, _ = call("compare", output_folder, tmp_path / "other")
    assert (code, "max_drop" in out) == (0, True)
    code, _, err = call("compare", output_folder, tmp_path / "other", "--data", "nets:batches")
    assert (code, "cannot be used with two runs" in " ".join(err.split())) == (Code.USAGE, True)
    code, _, err = call("compare", output_folder, tmp_path)
    assert (code, "is not a run" in " ".join(err.split())) == (Code.USAGE, True)


@pytest.mark.slow
def test_the_reproduction_script_writes_the_same_bytes(deployed) -> None:
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


def test_verify_of_a_file_that_departs_writes_the_departing_layer(call, output_folder, tmp_path) -> None:
    import onnx

    shutil.copytree(output_folder, tmp_path / "other")
    path = tmp_path / "other" / "model.onnx"
    proto = onnx.load(path)
    scale = next(tensor for tensor in proto.graph.initializer if tensor.name.endswith("conv.scale"))
    scale.CopyFrom(onnx.numpy_helper.from_array(4 * onnx.numpy_helper.to_array(scale), scale.name))
    onnx.save(proto, path)
    code, _, err = call("verify", tmp_path / "other", "--json")
    assert code == Code.UNVERIFIED
    assert "run.py" in "".join(err.split())
    assert (tmp_path / "other" / "failing" / "model.onnx").is_file()
    manifest = json.loads((tmp_path / "other" / ".scalepoint-files.json").read_text())["files"]
    assert {"failing/model.onnx", "failing/run.py"} <= set(manifest)
    assert call("verify", tmp_path / "other", "--json")[0] == Code.UNVERIFIED  # again, over the same files


def test_inspect_of_a_file_shows_its_inputs_and_metadata(call, output_folder) -> None:
    code, out, _ = call("inspect", output_folder / "model.onnx")
    assert code == 0
    for text in ("input x", "float32 *x3x8x8", "scalepoint.version", '{"batches": 3, "samples": 6}', "onnxruntime"):
        assert text in out
    document = json.loads(call("inspect", output_folder / "model.onnx", "--json")[1])
    assert document["metadata"]["scalepoint.calibration"] == {"batches": 3, "samples": 6}
    assert "int8 per_channel" in call("inspect", output_folder / "float.onnx")[1]  # the layers of a float file
    assert call("inspect", output_folder / "gone.onnx")[0] == 2


def test_metadata_comes_from_a_file_and_from_the_image_options(here) -> None:
    (here / "metadata.yaml").write_text("labels: [cat, dog]\n")
    settings = DeployConfig(metadata="metadata.yaml", size=32, mean=(0.5,), std=(0.25,))
    result = with_metadata(settings, ObjectLoader(here)).metadata
    assert result == {"labels": ["cat", "dog"], "preprocessing": {"size": 32, "mean": (0.5,), "std": (0.25,)}}
    (here / "net").mkdir()
    (here / "net" / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    hf_settings = DeployConfig(model="hf:net", metadata={"preprocessing": "mine"})
    assert with_metadata(hf_settings, ObjectLoader(here)).metadata == {"preprocessing": "mine"}
    no_metadata = hf_settings.updated({"metadata": None})
    assert with_metadata(no_metadata, ObjectLoader(here)).metadata == {"preprocessing": {"image_mean": [0.5]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("- a", "got a list"), ("a: [", "cannot be read"), ("abc", "got a str")],
)
def test_a_file_without_metadata_is_refused_before_the_run(call, here, text, message) -> None:
    if text is not None:
        (here / "metadata.yaml").write_text(text)
    code, _, err = call("deploy", "nets:net", "--data", "nets:fixed_batches", "--metadata", "metadata.yaml")
    assert code == 2
    assert message in " ".join(err.split())
    assert not (here / "out").exists()
