"""Modules for operations that the model calls as functions. They have settings, and references to parameters.

A reference is (owner module, name) and is read at every call. So `.to()`, a loaded state or a replaced parameter takes
effect, and the parameter keeps its name in the state_dict.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# Argument names of the weight and the bias in torch's functions.
WEIGHTS = ("weight", "mat2", "other")
BIASES = ("bias",)


@dataclass(frozen=True)
class Slot:
    """A placeholder for the n-th input among the arguments."""

    index: int


class Reference:
    """A parameter or buffer by owner and name. It is copied with its owner and not registered a second time."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner = owner
        self.name = name

    @property
    def value(self) -> Tensor:
        value: Tensor = getattr(self.owner, self.name)
        return value

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors: the value, or the parameters that a computed value depends on."""
        if not isinstance(self.owner, ComputedTensor):
            return [self.value]
        return [tensor for source in self.owner.sources() for tensor in source.tensors()]


@dataclass(frozen=True)
class ComputationStep:
    """One function call of a ComputedTensor. Slots in its arguments stand for the results of earlier steps."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class ComputedTensor(nn.Module):
    """A tensor that is computed from parameters only, at every access to `value`."""

    def __init__(self, steps: Sequence[ComputationStep]) -> None:
        super().__init__()
        self.steps = list(steps)

    @property
    def value(self) -> Tensor:
        values: list[Any] = []
        for step in self.steps:
            kwargs = {name: fill_slots(value, values) for name, value in step.kwargs.items()}
            values.append(step.function(*(fill_slots(value, values) for value in step.args), **kwargs))
        result: Tensor = values[-1]
        return result

    def sources(self) -> list[Reference]:
        """Return the parameters that it is computed from."""
        return [
            reference for step in self.steps for reference in collect_references([*step.args, *step.kwargs.values()])
        ]

    def extra_repr(self) -> str:
        sources = dict.fromkeys(source.name for source in self.sources())
        functions = [getattr(step.function, "__name__", str(step.function)) for step in self.steps]
        return " -> ".join([", ".join(sources), *functions])


class Operation(nn.Module):
    """One operation of a captured graph, as a module.

    It holds a function and its arguments by name, in the function's order. Inputs are slots and parameters are
    references; the first `positional` arguments are passed by position.
    """

    def __init__(
        self, kind: str, function: Callable[..., Any], arguments: Mapping[str, Any], positional: int | None = None
    ) -> None:
        super().__init__()
        self.kind = kind
        self.function = function
        self.arguments = dict(arguments)
        self.positional = positional or 0
        self.in_train: dict[str, Any] = {}  # arguments that have another value in train mode

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments that are neither inputs nor parameters."""
        return {name: value for name, value in self.arguments.items() if not _has_tensors(value)}

    @property
    def weight(self) -> Tensor | None:
        return self._parameter(*WEIGHTS)

    @property
    def bias(self) -> Tensor | None:
        return self._parameter(*BIASES)

    @property
    def is_computed(self) -> bool:
        """Whether its weight or bias is computed from other parameters."""
        return any(isinstance(reference.owner, ComputedTensor) for reference in self.references().values())

    @property
    def has_transposed_weight(self) -> bool:
        """Whether the weight of a linear operation has the shape (in, out), as in a plain matrix product x @ w."""
        return self.kind == "linear" and "weight" not in self.arguments

    def references(self) -> dict[str, Reference]:
        """Return the parameters by argument name; those in a list are numbered."""
        references: dict[str, Reference] = {}
        for name, value in self.arguments.items():
            if isinstance(value, Reference):
                references[name] = value
            elif isinstance(value, list | tuple):
                references |= {f"{name}.{i}": item for i, item in enumerate(value) if isinstance(item, Reference)}
        return references

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors of all references."""
        return [tensor for reference in self.references().values() for tensor in reference.tensors()]

    def forward(self, *inputs: Any) -> Any:
        return self.run(inputs, {})

    def run(self, inputs: Sequence[Any], replacements: Mapping[str, Any]) -> Any:
        """Run the operation with some of its arguments replaced."""
        arguments = self.arguments
        if self.training and self.in_train:
            arguments = {**arguments, **self.in_train}
        if replacements:
            arguments = {**arguments, **replacements}
        filled = [(name, fill_slots(value, inputs)) for name, value in arguments.items()]
        args = [value for _, value in filled[: self.positional]]
        return self.function(*args, **dict(filled[self.positional :]))

    def extra_repr(self) -> str:
        references = [f"{name}={reference.name}" for name, reference in self.references().items()]
        return ", ".join([self.kind, *references, *(f"{name}={value}" for name, value in self.settings.items())])

    def _parameter(self, *names: str) -> Tensor | None:
        candidates = (self.arguments.get(name) for name in names)
        return next((value.value for value in candidates if isinstance(value, Reference)), None)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_tensors(item) for item in value)
    return isinstance(value, Slot | Reference)


def get_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors that a module computes with: those that it references, and its own parameters."""
    tensors = getattr(module, "tensors", None)
    return [*(tensors() if callable(tensors) else ()), *module.parameters()]


def collect_references(value: Any) -> list[Reference]:
    """Return the references in an argument or in a nested list of arguments."""
    if isinstance(value, list | tuple):
        return [reference for item in value for reference in collect_references(item)]
    return [value] if isinstance(value, Reference) else []


def fill_slots(value: Any, inputs: Sequence[Any]) -> Any:
    """Return an argument with inputs instead of slots and tensors instead of references."""
    if isinstance(value, Slot):
        return inputs[value.index]
    if isinstance(value, Reference):
        return value.value
    if isinstance(value, list | tuple):
        return type(value)(fill_slots(item, inputs) for item in value)
    return value
