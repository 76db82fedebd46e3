"""Files that take other sizes (dynamic_axes), and files that do not (fixed_sizes), through the whole pipeline."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scalepoint
from scalepoint.cli.run_config import load_settings
from scalepoint.errors import ConfigError, ScalepointWarning, TargetError, UsageError, VerificationError
from scalepoint.formats import export, find_format
from scalepoint.graph.origin import get_origin
from scalepoint.options import DeployConfig
from scalepoint.pipeline import stages
from scalepoint.quantize import QuantConfig, coverage, quantize
from scalepoint.runtimes import find_runtime
from scalepoint.targets import find_target
from scalepoint.transformation import transform
from scalepoint.verification import RuntimeModel, verify
from tests.errors import raises
from tests.pace import fast

PICTURE = {"x": {2: "height", 3: "width"}}
QUANTIZED = QuantConfig(speed_first=False)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "litert", "executorch"])
def test_fixed_sizes_give_a_file_for_the_shapes_of_the_example(target, tmp_path):
    if target == "executorch":
        pytest.importorskip("executorch")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), torch.randn(2, 3, 8, 8)
    done = scalepoint.deploy(model, x, [x], target=target, fixed_sizes=True, output=tmp_path / "out", progress=False)
    assert done.verification.holds
    info = find_format(find_target(target).format).about(done.path)
    assert [declared.shape for declared in info.inputs] == [(2, 3, 8, 8)]


def test_fixed_sizes_and_free_axes_exclude_each_other(tmp_path):
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(UsageError, match="fixed_sizes= cannot be used with dynamic_axes="):
        scalepoint.deploy(
            nn.Conv2d(3, 4, 3), x, [x], fixed_sizes=True, dynamic_axes={"input": {2: "height"}}, output=tmp_path / "out"
        )


def test_a_resumed_run_with_fixed_sizes_writes_the_same_file(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(2, 8)
    options = {"fixed_sizes": True, "output": tmp_path / "out", "progress": False}
    uninterrupted = scalepoint.deploy(model, x, [x], **{**options, "output": tmp_path / "whole"})

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages, "export_files", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scalepoint.deploy(model, x, [x], **options)
    resumed = scalepoint.deploy(model, x, [x], resume=True, **options)
    assert resumed.path.read_bytes() == uninterrupted.path.read_bytes()


class Segments(nn.Module):
    """Down by two, up by a skip and by the size of the input, a pooled branch spread over the picture."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.pooled, self.up = nn.Conv2d(32, 32, 1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, x):
        a = self.first(x).relu()
        b = self.down(a).relu()
        b = b + F.interpolate(self.pooled(F.adaptive_avg_pool2d(b, 1)), size=b.shape[-2:], mode="bilinear")
        logits = self.head(torch.cat((a, self.up(b).relu()), 1))
        return F.interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)


