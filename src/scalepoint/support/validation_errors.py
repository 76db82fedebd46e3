"""What is wrong with a document, in our own words: file:line:column, the key, what is allowed, what was given.

c.yaml:3:10: threads: must be at least 1, not 0
c.yaml:5:5: quantization.weight: there is no key 'n_bit': did you mean 'n_bits'? ...
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from scalepoint.errors import ConfigError, ScalepointError, did_you_mean, short_repr
from scalepoint.support.documents import DocumentPositions

MAX_SHOWN_PROBLEMS = 5
Path = tuple[str | int, ...]


class UnknownFieldError(ConfigError):
    """A key that a model does not have; raised by a validator, which does not know the line."""

    def __init__(self, key: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no key {key!r}: {did_you_mean(key, known)}")
        self.key = key


class CheckedModel(BaseModel):
    """A pydantic model whose errors are ours: `except ScalepointError` catches a field that cannot be. pydantic's own
    ValidationError, which cannot be subclassed, is the cause of each."""

    error_class: ClassVar[type[ScalepointError]] = ConfigError

    if not TYPE_CHECKING:  # type checkers know the fields from pydantic

        def __init__(self, /, **data: Any) -> None:
            with self._translated(data):
                super().__init__(**data)

        # A mark of pydantic's own: validating a nested model then does not call this __init__.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with cls._translated(obj):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with cls._translated(None):
            return super().model_validate_json(json_data, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            message = f"a {type(self).__name__} is frozen: {name} cannot be set; make another one"
            raise self.error_class(message) from error

    @classmethod
    @contextmanager
    def _translated(cls, data: Any) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise cls.error_class(describe_errors(error, data)) from error


class Config(CheckedModel):
    """Frozen, and a misspelt field is refused with the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    raise UnknownFieldError(str(name), tuple(cls.model_fields))
        return data


def find_validation_error(error: BaseException | None) -> ValidationError | None:
    """pydantic's own error behind one of a CheckedModel."""
    cause = error.__cause__ if isinstance(error, ScalepointError) else error
    return cause if isinstance(cause, ValidationError) else None


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    path: Path
    message: str
    is_about_key: bool = False

    @property
    def key(self) -> str:
        """overrides[0].name"""
        path = self.path[:-1] if self.is_about_key else self.path
        return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path).lstrip(".")


def list_problems(error: ValidationError, data: Any) -> list[Problem]:
    """Everything that pydantic found wrong with `data`; alternatives that all fail at one place are one complaint."""
    found: dict[tuple[Path, bool], list[str]] = {}
    for each in _flatten_errors(error, data, ()):
        messages = found.setdefault((each.path, each.is_about_key), [])
        messages += [] if each.message in messages else [each.message]
    return [Problem(path, ", or ".join(messages), about) for (path, about), messages in found.items()]


def _flatten_errors(error: ValidationError, data: Any, prefix: Path) -> list[Problem]:
    found = []
    for each in error.errors(include_url=False):
        inner = each.get("ctx", {}).get("error")
        path, value = _follow_location(data, each["loc"])
        if (nested := find_validation_error(inner)) is not None:
            found += _flatten_errors(nested, value, prefix + path)
        elif isinstance(inner, UnknownFieldError):
            found.append(Problem((*prefix, *path, inner.key), str(inner.args[0]), True))
        elif isinstance(inner, Exception):
            found.append(Problem(prefix + path, str(inner.args[0] if inner.args else inner)))
        else:
            found.append(Problem(prefix + path, f"{_describe_allowed(each)}, not {short_repr(each['input'])}"))
    return found


def _follow_location(data: Any, location: Sequence[str | int]) -> tuple[Path, Any]:
    """As far as the document goes: what follows are the names of alternatives."""
    path: list[str | int] = []
    for step in location:
        is_item = isinstance(step, int) and isinstance(data, Sequence) and step < len(data)
        if not (is_item or (isinstance(data, Mapping) and step in data)):
            break
        data = data[step]
        path.append(step)
    return tuple(path), data


_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda each: f"must be at least {each['ge']}",
    "greater_than": lambda each: f"must be more than {each['gt']}",
    "less_than_equal": lambda each: f"must be at most {each['le']}",
    "less_than": lambda each: f"must be less than {each['lt']}",
    "literal_error": lambda each: f"must be {each['expected']}",
    "enum": lambda each: f"must be {each['expected']}",
}
_KINDS = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be a text",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be a mapping of keys",
    "model": "must be a mapping of keys",
    "none": "must be null",
}


def _describe_allowed(each: Any) -> str:
    kind = each["type"]
    if kind in _WORDS:
        return _WORDS[kind](each["ctx"])
    known = _KINDS.get(kind.partition("_")[0])
    return known or str(each["msg"]).replace("Input should", "must", 1)


def describe_errors(error: ValidationError, data: Any) -> str:
    """All complaints about what was given in Python, where there are no lines."""
    found = list_problems(error, data)
    more = [f"and {len(found) - MAX_SHOWN_PROBLEMS} more"] if len(found) > MAX_SHOWN_PROBLEMS else []
    return "; ".join(
        [f"{each.key + ': ' if each.key else ''}{each.message}" for each in found[:MAX_SHOWN_PROBLEMS]] + more
    )


def describe_errors_in_file(error: ValidationError, data: Any, file: str, places: DocumentPositions) -> str:
    """All complaints, one a line, each with its place in the file."""
    lines = []
    for each in list_problems(error, data):
        place = places.of(each.path, of_key=each.is_about_key)
        where = f"{file}:{place[0]}:{place[1]}" if place else file
        lines.append(f"{where}: {each.key + ': ' if each.key else ''}{each.message}")
    more = [f"and {len(lines) - MAX_SHOWN_PROBLEMS} more"] if len(lines) > MAX_SHOWN_PROBLEMS else []
    return "\n".join(lines[:MAX_SHOWN_PROBLEMS] + more)
