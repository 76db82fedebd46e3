"""Contract A4: called directly, a calculator's scale keeps the gradient to the tensor; what it stores does not."""

import copy
import gc

import pytest
import torch

from scalepoint.numerics import get_format
from scalepoint.spec import ExtendedQuantizationSpec, FakeQuantizeImplBase, QuantizationComponentFactory

CALCULATORS = ["static", "moving_average", "global_minmax"]
GRANULARITIES = {
    "tensor": {"type": "per_tensor"},
    "channel": {"type": "per_channel", "axis": 0},
    "last channel": {"type": "per_channel", "axis": -1},
    "block": {"type": "per_block", "axis": 1, "block_size": 4},
    "ragged block": {"type": "per_block", "axis": 1, "block_size": 5, "pad": True},
}
EXACT = {  # piecewise linear in the tensor: a finite difference is the gradient
    "int8 symmetric": {"dtype": "int8"},
    "int4 clipping": {"dtype": "int4", "qscheme": "symmetric_with_clipping"},
    "int8 asymmetric": {"dtype": "int8", "qscheme": "asymmetric"},
    "uint8 asymmetric": {"dtype": "uint8", "qscheme": "asymmetric"},
    "uint4 minval": {"dtype": "uint4", "qscheme": "asymmetric", "qformulation": "minval"},
    "e4m3": {"dtype": "float8_e4m3fn"},
    "e5m2": {"dtype": "float8_e5m2"},
}
ROUNDED = {  # scales of a narrow type: the gradient goes straight through their rounding
    "e4m3 e8m0": {"dtype": "float8_e4m3fn", "scale_dtype": "float8_e8m0fnu"},
    "mxfp4": {"dtype": "float4_e2m1fn"},
    "mxfp4 rceil": {"dtype": "float4_e2m1fn", "scale_rounding": "rceil"},
}
RANGES = ["minmax", "percentile", "mse", "entropy"]
STEP = 2.0**-8

SLOW = pytest.mark.slow
# Every two of calculator, granularity and format meet in what is fast.
CASES = [
    pytest.param(key, granularity, fields, id=f"{name}-{grain}-{key}", marks=SLOW if (i + j + k) % 3 else ())
    for i, (name, fields) in enumerate(EXACT.items())
    for j, (grain, granularity) in enumerate(GRANULARITIES.items())
    for k, key in enumerate(CALCULATORS)
]

each_calculator = pytest.mark.parametrize("key", CALCULATORS)
each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES.keys())


def create(key, **fields):
    spec = ExtendedQuantizationSpec(qparam_calculator_cls=key, **fields)
    return QuantizationComponentFactory.create_qparams_calculator(spec, "activation")


def values(seed=0):
    """Values of both signs whose extremes are at least two steps apart, so that no step changes which is largest."""
    order = torch.randperm(36, generator=torch.Generator().manual_seed(seed))
    return (order.to(torch.float32).view(3, 12) - 17.25) / 16


def compute_scale(calculator, batches):
    for batch in batches:
        calculator(batch)
    return calculator


def difference(make, x, weights):
    """d sum(weights * scale) / dx by central differences, each of a calculator that has seen the same before."""
    differences = torch.zeros_like(x)
    for index in range(x.numel()):
        sums = []
        for sign in (1, -1):
            moved = x.detach().clone()
            moved.view(-1)[index] += sign * STEP
            sums.append((make()(moved).scale.to(torch.float64) * weights).sum())
        differences.view(-1)[index] = (sums[0] - sums[1]) / (2 * STEP)
    return differences


