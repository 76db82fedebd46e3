"""Unusual tensors, each with a defined outcome."""

import pytest
import torch
from torch import nn

from scalepoint.errors import TensorError
from scalepoint.spec import PerChannelGranularity, QuantizationComponentFactory, QuantizationSpec
from tests.errors import raises

create = QuantizationComponentFactory.create_fake_quantizer
SPECS = {
    "int8": QuantizationSpec(),
    "uint8": QuantizationSpec(dtype="uint8", qscheme="asymmetric"),
    "minval": QuantizationSpec(qformulation="minval", qscheme="asymmetric"),
    "per channel": QuantizationSpec(granularity=PerChannelGranularity(axis=1)),
    "fp8": QuantizationSpec(dtype="float8_e4m3fn"),
    "mxfp4": QuantizationSpec(dtype="float4_e2m1fn"),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def frozen(spec=SPECS["int8"], x=None):
    fq = create(spec, "activation")
    fq(torch.randn(2, 3, 4, 4) if x is None else x)
    fq.disable_observer()
    return fq


def test_an_empty_tensor_is_returned_and_not_observed():
    fq = create(SPECS["int8"], "activation")
    x = torch.empty(0, 3)
    assert fq(x) is x
    assert not fq.qparams_calculator.is_initialized


def test_a_scalar_tensor_works_per_tensor_and_is_refused_per_channel():
    fq = create(SPECS["uint8"], "activation")
    assert fq(torch.tensor(2.0)) == 2.0
    assert fq.calculate_qparams().scale.shape == ()
    with pytest.raises(ValueError, match="outside shape"):
        create(SPECS["per channel"], "activation")(torch.tensor(2.0))


@each_spec
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 4)])
def test_all_zeros_stay_exactly_zero(spec, shape):
    fq = create(spec, "activation")
    assert torch.equal(fq(torch.zeros(shape)), torch.zeros(shape))
    assert (fq.calculate_qparams().scale > 0).all()


@each_spec
@pytest.mark.parametrize("size", [1e-42, 1e-38, 3e38], ids=str)
def test_tiny_and_huge_values_have_a_finite_positive_scale_and_a_finite_result(spec, size):
    fq = create(spec, "activation")
    y = fq(torch.tensor([[-1.0, 1.0], [0.5, -0.25]]) * size)
    scale = fq.calculate_qparams().scale
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    if spec.qformulation == "zp" or size < 1e38:  # a minval range wider than float32 overflows when it is restored
        assert torch.isfinite(y).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool])
def test_integers_pass_through_unobserved_with_the_reason(dtype):
    fq = create(SPECS["int8"], "activation")
    x = torch.ones(3, dtype=dtype)
    assert fq(x) is x
    assert not fq.qparams_calculator.is_initialized
    assert "cannot be quantized" in fq.reason


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.randn(3, dtype=torch.complex64), "complex"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(4).to_sparse_csr(), "sparse"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "nested|NestedTensor",
        ),
        (lambda: torch.randn(3).as_subclass(type("Wrapped", (torch.Tensor,), {})), "Wrapped"),
    ],
    ids=["complex", "sparse coo", "sparse csr", "nested", "subclass"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_other_tensors_than_plain_float_ones_are_errors_with_their_kind(make, kind):
    fq = create(SPECS["int8"], "activation")
    fq.name = "stem.input"
    with pytest.raises(TensorError, match=rf"stem\.input.*({kind})"):
        fq(make())


@each_spec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_are_computed_in_float32_and_returned_as_they_came(spec, dtype):
    fq = frozen(spec)
    x = torch.randn(2, 3, 4, 4).to(dtype)
    assert torch.equal(fq(x), fq(x.float()).to(dtype))


def test_the_largest_half_does_not_overflow():
    fq = create(SPECS["uint8"], "activation")
    y = fq(torch.tensor([-65504.0, 65504.0], dtype=torch.float16))
    assert torch.isfinite(y).all()
    assert fq.calculate_qparams().scale.item() == pytest.approx(2 * 65504 / 255)


LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
}


@each_spec
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("side", [4, 160], ids=["small", "large"])
def test_the_layout_in_memory_changes_no_value(spec, layout, side):
    x = layout(torch.randn(2, 3, side, side))
    fq, twin = create(spec, "activation"), create(spec, "activation")
    y = fq(x)
    assert torch.equal(y, twin(x.contiguous()))
    assert torch.equal(fq.calculate_qparams().scale, twin.calculate_qparams().scale)


def test_channels_last_stays_channels_last():
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert frozen()(x).is_contiguous(memory_format=torch.channels_last)


def test_a_meta_tensor_has_a_shape_when_frozen_and_is_an_error_when_observed():
    x = torch.empty(2, 3, 4, 4, device="meta")
    assert frozen()(x).shape == x.shape
    with pytest.raises(TensorError, match="meta tensor"):
        create(SPECS["int8"], "activation")(x)


def test_a_fake_tensor_has_a_shape_when_frozen():
    from torch._subclasses import FakeTensorMode

    fq = frozen()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fq(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)


def test_parameters_on_another_device_are_named():
    fq = frozen().to("meta")
    with raises(TensorError, "on cpu", "on meta", ".to('cpu')"):
        fq(torch.randn(2, 3, 4, 4))


def test_parameters_follow_the_device_of_the_first_tensor():
    fq = create(SPECS["int8"], "activation")
    fq(torch.randn(4))
    assert {buffer.device.type for buffer in fq.buffers()} == {"cpu"}


def test_a_leaf_that_requires_a_gradient_gets_one():
    x = nn.Parameter(torch.randn(2, 3, 4, 4))
    create(SPECS["uint8"], "weight")(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_works_without_gradients_and_leaves_usable_state(context):
    fq = create(SPECS["int8"], "activation")
    with context():
        inside = fq(torch.linspace(-1, 1, 9))
        assert not inside.requires_grad
    fq.disable_observer()
    assert torch.equal(fq(torch.linspace(-1, 1, 9)), inside)


def test_a_quantizer_made_in_inference_mode_works():
    with torch.inference_mode():
        fq = create(SPECS["int8"], "weight").eval()
        x = torch.randn(4, 4)
        first = fq(x)
        fq.disable_observer()
        assert torch.equal(fq(x), first)
        fq.disable_fake_quant()
        assert fq(x) is x


def test_another_rank_fits_per_tensor_and_is_refused_per_channel():
    assert frozen()(torch.randn(5, 7)).shape == (5, 7)
    assert frozen()(torch.tensor(0.5)).shape == ()
    fq = frozen(SPECS["per channel"])
    with raises(TensorError, "(1, 3, 1, 1)", "(5, 7)", "(1, 7)"):
        fq(torch.randn(5, 7))


def test_the_input_is_never_written_to():
    for spec in SPECS.values():
        for side in (4, 160):
            x = torch.randn(2, 3, side, side)
            before, version = x.clone(), x._version
            create(spec, "activation")(x)
            assert torch.equal(x, before)
            assert x._version == version


@pytest.mark.slow
def test_more_than_two_to_the_31_elements_work():
    x = torch.zeros(2**31 + 64, dtype=torch.bfloat16)
    x[-1], x[2**31] = 3.0, -1.0
    fq = create(SPECS["int8"], "activation")
    with torch.no_grad():
        y = fq(x)
    assert float(y[-1]) == pytest.approx(3.0, rel=0.02)
    assert float(y[2**31]) == pytest.approx(-1.0, rel=0.02)
    assert y[0] == 0
