"""What operations make of sizes and types, each case worked out once.

Blocks of a network repeat, and with them (operation, sizes, types, settings). Torch's fake tensors work every case out
anew, slowly where a size is a symbol; here a case that was seen gives an alias of what it gave before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

_UNSURE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_ALIKE = {  # one value of each, of the same type; torch works them out by the parts that they have in Python
    torch.ops.aten.relu.default,
    torch.ops.aten.hardtanh.default,
    torch.ops.aten.silu.default,
    torch.ops.aten.gelu.default,
    torch.ops.aten.hardswish.default,
    torch.ops.aten.layer_norm.default,
}
_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default  # what it saves for a gradient is empty
_NOTHING = torch.empty(0)


class Shapes:
    """Fake tensors of one mode: of tensors that have values, and of what operations give."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.cases: dict[Any, Any] = {}
        self.kinds: dict[int, Any] = {}  # of tensors, by id
        self.fakes: dict[int, Tensor] = {}  # of tensors that have values, by id
        self.alive: list[Any] = []  # an id is that of one tensor as long as it lives
        self.held: list[Tensor] = []  # those that have values

    def fake(self, value: Any) -> Any:
        """A tensor without its values; anything else as it is."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) not in self.fakes:
            self.held.append(value)
            self.fakes[id(value)] = self._like(value)
        return self.fakes[id(value)]

    def let_go(self) -> None:
        """Of tensors that have values; cases stay."""
        self.fakes.clear()
        self.held.clear()

    def _like(self, value: Tensor) -> Tensor:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return self.mode.from_tensor(value, static_shapes=True)
        case = (value.dtype, value.device, value.shape, value.stride())
        if case not in self.cases:
            with no_dispatch(), torch.inference_mode(False):  # views of the model's tensors know their base
                self.cases[case] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return self._alias(self.cases[case], value.device)

    def _alias(self, template: Tensor, device: torch.device) -> Tensor:
        with no_dispatch():
            return FakeTensor(self.mode, template.detach(), device)

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives for operands like these."""
        args, kwargs = tuple(map(self._faked, args)), {name: self._faked(each) for name, each in kwargs.items()}
        case = self._case(func, args, kwargs)
        if case is not None and case in self.cases:
            return self._again(self.cases[case])
        made: Any
        if func in _ALIKE and _is_dense(args[0]):
            made = self._alias(args[0], args[0].device)
        elif func is _NORM and _is_dense(args[0]):
            made = (self._alias(args[0], args[0].device), *(self._like(_NOTHING) for _ in range(2)))
        else:
            with self.mode, enable_python_dispatcher():  # kernels of some (pad) fix the sizes that they read
                made = func(*args, **kwargs)
        if case is not None and _is_plain(made):
            self.cases[case] = made
            self.alive.append(made)
        return made

    def _faked(self, value: Any) -> Any:
        """Operands without their values; torch nests them in lists alone."""
        if isinstance(value, Tensor):
            return self.fake(value)
        return type(value)(map(self._faked, value)) if type(value) in (list, tuple) else value

    def _again(self, made: Any) -> Any:
        """What a case gave, as new tensors."""
        if isinstance(made, Tensor):
            return self._alias(made, made.device)
        return type(made)(map(self._again, made)) if type(made) in (list, tuple) else made

    def _case(self, func: Any, args: Any, kwargs: Any) -> Any:
        if any(tag in func.tags for tag in _UNSURE):
            return None
        try:
            case = (func, self._said(args), self._said(kwargs))
            hash(case)
        except TypeError:  # a setting that has no hash, a tensor that says nothing of itself
            return None
        return case

    def _said(self, value: Any) -> Any:
        """All that sizes and types may depend on; 1, 1.0 and True differ."""
        if isinstance(value, FakeTensor):
            return self._kind(value)
        if isinstance(value, torch.SymInt):
            return value.node.expr
        if isinstance(value, list | tuple):
            return (type(value), *map(self._said, value))
        if isinstance(value, dict):
            return tuple((key, self._said(each)) for key, each in value.items())
        return (type(value), value)

    def _kind(self, value: FakeTensor) -> Any:
        if value.constant is not None or value.layout != torch.strided:
            raise TypeError("a tensor of values, or in another layout")
        if id(value) not in self.kinds:
            self.alive.append(value)
            extents = (*value.shape, *value.stride(), value.storage_offset())
            symbols = tuple(each.node.expr if isinstance(each, torch.SymInt) else each for each in extents)
            self.kinds[id(value)] = (value.dtype, value.device, value.is_conj(), value.is_neg(), symbols)
        return self.kinds[id(value)]


def _is_plain(made: Any) -> bool:
    """Whether all of it may stand for what the same case gives again: sizes known, no values."""
    leaves = [made] if isinstance(made, Tensor) else made if isinstance(made, list | tuple) else [0]
    return all(each is None or (isinstance(each, FakeTensor) and _has_sizes(each)) for each in leaves)


def _has_sizes(value: FakeTensor) -> bool:
    symbols: list[Any] = [each for each in value.shape if isinstance(each, torch.SymInt)]
    return value.constant is None and all(each.node.has_hint() for each in symbols)


def _is_dense(value: FakeTensor) -> bool:
    """Whether floats lie one after the other in the order of the axes, as numbers tell: all but the first are fixed."""
    expected = 1
    for extent, stride in zip(value.shape[:0:-1], value.stride()[:0:-1], strict=True):
        if not isinstance(extent, int) or not isinstance(stride, int) or (extent != 1 and stride != expected):
            return False
        expected *= extent
    is_plain = value.is_floating_point() and not value.is_conj() and not value.is_neg() and value.ndim > 1
    return is_plain and type(value.stride(0)) is int and value.stride(0) == expected
