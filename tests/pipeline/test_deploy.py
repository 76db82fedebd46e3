"""The one call, on a small net, through the real runtime."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import scalepoint
from scalepoint import DeployConfig
from scalepoint.errors import (
    CalibrationError,
    CaptureError,
    ConfigError,
    DocumentError,
    NonFiniteError,
    ScalepointError,
    ScalepointWarning,
    TargetError,
    UsageError,
)
from scalepoint.formats.onnx import save
from scalepoint.options import DeployOptions
from scalepoint.pipeline import stages
from scalepoint.pipeline.job import choose_placement
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig
from scalepoint.report import Report
from scalepoint.spec import PerChannelGranularity, QuantizationSpec
from scalepoint.verification import RuntimeModel
from tests.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


UNSAID, ALL, FAST = QuantConfig(), QuantConfig(speed_first=False), QuantConfig(speed_first=True)

EXPECTED_FILES = {
    "model.onnx", "float.onnx", "quantized", "report.html", "report.json", "config.yaml", "log.txt",
    ".scalepoint-files.json", "inputs.safetensors", "README.md", "use.py", "bom.cdx.json",
}  # fmt: skip
PLAIN = "float_plain.onnx"  # kept where it is the faster float file


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        pytest.param(UNSAID, {}, True, id="unsaid"),
        pytest.param(UNSAID, {"strict": True}, False, id="strict asks for all"),
        pytest.param(UNSAID, {"budget": "bits=5"}, False, id="a budget says what layers get"),
        pytest.param(ALL, {}, False, id="said"),
        pytest.param(FAST, {"strict": True, "budget": "bits=5"}, True, id="said against both"),
    ],
)
def test_deploy_leaves_slow_layers_float_unless_another_option_contradicts(config, options, expected, monkeypatch):
    monkeypatch.delenv("SCALEPOINT_PLACEMENT")
    filled, placement = choose_placement(DeployOptions(quantization=config, **options))
    assert filled.speed_first is expected
    assert placement == ("measured" if expected else "int8")


def test_a_placement_for_speed_is_refused_where_every_layer_must_be_quantized():
    for refused in ({"strict": True}, {"budget": "bits=5"}):
        with pytest.raises(UsageError, match="placement='measured' cannot be used with"):
            choose_placement(DeployOptions(placement="measured", **refused))


def test_an_unknown_default_placement_of_the_environment_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("SCALEPOINT_PLACEMENT", "mesured")
    with pytest.raises(UsageError, match=r"SCALEPOINT_PLACEMENT='mesured'.*did you mean 'measured'"):
        choose_placement(DeployOptions())


@pytest.mark.parametrize("config", [None, ALL], ids=["unsaid", "all"])
def test_deploy_names_what_it_leaves_float_for_speed(model, data, tmp_path, config):
    done = scalepoint.deploy(model, data[0], data, target="onnxruntime", config=config, output=tmp_path, smoke=True)
    float_rows = [row for row in done.report.coverage.operations if row.is_for_speed]
    assert config is None or not float_rows
    assert all(f"{row.name} " in str(done) and row.reason for row in float_rows)


class TestDeploy:
    @pytest.fixture(scope="class")
    def done(self, model, data, tmp_path_factory):
        runs = []

        model.eval()
        truth = model(data[0]).detach()

        def evaluate(run):
            runs.append(type(run).__name__)
            return float((run(data[0]) - truth).square().mean().neg())

        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.train()
        folder = tmp_path_factory.mktemp("deployed")
        everything = QuantConfig(speed_first=False)
        done = scalepoint.deploy(model, data[0][:1], data, config=everything, output=folder, evaluate=evaluate)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(module.training for module in model.modules())
        model.eval()
        return done, runs, folder

    def test_the_file_runs_in_int8_as_simulated(self, done):
        verification = done[0].verification
        assert verification.holds
        assert verification.low_precision == 5
        assert verification.fallbacks == ()

    def test_the_metric_sees_the_float_model_and_the_file_in_its_runtime(self, done):
        deployment, runs, _ = done
        assert runs == ["Net", "RuntimeModel"]
        assert deployment.float_score == 0
        assert -0.1 < deployment.score < 0

    def test_the_folder_contains_complete_files_only(self, done):
        deployment, _, folder = done
        names = {path.name for path in folder.iterdir()}
        baseline = deployment.verification.latency.baseline_file
        assert names == EXPECTED_FILES | {baseline}
        assert baseline in ("float.onnx", PLAIN)
        assert f"{folder / baseline} {deployment.path}" in " ".join(deployment.report.next_steps())
        report = Report.from_json((folder / "report.json").read_text())
        assert report.verification.holds
        assert "<title>" in (folder / "report.html").read_text()

    def test_printing_shows_the_summary(self, done):
        text = str(done[0])
        assert "onnxruntime" in text
        assert "size" in text
        assert "speed" in text

    def test_the_saved_model_equals_the_deployed_one(self, done, model, data):
        deployment, _, folder = done
        again = scalepoint.load(folder / "quantized", model, data[0][:1])
        with torch.no_grad():
            assert torch.equal(again(data[0]), deployment.model.eval()(data[0]))


def test_batches_with_nan_can_be_left_out(model, data, tmp_path):
    holed = [data[0], torch.full_like(data[0], math.nan)]
    settings = {"config": ALL, "output": tmp_path, "smoke": True, "progress": False}
    with pytest.raises(NonFiniteError, match="on_nan='skip'"):
        scalepoint.deploy(model, data[0], holed, **settings)
    with pytest.warns(ScalepointWarning, match="1 batches.*NaN"):
        done = scalepoint.deploy(model, data[0], holed, on_nan="skip", **settings)
    assert done.verification.holds


def test_data_of_unknown_length_is_accepted(model, data, tmp_path):
    """A loader has a length by its type, and an error where its dataset has none."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data[0])

    loader = DataLoader(Stream(), batch_size=4)
    done = scalepoint.deploy(model, data[0], loader, output=tmp_path, accuracy="fast", smoke=True, progress=False)
    assert done.tuned.layers


