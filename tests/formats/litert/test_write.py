"""LiteRT files: the codes and scales of the model in integer operators, and outputs that match the simulation."""

import numpy as np
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import ScalepointWarning, StoreError, TargetError
from scalepoint.formats import ExportRequest, export, find_format, read_value
from scalepoint.formats.litert.stored import LiteRtStoredStub
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, QuantizationSpec
from scalepoint.verification import RuntimeModel, Status, verify
from scalepoint.verification.departure import match_calls
from scalepoint.verification.simulation import simulate
from tests.formats.executorch.test_write import Encoder

HERE = find_runtime("litert").is_installed
pytestmark = pytest.mark.skipif(not HERE, reason="LiteRT is not installed: pip install 'scalepoint[litert]'")
INT4 = QuantizationSpec(
    dtype="int4", qscheme="symmetric", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
)
BLOCKS = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(block_size=32), qparam_calculator_cls="static")
STATIC = QuantizationSpec(dtype="int8", qscheme="asymmetric", qparam_calculator_cls="global_minmax")


class Net(nn.Module):
    """A stem with a pool, a residual block, a concat of two scales, an average pool, a gate, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.MaxPool2d(3, 2, 1)
        self.one, self.two, self.three = (nn.Conv2d(16, 16, 3, 1, 1) for _ in range(3))
        self.depthwise, self.average = nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.AvgPool2d(2)
        self.last, self.head = nn.Conv2d(32, 16, 1, bias=False), nn.Linear(16, 10)
        self.two.weight.data *= 8

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.stem(nn.functional.pad(x, (0, 1, 0, 1))))))
        y = torch.relu(self.one(x) + x) + self.three(x)
        y = torch.cat([torch.relu(self.two(y)), y], 1)
        y = nn.functional.silu(self.last(self.average(nn.functional.relu6(self.depthwise(y)))))
        return self.head(y.mean((2, 3)))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Deploy a net with a metric that uses a larger batch than the example."""
    torch.manual_seed(0)
    model, large_batch, x = Net().eval(), torch.randn(21, 3, 32, 32), torch.randn(2, 3, 32, 32)
    evaluations = []

    def evaluate(run):
        evaluations.append((isinstance(run, RuntimeModel), run(large_batch).detach()))
        return 1.0

    done = scalepoint.deploy(
        model, x, [x, torch.randn(2, 3, 32, 32)], target="litert", output=tmp_path_factory.mktemp("litert"),
        evaluate=evaluate, smoke=True, progress=False,
    )  # fmt: skip
    return done, x, large_batch, evaluations


def test_the_net_runs_in_integers_in_one_xnnpack_partition(deployed):
    verification = deployed[0].verification
    assert verification.status == Status.OK
    assert (verification.executed["XNNPACK"], verification.low_precision, verification.fallbacks) == (1, 7, ())
    assert [op for op in verification.executed if "own kernel" in op] == []
    integers = {"CONV_2D int8": 5, "DEPTHWISE_CONV_2D int8": 1, "ADD int8": 2, "FULLY_CONNECTED float32 x int8": 1}
    integers |= {
        "DEPTHWISE_CONV_2D int8 (average pool)": 1,
        "QUANTIZE int8": 1,
    }  # of values that other operations than the concat read too
    assert {op: verification.executed.get(op) for op in integers} == integers
    assert {"MAX_POOL_2D int8", "CONCATENATION int8", "MEAN"} <= verification.executed.keys()
    assert verification.executed["TRANSPOSE int8"] == 1  # of the input: all tensors after it have channels last
    assert {"TRANSPOSE", "PAD"}.isdisjoint(verification.executed)


def test_outputs_match_the_simulation_in_both_kinds_of_kernels(deployed):
    verification = deployed[0].verification
    assert verification.optimized[0].sqnr > 50
    assert verification.unoptimized[0].sqnr > 25


