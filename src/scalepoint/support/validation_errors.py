"""Errors of config files and other documents: file:line:column, the key, what is allowed, and the value.

c.yaml:3:10: threads: must be at least 1, got 0
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
    """A key that a model does not have. Raised by a validator, which does not know the line of the key."""

    def __init__(self, key: str, known_keys: Sequence[str]) -> None:
        super().__init__(f"there is no key {key!r}: {did_you_mean(key, known_keys)}")
        self.key = key


class CheckedModel(BaseModel):
    """A pydantic model that raises a ScalepointError for invalid values.

    pydantic's ValidationError cannot be subclassed. It is the cause of the error.
    """

    error_class: ClassVar[type[ScalepointError]] = ConfigError

    if not TYPE_CHECKING:  # a type checker derives __init__ from the fields

        def __init__(self, /, **data: Any) -> None:
            with self._errors_translated(data):
                super().__init__(**data)

        # With this attribute (pydantic 2) validating a nested model does not call this __init__.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with cls._errors_translated(obj):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with cls._errors_translated(None):
            return super().model_validate_json(json_data, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            message = f"a {type(self).__name__} is frozen, so {name} cannot be set: create another one"
            raise self.error_class(message) from error

    @classmethod
    @contextmanager
    def _errors_translated(cls, data: Any) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise cls.error_class(describe_errors(error, data)) from error


class Config(CheckedModel):
    """A frozen model. For an unknown field the error suggests the nearest known one."""

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
    """Return the error itself, or the cause of an error of a CheckedModel, if it is a ValidationError of pydantic."""
    cause = error.__cause__ if isinstance(error, ScalepointError) else error
    return cause if isinstance(cause, ValidationError) else None


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a document, and where.

    Attributes:
        path: Keys and indices that lead to the value.
        message: What is wrong.
        is_about_key: Whether the key is wrong, not its value.
    """

    path: Path
    message: str
    is_about_key: bool = False

    @property
    def key(self) -> str:
        """The path of the value as text, such as "overrides[0].name"."""
        path = self.path[:-1] if self.is_about_key else self.path
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


def list_problems(error: ValidationError, data: Any) -> list[Problem]:
    """Return all problems of a document. Alternatives (unions) that fail for one value become one problem."""
    messages_by_value: dict[tuple[Path, bool], list[str]] = {}
    for problem in _flatten_errors(error, data, ()):
        messages = messages_by_value.setdefault((problem.path, problem.is_about_key), [])
        if problem.message not in messages:
            messages.append(problem.message)
    return [
        Problem(path, ", or ".join(messages), is_about_key)
        for (path, is_about_key), messages in messages_by_value.items()
    ]


def _flatten_errors(error: ValidationError, data: Any, prefix: Path) -> list[Problem]:
    """Convert pydantic's errors, also those of models that validate a part of the document by themselves."""
    problems = []
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        path, value = _follow_location(data, details["loc"])
        if (nested := find_validation_error(cause)) is not None:
            problems += _flatten_errors(nested, value, prefix + path)
        elif isinstance(cause, UnknownFieldError):
            problems.append(Problem((*prefix, *path, cause.key), str(cause.args[0]), True))
        elif isinstance(cause, Exception):
            problems.append(Problem(prefix + path, str(cause.args[0] if cause.args else cause)))
        else:
            problems.append(Problem(prefix + path, f"{_describe_allowed(details)}, got {short_repr(details['input'])}"))
    return problems


def _follow_location(data: Any, location: Sequence[str | int]) -> tuple[Path, Any]:
    """Return the part of a location that exists in the document, and its value.

    pydantic appends the names of the alternatives of a union to a location.
    """
    path: list[str | int] = []
    for step in location:
        is_item = isinstance(step, int) and isinstance(data, Sequence) and step < len(data)
        if not (is_item or (isinstance(data, Mapping) and step in data)):
            break
        data = data[step]
        path.append(step)
    return tuple(path), data


# type of pydantic's error -> text, from the context of the error
_LIMIT_TEXTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "greater_than": lambda context: f"must be more than {context['gt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "less_than": lambda context: f"must be less than {context['lt']}",
    "literal_error": lambda context: f"must be {context['expected']}",
    "enum": lambda context: f"must be {context['expected']}",
}
# first word of the type of pydantic's error -> text
_TYPE_TEXTS = {
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


def _describe_allowed(details: Any) -> str:
    error_type = details["type"]
    if error_type in _LIMIT_TEXTS:
        return _LIMIT_TEXTS[error_type](details["ctx"])
    text = _TYPE_TEXTS.get(error_type.partition("_")[0])
    return text or str(details["msg"]).replace("Input should", "must", 1)


def describe_errors(error: ValidationError, data: Any) -> str:
    """Describe all problems of values that were passed in Python, in one line."""
    return "; ".join(_shorten_list([str(problem) for problem in list_problems(error, data)]))


def describe_errors_in_file(error: ValidationError, data: Any, file: str, positions: DocumentPositions) -> str:
    """Describe all problems of a file, one per line, with line and column."""
    lines = []
    for problem in list_problems(error, data):
        position = positions.of(problem.path, of_key=problem.is_about_key)
        location = f"{file}:{position[0]}:{position[1]}" if position else file
        lines.append(f"{location}: {problem}")
    return "\n".join(_shorten_list(lines))


def _shorten_list(texts: list[str]) -> list[str]:
    hidden = len(texts) - MAX_SHOWN_PROBLEMS
    return texts[:MAX_SHOWN_PROBLEMS] + ([f"and {hidden} more"] if hidden > 0 else [])
