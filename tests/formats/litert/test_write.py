"""Files for LiteRT: our own codes and scales in integer operators, and outputs as simulated."""

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
from scalepoint.verification import Status, verify
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
    """By the one call, with a metric that reads more pictures than the example has."""
    torch.manual_seed(0)
    model, many, x = Net().eval(), torch.randn(21, 3, 32, 32), torch.randn(2, 3, 32, 32)
    seen = []

    def evaluate(run):
        seen.append((hasattr(run, "served"), run(many).detach()))
        return 1.0

    done = scalepoint.deploy(
        model, x, [x, torch.randn(2, 3, 32, 32)], target="litert", output=tmp_path_factory.mktemp("litert"),
        evaluate=evaluate, smoke=True, progress=False,
    )  # fmt: skip
    return done, x, many, seen


def test_the_net_runs_in_integers_in_one_piece_in_xnnpack(deployed):
    found = deployed[0].verification
    assert found.status == Status.OK
    assert (found.executed["XNNPACK"], found.low_precision, found.fallbacks) == (1, 7, ())
    assert [op for op in found.executed if "own kernel" in op] == []
    integers = {"CONV_2D int8": 5, "DEPTHWISE_CONV_2D int8": 1, "ADD int8": 2, "FULLY_CONNECTED float32 x int8": 1}
    integers |= {"DEPTHWISE_CONV_2D int8 (average pool)": 1, "QUANTIZE int8": 1}  # of what not only the concat reads
    assert {op: found.executed.get(op) for op in integers} == integers
    assert {"MAX_POOL_2D int8", "CONCATENATION int8", "MEAN"} <= found.executed.keys()
    assert found.executed["TRANSPOSE int8"] == 1  # of the input: channels stand last from there on
    assert {"TRANSPOSE", "PAD"}.isdisjoint(found.executed)


def test_outputs_are_those_of_the_simulation_in_both_kinds_of_kernels(deployed):
    found = deployed[0].verification
    assert found.optimized[0].sqnr > 50
    assert found.unoptimized[0].sqnr > 25


def test_a_metric_is_judged_in_the_runtime_whatever_its_batch(deployed):
    done, _, many, seen = deployed
    assert [in_runtime for in_runtime, _ in seen] == [False, True]
    with torch.no_grad():
        wanted = done.model(many)
    assert seen[1][1].shape == (21, 10)
    assert float((seen[1][1] - wanted).square().sum() / wanted.square().sum()) < 1e-3


def test_what_its_maker_gives_is_in_the_file(deployed, tmp_path):
    done, x, *_ = deployed
    path = export(done.model, tmp_path / "m.tflite", x, metadata={"labels": ["cat", "dög"]})
    said = find_format("litert").about(path)
    assert read_value(said.metadata["labels"]) == ["cat", "dög"]
    assert said.made_for == {"target": "litert"}
    assert "scalepoint.config" in said.metadata


def test_the_file_tells_its_inputs_and_what_it_was_made_for(deployed):
    done = deployed[0]
    said = find_format("litert").about(done.path)
    assert (said.inputs[0].name, said.inputs[0].dtype, said.inputs[0].shape) == ("x", "float32", (None, 3, 32, 32))
    assert dict(said.made_for) == {"target": "litert"}
    assert (said.size, done.path.name) == (done.path.stat().st_size, "model.tflite")


def test_weights_biases_and_their_scales_are_the_models(deployed):
    """Read back by the schema, from the bytes."""
    from ai_edge_litert import schema_py_generated as schema

    done = deployed[0]
    model = schema.Model.GetRootAs(done.path.read_bytes(), 0)
    graph = model.Subgraphs(0)
    held = {graph.Tensors(place).Name().decode(): graph.Tensors(place) for place in range(graph.TensorsLength())}
    layer = next(each for name, each in done.model.named_modules() if name.endswith("one_fused.conv"))
    wanted = layer.get_deployed()
    tensor = next(each for name, each in held.items() if name.endswith("one_fused.stored_conv"))
    codes = model.Buffers(tensor.Buffer()).DataAsNumpy().view(np.int8).reshape(16, 3, 3, 16).transpose(0, 3, 1, 2)
    assert np.array_equal(codes, wanted.codes.numpy())
    assert np.array_equal(tensor.Quantization().ScaleAsNumpy(), layer.weight_quant.scale.numpy())
    assert codes.min() >= -127
    bias = next(each for name, each in held.items() if name.endswith("one_fused.stored_conv.bias"))
    assert np.array_equal(model.Buffers(bias.Buffer()).DataAsNumpy().view(np.int32), wanted.bias.detach().numpy())