class Frames(nn.Module):
    """Attention over frames, and an LSTM."""

    def __init__(self):
        super().__init__()
        self.first, self.attend = nn.Linear(12, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.cells, self.head = nn.LSTM(32, 16, batch_first=True, bidirectional=True), nn.Linear(32, 6)

    def forward(self, frames):
        x = self.first(frames).relu()
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(self.cells(x)[0])


@pytest.fixture(scope="module")
def segments():
    torch.manual_seed(0)
    return Segments().eval()


@pytest.fixture(scope="module")
def pictures():
    torch.manual_seed(1)
    return [torch.randn(2, 3, 16, 16), torch.randn(1, 3, 24, 12)]


@pytest.fixture(scope="module")
def done(segments, pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("free")
    return scalepoint.deploy(
        segments, pictures[0], pictures, config=QUANTIZED, output=folder, dynamic_axes=PICTURE, progress=False
    )


def axes(path, name):
    graph = onnx.load(path).graph
    (value,) = (tensor for tensor in (*graph.input, *graph.output) if tensor.name == name)
    return [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]


def test_both_files_name_the_free_axes_of_inputs_and_outputs(done):
    for path in (done.path, done.float_path):
        assert axes(path, "x") == ["batch", 3, "height", "width"]
        assert axes(path, "output_0") == ["batch", 5, "height", "width"]


def test_the_file_is_verified_at_other_sizes_and_the_report_says_so(done):
    verification = done.verification
    assert verification.low_precision >= 4
    assert verification.resized.sizes == {"height": 24, "width": 12}
    assert verification.resized.steps == {"height": 2, "width": 2}
    assert verification.resized.sqnr >= 40
    assert "height 24, width 12 (height in steps of 2, width in steps of 2)" in " ".join(
        str(verification).replace("│", "").split()
    )
    assert str(PICTURE) in done.report.reproduction.call


@pytest.mark.parametrize("size", [(16, 16), (32, 20), (10, 64)])
def test_the_file_runs_at_any_size_as_simulated(done, size):
    x = torch.randn(3, 3, *size)
    with RuntimeModel(done.path) as run:
        output = run(x)
    expected = done.model(x)
    assert output.shape == expected.shape == (3, 5, *size)
    assert (output - expected).square().sum() <= 1e-4 * expected.square().sum()


def test_a_saved_model_has_the_free_axes(done, segments, pictures):
    folder = done.path.parent
    config = DeployConfig.from_file(folder / "config.yaml")
    assert config.dynamic_axes == PICTURE
    x = torch.randn(1, 3, 20, 28)
    for again in (scalepoint.load(folder / "quantized"), scalepoint.load(folder / "quantized", segments, pictures[0])):
        assert get_origin(again) == get_origin(done.model)
        assert torch.equal(again(x), done.model(x))
        path = export(again, folder / "again" / "model.onnx", torch.randn(1, 3, 8, 8))
        assert axes(path, "x") == ["batch", 3, "height", "width"]


def test_macs_are_those_of_the_example(segments, pictures):
    free, fixed = (
        transform(segments, pictures[0], target="onnxruntime", dynamic_axes=dynamic) for dynamic in (PICTURE, None)
    )
    actual, expected = (
        [(row.name, row.macs) for row in coverage(scalepoint.insert_qdq(graph.model, graph.matches)).operations]
        for graph in (free, fixed)
    )
    assert actual == expected


@pytest.mark.parametrize("runtime", fast(("onnxruntime", "openvino"), "onnxruntime"))
def test_a_file_takes_any_number_of_frames(runtime, tmp_path):
    if not find_runtime(runtime).is_installed:
        pytest.skip(f"{runtime} is not installed")
    torch.manual_seed(0)
    model, x = Frames().eval(), torch.randn(2, 20, 12)
    quantized = quantize(
        model, x, forward_loop=[x], target=runtime, dynamic_axes={"frames": {1: "frames"}}, progress=False
    )
    path = export(quantized, tmp_path / "model.onnx", x)
    assert axes(path, "output_0") == ["batch", "frames", 6]
    verification = verify(path, quantized, x, layers=False)
    verification.check()
    assert verification.resized.sizes == {"frames": 30}


def test_verification_fails_for_a_file_whose_axes_are_not_free(segments, pictures, tmp_path):
    options = {"forward_loop": pictures[:1], "target": "onnxruntime", "progress": False}
    free = quantize(segments, pictures[0], dynamic_axes=PICTURE, **options)
    fixed = quantize(segments, pictures[0], **options)
    path = export(fixed, tmp_path / "model.onnx", pictures[0])
    verification = verify(path, free, pictures[0], layers=False)
    assert not verification.holds
    assert "Got invalid dimensions" in verification.resized.message
    with raises(VerificationError, "dynamic_axes", "height 24", "width 12"):
        verification.check()


@pytest.mark.parametrize("target", ["coreml", "executorch", "litert"])
def test_a_target_of_fixed_sizes_refuses_before_any_work(target, segments, pictures, tmp_path):
    with raises(TargetError, f"'{target}'", "fixed sizes", "once for each size"):
        scalepoint.deploy(segments, pictures[0], pictures, target=target, output=tmp_path / "out", dynamic_axes=PICTURE)
    assert not (tmp_path / "out").exists()
    with pytest.raises(TargetError, match="fixed sizes"):
        transform(segments, pictures[0], target=target, dynamic_axes=PICTURE)


def test_an_unknown_input_name_is_refused_before_any_work(segments, pictures, tmp_path):
    with pytest.raises(UsageError, match="no input 'image'"):
        scalepoint.deploy(segments, pictures[0], pictures, output=tmp_path / "out", dynamic_axes={"image": [2, 3]})
    assert not (tmp_path / "out").exists()


def test_the_warning_of_other_sizes_names_the_setting(segments, pictures, tmp_path):
    options = {"config": QUANTIZED, "smoke": True, "progress": False}
    setting = "dynamic_axes={'x': {2: 'x_2', 3: 'x_3'}}"
    with pytest.warns(ScalepointWarning, match="will not accept") as caught_warnings:
        scalepoint.deploy(nn.Conv2d(3, 4, 3), pictures[0], pictures, output=tmp_path / "a", **options)
    assert str(caught_warnings[-1].message).endswith(
        "make them dynamic: dynamic_axes={'input': {2: 'input_2', 3: 'input_3'}}"
    )
    with pytest.raises(RuntimeError) as caught:
        scalepoint.deploy(segments, pictures[0], pictures, output=tmp_path / "b", **options)
    assert any(note.endswith(f"make the other sizes dynamic: {setting}") for note in caught.value.__notes__)


def test_the_key_of_a_config_is_read_as_yaml_and_json_have_it(tmp_path):
    for name, text in (
        ("a.yaml", "dynamic_axes: {x: {2: height, 3: width}}"),
        ("b.json", '{"dynamic_axes": {"x": {"2": "height", "3": "width"}}}'),
        ("c.yaml", "dynamic_axes: 'x:2=height,3=width'"),
    ):
        (tmp_path / name).write_text(text)
        config = DeployConfig.from_file(tmp_path / name)
        assert config.dynamic_axes == PICTURE
        config.to_file(tmp_path / f"again-{name}")
        assert DeployConfig.from_file(tmp_path / f"again-{name}") == config
    (tmp_path / "d.yaml").write_text("dynamic_axes: {x: {two: height}}")
    with raises(ConfigError, "axis", "'x'", "'two'"):
        DeployConfig.from_file(tmp_path / "d.yaml")


def test_the_flag_is_the_key():
    flags = {"dynamic_axes": ["x:2=height,3=width", "mask:1"]}
    assert load_settings(flags, scalepoint.DeployConfig).dynamic_axes == {**PICTURE, "mask": {1: "mask_1"}}
    with raises(UsageError, "--dynamic-axes", "x:2=height,3=width", "x:2,3", "'x=2'"):
        load_settings({"dynamic_axes": ["x=2"]}, scalepoint.DeployConfig)
