"""Files for ExecuTorch: one delegate, our codes and scales, and the outputs of the simulation."""

import numpy as np
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import StoreError
from scalepoint.formats import ExportRequest, export, find_format
from scalepoint.formats.executorch.stored import XnnpackStoredStub
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.verification import RuntimeModel, Status, verify
from scalepoint.verification.departure import match_calls
from scalepoint.verification.simulation import simulate

HERE = find_runtime("executorch").is_installed
pytestmark = pytest.mark.skipif(not HERE, reason="executorch is not installed: pip install 'scalepoint[executorch]'")
INT4 = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(block_size=32), qparam_calculator_cls="static")


class Net(nn.Module):
    """A stem with a pool, a residual block whose input has three readers, a depthwise layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.MaxPool2d(3, 2, 1)
        self.one, self.two, self.three = (nn.Conv2d(16, 16, 3, 1, 1) for _ in range(3))
        self.depthwise = nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        y = torch.relu(self.one(x) + x) + self.three(x)
        y = nn.functional.relu6(self.depthwise(torch.relu(self.two(y))))
        return self.head(y.mean((2, 3)))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A deploy() with a channels_last example and a metric whose batch is larger than the file's maximum."""
    torch.manual_seed(0)
    model, many = Net().eval(), torch.randn(21, 3, 32, 32)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    calls = []

    def evaluate(run):
        calls.append((isinstance(run, RuntimeModel), run(many).detach()))
        return 1.0

    folder = tmp_path_factory.mktemp("executorch")
    data = [x, torch.randn(2, 3, 32, 32)]
    deployment = scalepoint.deploy(
        model, x, data, target="executorch", output=folder, evaluate=evaluate, smoke=True, progress=False
    )
    return deployment, x, many, calls


def test_one_delegate_runs_the_whole_net_in_int8(deployed):
    verification = deployed[0].verification
    assert verification.status == Status.OK
    executed = verification.executed
    assert (executed["XnnpackBackend"], verification.low_precision, verification.fallbacks) == (1, 6, ())
    assert not [op for op in executed if op.startswith(("aten", "executorch_prim"))]
    assert "XNNDepthwiseConv2d qcint8" in executed


def test_outputs_match_the_simulation(deployed):
    assert deployed[0].verification.optimized[0].sqnr > 30


def test_a_metric_runs_in_the_runtime_whatever_its_batch(deployed):
    deployment, _, many, calls = deployed
    assert [in_runtime for in_runtime, _ in calls] == [False, True]
    with torch.no_grad():
        expected = deployment.model(many)
    output = calls[1][1]
    assert output.shape == (21, 10)
    assert float((output - expected).square().sum() / expected.square().sum()) < 1e-2


def test_a_file_states_its_inputs_and_its_target(deployed):
    path = deployed[0].path
    info = find_format("executorch").about(path)
    assert (info.inputs[0].name, info.inputs[0].dtype, info.inputs[0].shape) == ("x", "float32", (None, 3, 32, 32))
    assert dict(info.made_for) == {"target": "executorch"}
    assert info.size == path.stat().st_size
    assert path.name == "model.pte"


@pytest.mark.slow
def test_the_float_file_is_timed_next_to_the_quantized_file(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 8, 3)).eval(), torch.randn(1, 3, 32, 32)
    deployment = scalepoint.deploy(model, x, [x], target="executorch", output=tmp_path, progress=False)
    assert (tmp_path / "float.pte").is_file()
    assert 0 < deployment.verification.latency.ratio < 100
    assert deployment.verification.size < deployment.verification.float_size


@pytest.mark.slow
def test_every_code_is_at_most_one_step_from_the_simulation(deployed, tmp_path):
    """XNNPACK rounds sums differently (multipliers of 21 bits); in a net of this depth the error stays small."""
    deployment, x, _, _ = deployed
    executorch, runtime = find_format("executorch"), find_runtime("executorch")
    path = tmp_path / "layer_outputs.pte"
    executorch.write_with_layer_outputs(deployment.model, path, ExportRequest(((x,), {})))
    _, codes = simulate(deployment.model, ((x,), {}))
    with exchange_files({"x": x.numpy()}) as files:
        answer = run_task(runtime, {"task": "run", "path": str(path), "options": {}, **files.paths})
        outputs = files.outputs(answer)
    quantizers = executorch.about(path).quantizers
    compared = 0
    for name, calls in codes.items():
        for expected, actual in match_calls(name, calls, quantizers, outputs):
            distance = np.abs(actual.astype(int) - expected)
            assert distance.max() <= 1, name
            assert (distance == 0).mean() > 0.98, name
            compared += 1
    assert compared == sum(map(len, codes.values()))