def test_a_metric_runs_in_the_runtime_with_any_batch_size(deployed):
    done, _, large_batch, evaluations = deployed
    assert [in_runtime for in_runtime, _ in evaluations] == [False, True]
    with torch.no_grad():
        expected = done.model(large_batch)
    assert evaluations[1][1].shape == (21, 10)
    assert float((evaluations[1][1] - expected).square().sum() / expected.square().sum()) < 1e-3


def test_user_metadata_is_in_the_file(deployed, tmp_path):
    done, x, *_ = deployed
    path = export(done.model, tmp_path / "m.tflite", x, metadata={"labels": ["cat", "dög"]})
    info = find_format("litert").about(path)
    assert read_value(info.metadata["labels"]) == ["cat", "dög"]
    assert info.made_for == {"target": "litert"}
    assert "scalepoint.config" in info.metadata


def test_the_file_states_its_inputs_and_its_target(deployed):
    done = deployed[0]
    info = find_format("litert").about(done.path)
    assert (info.inputs[0].name, info.inputs[0].dtype, info.inputs[0].shape) == ("x", "float32", (None, 3, 32, 32))
    assert dict(info.made_for) == {"target": "litert"}
    assert (info.size, done.path.name) == (done.path.stat().st_size, "model.tflite")


def test_weights_biases_and_their_scales_equal_those_of_the_model(deployed):
    """The file is read by its schema."""
    from ai_edge_litert import schema_py_generated as schema

    done = deployed[0]
    model = schema.Model.GetRootAs(done.path.read_bytes(), 0)
    graph = model.Subgraphs(0)
    tensors = {graph.Tensors(index).Name().decode(): graph.Tensors(index) for index in range(graph.TensorsLength())}
    layer = next(item for name, item in done.model.named_modules() if name.endswith("one_fused.conv"))
    expected = layer.get_deployed()
    tensor = next(item for name, item in tensors.items() if name.endswith("one_fused.stored_conv"))
    codes = model.Buffers(tensor.Buffer()).DataAsNumpy().view(np.int8).reshape(16, 3, 3, 16).transpose(0, 3, 1, 2)
    assert np.array_equal(codes, expected.codes.numpy())
    assert np.array_equal(tensor.Quantization().ScaleAsNumpy(), layer.weight_quant.scale.numpy())
    assert codes.min() >= -127
    bias = next(item for name, item in tensors.items() if name.endswith("one_fused.stored_conv.bias"))
    assert np.array_equal(model.Buffers(bias.Buffer()).DataAsNumpy().view(np.int32), expected.bias.detach().numpy())


def test_codes_equal_the_simulation_until_a_concat_changes_a_scale(deployed, tmp_path):
    """XNNPACK changes a scale with an 8-bit multiplier, so codes differ by one or two steps after the concat.

    The mean of four codes is often exactly between two codes; the simulation has a float slightly above or below it.
    """
    done, x, _, _ = deployed
    form, path = find_format("litert"), tmp_path / "exposed.tflite"
    form.write_with_layer_outputs(done.model, path, ExportRequest(((x,), {})))
    _, codes = simulate(done.model, ((x,), {}))
    with exchange_files({"x": x.numpy()}) as files:
        answer = run_task(find_runtime("litert"), {"task": "run", "path": str(path), "options": {}, **files.paths})
        outputs = files.outputs(answer)
    compared, is_after_concat = 0, False
    for name, calls in codes.items():
        for expected, actual in match_calls(name, calls, form.about(path).quantizers, outputs):
            distance = np.abs(actual.astype(int) - expected)
            is_after_concat |= actual.shape == (2, 32, 8, 8)  # the concat and everything after it
            assert distance.max() <= (2 if is_after_concat else 0), name
            assert (distance == 0).mean() > 0.8, name
            compared += 1
    assert compared == sum(map(len, codes.values())) - 1  # the head quantizes rows inside of its kernel


