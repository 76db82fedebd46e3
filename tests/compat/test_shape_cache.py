"""Output shapes of operations are inferred once, and are the same as torch's."""

import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from scalepoint.compat.shape_cache import SAME_SHAPE_OPERATIONS, ShapeCache

aten = torch.ops.aten


class CountingMode(FakeTensorMode):
    """A mode that counts how many operations it infers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def shapes() -> ShapeCache:
    return ShapeCache(CountingMode(shape_env=ShapeEnv()))


def is_same(first: Tensor, second: Tensor) -> bool:
    return (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())


CASES = {
    "relu": (aten.relu.default, lambda x: (x,)),
    "an integer operand": (aten.add.Tensor, lambda x: (x.to(torch.int64), 1)),
    "a float operand": (aten.add.Tensor, lambda x: (x.to(torch.int64), 1.0)),
    "an axis": (aten.sum.dim_IntList, lambda x: (x, [1], True)),
    "another axis": (aten.sum.dim_IntList, lambda x: (x, [0], True)),
    "a layout": (aten.relu.default, lambda x: (x.t(),)),
    "several outputs": (aten.split.Tensor, lambda x: (x, 2, 1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_cached_result_is_the_same_as_from_torch(shapes, case):
    for func, make in CASES.values():  # fill the cache with all cases: none may be confused with another
        shapes.infer(func, make(torch.randn(4, 6)), {})
    func, make = case
    expected, count = func(*make(torch.randn(4, 6))), shapes.mode.count
    inferred = shapes.infer(func, make(torch.randn(4, 6)), {})
    assert shapes.mode.count == count
    pairs = [(inferred, expected)] if isinstance(expected, Tensor) else list(zip(inferred, expected, strict=True))
    assert all(is_same(*pair) for pair in pairs)


LAYOUTS = {
    "plain": lambda x: x,
    "one axis": lambda x: x[0, 0, 0],
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "a slice": lambda x: x[:, 1:3],
    "a slice of the batch": lambda x: x[1:3],
    "every second": lambda x: x[::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "axes of size one": lambda x: x[:, :1, :, :1],
    "integers": lambda x: x.to(torch.int32),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("func", sorted(SAME_SHAPE_OPERATIONS, key=str), ids=str)
def test_activations_have_the_same_shape_and_strides_as_in_torch(shapes, layout, func):
    x = layout(torch.randn(4, 6, 3, 5))
    args = (x, x.shape[-1:]) if func is aten.layer_norm.default else (x,)
    try:
        expected = func(*args)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch does not implement this dtype")
    assert is_same(shapes.infer(func, args, {}), expected)


@pytest.mark.parametrize("layout", ["plain", "channels last", "a slice of the batch"])
def test_batch_norm_has_the_same_shapes_and_strides_as_in_torch(shapes, layout):
    x = LAYOUTS[layout](torch.randn(4, 6, 3, 5))
    args = (x, *(torch.rand(6) for _ in range(4)), 0.1, 1e-5)
    func = aten._native_batch_norm_legit_no_training.default
    assert all(map(is_same, shapes.infer(func, args, {}), func(*args)))


def test_every_result_is_a_new_tensor(shapes):
    x = shapes.to_fake(torch.randn(4, 6))
    assert shapes.infer(aten.relu.default, (x,), {}) is not shapes.infer(aten.relu.default, (x,), {})


def test_different_input_sizes_are_different_cases(shapes):
    sizes = [shapes.infer(aten.relu.default, (torch.randn(batch, 3),), {}).shape for batch in (2, 5, 2)]
    assert sizes == [(2, 3), (5, 3), (2, 3)]


def test_random_operations_are_cached_too(shapes):
    q = torch.randn(2, 3, 5, 4)
    for _ in range(2):
        count = shapes.mode.count
        assert shapes.infer(aten.scaled_dot_product_attention.default, (q, q, q), {}).shape == q.shape
    assert shapes.mode.count == count


def test_a_real_tensor_gets_one_fake_tensor(shapes):
    x = torch.randn(2)
    assert shapes.to_fake(x) is shapes.to_fake(x)
    assert shapes.to_fake(3) == 3


def test_real_tensors_are_released_and_inferred_shapes_stay(shapes):
    x = torch.randn(4, 6)
    shapes.infer(aten.sum.dim_IntList, (x, [1]), {})
    reference, count = weakref.ref(x), shapes.mode.count
    del x
    shapes.release_tensors()
    assert reference() is None
    shapes.infer(aten.sum.dim_IntList, (torch.randn(4, 6), [1]), {})
    assert shapes.mode.count == count
