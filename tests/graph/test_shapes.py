"""Sizes and types of operations, worked out once a case."""

import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from scalepoint.graph.shapes import _ALIKE, Shapes

aten = torch.ops.aten


class Counted(FakeTensorMode):
    """A mode that counts how often it works something out."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def shapes() -> Shapes:
    return Shapes(Counted(shape_env=ShapeEnv()))


def same(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


CASES = {
    "relu": (aten.relu.default, lambda x: (x,)),
    "an integer is no float": (aten.add.Tensor, lambda x: (x.to(torch.int64), 1)),
    "a float makes another type": (aten.add.Tensor, lambda x: (x.to(torch.int64), 1.0)),
    "an axis": (aten.sum.dim_IntList, lambda x: (x, [1], True)),
    "another axis": (aten.sum.dim_IntList, lambda x: (x, [0], True)),
    "a layout": (aten.relu.default, lambda x: (x.t(),)),
    "several": (aten.split.Tensor, lambda x: (x, 2, 1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_second_of_a_case_is_as_the_first_and_as_torch_has_it(shapes, case):
    for func, make in CASES.values():  # all in one memory: none may be taken for another
        shapes.of(func, make(torch.randn(4, 6)), {})
    func, make = case
    wanted, before = func(*make(torch.randn(4, 6))), shapes.mode.count
    found = shapes.of(func, make(torch.randn(4, 6)), {})
    assert shapes.mode.count == before
    pairs = [(found, wanted)] if isinstance(wanted, Tensor) else list(zip(found, wanted, strict=True))
    assert all(same(*pair) for pair in pairs)


LAYOUTS = {
    "plain": lambda x: x,
    "one axis": lambda x: x[0, 0, 0],
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "a slice": lambda x: x[:, 1:3],
    "a slice of the batch": lambda x: x[1:3],
    "every other": lambda x: x[::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "extents of one": lambda x: x[:, :1, :, :1],
    "whole numbers": lambda x: x.to(torch.int32),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("func", sorted(_ALIKE, key=str), ids=str)
def test_an_activation_gives_what_torch_gives_in_every_layout(shapes, layout, func):
    x = layout(torch.randn(4, 6, 3, 5))
    args = (x, x.shape[-1:]) if func is aten.layer_norm.default else (x,)
    try:
        wanted = func(*args)
    except (RuntimeError, NotImplementedError):
        pytest.skip("not for these numbers")
    assert same(shapes.of(func, args, {}), wanted)


@pytest.mark.parametrize("layout", ["plain", "channels last", "a slice of the batch"])
def test_batch_norm_gives_what_torch_gives_in_every_layout(shapes, layout):
    x = LAYOUTS[layout](torch.randn(4, 6, 3, 5))
    args = (x, *(torch.rand(6) for _ in range(4)), 0.1, 1e-5)
    func = aten._native_batch_norm_legit_no_training.default
    assert all(map(same, shapes.of(func, args, {}), func(*args)))


def test_every_result_is_a_tensor_of_its_own(shapes):
    x = shapes.fake(torch.randn(4, 6))
    assert shapes.of(aten.relu.default, (x,), {}) is not shapes.of(aten.relu.default, (x,), {})


def test_what_has_other_sizes_is_another_case(shapes):
    found = [shapes.of(aten.relu.default, (torch.randn(batch, 3),), {}).shape for batch in (2, 5, 2)]
    assert found == [(2, 3), (5, 3), (2, 3)]


def test_what_draws_numbers_has_its_sizes_once(shapes):
    q = torch.randn(2, 3, 5, 4)
    for _ in range(2):
        before = shapes.mode.count
        assert shapes.of(aten.scaled_dot_product_attention.default, (q, q, q), {}).shape == q.shape
    assert shapes.mode.count == before


def test_a_tensor_is_faked_once(shapes):
    x = torch.randn(2)
    assert shapes.fake(x) is shapes.fake(x)
    assert shapes.fake(3) == 3


def test_tensors_with_values_are_let_go_and_cases_stay(shapes):
    x = torch.randn(4, 6)
    shapes.of(aten.sum.dim_IntList, (x, [1]), {})
    kept, before = weakref.ref(x), shapes.mode.count
    del x
    shapes.let_go()
    assert kept() is None
    shapes.of(aten.sum.dim_IntList, (torch.randn(4, 6), [1]), {})
    assert shapes.mode.count == before