def test_the_first_deviating_layer_is_found(deployed, monkeypatch):
    done, x, _, _ = deployed
    original_init = LiteRtStoredStub.__init__

    def wrong(self, stub, factor):
        original_init(self, stub, factor * 3 if stub.name == "three_fused_quant" else factor)

    monkeypatch.setattr(LiteRtStoredStub, "__init__", wrong)
    monkeypatch.setattr(
        "scalepoint.verification.verify_file.worst_sqnr", lambda agreements: 0.0
    )  # otherwise the deviating layer is not searched
    departure = verify(done.path, done.model, x).departure
    assert departure.where == "three_fused_quant"
    assert departure.largest > 2


@pytest.mark.parametrize("keep", [4, 100, 2000])
def test_a_truncated_file_is_refused(deployed, tmp_path, keep):
    part = tmp_path / "part.tflite"
    part.write_bytes(deployed[0].path.read_bytes()[:keep])
    with pytest.raises(StoreError, match=r"\.tflite file"):
        find_format("litert").about(part)


def encoder_inputs():
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(0, 512, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    inputs["attention_mask"][1, 5:] = 0
    return inputs


@pytest.mark.parametrize(
    ("config", "operator", "least"),
    [
        (None, "FULLY_CONNECTED float32 x int8", 80),
        (QuantConfig(activation=STATIC), "FULLY_CONNECTED int8", 30),
        pytest.param(QuantConfig(weight=INT4), "FULLY_CONNECTED float32 x int4", 80, marks=pytest.mark.slow),
        (QuantConfig(weight=BLOCKS), "FULLY_CONNECTED float32 x int4", 80),
    ],
    ids=["rows", "constant scales", "4 bits", "4 bits in blocks"],
)
def test_linear_layers_of_a_transformer_run_in_integers(config, operator, least, tmp_path):
    inputs = encoder_inputs()
    model = quantize(Encoder().eval(), inputs, config, forward_loop=[inputs], target="litert")
    path = export(model, tmp_path / "encoder.tflite", inputs)
    verification = verify(path, model, inputs)
    assert (verification.executed[operator], verification.fallbacks) == (6, ())
    assert verification.optimized[0].output == "tokens"
    assert verification.optimized[0].sqnr > least
    assert (verification.executed["BATCH_MATMUL"], verification.executed["SOFTMAX"]) == (2, 1)
    assert (verification.executed["XNNPACK"], verification.executed["EMBEDDING_LOOKUP (own kernel)"]) == (1, 1)
    assert verification.size < 100_000  # of 262,144 in float: the table in int8 too


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return torch.kthvalue(self.conv(x), 2).values


class Branched(Middle):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (self.conv(x),))


class Sized(Middle):
    def forward(self, x):
        return self.conv(x[: int((x.sum() > 0).sum()) + 1])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Middle(), r"aten.kthvalue.*\.tflite"),
        (Sized(), "depends on the data"),
        (Branched(), r"torch\.cond .*has branches"),
    ],
    ids=["no form", "dynamic shape", "branches"],
)
@pytest.mark.filterwarnings("ignore:torch traces the model once more")
def test_unsupported_operations_are_refused_before_data_is_read(model, message, tmp_path):
    def never():
        yield pytest.fail("data was read")

    with pytest.raises(TargetError, match=message) as caught:
        scalepoint.deploy(
            model.eval(), torch.randn(2, 3, 8, 8), never(), target="litert", output=tmp_path / "out", progress=False
        )
    assert "deploy for 'onnxruntime'" in str(caught.value)


def test_a_fixed_batch_causes_a_warning_with_the_reason(tmp_path):
    x = torch.randn(2, 3, 4, 4)
    model = quantize(
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.ReLU()).eval(), x, None, forward_loop=[x], target="litert"
    )
    with pytest.warns(ScalepointWarning, match="is 2.*transposed convolution"):
        path = export(model, tmp_path / "fixed.tflite", x)
    assert find_format("litert").about(path).inputs[0].shape == (2, 3, 4, 4)