def test_codes_are_those_of_the_simulation_until_a_concat_changes_a_scale(deployed, tmp_path):
    """XNNPACK changes it by a multiplier of 8 bits: a step or two apart from there on. A mean of four codes is often a
    half, for the simulation a float that is a little more or less."""
    done, x, _, _ = deployed
    form, path = find_format("litert"), tmp_path / "exposed.tflite"
    form.write_with_layer_outputs(done.model, path, ExportRequest(((x,), {})))
    _, codes = simulate(done.model, ((x,), {}))
    with exchange_files({"x": x.numpy()}) as files:
        answer = run_task(find_runtime("litert"), {"task": "run", "path": str(path), "options": {}, **files.files})
        found = files.outputs(answer)
    compared, is_behind = 0, False
    for name, calls in codes.items():
        for wanted, given in match_calls(name, calls, form.about(path).quantizers, found):
            apart = np.abs(given.astype(int) - wanted)
            is_behind |= given.shape == (2, 32, 8, 8)  # of the concat and all after it
            assert apart.max() <= (2 if is_behind else 0), name
            assert (apart == 0).mean() > 0.8, name
            compared += 1
    assert compared == sum(map(len, codes.values())) - 1  # the rows of the head, whose codes stay in its kernel


def test_the_first_layer_that_departs_is_named(deployed, monkeypatch):
    done, x, _, _ = deployed
    made = LiteRtStoredStub.__init__

    def wrong(self, stub, factor):
        made(self, stub, factor * 3 if stub.name == "three_fused_quant" else factor)

    monkeypatch.setattr(LiteRtStoredStub, "__init__", wrong)
    monkeypatch.setattr(
        "scalepoint.verification.verify_file.worst_sqnr", lambda agreements: 0.0
    )  # else it is not searched for
    found = verify(done.path, done.model, x).departure
    assert found.where == "three_fused_quant"
    assert found.largest > 2


@pytest.mark.parametrize("keep", [4, 100, 2000])
def test_a_part_of_a_file_is_told(deployed, tmp_path, keep):
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
    found = verify(path, model, inputs)
    assert (found.executed[operator], found.fallbacks) == (6, ())
    assert found.optimized[0].output == "tokens"
    assert found.optimized[0].sqnr > least
    assert (found.executed["BATCH_MATMUL"], found.executed["SOFTMAX"]) == (2, 1)
    assert (found.executed["XNNPACK"], found.executed["EMBEDDING_LOOKUP (own kernel)"]) == (1, 1)
    assert found.size < 100_000  # of 262,144 in float: the table in int8 too


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
    ("model", "said"),
    [
        (Middle(), r"aten.kthvalue.*\.tflite"),
        (Sized(), "depends on the data"),
        (Branched(), r"torch\.cond .*has branches"),
    ],
    ids=["no form", "dynamic shape", "branches"],
)
@pytest.mark.filterwarnings("ignore:torch traces the model once more")
def test_what_a_file_cannot_hold_is_refused_before_any_data_is_read(model, said, tmp_path):
    def never():
        raise AssertionError("data was read")
        yield

    with pytest.raises(TargetError, match=said) as caught:
        scalepoint.deploy(
            model.eval(), torch.randn(2, 3, 8, 8), never(), target="litert", output=tmp_path / "out", progress=False
        )
    assert "deploy for 'onnxruntime'" in str(caught.value)


def test_a_batch_that_cannot_be_free_is_told_with_the_reason(tmp_path):
    x = torch.randn(2, 3, 4, 4)
    model = quantize(
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.ReLU()).eval(), x, None, forward_loop=[x], target="litert"
    )
    with pytest.warns(ScalepointWarning, match="is 2.*transposed convolution"):
        path = export(model, tmp_path / "fixed.tflite", x)
    assert find_format("litert").about(path).inputs[0].shape == (2, 3, 4, 4)
