"""Calls of a frozen quantizer with small tensors: prepared once, and prepared again after any change."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from scalepoint.errors import NotObservedError, TensorError
from scalepoint.numerics import QParams, fake_quantize
from scalepoint.spec import (
    DefaultFakeQuantize,
    PerBlockGranularity,
    PerChannelGranularity,
    QuantizationComponentFactory,
    QuantizationSpec,
)

BLOCK = PerBlockGranularity(axis=1, block_size=32)
SPECS = {
    "int8": QuantizationSpec(),
    "int8 per channel": QuantizationSpec(granularity=PerChannelGranularity(axis=0)),
    "uint8 asymmetric": QuantizationSpec(dtype="uint8", qscheme="asymmetric"),
    "uint8 minval": QuantizationSpec(dtype="uint8", qscheme="asymmetric", qformulation="minval"),
    "int4 in blocks": QuantizationSpec(dtype="int4", granularity=BLOCK),
    "fp8 e4m3": QuantizationSpec(dtype="float8_e4m3fn"),
    "fp8 e5m2 per channel": QuantizationSpec(dtype="float8_e5m2", granularity=PerChannelGranularity(axis=0)),
    "fp6": QuantizationSpec(dtype="float6_e3m2"),
    "MXFP4": QuantizationSpec(dtype="float4_e2m1fn", scale_dtype="float8_e8m0fnu", granularity=BLOCK),
    "NVFP4": QuantizationSpec(
        dtype="float4_e2m1fn", scale_dtype="float8_e4m3fn", granularity=PerBlockGranularity(axis=1, block_size=16)
    ),
}
ASYMMETRIC = SPECS["uint8 asymmetric"]


def sample(seed: int = 0) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))


def prepared(spec: QuantizationSpec = ASYMMETRIC) -> DefaultFakeQuantize:
    """A frozen activation quantizer that has prepared its calls with tensors of 4 x 64."""
    fake_quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, "activation")
    assert isinstance(fake_quantizer, DefaultFakeQuantize)
    fake_quantizer(sample())
    fake_quantizer.disable_observer()
    fake_quantizer(sample())
    assert fake_quantizer._prepared_call is not None
    return fake_quantizer


def expected(fake_quantizer: DefaultFakeQuantize, x: Tensor, qparams: QParams | None = None) -> Tensor:
    """The arithmetic of the tensor layer with the present parameters, without any cache."""
    qparams = fake_quantizer.calculate_qparams() if qparams is None else qparams
    block = fake_quantizer.granularity.get_block_size(x.shape)
    return fake_quantize(x, qparams, fake_quantizer.grid, block, fixed_zero=True)


def assert_same_bits(actual: Tensor, reference: Tensor) -> None:
    assert actual.dtype == reference.dtype
    assert actual.stride() == reference.stride()
    assert torch.equal(actual.view(torch.int32), reference.view(torch.int32))


@pytest.mark.parametrize("name", SPECS)
def test_a_prepared_call_gives_the_same_bits(name):
    fake_quantizer = prepared(SPECS[name])
    special = sample(2)
    special[0, :9] = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 3e38, -1e-3])
    scale = fake_quantizer.calculate_qparams().scale
    ties = 2.5 * scale.repeat_interleave(64 // scale.shape[1], 1).expand(4, 64)
    for x in (sample(), sample(1) * 10, special, ties.contiguous()):
        assert_same_bits(fake_quantizer(x), expected(fake_quantizer, x))


def load_other_state(fake_quantizer: DefaultFakeQuantize) -> None:
    other = prepared()
    other.enable_observer()
    other(sample(1) * 5)
    other.disable_observer()
    fake_quantizer.load_state_dict(other.state_dict())


def replace_scale(fake_quantizer: DefaultFakeQuantize) -> None:
    calculator = fake_quantizer.qparams_calculator
    calculator.scale = calculator.scale * 2


def observe_again(fake_quantizer: DefaultFakeQuantize) -> None:
    fake_quantizer.enable_observer()
    fake_quantizer(sample(1) * 5)
    fake_quantizer.disable_observer()


def replace_calculator(fake_quantizer: DefaultFakeQuantize) -> None:
    other = prepared()
    observe_again(other)
    fake_quantizer.qparams_calculator = other.qparams_calculator


def change_zero_point(fake_quantizer: DefaultFakeQuantize) -> None:
    zero_point = fake_quantizer.qparams_calculator.zero_point
    assert zero_point is not None
    zero_point.add_(40)


CHANGES = {
    "load_state_dict": load_other_state,
    "scale in place": lambda fake_quantizer: fake_quantizer.qparams_calculator.scale.mul_(3),
    "zero point in place": change_zero_point,
    "new scale": replace_scale,
    "observing": observe_again,
    "new calculator": replace_calculator,
}


@pytest.mark.parametrize("way", CHANGES)
def test_new_parameters_are_used_at_once(way):
    fake_quantizer, x = prepared(), sample()
    before = fake_quantizer(x)
    CHANGES[way](fake_quantizer)
    reference = expected(fake_quantizer, x)
    assert not torch.equal(reference, before)
    for _ in range(2):
        assert_same_bits(fake_quantizer(x), reference)


@pytest.mark.parametrize("way", ["method", "buffer", "new buffer", "load_state_dict", "disabled"])
def test_a_switch_takes_effect_at_once(way):
    fake_quantizer, x = prepared(), sample()
    if way == "method":
        fake_quantizer.disable_fake_quant()
    elif way == "buffer":
        fake_quantizer.fake_quant_enabled.zero_()
    elif way == "new buffer":
        fake_quantizer.fake_quant_enabled = torch.zeros(1, dtype=torch.uint8)
    elif way == "load_state_dict":
        fake_quantizer.load_state_dict({**fake_quantizer.state_dict(), "fake_quant_enabled": torch.zeros(1)})
    else:
        fake_quantizer.disabled.fill_(1)
    assert fake_quantizer(x) is x


def test_an_observer_that_is_on_again_observes():
    fake_quantizer = prepared()
    scale = fake_quantizer.calculate_qparams().scale.clone()
    fake_quantizer.observer_enabled.fill_(1)
    fake_quantizer(sample(1) * 100)
    assert not torch.equal(fake_quantizer.calculate_qparams().scale, scale)


def test_reset_deletes_the_parameters_of_a_prepared_call():
    fake_quantizer = prepared()
    fake_quantizer.qparams_calculator.reset()
    with pytest.raises(NotObservedError):
        fake_quantizer(sample())


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_has_its_own_parameters(way):
    fake_quantizer, x = prepared(), sample()
    copied = copy.deepcopy(fake_quantizer) if way == "deepcopy" else pickle.loads(pickle.dumps(fake_quantizer))  # noqa: S301  # our own bytes
    before = fake_quantizer(x)
    copied.qparams_calculator.scale.mul_(3)
    assert_same_bits(copied(x), expected(copied, x))
    assert_same_bits(fake_quantizer(x), before)
    assert not torch.equal(copied(x), before)


@pytest.mark.parametrize("change", [nn.Module.train, nn.Module.eval, nn.Module.double, nn.Module.half])
def test_modes_and_casts_of_the_model_keep_the_result(change):
    fake_quantizer, x = prepared(), sample()
    before = fake_quantizer(x)
    change(nn.Sequential(fake_quantizer))
    assert_same_bits(fake_quantizer(x), before)


def test_on_the_meta_device_it_asks_to_be_moved():
    fake_quantizer = prepared().to("meta")
    with pytest.raises(TensorError, match="move the quantizer"):
        fake_quantizer(sample())


def test_another_range_of_codes_is_used_at_once():
    fake_quantizer, x = prepared(), sample()
    other = prepared(QuantizationSpec(dtype="uint4", qscheme="asymmetric"))
    fake_quantizer.grid, fake_quantizer._steps_cache = other.grid, None
    assert_same_bits(fake_quantizer(x), expected(fake_quantizer, x))


def test_parameters_given_by_functional_call_are_used():
    fake_quantizer, x = prepared(), sample()
    scale = fake_quantizer.calculate_qparams().scale * 3
    result = torch.func.functional_call(fake_quantizer, {"qparams_calculator.scale": scale}, (x,))
    assert_same_bits(result, expected(fake_quantizer, x, fake_quantizer.calculate_qparams()._replace(scale=scale)))
    assert not torch.equal(fake_quantizer(x), result)


def test_a_gradient_still_reaches_the_tensor():
    fake_quantizer = prepared()
    x = (sample() * 2).requires_grad_()
    result = fake_quantizer(x)
    result.sum().backward()
    assert x.grad is not None
    assert 0 < x.grad.mean() < 1  # some values are clamped
    with torch.no_grad():
        assert_same_bits(fake_quantizer(x), result.detach())


@pytest.mark.parametrize(
    "change",
    {
        "half": Tensor.half,
        "bfloat16": Tensor.bfloat16,
        "double": Tensor.double,
        "transposed": lambda x: x.t().contiguous().t(),
        "strided": lambda x: x.repeat(1, 2)[:, ::2],
        "more rows": lambda x: x.repeat(3, 1),
        "3 axes": lambda x: x.view(2, 2, 64),
        "no rows": lambda x: x[:0],
        "integers": Tensor.int,
        "parameter": nn.Parameter,
    }.values(),
)
@pytest.mark.parametrize("name", ["int8", "fp8 e4m3"])
def test_other_tensors_take_the_normal_path(name, change):
    fake_quantizer, x = prepared(SPECS[name]), change(sample())
    fresh = copy.deepcopy(fake_quantizer)
    with torch.no_grad():
        actual, reference = fake_quantizer(x), fresh(x)
    assert actual.dtype == reference.dtype
    assert actual.stride() == reference.stride()
    assert torch.equal(actual, reference)


def test_another_shape_per_channel_is_still_an_error():
    fake_quantizer = prepared(SPECS["int8 per channel"])
    with pytest.raises(TensorError, match="another shape"):
        fake_quantizer(torch.randn(8, 64))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp rules
def test_transforms_of_torch_func():
    fake_quantizer, x = prepared(), sample() * 2
    reference = expected(fake_quantizer, x)
    assert torch.equal(torch.func.vmap(fake_quantizer)(x[None])[0], reference)
    grad = torch.func.grad(lambda t: fake_quantizer(t).sum())(x)
    assert 0 < grad.mean() < 1
    primal, tangent = torch.func.jvp(fake_quantizer, (x,), (torch.ones_like(x),))
    assert torch.equal(primal, reference)
    assert torch.equal(tangent, grad)
    assert_same_bits(fake_quantizer(x), reference)


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_contexts_of_torch(context):
    fake_quantizer, x = prepared(), sample()
    with context():
        assert_same_bits(fake_quantizer(x), expected(fake_quantizer, x))
        fake_quantizer.qparams_calculator.scale.mul_(2)
        assert_same_bits(fake_quantizer(x), expected(fake_quantizer, x))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_traced_graphs_contain_the_arithmetic():
    fake_quantizer, x, other = prepared(), sample(), sample(1)
    reference = expected(fake_quantizer, other)
    exported = torch.export.export(fake_quantizer, (x,)).module()
    compiled = torch.compile(fake_quantizer, backend="eager", fullgraph=True)
    traced = torch.jit.trace(fake_quantizer, (x,))
    for graph in (exported, compiled, traced):
        graph(x)
        assert torch.equal(graph(other), reference)
    fake_quantizer.qparams_calculator.scale.mul_(2)
    assert torch.equal(compiled(other), expected(fake_quantizer, other))


def test_a_step_that_a_subclass_or_an_object_replaces_is_called():
    class Doubling(DefaultFakeQuantize):
        def simulate(self, tensor: Tensor, qparams: QParams) -> Tensor:
            return 2 * super().simulate(tensor, qparams)

    plain, x = prepared(), sample()
    doubling = copy.deepcopy(plain)
    doubling.__class__ = Doubling
    replaced = copy.deepcopy(plain)
    replaced.simulate = lambda tensor, qparams: 2 * plain.simulate(tensor, qparams)
    for fake_quantizer in (doubling, replaced):
        for _ in range(3):
            assert torch.equal(fake_quantizer(x), 2 * plain(x))
