"""A folder saved with its graph loads without the float model: bit-equal, trainable, exportable.

A hostile graph is refused without running anything.
"""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import ScalepointError, StoreError, UsageError
from scalepoint.quantize import QuantConfig, SmoothQuantConfig, enable_fake_quant, prepare_qat, quantize
from scalepoint.quantize.store import MANIFEST
from tests.models import Decoder, ResNet, UNet, VisionTransformer, with_norm_statistics
from tests.pace import fast
from tests.warm import warm

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


class NamedInputs(nn.Module):
    """Named inputs, an optional one, outputs in a dict, a tied weight, a constant created in forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x, shift=None):
        y = self.first(x) + self.offset + torch.tensor([1.0, 2.0] * 4)
        y = y if shift is None else y + shift
        return {"out": self.second(torch.relu(y)), "both": [y, (x,)]}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Conv2d(8, 4, 1))


CASES = {
    "resnet": (lambda: with_norm_statistics(ResNet((1, 1, 1, 1), 4, 8)), lambda: torch.randn(2, 3, 32, 32)),
    "transformer": (lambda: VisionTransformer(16, 2, 1, 32, 16, 8), lambda: torch.randn(2, 3, 32, 32)),
    "decoder": (Decoder, lambda: torch.randint(0, 16, (2, 8))),
    "unet": (lambda: with_norm_statistics(UNet()), lambda: torch.randn(2, 3, 32, 32)),
    "names": (NamedInputs, lambda: {"x": torch.randn(2, 8), "shift": torch.randn(2, 8)}),
    "recurrent": (Recurrent, lambda: torch.randn(2, 5, 8)),
    "computed weight": (normed, lambda: torch.randn(2, 3, 8, 8)),
}


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def make_quantized(case: str, config: QuantConfig | None = None, **options):
    torch.manual_seed(0)
    factory, inputs = CASES[case]
    model, example = factory().eval(), inputs()
    quantized = quantize(
        model, example, config, forward_loop=lambda quantized: run(quantized, example), freeze_weights=True, **options
    )
    return model, quantized, example


@pytest.mark.parametrize("case", fast(CASES, "recurrent", "names", "computed weight"))
def test_the_folder_alone_gives_the_same_outputs(tmp_path, case):
    model, quantized, example = make_quantized(case)
    scalepoint.save(quantized, tmp_path / "saved", with_graph=True)
    alone = scalepoint.load(tmp_path / "saved")
    torch.testing.assert_close(run(alone, example), run(quantized, example), rtol=0, atol=0)
    beside = scalepoint.load(tmp_path / "saved", model, example)
    assert alone.state_dict().keys() == beside.state_dict().keys()
    assert str(alone.graph) == str(beside.graph)
    assert scalepoint.coverage(alone) == scalepoint.coverage(quantized)


def test_another_process_can_load_the_folder(tmp_path):
    _, quantized, example = make_quantized("names")
    scalepoint.save(quantized, tmp_path / "saved", with_graph=True)
    torch.save(example, tmp_path / "example.pt")
    code = (
        "import torch, scalepoint\n"
        "example = torch.load('example.pt', weights_only=True)\n"
        "model = scalepoint.load('saved')\n"
        "print(float(model(**example)['out'].double().sum()))"
    )
    done = subprocess.run([*warm(), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == float(run(quantized, example)["out"].double().sum())


def test_a_loaded_model_is_saved_to_the_same_bytes(tmp_path):
    _, quantized, _ = make_quantized("computed weight")
    scalepoint.save(quantized, tmp_path / "one", with_graph=True)
    scalepoint.save(scalepoint.load(tmp_path / "one"), tmp_path / "two", with_graph=True)
    one, two = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / MANIFEST).read_bytes() == (tmp_path / "two" / MANIFEST).read_bytes()


def test_smoothed_models_load_without_the_float_model(tmp_path):
    config = QuantConfig(smooth_quant=SmoothQuantConfig(enabled=True))
    _, quantized, example = make_quantized("transformer", config)
    scalepoint.save(quantized, tmp_path / "saved", with_graph=True)
    assert torch.equal(run(scalepoint.load(tmp_path / "saved"), example), run(quantized, example))


def test_training_continues_after_loading(tmp_path):
    model, quantized, example = make_quantized("resnet")
    scalepoint.save(quantized, tmp_path / "saved", with_graph=True)
    steps = []
    for loaded in (scalepoint.load(tmp_path / "saved"), scalepoint.load(tmp_path / "saved", model, example)):
        prepare_qat(loaded)
        enable_fake_quant(loaded)
        optimizer = torch.optim.SGD(loaded.parameters(), 0.1)
        loaded.train()(example).square().sum().backward()
        optimizer.step()
        steps.append(loaded.state_dict())
    before = quantized.state_dict()
    assert any(not torch.equal(steps[0][name], value) for name, value in before.items() if value.numel())
    for name, value in steps[1].items():
        assert torch.equal(steps[0][name], value), name


def test_a_loaded_model_can_be_exported(tmp_path):
    _, quantized, example = make_quantized("transformer", target="onnxruntime")
    scalepoint.save(quantized, tmp_path / "saved", with_graph=True)
    paths = [tmp_path / "one.onnx", tmp_path / "two.onnx"]
    for path, model in zip(paths, (quantized, scalepoint.load(tmp_path / "saved")), strict=True):
        scalepoint.export(model, path, example)
    assert scalepoint.verify(paths[1], quantized, example).holds
    assert paths[0].stat().st_size == paths[1].stat().st_size


def test_without_a_graph_the_error_asks_for_the_float_model(tmp_path):
    _, quantized, _ = make_quantized("computed weight")
    scalepoint.save(quantized, tmp_path / "saved")
    with pytest.raises(StoreError, match="with_graph=True"):
        scalepoint.load(tmp_path / "saved")


def test_a_graph_that_cannot_be_data_is_refused_with_a_reason(tmp_path):
    class WithCustomModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.head(self.body(x))

    torch.manual_seed(0)
    example = torch.randn(2, 3, 4, 4)
    result = scalepoint.transform(WithCustomModule().eval(), example, leave=["body"])
    quantized = scalepoint.insert_qdq(result.model, result.matches)
    scalepoint.calibrate(quantized, [example])
    with pytest.raises(UsageError, match="body is called"):
        scalepoint.save(quantized, tmp_path / "saved", with_graph=True)
    assert not (tmp_path / "saved").exists()
    scalepoint.save(quantized, tmp_path / "saved", with_graph=None)
    with pytest.raises(StoreError, match="without its graph"):
        scalepoint.load(tmp_path / "saved")


def tampered(folder: Path, change) -> None:
    """Change the graph in a manifest, and make its checksum valid."""
    sealed = json.loads((folder / MANIFEST).read_text())
    change(sealed["manifest"]["graph"])
    body = json.dumps(sealed["manifest"], sort_keys=True)
    sealed["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(sealed))


def node(graph, op):
    return next(node for node in graph["nodes"] if node["op"] == op)


CODE = "x):\n    open('owned', 'w')\n    return (x"
HOSTILE = {
    "code as an argument": lambda graph: graph["arguments"].__setitem__(0, CODE),
    "code as a placeholder": lambda graph: node(graph, "placeholder").update(target=CODE),
    "code as a name": lambda graph: node(graph, "placeholder").update(name=CODE),
    "code as a target": lambda graph: node(graph, "call_module").update(target="0'); open('owned', 'w'); ('"),
    "code as a path": lambda graph: graph["modules"][1].update(path="0'); open('owned', 'w'); ('"),
    "code as the class": lambda graph: graph.update(name=CODE),
    "a keyword as a name": lambda graph: node(graph, "placeholder").update(name="import"),
    "an operator that opens files": lambda graph: node(graph, "call_module").update(
        op="call_function", target="aten::from_file.default", args=["owned", True, 4]
    ),
    "an operator that saves": lambda graph: node(graph, "call_module").update(
        op="call_function", target="aten::save.default", args=[1, "owned"]
    ),
    "an operator of another namespace": lambda graph: node(graph, "call_module").update(
        op="call_function", target="prims::device_put.default"
    ),
    "a function of Python": lambda graph: node(graph, "call_module").update(
        op="call_function", target="builtins.open", args=["owned", "w"]
    ),
    "a method": lambda graph: node(graph, "call_module").update(op="call_method", target="numpy"),
    "a class of another package": lambda graph: graph["modules"][1].update(kind="subprocess.Popen"),
    "a setting that is a method": lambda graph: next(
        module for module in graph["modules"] if module.get("kind") == "ReLU"
    )["settings"].update(forward=3),
    "a tensor that is not there": lambda graph: graph["tensors"].update(nothing="parameter"),
    "a huge input": lambda graph: graph["inputs"][0].update(shape=[2**20, 2**20]),
    "nested inputs of another class": lambda graph: graph.update(takes={"os.system": ["touch owned"]}),
    "an unknown key": lambda graph: graph.update(run="me"),
    "a node of the future": lambda graph: node(graph, "output").update(args=[{"node": "nowhere"}]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_graph_is_a_store_error_and_runs_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    _, quantized, _ = make_quantized("computed weight")
    scalepoint.save(quantized, "saved", with_graph=True)
    tampered(tmp_path / "saved", HOSTILE[kind])
    with pytest.raises(ScalepointError):
        scalepoint.load("saved")
    assert {path.name for path in tmp_path.iterdir()} == {"saved"}
