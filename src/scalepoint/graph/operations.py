"""Modules for operations that were written as functions: they hold settings and refer to parameters where those live.

A reference is (owner module, name), read at every call, so that `.to()`, a loaded state or a replaced parameter is
seen, and the parameter keeps its one place and name in the state_dict.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

WEIGHTS = ("weight", "mat2", "other")  # the names that torch's functions give a weight, and a bias
BIASES = ("bias",)


@dataclass(frozen=True)
class Slot:
    """The place of the n-th input among the arguments."""

    index: int


class Reference:
    """A parameter or buffer, given by its owner and name. It is copied with its owner and never registered twice."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner = owner
        self.name = name

    @property
    def value(self) -> Tensor:
        value: Tensor = getattr(self.owner, self.name)
        return value

    def tensors(self) -> list[Tensor]:
        """What is stored: the value, or what a computed one is made of."""
        if not isinstance(self.owner, ComputedTensor):
            return [self.value]
        return [tensor for source in self.owner.sources() for tensor in source.tensors()]


@dataclass(frozen=True)
class ComputationStep:
    """One function; its arguments hold references to parameters and slots for what earlier steps gave."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class ComputedTensor(nn.Module):
    """A tensor made of parameters alone."""

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
        """What it is made of."""
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
        self.in_train: dict[str, Any] = {}  # arguments that are other in train mode

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that are neither inputs nor parameters."""
        return {name: value for name, value in self.arguments.items() if not _has_tensors(value)}

    @property
    def weight(self) -> Tensor | None:
        return self._parameter(*WEIGHTS)

    @property
    def bias(self) -> Tensor | None:
        return self._parameter(*BIASES)

    @property
    def is_computed(self) -> bool:
        """Whether its weight or bias is made of other parameters."""
        return any(isinstance(reference.owner, ComputedTensor) for reference in self.references().values())

    @property
    def has_transposed_weight(self) -> bool:
        """Whether the weight of a linear operation is (in, out), as a plain matrix product has it."""
        return self.kind == "linear" and "weight" not in self.arguments

    def references(self) -> dict[str, Reference]:
        """The parameters by argument name; those of a list are numbered."""
        references: dict[str, Reference] = {}
        for name, value in self.arguments.items():
            if isinstance(value, Reference):
                references[name] = value
            elif isinstance(value, list | tuple):
                references |= {f"{name}.{i}": item for i, item in enumerate(value) if isinstance(item, Reference)}
        return references

    def tensors(self) -> list[Tensor]:
        """What is stored of all that it refers to."""
        return [tensor for reference in self.references().values() for tensor in reference.tensors()]

    def forward(self, *inputs: Any) -> Any:
        return self.run(inputs, {})

    def run(self, inputs: Sequence[Any], instead: Mapping[str, Any]) -> Any:
        """The operation with some of its arguments replaced."""
        arguments = {**self.arguments, **self.in_train} if self.training and self.in_train else self.arguments
        arguments = {**arguments, **instead} if instead else arguments
        filled_arguments = [(name, fill_slots(value, inputs)) for name, value in arguments.items()]
        return self.function(
            *(value for _, value in filled_arguments[: self.positional]), **dict(filled_arguments[self.positional :])
        )

    def extra_repr(self) -> str:
        owned = [f"{name}={reference.name}" for name, reference in self.references().items()]
        return ", ".join([self.kind, *owned, *(f"{name}={value}" for name, value in self.settings.items())])

    def _parameter(self, *names: str) -> Tensor | None:
        candidates = (self.arguments.get(name) for name in names)
        return next((value.value for value in candidates if isinstance(value, Reference)), None)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_tensors(item) for item in value)
    return isinstance(value, Slot | Reference)


def get_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that a module computes with: those that it refers to, else its own parameters."""
    refers = getattr(module, "tensors", None)
    return [*(refers() if callable(refers) else ()), *module.parameters()]


def collect_references(value: Any) -> list[Reference]:
    if isinstance(value, list | tuple):
        return [reference for item in value for reference in collect_references(item)]
    return [value] if isinstance(value, Reference) else []


def fill_slots(value: Any, inputs: Sequence[Any]) -> Any:
    """An argument with inputs in its slots and the tensors that are referred to."""
    if isinstance(value, Slot):
        return inputs[value.index]
    if isinstance(value, Reference):
        return value.value
    if isinstance(value, list | tuple):
        return type(value)(fill_slots(item, inputs) for item in value)
    return value
