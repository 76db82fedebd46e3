"""With saved codes gradients are the same bit for bit, and one byte per element is saved for backward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scalepoint.numerics import Grid, QParams, fake_quantize, get_format, save_codes_for_backward, saved_codes
from scalepoint.quantize import QuantConfig, TensorQuantConfig, prepare_qat, quantize

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def grid_of(name):
    fmt = get_format(getattr(torch, name))
    return Grid(fmt, fmt.low, fmt.high, "asymmetric", "zp")


def quantized(x, name="uint8", scale=0.037, zero=100, learns=False):
    qparams = QParams(torch.tensor(scale, requires_grad=learns), torch.tensor(zero, dtype=torch.int32), None)
    return fake_quantize(x, qparams, grid_of(name)), qparams.scale


def run(dtype, saves_codes, name="uint8", zero=100, learns=False):
    torch.manual_seed(0)
    x = torch.randn(64, 32).mul(2).to(dtype).requires_grad_()
    weight = torch.randn(16, 32).to(dtype).requires_grad_()
    y, scale = quantized(x, name, zero=zero, learns=learns)
    if saves_codes:
        with save_codes_for_backward(y):
            z = F.linear(y, weight)
    else:
        z = F.linear(y, weight)
    z.float().square().mean().backward()
    return x.grad, weight.grad, scale.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "zero"), [("uint8", 100), ("int8", 0), ("int4", -3)])
@pytest.mark.parametrize("learns", [False, True])
def test_the_gradients_are_the_same(dtype, name, zero, learns):
    with_codes, plain = run(dtype, True, name, zero, learns), run(dtype, False, name, zero, learns)
    assert all(a is None or torch.equal(a, b) for a, b in zip(with_codes, plain, strict=True))


@pytest.mark.parametrize("shape", [(3, 70_000), (2, 5, 181, 97)], ids=str)  # processed in pieces
def test_large_tensors_come_back_bit_for_bit(shape):
    y, _ = quantized(torch.randn(shape, requires_grad=True).mul(2))
    saved = getattr(y, saved_codes._MARK_ATTRIBUTE).to_saved_codes(y.detach())
    assert saved.saved_bytes.dtype == torch.int8
    assert torch.equal(saved_codes._unpack(saved), y.detach())


def test_one_byte_per_element_is_saved_in_a_training_net(monkeypatch):
    packed = []
    original = saved_codes._QuantizationMark.to_saved_codes
    monkeypatch.setattr(
        saved_codes._QuantizationMark, "to_saved_codes", lambda *args: packed.append(original(*args)) or packed[-1]
    )
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 12, 12)
    config = QuantConfig(activation=TensorQuantConfig(symmetric=False))
    model = prepare_qat(quantize(net, x, config, forward_loop=[x], freeze_weights=False, progress=False))
    model.train()
    model(x).sum().backward()
    assert [tuple(saved.saved_bytes.shape) for saved in packed] == [(2, 4, 10, 10)]
    assert all(saved.saved_bytes.dtype == torch.int8 for saved in packed)


def test_a_scale_may_change_before_backward():
    x = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(16, 32, requires_grad=True)
    scale = torch.tensor(0.05)
    y = fake_quantize(x, QParams(scale, torch.tensor(128, dtype=torch.int32), None), grid_of("uint8"))
    with save_codes_for_backward(y):
        z = F.linear(y, weight)
    scale.mul_(3)
    z.sum().backward()
    torch.testing.assert_close(weight.grad, y.detach().sum(0).expand(16, -1), rtol=1e-5, atol=1e-4)


def test_a_quantized_tensor_that_was_written_to_is_saved_as_floats():
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    y, _ = quantized(x)
    y.add_(0.011)  # not a multiple of the scale any more
    with save_codes_for_backward(y):
        z = F.linear(y, weight)
    z.sum().backward()
    torch.testing.assert_close(weight.grad, y.detach().sum(0).expand(16, -1), rtol=1e-5, atol=1e-4)


def test_codes_are_computed_in_the_forward_pass():
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    y, _ = quantized(x)
    before = y.detach().clone()
    with save_codes_for_backward(y):
        z = F.linear(y, weight)
    y.detach().add_(1)
    z.sum().backward()
    torch.testing.assert_close(weight.grad, before.sum(0).expand(16, -1), rtol=1e-5, atol=1e-4)


def test_any_other_tensor_that_is_written_to_before_backward_is_an_error():
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    y, _ = quantized(x)
    with save_codes_for_backward(y):
        z = F.linear(y, weight)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="written to in place"):
        z.sum().backward()


def test_layers_that_read_one_tensor_share_its_codes(monkeypatch):
    packed, original = [], saved_codes._QuantizationMark.to_saved_codes
    monkeypatch.setattr(
        saved_codes._QuantizationMark, "to_saved_codes", lambda *args: packed.append(original(*args)) or packed[-1]
    )
    x = torch.randn(64, 32, requires_grad=True)
    weights = [torch.randn(16, 32, requires_grad=True) for _ in range(3)]
    y, _ = quantized(x)
    total = torch.zeros(())
    for weight in weights:
        with save_codes_for_backward(y):
            total = total + F.linear(y, weight).sum()
    assert len(packed) == 3
    assert all(saved.saved_bytes is packed[0].saved_bytes for saved in packed)
    total.backward()
    for weight in weights:
        torch.testing.assert_close(weight.grad, y.detach().sum(0).expand(16, -1), rtol=1e-5, atol=1e-4)


def test_a_square_weight_is_not_confused_with_its_transpose():
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with save_codes_for_backward(None, weight, weight.detach):
        z = F.linear(x, weight, torch.zeros(8))
    z.backward(torch.eye(8)[:5])
    assert torch.equal(x.grad, weight.detach()[:5])


def test_a_second_derivative_is_the_same():
    gradients = []
    for saves_codes in (True, False):
        torch.manual_seed(0)
        x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
        y, _ = quantized(x)
        if saves_codes:
            with save_codes_for_backward(y):
                z = F.linear(y, weight)
        else:
            z = F.linear(y, weight)
        (gradient,) = torch.autograd.grad(z.square().sum(), weight, create_graph=True)
        gradient.square().sum().backward()
        gradients.append((x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_nothing_changes_under_torch_func_and_when_hooks_are_forbidden():
    weight = torch.randn(16, 32)

    def loss(x):
        y, _ = quantized(x)
        with save_codes_for_backward(y, weight, lambda: weight):
            return F.linear(y, weight).square().sum()

    x = torch.randn(64, 32, requires_grad=True)
    loss(x).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), x.grad)
    torch.testing.assert_close(torch.vmap(loss)(x.detach()[None]), loss(x.detach())[None])
    with torch.autograd.graph.disable_saved_tensors_hooks("forbidden"):
        loss(x)


def test_tensors_that_are_not_quantized_are_saved_as_they_are():
    x = torch.randn(8, 8, requires_grad=True)
    with save_codes_for_backward(x):
        z = (x * x).sum()
    z.backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_with_activation_checkpointing_the_gradients_are_the_same():
    def block(x, weight):
        y, _ = quantized(x)
        with save_codes_for_backward(y):
            return F.linear(y, weight).relu()

    gradients = []
    for is_checkpointed in (True, False):
        torch.manual_seed(0)
        x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
        z = checkpoint(block, x, weight, use_reentrant=False) if is_checkpointed else block(x, weight)
        z.square().mean().backward()
        gradients.append((x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it of every input
def test_a_compiled_layer_that_reads_a_quantized_tensor_gives_the_same_gradients():
    def layer(y, weight):
        with save_codes_for_backward(y, weight, weight.detach):
            return F.linear(y, weight).square().mean()

    gradients = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
        run(quantized(x)[0], weight).backward()
        gradients.append((x.grad, weight.grad))
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference)