@pytest.mark.parametrize(("key", "granularity", "fields"), CASES)
@pytest.mark.parametrize("earlier", [pytest.param(0, id="first batch"), pytest.param(2, id="third batch", marks=SLOW)])
def test_the_gradient_of_the_scale_is_its_finite_difference(key, granularity, fields, earlier):
    def make():
        batches = [values(seed) / 2 for seed in range(1, earlier + 1)]
        return compute_scale(create(key, granularity=granularity, **fields), batches)

    x = values().requires_grad_()
    scale = make()(x).scale
    weights = torch.arange(1.0, scale.numel() + 1).view(scale.shape)
    (scale * weights).sum().backward()
    assert x.grad.abs().sum() > 0
    torch.testing.assert_close(x.grad, difference(make, x, weights), rtol=1e-3, atol=2e-5)


@each_calculator
@each_granularity
@pytest.mark.parametrize("fields", ROUNDED.values(), ids=ROUNDED.keys())
def test_a_scale_that_is_rounded_to_a_power_of_two_has_the_gradient_of_the_exact_one(key, granularity, fields):
    x = values().requires_grad_()
    scale = create(key, granularity=granularity, **fields)(x).scale
    assert torch.equal(scale.log2() % 1, torch.zeros_like(scale))
    scale.sum().backward()
    exact = x.detach().clone().requires_grad_()
    create(key, granularity=granularity, dtype="float8_e4m3fn")(exact).scale.sum().backward()
    largest = get_format(ExtendedQuantizationSpec(**fields).dtype).high
    torch.testing.assert_close(x.grad, exact.grad * 448 / largest)


def test_both_scales_of_a_two_level_format_take_part():
    fields = {"dtype": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "granularity": GRANULARITIES["block"]}
    x = values().requires_grad_()
    calculator = create("static", **fields)
    scale = calculator(x).scale
    scale.sum().backward()
    largest = x.detach().view(3, 3, 4).abs().amax(-1, keepdim=True)
    is_largest = (x.detach().view(3, 3, 4).abs() == largest).view(3, 12)
    assert torch.equal(x.grad != 0, is_largest)
    # but for the one that also sets the scale of the tensor, d scale = d max_abs / 6
    is_other_pair = is_largest & (x.detach().abs() != largest.max())
    torch.testing.assert_close(x.grad[is_other_pair], x.detach()[is_other_pair].sign() / 6)


@each_calculator
@pytest.mark.parametrize("search", RANGES)
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
def test_a_searched_range_keeps_the_gradient_of_the_ends_it_chose(key, search, scheme):
    x = values().requires_grad_()
    scale = create(key, range_calculator_cls=search, qscheme=scheme)(x).scale
    scale.sum().backward()
    assert 0 < x.grad.abs().sum() < 1
    # the range grows and shrinks with the tensor: x . d scale / dx = scale
    torch.testing.assert_close((x.grad * x.detach()).sum(), scale.detach().sum(), rtol=0.1, atol=0)


def test_a_pair_safe_range_keeps_the_gradient_of_the_pairs():
    x = torch.tensor([[0.5, 0.75], [1.0, -1.0]], requires_grad=True)
    spec = ExtendedQuantizationSpec(
        qscheme="symmetric_with_clipping",
        granularity={"type": "per_channel", "axis": 0},
        qparam_calculator_cls="static",
        range_calculator_cls="pair_safe",
    )
    scale = QuantizationComponentFactory.create_qparams_calculator(spec, "weight")(x).scale
    scale[0].backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1.0, 1.0], [0.0, 0.0]]) / 127.5)


def test_a_dynamic_scale_keeps_the_gradient_when_called_directly_and_not_in_a_fake_quantizer():
    spec = ExtendedQuantizationSpec(qparam_calculator_cls="dynamic", granularity={"type": "per_token"})
    calculator = QuantizationComponentFactory.create_qparams_calculator(spec, "activation")
    x = values().requires_grad_()
    calculator(x).scale.sum().backward()
    assert torch.equal((x.grad != 0).sum(1), torch.ones(3, dtype=torch.int64))
    assert not calculator.get_qparams().scale.requires_grad
    assert not calculator.compute_for(x).scale.requires_grad


@each_calculator
def test_minval_keeps_its_gradient_too(key):
    x = values().requires_grad_()
    create(key, qscheme="asymmetric", qformulation="minval")(x).minval.sum().backward()
    assert torch.equal(x.grad, (x == x.min()).to(torch.float32))