@pytest.mark.slow
def test_verify_names_the_first_layer_that_departs(deployed, monkeypatch):
    deployment, x, _, _ = deployed
    original = XnnpackStoredStub.__init__

    def with_wrong_scale(self, stub, factor):
        original(self, stub, factor * 3 if stub.name == "two_relu_2_quant" else factor)

    monkeypatch.setattr(XnnpackStoredStub, "__init__", with_wrong_scale)
    # verify searches for the layer only if the outputs differ.
    monkeypatch.setattr("scalepoint.verification.verify_file.worst_sqnr", lambda agreements: 0.0)
    departure = verify(deployment.path, deployment.model, x).departure
    assert departure.where == "two_relu_2_quant"
    assert departure.largest > 2


@pytest.mark.parametrize("size", [4, 100, 2000])
def test_a_truncated_file_is_rejected(deployed, tmp_path, size):
    part = tmp_path / "part.pte"
    part.write_bytes(deployed[0].path.read_bytes()[:size])
    with pytest.raises(StoreError, match="ExecuTorch program"):
        find_format("executorch").about(part)


class Encoder(nn.Module):
    """An embedding, attention with a mask, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(512, 64), nn.LayerNorm(64)
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, input_ids, attention_mask):
        x = self.table(input_ids)
        y = self.norm(x)
        projections = (self.query, self.key, self.value)
        heads = [projection(y).unflatten(-1, (4, 16)).transpose(1, 2) for projection in projections]
        mask = attention_mask.bool()[:, None, None]
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))
        return {"tokens": x + self.down(nn.functional.silu(self.up(x)))}


@pytest.mark.slow
def test_dynamic_activations_and_int4_groups_run_in_integers(tmp_path):
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(0, 512, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    inputs["attention_mask"][1, 5:] = 0
    model = quantize(Encoder().eval(), inputs, QuantConfig(weight=INT4), forward_loop=[inputs], target="executorch")
    path = export(model, tmp_path / "groups.pte", inputs)
    verification = verify(path, model, inputs)
    executed = verification.executed
    assert (executed["XNNFullyConnected qbint4"], executed["XNNConvert"]) == (6, 6)  # one conversion for each layer
    assert verification.fallbacks == ()
    assert verification.optimized[0].output == "tokens"
    assert verification.optimized[0].sqnr > 80
    assert (executed["XNNBatchMatrixMultiply"], executed["XNNSoftmax"]) == (2, 1)
    outside = {op for op in executed if op.startswith("aten")}
    assert not outside & {"aten::mul", "aten::expand_copy", "aten::logical_not", "aten::bmm", "aten::linear"}
    assert verification.size < 100_000  # 262,144 in float; the table is int8, the other weights are int4


class UNetConcats(nn.Module):
    """A concat of a skip connection with an upsampled tensor, as in a U-Net, and a concat of a tensor with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.body, self.last = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = torch.relu(self.down(x))
        x = torch.relu(self.body(torch.cat([x, self.up(nn.functional.max_pool2d(x, 2))], 1)))
        return self.last(torch.cat([x, x], 1))


def test_concat_inputs_of_different_scales_are_requantized_to_the_output_scale(tmp_path):
    torch.manual_seed(0)
    model, x = UNetConcats().eval(), torch.randn(2, 3, 16, 16)
    quantized = quantize(model, x, forward_loop=[x], target="executorch", freeze_weights=True)
    export(quantized, tmp_path / "m.pte", x)
    verification = verify(tmp_path / "m.pte", quantized, x, runtime="executorch")
    assert verification.status == Status.OK, verification.message
    assert verification.holds
    assert verification.sqnr > 60


def test_activations_that_xnnpack_runs_only_in_part_match_the_simulation(tmp_path):
    """Parts of CELU and Hardshrink run outside of the delegate, and read the same tensor as the parts inside."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 1), nn.CELU(0.5), nn.Conv2d(8, 8, 1), nn.Hardshrink(), nn.Conv2d(8, 8, 1), nn.RReLU()
    model, x = nn.Sequential(*layers, nn.Conv2d(8, 4, 1)).eval(), torch.randn(2, 3, 8, 8) * 2
    quantized = quantize(model, x, forward_loop=[x], target="executorch")
    export(quantized, tmp_path / "m.pte", x)
    verification = verify(tmp_path / "m.pte", quantized, x, layers=False)
    assert verification.status == Status.OK, verification.message
    assert verification.sqnr > 30
