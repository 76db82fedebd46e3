"""Names of inputs, outputs and axes come from the model: equal in float and quantized files and for every config."""

from collections import namedtuple

import onnx
import pytest
import torch
from torch import Tensor, nn

import scalepoint
from scalepoint import export, verify
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.quantize.quantized_layers import QuantizedLayer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
Pair = namedtuple("Pair", "first second")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))) + 1


class Tokens(nn.Module):
    """Dict outputs, one of them nested; a parameter with the name of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.logits = nn.Parameter(torch.ones(4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict:
        x = self.a(self.embed(input_ids)) * attention_mask[..., None]
        return {"logits": self.b(x) * self.logits, "hidden": [x, x.mean(1)]}


class Mixed(nn.Module):
    """An input that is returned, a value that is returned twice, a named tuple in a tuple, and a nested input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, images: Tensor, other: dict) -> tuple:
        a = self.a(images)
        return self.b(a + other["z"]), Pair(a, images), a


def interface(path):
    graph = onnx.load(path).graph
    return tuple(
        {value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in values}
        for values in (graph.input, graph.output)
    )


def export_interface(model, tmp_path, args=(), kwargs=None, **options):
    quantized = quantize(
        model.eval(), args or None, forward_loop=[kwargs or args], target="onnxruntime", kwargs=kwargs, **options
    )
    path, plain = tmp_path / "m.onnx", tmp_path / "float.onnx"
    export(quantized, path, args, kwargs=kwargs, float_path=plain)
    onnx.checker.check_model(str(path), full_check=True)
    assert interface(path) == interface(plain)
    assert verify(path, quantized, args, kwargs=kwargs).holds
    return interface(path)


def test_arguments_a_plain_output_and_the_batch(tmp_path):
    inputs, outputs = export_interface(Plain(), tmp_path, (torch.randn(3, 16),))
    assert inputs == {"x": ["batch", 16]}
    assert outputs == {"output_0": ["batch", 4]}


def test_names_do_not_depend_on_what_is_quantized(tmp_path):
    config = {"overrides": [{"name": "a", "weight": "float"}]}
    names = export_interface(Plain(), tmp_path, (torch.randn(3, 16),), config=config)
    assert names == ({"x": ["batch", 16]}, {"output_0": ["batch", 4]})


def test_keys_of_a_dict_and_the_sequence_of_tokens(tmp_path):
    token_inputs = {"input_ids": torch.randint(0, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    inputs, outputs = export_interface(Tokens(), tmp_path, kwargs=token_inputs)
    assert inputs == {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "sequence"]}
    assert outputs == {
        "logits": ["batch", "sequence", 4],
        "hidden_0": ["batch", "sequence", 16],
        "hidden_1": ["batch", 16],
    }


def test_fields_nested_inputs_and_values_that_are_returned_twice(tmp_path):
    inputs, outputs = export_interface(Mixed(), tmp_path, (torch.randn(3, 16), {"z": torch.randn(3, 16)}))
    assert list(inputs) == ["images", "other_z"]
    assert list(outputs) == ["output_0", "first", "second", "output_3"]


def test_an_argument_named_like_a_builtin_keeps_its_name(tmp_path):
    x = torch.randn(2, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs, _ = export_interface(model, tmp_path, (x,))
    assert inputs == {"input": ["batch", 16]}
    verification = verify(
        tmp_path / "m.onnx",
        quantize(model, x, forward_loop=[x], target="onnxruntime"),
        x,
        float_path=tmp_path / "float.onnx",
    )
    assert verification.latency.shapes == {"input": (2, 16)}


def test_chosen_codes_of_a_loaded_model_are_named_as_those_of_the_saved_one(tmp_path):
    """Codes that an algorithm chose need not be contiguous in memory; those of a file are."""
    net, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval(), torch.randn(2, 4, 8, 8)
    config = QuantConfig.weight_only("int8", None)
    saved = quantize(net, x, config, target="reference", freeze_weights=True)
    (layer,) = (module for module in saved.modules() if isinstance(module, QuantizedLayer))
    codes = layer.weight_quant.codes(layer.weight)
    layer.weight_quant.set_codes(codes.to(memory_format=torch.channels_last))
    scalepoint.save(saved, tmp_path / "saved")
    loaded = scalepoint.load(tmp_path / "saved", net, x)
    names = []
    for name, model in (("saved", saved), ("loaded", loaded)):
        export(model, tmp_path / f"{name}.onnx", x)
        names.append([tensor.name for tensor in onnx.load(tmp_path / f"{name}.onnx").graph.initializer])
    assert names[0] == names[1]
    assert any(name.endswith("stored_conv.codes") for name in names[0])