@each_calculator
def test_a_fixed_end_has_no_gradient(key):
    x = values().requires_grad_()
    create(key, qscheme="asymmetric", float_range=[None, 3.0])(x).scale.sum().backward()
    torch.testing.assert_close(x.grad, -(x == x.min()).to(torch.float32) / 255)
    assert not create(key, float_range=[-3.0, 3.0])(x).scale.requires_grad


def test_a_moving_average_passes_the_share_of_the_new_batch():
    calculator = create("moving_average", averaging_constant=0.25)
    calculator(torch.tensor([1.0, -1.0]))
    x = torch.tensor([2.0, -1.0], requires_grad=True)
    calculator(x).scale.backward()
    torch.testing.assert_close(x.grad, torch.tensor([0.25 / 127.5, 0.0]))


def test_a_batch_inside_the_global_range_gets_no_gradient():
    calculator = create("global_minmax")
    calculator(torch.tensor([5.0, -5.0]))
    x = torch.tensor([2.0, -1.0], requires_grad=True)
    calculator(x).scale.backward()
    assert torch.equal(x.grad, torch.zeros(2))


@pytest.mark.parametrize("key", [*CALCULATORS, "histogram_mse", "dynamic", "learned"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_stored_parameters_have_no_graph(key, dtype):
    calculator = create(key, dtype=dtype)
    for _ in range(3):
        x = values().requires_grad_() * 2
        calculator(x)
        assert all(not buffer.requires_grad for buffer in calculator.buffers())
        assert not calculator.get_qparams().scale.requires_grad
    twin = copy.deepcopy(calculator)
    assert torch.equal(twin.get_qparams().scale, calculator.get_qparams().scale)


@pytest.mark.usefixtures("fast_gc_collect")
@each_calculator
def test_earlier_batches_and_their_graphs_are_freed(key):
    calculator = create(key)
    alive = []
    for _ in range(5):
        x = torch.randn(64, 64, requires_grad=True)
        y = (x * 2).requires_grad_()
        y.register_hook(lambda grad: grad)
        alive.append(torch.utils.weak.WeakTensorKeyDictionary({y: None}))
        calculator(y).scale.sum().backward()
        del x, y
    gc.collect()
    assert [len(references) for references in alive] == [0] * 5


@each_calculator
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_gradient_comes_back_in_the_dtype_of_the_tensor(key, dtype):
    x = values().to(dtype).requires_grad_()
    create(key)(x).scale.sum().backward()
    assert x.grad.dtype == dtype
    assert x.grad.abs().sum() > 0


@each_calculator
def test_under_no_grad_nothing_is_recorded(key):
    with torch.no_grad():
        assert not create(key)(values().requires_grad_()).scale.requires_grad


@each_calculator
@pytest.mark.parametrize("dtype", ["int8", "float4_e2m1fn"])
def test_the_scale_of_a_fake_quantizer_gets_no_gradient(key, dtype):
    spec = ExtendedQuantizationSpec(dtype=dtype, qparam_calculator_cls=key)
    quantizer: FakeQuantizeImplBase = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
    x = (values() * 0.99).requires_grad_()
    quantizer(x).sum().backward()
    assert torch.equal(x.grad, (x.grad != 0).to(torch.float32))  # straight through, 1 or clamped


@each_calculator
def test_the_gradient_passes_through_a_compiled_calculator(key):
    calculator, twin = create(key), create(key)
    compiled = torch.compile(calculator, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x, expected = ((values(seed) * (seed + 1)).requires_grad_() for _ in range(2))
        compiled(x).scale.sum().backward()
        twin(expected).scale.sum().backward()
        assert torch.equal(x.grad, expected.grad)
        assert x.grad.abs().sum() > 0
        assert torch.equal(calculator.scale, twin.scale)
        assert not calculator.scale.requires_grad
