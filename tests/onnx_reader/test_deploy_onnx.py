"""An .onnx file through deploy, inspect and the command line."""

import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.cli.app import run
from scalepoint.errors import OnnxReadError, ScalepointError, ScalepointWarning, UsageError, VerificationError
from scalepoint.verification import onnx_parity
from scalepoint.verification.onnx_parity import Parity, check_parity
from tests.onnx_reader.graphs import model_of, random, save

# Two convolutions with free height and width, and names that are no identifiers.
NET = """net (float[N, 3, height, width] images) => (float[N, 5] scores) {
    a = Conv<pads = [1, 1, 1, 1]>(images, first__weight, first__bias)
    b = Relu(a)
    c = Conv<pads = [1, 1, 1, 1]>(b, second__weight)
    d = Relu(c)
    e = GlobalAveragePool(d)
    f = Flatten(e)
    scores = Gemm<transB = 1>(f, head__weight)
}"""


def network(**changes):
    text = NET.replace("__", "_")
    model = model_of(
        text,
        first_weight=random(16, 3, 3, 3),
        first_bias=random(16),
        second_weight=random(16, 16, 3, 3, seed=1),
        head_weight=random(5, 16, seed=2),
    )
    model.graph.input[0].name = model.graph.node[0].input[0] = "images:0"
    model.metadata_props.add(key="author", value="somebody")
    for name, value in changes.items():
        setattr(model.graph.node[0], name, value)
    return model


