"""Save, load, copy, cast, compile, export and vmap, for every kind of quantizer."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from scalepoint.spec import ExtendedQuantizationSpec, QuantizationComponentFactory

create = QuantizationComponentFactory.create_fake_quantizer
BLOCK = {"type": "per_block", "axis": 1, "block_size": 8}

SPECS = {
    "int8": {},
    "int8 per channel": {"granularity": {"type": "per_channel", "axis": 0}},
    "uint8 asymmetric": {"dtype": "uint8", "qscheme": "asymmetric"},
    "minval": {"qformulation": "minval", "qscheme": "asymmetric"},
    "int4 block": {"dtype": "int4", "granularity": BLOCK},
    "ragged": {"granularity": {"type": "per_block", "axis": 1, "block_size": 7, "pad": True}},
    "fp8": {"dtype": "float8_e4m3fn"},
    "mxfp4": {"dtype": "float4_e2m1fn", "granularity": BLOCK, "scale_rounding": "even"},
    "nvfp4": {"dtype": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "granularity": BLOCK},
    "moving average": {"qparam_calculator_cls": "moving_average"},
    "global": {"qparam_calculator_cls": "global_minmax"},
    "histogram percentile": {"qparam_calculator_cls": "histogram_percentile"},
    "histogram mse": {"qparam_calculator_cls": "histogram_mse", "bins": 256, "search_steps": 5},
    "histogram entropy": {"qparam_calculator_cls": "histogram_entropy", "bins": 256, "search_steps": 5},
    "learned": {"qparam_calculator_cls": "learned"},
    "dynamic per token": {"qparam_calculator_cls": "dynamic", "granularity": {"type": "per_token"}},
    "mse": {"range_calculator_cls": "mse", "search_steps": 5},
    "percentile": {"range_calculator_cls": "percentile", "percentile": 90.0},
    "entropy": {"range_calculator_cls": "entropy", "bins": 64, "search_steps": 5},
}
each_spec = pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS.keys())
a_third_is_fast = pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=pytest.mark.slow if index % 3 or name == "entropy" else ())
        for index, (name, fields) in enumerate(SPECS.items())
    ],
)


def calibrated(fields, target="activation"):
    fq = create(ExtendedQuantizationSpec(**fields), target)
    fq(torch.randn(4, 16))
    fq(torch.randn(4, 16) * 2)
    return fq


@each_spec
@pytest.mark.parametrize("observing", [False, True], ids=["frozen", "observing"])
@pytest.mark.parametrize("medium", ["state_dict", "safetensors", "inside a model"])
def test_a_calibrated_state_loaded_into_a_fresh_quantizer_gives_equal_outputs_without_a_warm_up(
    fields, observing, medium, tmp_path
):
    fq = calibrated(fields)
    fq.enable_observer(observing)
    fresh = create(ExtendedQuantizationSpec(**fields), "activation")
    if medium == "state_dict":
        fresh.load_state_dict(fq.state_dict())
    elif medium == "safetensors":
        save_file(fq.state_dict(), tmp_path / "fq.safetensors")
        fresh.load_state_dict(load_file(tmp_path / "fq.safetensors"))
    else:
        nn.ModuleDict({"a": fresh}).load_state_dict(nn.ModuleDict({"a": fq}).state_dict())
    x = torch.randn(4, 16)
    assert torch.equal(fresh(x), fq(x))
    assert torch.equal(fresh(x), fq(x))


@each_spec
def test_a_copy_is_equal_and_independent(fields):
    fq = calibrated(fields)
    twin = copy.deepcopy(fq)
    x = torch.randn(4, 16)
    assert torch.equal(twin(x), fq(x))
    twin.disable_fake_quant()
    assert twin(x) is x
    assert not torch.equal(fq(x), x)


@each_spec
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "to"])
def test_scales_and_statistics_stay_float32_when_the_model_is_cast(fields, cast):
    fq = calibrated(fields)
    fq.disable_observer()
    x = torch.randn(4, 16)
    before = fq(x)
    model = nn.Sequential(nn.Linear(2, 2), fq)
    model.to(torch.float16) if cast == "to" else getattr(model, cast)()
    assert model[0].weight.dtype != torch.float32
    for value in [*fq.buffers(), *fq.parameters()]:
        assert value.dtype in (torch.float32, torch.int32, torch.int64, torch.uint8)
    assert torch.equal(fq(x), before)


def frozen_and_observing(fields):
    for observing in (False, True):
        fq = calibrated(fields)
        fq.enable_observer(observing)
        yield fq


@a_third_is_fast
def test_torch_compile_needs_no_graph_break_and_gives_the_same(fields):
    x = torch.randn(4, 16)
    for fq in frozen_and_observing(fields):
        torch._dynamo.reset()
        twin = copy.deepcopy(fq)
        compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), fq(x))
        for name, value in fq.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value), name


@pytest.mark.parametrize("fields", [SPECS["int4 block"], SPECS["moving average"]], ids=["weight", "activation"])
def test_a_compiled_quantizer_trains_as_an_eager_one(fields):
    for fq in frozen_and_observing(fields):
        torch._dynamo.reset()
        compiled = torch.compile(copy.deepcopy(fq), fullgraph=True, backend="aot_eager")
        grads = []
        for run in (fq, compiled):
            x = (torch.arange(64.0).view(4, 16) / 10 - 3).requires_grad_()
            run(x).square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_a_compiled_quantizer_reacts_to_its_methods():
    fq = calibrated({})
    fq.disable_observer()
    compiled = torch.compile(fq, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16)
    quantized = compiled(x)
    fq.disable_fake_quant()
    assert torch.equal(compiled(x), x)
    fq.enable_fake_quant()
    assert torch.equal(compiled(x), quantized)


@a_third_is_fast
def test_torch_export_takes_it_and_gives_the_same(fields):
    x = torch.randn(4, 16)
    for fq in frozen_and_observing(fields):
        program = torch.export.export(copy.deepcopy(fq), (x,))
        assert torch.equal(program.module()(x), fq(x))


@pytest.mark.parametrize(
    "fields", [SPECS[name] for name in ("int8", "uint8 asymmetric", "fp8", "dynamic per token")], ids=str
)
def test_an_exported_activation_quantizer_keeps_a_dynamic_batch(fields):
    fq = calibrated(fields)
    fq.disable_observer()
    program = torch.export.export(fq, (torch.randn(4, 16),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    x = torch.randn(9, 16)
    assert torch.equal(program.module()(x), fq(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("name", ["int8", "uint8 asymmetric", "int4 block", "mxfp4"])
def test_inductor_gives_the_same_codes(name):
    fq = calibrated(SPECS[name])
    fq.disable_observer()
    torch._dynamo.reset()
    x = torch.randn(4, 16)
    assert torch.equal(torch.compile(fq, fullgraph=True)(x), fq(x))


@pytest.mark.parametrize("name", ["int8", "int8 per channel", "uint8 asymmetric", "int4 block", "fp8", "mxfp4"])
def test_vmap_and_func_grad_see_the_straight_through_gradient(name):
    fq = calibrated(SPECS[name])
    fq.disable_observer()
    batch = torch.randn(3, 4, 16)
    assert torch.equal(torch.vmap(fq)(batch), torch.stack([fq(x) for x in batch]))
    x = batch[0].clone().requires_grad_()
    fq(x).square().sum().backward()
    assert torch.equal(torch.func.grad(lambda value: fq(value).square().sum())(batch[0]), x.grad)


def test_a_state_of_another_shape_is_refused():
    fq, other = (create(ExtendedQuantizationSpec(**SPECS["int8 per channel"]), "weight") for _ in range(2))
    fq(torch.randn(4, 16))
    other(torch.randn(6, 16))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(fq.state_dict())


def test_an_uncalibrated_state_makes_a_calibrated_quantizer_uncalibrated():
    fq, fresh = calibrated({}), create(ExtendedQuantizationSpec(), "activation")
    fq.load_state_dict(fresh.state_dict())
    assert not fq.qparams_calculator.is_initialized


def test_export_mode_is_part_of_the_state():
    fq = calibrated(SPECS["moving average"])
    fq.set_export_mode()
    fresh = create(ExtendedQuantizationSpec(**SPECS["moving average"]), "activation")
    fresh.load_state_dict(fq.state_dict())
    x = torch.randn(4, 16) * 100
    assert torch.equal(fresh(x), fq(x))
    assert torch.equal(fresh.calculate_qparams().scale, fq.calculate_qparams().scale)


def test_a_quantizer_made_on_the_meta_device_loads_a_state():
    fq = calibrated({})
    fq.disable_observer()
    with torch.device("meta"):
        fresh = create(ExtendedQuantizationSpec(), "activation")
    fresh.to_empty(device="cpu").load_state_dict(fq.state_dict())
    x = torch.randn(4, 16)
    assert torch.equal(fresh(x), fq(x))
