"""Files for ExecuTorch: one delegate, our own codes and scales, and outputs as simulated."""

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
from scalepoint.verification import Status, verify
from scalepoint.verification.departure import match_calls
from scalepoint.verification.simulation import simulate

HERE = find_runtime("executorch").is_here
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
    """By the one call, with an example of another layout, and a metric that reads more pictures than the file takes."""
    torch.manual_seed(0)
    model, many = Net().eval(), torch.randn(21, 3, 32, 32)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    seen = []

    def evaluate(run):
        seen.append((hasattr(run, "served"), run(many).detach()))
        return 1.0

    folder = tmp_path_factory.mktemp("executorch")
    data = [x, torch.randn(2, 3, 32, 32)]
    done = scalepoint.deploy(
        model, x, data, target="executorch", output=folder, evaluate=evaluate, smoke=True, progress=False
    )
    return done, x, many, seen


def test_one_delegate_holds_the_whole_net_in_int8(deployed):
    found = deployed[0].verification
    assert found.status == Status.OK
    assert (found.executed["XnnpackBackend"], found.low_precision, found.fallbacks) == (1, 6, ())
    assert not [op for op in found.executed if op.startswith(("aten", "executorch_prim"))]
    assert "XNNDepthwiseConv2d qcint8" in found.executed


def test_outputs_are_those_of_the_simulation(deployed):
    assert deployed[0].verification.optimized[0].sqnr > 30


def test_a_metric_is_judged_in_the_runtime_whatever_its_batch(deployed):
    done, _, many, seen = deployed
    assert [in_runtime for in_runtime, _ in seen] == [False, True]
    with torch.no_grad():
        wanted = done.model(many)
    assert seen[1][1].shape == (21, 10)
    assert float((seen[1][1] - wanted).square().sum() / wanted.square().sum()) < 1e-2


def test_the_file_tells_its_inputs_and_what_it_was_made_for(deployed):
    done = deployed[0]
    said = find_format("executorch").about(done.path)
    assert (said.inputs[0].name, said.inputs[0].dtype, said.inputs[0].shape) == ("x", "float32", (None, 3, 32, 32))
    assert dict(said.made_for) == {"target": "executorch"}
    assert said.size == done.path.stat().st_size
    assert done.path.name == "model.pte"


@pytest.mark.slow
def test_the_float_file_is_timed_beside_it(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 8, 3)).eval(), torch.randn(1, 3, 32, 32)
    done = scalepoint.deploy(model, x, [x], target="executorch", output=tmp_path, progress=False)
    assert (tmp_path / "float.pte").is_file()
    assert 0 < done.verification.latency.ratio < 100
    assert done.verification.size < done.verification.float_size


@pytest.mark.slow
def test_every_code_is_at_most_a_step_from_the_simulation(deployed, tmp_path):
    """What XNNPACK rounds otherwise (its adds have multipliers of 21 bits) does not grow in a net of this depth."""
    done, x, _, _ = deployed
    form, runtime = find_format("executorch"), find_runtime("executorch")
    form.write_with_layer_outputs(done.model, tmp_path / "exposed.pte", ExportRequest(((x,), {})))
    _, codes = simulate(done.model, ((x,), {}))
    with exchange_files({"x": x.numpy()}) as files:
        answer = run_task(runtime, {"task": "run", "path": str(tmp_path / "exposed.pte"), "options": {}, **files.files})
        found = files.outputs(answer)
    quantizers = form.about(tmp_path / "exposed.pte").quantizers
    compared = 0
    for name, calls in codes.items():
        for wanted, given in match_calls(name, calls, quantizers, found):
            apart = np.abs(given.astype(int) - wanted)
            assert apart.max() <= 1, name
            assert (apart == 0).mean() > 0.98, name
            compared += 1
    assert compared == sum(map(len, codes.values()))


@pytest.mark.slow
def test_the_first_layer_that_departs_is_named(deployed, monkeypatch):
    done, x, _, _ = deployed
    made = XnnpackStoredStub.__init__

    def wrong(self, stub, factor):
        made(self, stub, factor * 3 if stub.name == "two_relu_2_quant" else factor)

    monkeypatch.setattr(XnnpackStoredStub, "__init__", wrong)
    monkeypatch.setattr(
        "scalepoint.verification.verify_file.worst_sqnr", lambda agreements: 0.0
    )  # else it is not searched for
    found = verify(done.path, done.model, x).departure
    assert found.where == "two_relu_2_quant"
    assert found.largest > 2


@pytest.mark.parametrize("keep", [4, 100, 2000])
def test_a_part_of_a_file_is_told(deployed, tmp_path, keep):
    part = tmp_path / "part.pte"
    part.write_bytes(deployed[0].path.read_bytes()[:keep])
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
        heads = [each(y).unflatten(-1, (4, 16)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        mask = attention_mask.bool()[:, None, None]
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))
        return {"tokens": x + self.down(nn.functional.silu(self.up(x)))}


@pytest.mark.slow
def test_rows_and_groups_of_four_bits_run_in_integers(tmp_path):
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(0, 512, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    inputs["attention_mask"][1, 5:] = 0
    model = quantize(Encoder().eval(), inputs, QuantConfig(weight=INT4), forward_loop=[inputs], target="executorch")
    path = export(model, tmp_path / "groups.pte", inputs)
    found = verify(path, model, inputs)
    assert (found.executed["XNNFullyConnected qbint4"], found.executed["XNNConvert"]) == (6, 6)  # rows for each
    assert found.fallbacks == ()
    assert found.optimized[0].output == "tokens"
    assert found.optimized[0].sqnr > 80
    assert (found.executed["XNNBatchMatrixMultiply"], found.executed["XNNSoftmax"]) == (2, 1)
    outside = {op for op in found.executed if op.startswith("aten")}
    assert not outside & {"aten::mul", "aten::expand_copy", "aten::logical_not", "aten::bmm", "aten::linear"}
    assert found.size < 100_000  # of 262,144 in float: the table in int8, two weights a byte


class Joined(nn.Module):
    """As a U-Net joins: what was pooled and brought back up beside what was not; then a tensor with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.body, self.last = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = torch.relu(self.down(x))
        x = torch.relu(self.body(torch.cat([x, self.up(nn.functional.max_pool2d(x, 2))], 1)))
        return self.last(torch.cat([x, x], 1))


def test_tensors_of_several_scales_are_joined_at_that_of_the_result(tmp_path):
    torch.manual_seed(0)
    model, x = Joined().eval(), torch.randn(2, 3, 16, 16)
    quantized = quantize(model, x, forward_loop=[x], target="executorch", freeze_weights=True)
    export(quantized, tmp_path / "m.pte", x)
    found = verify(tmp_path / "m.pte", quantized, x, runtime="executorch")
    assert found.status == Status.OK, found.message
    assert found.holds
    assert found.sqnr > 60


def test_activations_that_xnnpack_takes_in_part_compute_what_the_simulation_does(tmp_path):
    """Parts of CELU and Hardshrink run outside of its delegates, and read the same tensor as the parts inside."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 1), nn.CELU(0.5), nn.Conv2d(8, 8, 1), nn.Hardshrink(), nn.Conv2d(8, 8, 1), nn.RReLU()
    model, x = nn.Sequential(*layers, nn.Conv2d(8, 4, 1)).eval(), torch.randn(2, 3, 8, 8) * 2
    quantized = quantize(model, x, forward_loop=[x], target="executorch")
    export(quantized, tmp_path / "m.pte", x)
    found = verify(tmp_path / "m.pte", quantized, x, layers=False)
    assert found.status == Status.OK, found.message
    assert found.sqnr > 30
