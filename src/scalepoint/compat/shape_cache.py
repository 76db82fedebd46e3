"""Output shapes and dtypes of operations, inferred once for each combination of operation, input shapes and settings.

The blocks of a network repeat, and with them these combinations. Torch's fake tensors infer each one again, which is
slow if a size is a symbol. Here a combination that was seen before returns new tensors with the metadata of the first
result. Part of the patch `fast_export`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._mode_utils import no_dispatch

from scalepoint.compat.torch_names import FakeTensor, FakeTensorMode

UNCACHED_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
# These return a tensor like their input. Torch infers that slowly, by running their decomposition in Python.
SAME_SHAPE_OPERATIONS = {
    torch.ops.aten.relu.default,
    torch.ops.aten.hardtanh.default,
    torch.ops.aten.silu.default,
    torch.ops.aten.gelu.default,
    torch.ops.aten.hardswish.default,
    torch.ops.aten.layer_norm.default,
}
BATCH_NORM_IN_EVAL = torch.ops.aten._native_batch_norm_legit_no_training.default
EMPTY = torch.empty(0)  # what batch norm in eval mode returns as saved mean and variance


class ShapeCache:
    """Infers the outputs of operations as fake tensors of one mode.

    Python reuses the id of a freed object. So the tensors whose ids are keys are kept alive: those of `_descriptions`
    in `_alive`, those of `_fakes` in `_real_tensors`.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._outputs: dict[Any, Any] = {}  # by operation, input shapes and settings
        self._templates: dict[Any, Tensor] = {}  # meta tensors, by dtype, device, shape and strides
        self._descriptions: dict[int, Any] = {}  # of fake tensors, by id
        self._fakes: dict[int, Tensor] = {}  # of real tensors, by id
        self._alive: list[Any] = []
        self._real_tensors: list[Tensor] = []

    def infer(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation returns for these arguments, as fake tensors."""
        args = tuple(self.to_fake(value) for value in args)
        kwargs = {name: self.to_fake(value) for name, value in kwargs.items()}
        key = self._make_key(operation, args, kwargs)
        if key is not None and key in self._outputs:
            return self._alias_nested(self._outputs[key])
        outputs: Any
        if operation in SAME_SHAPE_OPERATIONS and _is_dense_float(args[0]):
            outputs = self._alias(args[0], args[0].device)
        elif operation is BATCH_NORM_IN_EVAL and _is_dense_float(args[0]):
            outputs = (self._alias(args[0], args[0].device), self._make_fake(EMPTY), self._make_fake(EMPTY))
        else:
            # Without the Python dispatcher some kernels (pad) turn the symbols that they read into numbers.
            with self.mode, enable_python_dispatcher():
                outputs = operation(*args, **kwargs)
        if key is not None and _is_cacheable(outputs):
            self._outputs[key] = outputs
            self._alive.append(outputs)
        return outputs

    def to_fake(self, value: Any) -> Any:
        """Make the tensors of an argument fake. Operations of torch nest tensors only in lists and tuples."""
        if type(value) in (list, tuple):
            return type(value)(map(self.to_fake, value))
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) not in self._fakes:
            self._real_tensors.append(value)
            self._fakes[id(value)] = self._make_fake(value)
        return self._fakes[id(value)]

    def release_tensors(self) -> None:
        """Drop the references to real tensors. Inferred outputs are kept."""
        self._fakes.clear()
        self._real_tensors.clear()

    def _alias_nested(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return self._alias(outputs, outputs.device)
        return type(outputs)(map(self._alias_nested, outputs)) if type(outputs) in (list, tuple) else outputs

    def _alias(self, template: Tensor, device: torch.device) -> Tensor:
        """Make a new fake tensor with the dtype, shape and strides of a meta or fake tensor.

        Without dispatch, because the mode would otherwise infer `detach` like an operation of the model.
        """
        with no_dispatch():
            return FakeTensor(self.mode, template.detach(), device)

    def _make_fake(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return self.mode.from_tensor(tensor, static_shapes=True)
        key = (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if key not in self._templates:
            # Not in inference mode: views of the model's parameters must keep their base.
            with no_dispatch(), torch.inference_mode(False):
                self._templates[key] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
                )
        return self._alias(self._templates[key], tensor.device)

    def _make_key(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Return everything the output shapes depend on; None if that cannot be compared."""
        if any(tag in operation.tags for tag in UNCACHED_TAGS):
            return None
        try:
            key = (operation, self._describe(args), self._describe(kwargs))
            hash(key)
        except TypeError:  # a setting without a hash, or a tensor that `_describe_tensor` rejects
            return None
        return key

    def _describe(self, value: Any) -> Any:
        """Return a hashable description. It contains the type, because 1, 1.0 and True are equal as keys."""
        if isinstance(value, FakeTensor):
            return self._describe_tensor(value)
        if isinstance(value, torch.SymInt):
            return value.node.expr
        if isinstance(value, list | tuple):
            return (type(value), *map(self._describe, value))
        if isinstance(value, dict):
            return tuple((name, self._describe(item)) for name, item in value.items())
        return (type(value), value)

    def _describe_tensor(self, tensor: FakeTensor) -> Any:
        if tensor.constant is not None or tensor.layout != torch.strided:
            raise TypeError("a tensor with constant values, or not a strided one")
        if id(tensor) not in self._descriptions:
            self._alive.append(tensor)
            numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
            expressions = tuple(number.node.expr if isinstance(number, torch.SymInt) else number for number in numbers)
            self._descriptions[id(tensor)] = (
                tensor.dtype,
                tensor.device,
                tensor.is_conj(),
                tensor.is_neg(),
                expressions,
            )
        return self._descriptions[id(tensor)]


def _is_cacheable(outputs: Any) -> bool:
    """Whether all outputs are fake tensors of known sizes and without constant values."""
    if isinstance(outputs, Tensor):
        outputs = [outputs]
    if not isinstance(outputs, list | tuple):
        return False
    return all(output is None or (isinstance(output, FakeTensor) and _has_known_sizes(output)) for output in outputs)


def _has_known_sizes(tensor: FakeTensor) -> bool:
    symbols: list[Any] = [size for size in tensor.shape if isinstance(size, torch.SymInt)]
    return tensor.constant is None and all(symbol.node.has_hint() for symbol in symbols)


def _is_dense_float(tensor: FakeTensor) -> bool:
    """Whether a float tensor is contiguous. False if a size after the first is a symbol."""
    expected_stride = 1
    for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):  # from the last axis to axis 1
        if not isinstance(size, int) or not isinstance(stride, int):
            return False
        if size != 1 and stride != expected_stride:
            return False
        expected_stride *= size
    is_plain = tensor.is_floating_point() and not tensor.is_conj() and not tensor.is_neg() and tensor.ndim > 1
    return is_plain and type(tensor.stride(0)) is int and tensor.stride(0) == expected_stride