def fail_in_runtime(run):
    """A metric that interrupts the run after verification."""
    if isinstance(run, nn.Module):
        return 1.0
    raise RuntimeError("interrupted")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployed")
    path = save(network(), folder / "net.onnx")
    data = [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    done = scalepoint.deploy(path, None, data, output=folder / "out", cpu="vnni", config={"speed_first": False})
    return folder, done


def test_deploy_takes_an_onnx_file_and_keeps_its_names_axes_and_metadata(deployed):
    folder, done = deployed
    file = onnx.load(folder / "out" / "model.onnx")
    assert [value.name for value in (*file.graph.input, *file.graph.output)] == ["images:0", "scores"]
    axes = [size.dim_param or size.dim_value for size in file.graph.input[0].type.tensor_type.shape.dim]
    assert axes == ["batch", 3, "height", "width"]
    assert {entry.key: entry.value for entry in file.metadata_props}["author"] == "somebody"
    assert not done.coverage.is_empty
    assert done.verification.sqnr > 40


def test_the_given_file_is_the_baseline(deployed):
    folder, done = deployed
    assert (folder / "out" / "original.onnx").read_bytes() == (folder / "net.onnx").read_bytes()
    assert done.verification.latency.baseline_file == "original.onnx"
    assert done.verification.float_size == (folder / "net.onnx").stat().st_size


def test_a_file_with_external_data_is_the_baseline_and_files_of_the_user_stay(tmp_path):
    path, out = tmp_path / "source" / "net.onnx", tmp_path / "out"
    path.parent.mkdir()
    onnx.save(network(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    out.mkdir()
    (out / "weights.bin").write_text("the user's")
    data = [torch.randn(2, 3, 16, 16)]
    done = scalepoint.deploy(path, None, data, output=out, cpu="vnni", config={"speed_first": False}, force=True)
    assert done.verification.latency.baseline_file == "original.onnx"
    (copied,) = out.glob("original.*.data")
    assert copied.read_bytes() == (path.parent / "weights.bin").read_bytes()
    onnx.checker.check_model(str(out / "original.onnx"))
    assert done.verification.float_size == sum(file.stat().st_size for file in out.glob("original.*"))
    assert (out / "weights.bin").read_text() == "the user's"
    assert not (out / ".scalepoint").exists()


def test_a_resumed_run_compares_with_the_file_as_it_is_now(tmp_path):
    path = save(network(), tmp_path / "net.onnx")
    data = [torch.randn(2, 3, 16, 16)]
    options = {"output": tmp_path / "out", "cpu": "vnni", "config": {"speed_first": False}}
    with pytest.raises(RuntimeError, match="interrupted"):
        scalepoint.deploy(path, None, data, evaluate=fail_in_runtime, **options)
    changed = network()
    changed.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(random(16, 3, 3, 3, seed=9), "first_weight"))
    save(changed, path)
    with pytest.warns(ScalepointWarning, match="the model"):
        scalepoint.deploy(path, None, data, evaluate=lambda run: 1.0, resume=True, **options)
    assert (tmp_path / "out" / "original.onnx").read_bytes() == (tmp_path / "net.onnx").read_bytes()


def test_a_saved_folder_of_a_file_loads_without_the_file(deployed):
    folder, done = deployed
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(scalepoint.load(folder / "out" / "quantized")(x), done.model(x))


def test_a_file_and_its_module_are_compared_before_any_work_and_the_first_node_is_named(tmp_path, monkeypatch):
    path = save(network(), tmp_path / "net.onnx")
    loaded = scalepoint.load_onnx(path)
    example = loaded.make_example({"images:0": (1, 3, 16, 16)})
    result = check_parity(loaded, example)
    assert result.status == Parity.SAME
    assert result.sqnr > 80
    second = [module for module in loaded.modules() if isinstance(module, nn.Conv2d)][1]
    with torch.no_grad():
        second.weight.mul_(1.5)
    result = check_parity(loaded, example)
    assert result.status == Parity.DIFFERENT
    assert "'c' (Conv)" in result.message
    monkeypatch.setattr(onnx_parity, "MIN_SQNR", 1000.0)
    with pytest.raises(VerificationError, match=r"differs from the file.*Nothing was quantized"):
        scalepoint.deploy(path, None, [torch.randn(1, 3, 16, 16)], output=tmp_path / "out", cpu="vnni")


def test_outputs_of_about_0_are_not_compared(tmp_path):
    model = model_of("net (float[1, 4] x) => (float[1, 4] y) { y = Mul(x, z) }", z=np.float32(1e-9))
    loaded = scalepoint.load_onnx(save(model, tmp_path / "net.onnx"))
    loaded.steps[0] = type(loaded.steps[0])("missing", (), ())
    loaded = scalepoint.load_onnx(save(model, tmp_path / "net.onnx"))
    object.__setattr__(loaded.steps[0], "arguments", ("x", loaded.steps[0].arguments[1].map(lambda n: n * 2)))
    result = check_parity(loaded, {"x": torch.ones(1, 4)})
    assert result.status == Parity.NOT_COMPARED
    assert "nothing could be compared" in result.message


def test_an_axis_that_the_model_computes_with_becomes_fixed_with_a_warning(tmp_path):
    text = """net (float[N, L] x) => (float[N, 3] y) {
        y = MatMul(x, w)
    }"""
    path = save(model_of(text, w=random(16, 3)), tmp_path / "net.onnx")
    data = [torch.randn(2, 16) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scalepoint.deploy(path, None, data, output=tmp_path / "out", smoke=True, cpu="vnni", allow_departure=True)
    assert any("are free in" in str(warning.message) for warning in caught)


def test_a_resumed_run_with_fixed_axes_exports_nothing_again(tmp_path):
    text = "net (float[N, L] x) => (float[N, 3] y) { y = MatMul(x, w) }"
    path = save(model_of(text, w=random(16, 3)), tmp_path / "net.onnx")
    data = [torch.randn(2, 16) for _ in range(2)]
    options = {"output": tmp_path / "out", "cpu": "vnni", "config": {"speed_first": False}}
    with pytest.raises(RuntimeError, match="interrupted"), pytest.warns(ScalepointWarning, match="are free in"):
        scalepoint.deploy(path, None, data, evaluate=fail_in_runtime, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*changed since")
        with pytest.raises(RuntimeError, match="interrupted"):
            scalepoint.deploy(path, None, data, evaluate=fail_in_runtime, resume=True, **options)


def test_options_of_files_are_refused_for_other_models(tmp_path):
    for options in ({"shape": {"x": (1, 2)}}, {"fixed_inputs": {"x": 1}}, {"requantize": True}):
        with pytest.raises(UsageError, match=r"\.onnx files"):
            scalepoint.deploy(nn.Linear(2, 2), torch.ones(1, 2), [], output=tmp_path / "out", **options)
    path = save(network(), tmp_path / "net.onnx")
    with pytest.raises(UsageError, match="does not fit the file"):
        scalepoint.deploy(path, None, [], shape={"images:0": (1, 4, 8, 8)}, output=tmp_path / "out")


def test_a_file_that_is_not_onnx_is_refused_by_name(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"no model")
    with pytest.raises(ScalepointError, match="ONNX file"):
        scalepoint.deploy(tmp_path / "net.onnx", None, [], output=tmp_path / "out")
    with pytest.raises(ScalepointError, match="is not an"):
        scalepoint.deploy("net.bin", None, [], output=tmp_path / "out")


def test_inspect_and_transform_take_a_file(tmp_path):
    path = save(network(), tmp_path / "net.onnx")
    rows = scalepoint.inspect(path, torch.randn(1, 3, 16, 16)).operations
    assert sum(row.macs or 0 for row in rows) > 0
    assert sum(scalepoint.transform(path).report.counts().values()) >= 3


FILES = {"openvino": ".onnx", "tensorrt": ".onnx", "executorch": ".pte", "litert": ".tflite", "coreml": ".mlpackage"}


@pytest.mark.parametrize("target", FILES)
@pytest.mark.slow
def test_other_targets_take_a_file(tmp_path, target):
    path = save(network(), tmp_path / "net.onnx")
    data = [torch.from_numpy(random(2, 3, 16, 16, seed=seed)) for seed in range(2)]
    done = scalepoint.deploy(path, None, data, target=target, output=tmp_path / "out", smoke=True)
    assert done.path.suffix == FILES[target]
    assert not done.coverage.is_empty
    assert done.verification is None or done.verification.status.value != "ok" or done.verification.holds


@pytest.mark.parametrize(
    "options",
    [
        {"accuracy": "balanced"},
        {"budget": "bits=7"},
        {"max_drop": 0.5, "evaluate": lambda run: -float(run(torch.ones(1, 3, 16, 16)).abs().mean())},
        {"fixed_sizes": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.slow
def test_options_of_deploy_work_with_a_file(tmp_path, options):
    path = save(network(), tmp_path / "net.onnx")
    data = [torch.from_numpy(random(2, 3, 16, 16, seed=seed)) for seed in range(2)]
    config = {"speed_first": False}
    done = scalepoint.deploy(path, None, data, output=tmp_path / "out", cpu="vnni", config=config, **options)
    assert not done.coverage.is_empty
    assert done.verification.sqnr > 40
    assert (done.tuned is not None) == (options.keys() <= {"accuracy", "budget"})  # narrow weights are tuned by default
    assert ("budget" not in options) or done.allocation is not None


@pytest.mark.slow
def test_an_interrupted_run_of_a_file_is_resumed(tmp_path):
    path = save(network(), tmp_path / "net.onnx")
    data = [torch.from_numpy(random(2, 3, 16, 16, seed=seed)) for seed in range(2)]

    def stop(event):
        if (event.kind, event.name) == ("start", "exporting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scalepoint.deploy(path, None, data, output=tmp_path / "out", cpu="vnni", callback=stop)
    done = scalepoint.deploy(path, None, data, output=tmp_path / "out", cpu="vnni", resume=True)
    assert done.path.is_file()


@pytest.mark.slow
def test_a_sweep_takes_a_file(tmp_path):
    path = save(network(), tmp_path / "net.onnx")
    data = [torch.from_numpy(random(2, 3, 16, 16, seed=seed)) for seed in range(2)]
    grid = {"target": ["onnxruntime", "openvino"]}
    table = scalepoint.sweep(path, None, data, grid=grid, output=tmp_path / "out", smoke=True, progress=False)
    assert [(row.status, row.message) for row in table.rows] == [("done", "")] * 2


class TestOnTheCommandLine:
    def test_deploy_with_a_shape_and_random_data(self, tmp_path, capsys):
        path = save(network(), tmp_path / "net.onnx")
        code = run(["deploy", path, "--data", "random", "--shape", "1,3,16,16", "-o", str(tmp_path / "out"), "--smoke"])
        text = capsys.readouterr().err
        assert code == 0
        assert "accuracy means nothing" in text
        assert "agree" in text
        assert (tmp_path / "out" / "model.onnx").is_file()

    def test_deploy_with_a_folder_of_arrays(self, tmp_path, capsys):
        path = save(network(), tmp_path / "net.onnx")
        (tmp_path / "data").mkdir()
        for number in range(2):
            np.save(tmp_path / "data" / f"{number}.npy", random(2, 3, 16, 16, seed=number))
        code = run(["deploy", path, "--data", str(tmp_path / "data"), "-o", str(tmp_path / "out"), "--smoke"])
        assert code == 0, capsys.readouterr().err

    def test_inspect_shows_layers_of_a_float_file_and_prints_default_sizes(self, tmp_path, capsys):
        path = save(network(), tmp_path / "net.onnx")
        assert run(["inspect", path]) == 0
        output = capsys.readouterr()
        assert "conv" in output.out
        assert "height=224" in output.err
        assert "--shape images_0=1,3,224,224" in output.err

    def test_a_quantized_file_is_refused_with_the_option_that_accepts_it(self, tmp_path, capsys):
        text = "net (float[2, 4] x) => (uint8[2, 4] y) { y = QuantizeLinear(x, s) }"
        path = save(model_of(text, s=np.float32(0.5)), tmp_path / "net.onnx")
        assert run(["deploy", path, "--data", "random", "-o", str(tmp_path / "out")]) == 3
        assert "requantize" in capsys.readouterr().err

    def test_random_data_and_shapes_are_for_files(self, tmp_path, capsys):
        assert run(["deploy", "torch.nn:Identity", "--data", "random", "-o", str(tmp_path / "out")]) == 2
        assert "for .onnx files" in capsys.readouterr().err


def test_an_operator_that_is_not_supported_is_named(tmp_path):
    path = save(model_of("net (float[2] x) => (float[2] y) { y = NoSuchOperator(x) }"), tmp_path / "net.onnx")
    with pytest.raises(OnnxReadError, match="NoSuchOperator"):
        scalepoint.deploy(path, None, [], output=tmp_path / "out")


def test_a_number_may_be_the_first_operand(tmp_path):
    text = """net (float[1, 8] x) => (float[1, 4] y) {
        a = Mul(half, x)
        b = Add(half, a)
        c = Sub(half, b)
        d = Div(half, c)
        y = MatMul(d, w)
    }"""
    path = save(model_of(text, half=np.array([0.5], np.float32), w=random(8, 4)), tmp_path / "net.onnx")
    data = [torch.from_numpy(random(1, 8, seed=seed)) for seed in range(2)]
    done = scalepoint.deploy(path, None, data, output=tmp_path / "out", smoke=True, cpu="vnni", placement="int8")
    assert done.verification.holds