def test_a_smoke_run_measures_nothing(model, data, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("scalepoint.pipeline.build_report.compare", lambda *_, **__: calls.append("compare"))
    monkeypatch.setattr("scalepoint.pipeline.build_report.histograms", lambda *_, **__: calls.append("histograms"))
    float_paths = []
    real = stages.export

    def export(*args, **options):
        float_paths.append(options["float_path"])
        return real(*args, **options)

    monkeypatch.setattr(stages, "export", export)
    done = scalepoint.deploy(model, data[0], [*data, *data], output=tmp_path, smoke=True, progress=False)
    assert (calls, float_paths) == ([], [None])
    assert not (tmp_path / "float.onnx").exists()
    assert done.verification.holds
    assert (done.verification.latency, done.verification.float_size) == (None, None)
    assert "a full run: the same call without smoke" in str(done)


class Nested(nn.Module):
    """Returns values that a file cannot hold next to a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return {"y": self.layer(x), "none": None, "text": "a word", "more": [self.layer(x).sum(1), None]}


def test_the_metric_gets_outputs_with_the_models_structure_and_nones(tmp_path):
    x = torch.randn(2, 8)

    def metric(run):
        output = run(x)
        assert list(output) == ["y", "none", "text", "more"]
        assert (output["none"], output["text"], output["more"][1]) == (None, "a word", None)
        return float(output["y"].mean() + output["more"][0].mean())

    done = scalepoint.deploy(Nested(), x, [x], output=tmp_path / "out", evaluate=metric, smoke=True, progress=False)
    assert done.report.accuracy[0].where == "runtime"


def test_a_metric_that_is_nan_for_the_file_is_reported(model, data, tmp_path):
    def evaluate(run):
        return 0.5 if run is model else math.nan

    with pytest.warns(ScalepointWarning, match="NaN.*quantized file"):
        done = scalepoint.deploy(model, data[0], data, output=tmp_path, evaluate=evaluate, smoke=True, progress=False)
    assert math.isnan(done.score)


def test_external_weights_are_written_with_the_file_and_old_ones_deleted(tmp_path, monkeypatch):
    """A model of more than 2 GB has its weights in files of their own; here everything counts as that large."""
    monkeypatch.setattr(save, "MAX_SINGLE_FILE_BYTES", 100)
    x = torch.randn(2, 64)
    all_data_files = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
        done = scalepoint.deploy(net, x, [x], output=tmp_path, force=True)
        names = {path.name for path in tmp_path.iterdir()}
        data = {name for name in names if name.endswith(".data")}
        assert names - data - {PLAIN} == EXPECTED_FILES
        assert len(data) == 2
        assert not data & all_data_files
        all_data_files |= data
        run = RuntimeModel(done.path)
        assert torch.nn.functional.cosine_similarity(run(x), net(x)).min() > 0.99


def test_a_model_in_train_mode_is_deployed_in_eval_mode(model, data, tmp_path):
    train_model = copy.deepcopy(model).train()
    done = scalepoint.deploy(train_model, data[0], data, output=tmp_path, smoke=True)
    assert train_model.training
    assert not any(module.training for module in done.model.modules())
    with torch.no_grad():
        simulated = done.model(data[1])
    with RuntimeModel(done.path) as run:
        output = run(data[1])
    torch.testing.assert_close(output, simulated, rtol=1e-3, atol=1e-3)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 16, 5, padding=2), nn.Linear(16, 4)

    def forward(self, x, ids=None):
        y = self.head(torch.relu(self.conv(x)).mean(-1))
        return y if ids is None else y + ids.float().mean(1, keepdim=True)


@pytest.mark.parametrize("form", ["list", "iterator", "function", "by name"])
def test_data_with_sizes_that_the_file_does_not_accept_causes_a_warning(form, tmp_path):
    batches = [torch.randn(count, 8, length) for count, length in ((3, 41), (2, 17))]
    options = {
        "list": batches,
        "iterator": iter(batches),
        "function": lambda model: [model(batch) for batch in batches],
        "by name": [{"x": batch} for batch in batches],
    }
    with pytest.warns(ScalepointWarning, match="'x'.*17, 41.*axis 2.*30.*pad or resize"):
        scalepoint.deploy(Speech().eval(), torch.randn(2, 8, 30), options[form], output=tmp_path, smoke=True)


def test_other_batch_sizes_and_token_counts_cause_no_warning(tmp_path):
    batches = [(torch.randn(n, 8, 30), torch.randint(0, 9, (n, length))) for n, length in ((2, 5), (3, 7))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScalepointWarning)
        scalepoint.deploy(Speech().eval(), batches[0], batches, output=tmp_path, smoke=True)


class TestRefused:
    def test_a_drop_without_a_metric(self, model, data, tmp_path):
        with pytest.raises(UsageError, match="evaluate"):
            scalepoint.deploy(model, data[0], data, output=tmp_path, max_drop=1.0)

    def test_data_that_can_be_read_once_for_several_trials(self, model, data, tmp_path):
        with pytest.raises(UsageError, match="iterator"):
            scalepoint.deploy(model, data[0], iter(data), output=tmp_path, evaluate=lambda run: 0.0, max_drop=1.0)

    def test_a_float_type_that_the_target_lacks_before_any_work(self, model, data, tmp_path):
        calls = []
        with pytest.raises(TargetError, match="float_dtype=float16: target 'onnxruntime' runs"):
            scalepoint.deploy(model, data[0], calls.append, output=tmp_path / "out", float_dtype="float16")
        assert not calls
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("value", [None, "high", torch.zeros(2)])
    def test_a_metric_that_returns_no_number(self, model, data, tmp_path, value):
        with pytest.raises(UsageError, match="one number"):
            scalepoint.deploy(model, data[0], data, output=tmp_path, evaluate=lambda run: value, progress=False)

    def test_a_metric_that_is_nan_for_the_float_model(self, model, data, tmp_path):
        with raises(NonFiniteError, "evaluate", "NaN", "float model"):
            scalepoint.deploy(model, data[0], data, output=tmp_path, evaluate=lambda run: math.nan, progress=False)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"threads": 0}, "threads: .*at least 1"),
            ({"max_batches": 0}, "max_batches: .*at least 1"),
            ({"max_drop": -1.0, "evaluate": lambda run: 1.0}, "max_drop: .*at least 0"),
            ({"leave": "body.0"}, "leave: .*list.*'body.0'"),
            ({"on_nan": "ignore"}, "on_nan: .*'error' or 'skip'.*'ignore'"),
            ({"evaluate": "accuracy"}, "evaluate=.*'accuracy'"),
            ({"config": {"wieght": "float"}}, "config: .*'wieght'.*'weight'"),
            ({"config": {"weight": "int7"}}, "config: weight: .* got 'int7'"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_invalid_values_are_refused_before_any_work(self, model, data, tmp_path, options, message):
        with pytest.raises(ScalepointError, match=message):
            scalepoint.deploy(model, data[0], data, output=tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("model", "message"),
        [(nn.Sequential(nn.LazyLinear(3)), "0 .*lazy module"), (nn.Linear(4, 3, device="meta"), "weight .* meta")],
        ids=["lazy", "meta"],
    )
    def test_a_model_without_values(self, model, message, tmp_path):
        with pytest.raises(CaptureError, match=message):
            scalepoint.deploy(model, torch.randn(2, 4), [torch.randn(2, 4)], output=tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("bad_example", ["a loader", "a shape"])
    def test_the_error_for_an_example_without_a_tensor_says_what_to_pass(self, model, data, tmp_path, bad_example):
        example = DataLoader(data) if bad_example == "a loader" else tuple(data[0].shape)
        with raises(CaptureError, "no tensor", "next(iter(loader))"):
            scalepoint.deploy(model, example, data, output=tmp_path)

    def test_several_targets_at_once(self, model, data, tmp_path):
        with raises(TargetError, "Target", "one at a time"):
            scalepoint.deploy(model, data[0], data, target=["onnxruntime", "openvino"], output=tmp_path / "out")

    def test_an_example_of_another_type_than_the_models(self, data, tmp_path):
        model = nn.Sequential(nn.Linear(8, 8))
        x = torch.randn(2, 8).double().numpy()
        with raises(CaptureError, "inputs", "float64", "parameters", "float32"):
            scalepoint.deploy(model, x, [x], output=tmp_path / "out", progress=False)

    @pytest.mark.parametrize(
        "batch", [torch.randn(2, 9), torch.ones(2, 8, dtype=torch.long)], ids=["another size", "another type"]
    )
    def test_data_that_differs_from_the_example(self, batch, tmp_path):
        model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
        with raises(CalibrationError, "batch 1", "unlike the example", "captured"):
            scalepoint.deploy(model, x, [x, batch], output=tmp_path / "out", progress=False)

    def test_a_folder_whose_name_is_not_text(self, model, data, tmp_path):
        with raises(UsageError, "cannot be encoded", "PYTHONUTF8=1"):
            scalepoint.deploy(model, data[0], data, output=tmp_path / "out\udcff", progress=False)

    def test_an_unknown_target(self, model, data, tmp_path):
        with pytest.raises(TargetError, match="onnxruntime"):
            scalepoint.deploy(model, data[0], data, target="onnxruntim", output=tmp_path)


class TestConfigFile:
    @pytest.mark.parametrize("name", ["c.yaml", "c.json"])
    def test_a_file_round_trips(self, tmp_path, name):
        config = DeployConfig(
            target="tensorrt", max_drop=0.5, quantization=QuantConfig(weight=TensorQuantConfig(n_bits=4))
        )
        config.to_file(tmp_path / name)
        assert DeployConfig.from_file(tmp_path / name) == config

    def test_the_error_for_a_misspelt_key_suggests_the_nearest(self, tmp_path):
        (tmp_path / "c.yaml").write_text("max_dorp: 1\n")
        with pytest.raises(ConfigError, match="max_drop"):
            DeployConfig.from_file(tmp_path / "c.yaml")
        with pytest.raises(ConfigError, match="max_drop"):
            DeployConfig(max_dorp=1)

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda: DeployConfig(quantization={"weight": {"n_bits": "four"}}),
            lambda: QuantConfig(weight={"n_bits": 99}),
            lambda: TensorQuantConfig(n_bits="x"),
            lambda: QuantizationSpec(dtype="int77"),
            lambda: PerChannelGranularity(axs=1),
            lambda: scalepoint.Budget(size=3),
            lambda: scalepoint.Budget(size="abc"),
            lambda: scalepoint.deploy(nn.Linear(2, 2), torch.ones(1, 2), [torch.ones(1, 2)], budget="size=abc"),
            lambda: scalepoint.deploy(nn.Linear(2, 2), torch.ones(1, 2), [], config={"weight": {"n_bits": 99}}),
        ],
    )
    def test_an_invalid_field_is_a_scalepoint_error(self, wrong):
        with pytest.raises(ScalepointError) as caught:
            wrong()
        assert "errors.pydantic.dev" not in str(caught.value)

    @pytest.mark.parametrize("text", ["- 1", "a: [", "\0"])
    def test_values_that_are_not_a_config(self, tmp_path, text):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(DocumentError):
            DeployConfig.from_file(tmp_path / "c.yaml")

    def test_a_schema_for_editors(self):
        assert DeployConfig.model_json_schema()["properties"]["target"]["default"] == "onnxruntime"


class TestStaticRules:
    """A target without a runtime here is judged by its compiler's rules."""

    def test_a_clean_file(self, tmp_path):
        x = torch.randn(2, 3, 16, 16)
        net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()
        done = scalepoint.deploy(net, x, [x], target="tensorrt", output=tmp_path, float_dtype="float16", progress=False)
        assert done.report.findings == ()
        assert "find no problem" in done.report.verdict()
        assert Report.from_json((tmp_path / "report.json").read_text()).findings == ()

    def test_findings_are_reported(self, tmp_path):
        x = torch.randn(2, 64)
        half = QuantConfig(overrides=(Override(name="0", weight="float"),))
        done = scalepoint.deploy(
            nn.Sequential(nn.Linear(64, 64)).eval(),
            x,
            [x],
            target="tensorrt",
            config=half,
            output=tmp_path,
            progress=False,
        )
        assert [finding.split()[0] for finding in done.report.findings] == ["R09"]
        assert "find 1 problem" in done.report.verdict()
        assert "R09" in (tmp_path / "report.html").read_text()

    def test_other_targets_have_no_findings(self, tmp_path):
        x = torch.randn(2, 64)
        done = scalepoint.deploy(
            nn.Sequential(nn.Linear(64, 64)).eval(), x, [x], output=tmp_path, smoke=True, progress=False
        )
        assert done.report.findings is None


class Scaled(nn.Module):
    """Takes a second input, by name in the tests."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, scale=None):
        hidden = torch.relu(self.first(x))
        return self.second(hidden if scale is None else hidden * scale)


def test_an_example_may_have_positional_and_keyword_inputs(tmp_path):
    torch.manual_seed(0)
    x, scale = torch.randn(4, 16), torch.rand(4, 16)
    options = {"kwargs": {"scale": scale}, "config": {"speed_first": False}, "progress": False}
    done = scalepoint.deploy(Scaled().eval(), x, [{"x": x, "scale": scale}], output=tmp_path / "out", **options)
    assert done.verification.holds
    assert {layer.name for layer in done.report.layers} == {"first", "second"}


@pytest.mark.parametrize("kind", ["dict", "tuple", "iterator", "labels"])
def test_an_input_that_only_the_data_has_is_named(tmp_path, kind):
    """Labels that follow the inputs are no input, whatever forward would take in their place."""
    torch.manual_seed(0)
    x, scale = torch.randn(4, 16), torch.rand(4, 16)
    batch = {"x": x, "scale": scale} if kind in ("dict", "iterator") else (x, scale)
    data = {"iterator": iter([batch]), "labels": [(x, torch.tensor([0, 1, 2, 1]))]}.get(kind, [batch])
    options = {"config": {"speed_first": False}, "progress": False, "smoke": True, "output": tmp_path / "out"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scalepoint.deploy(Scaled().eval(), x, data, **options)
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, ScalepointWarning)]
    matching = [text for text in texts if "'scale'" in text and "example_inputs=" in text]
    assert len(matching) == (0 if kind == "labels" else 1), texts


class OtherSelf(nn.Module):
    """A module whose methods do not call their first argument self."""

    def __init__(this):  # noqa: N805
        super().__init__()
        this.linear = nn.Linear(16, 16)

    def forward(this, x):  # noqa: N805
        return this.linear(x)


def test_the_self_argument_of_forward_may_have_any_name(tmp_path):
    x = torch.randn(4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scalepoint.deploy(OtherSelf().eval(), (x,), [(x,)], smoke=True, progress=False, output=tmp_path / "out")


def a_call(folder, **options):
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    arguments = {"target": "reference", "smoke": True, "progress": False, "output": folder / "out"}
    arguments |= {"model": nn.Linear(16, 4).eval(), "example_inputs": x, "calibration_data": [x]}
    return scalepoint.deploy(**{**arguments, **options})


def test_an_os_error_of_the_metric_is_not_reported_as_a_locked_folder(tmp_path):
    def evaluate(run):
        raise BlockingIOError(11, "a socket of the metric has nothing to read")

    with pytest.raises(BlockingIOError, match="socket"):
        a_call(tmp_path, evaluate=evaluate)


def test_missing_data_is_refused_before_any_work(tmp_path):
    class NeverRun(nn.Linear):
        def forward(self, x):
            raise AssertionError

    with pytest.raises(UsageError, match="calibration_data"):
        a_call(tmp_path, model=NeverRun(16, 4).eval(), calibration_data=None)
    done = a_call(tmp_path, calibration_data=None, config=QuantConfig(activation="float"))
    assert done.path.is_file()


@pytest.mark.parametrize("value", [object(), {"inner": [object()]}, b"bytes", nn.Linear, len])
def test_metadata_that_cannot_be_stored_is_refused(tmp_path, value):
    with pytest.raises(UsageError, match="'a' contains"):
        a_call(tmp_path, metadata={"a": value})


def test_the_error_for_an_empty_batch_mentions_options_of_deploy_only(tmp_path):
    with pytest.raises(CalibrationError) as caught:
        a_call(tmp_path, calibration_data=[torch.empty(0, 16)], config={"speed_first": False})
    assert "is empty" in str(caught.value)
    assert "leave their layers float in the config" in str(caught.value)
