"""Read the tokenizer files of a checkpoint, and check the type of every field.

    tokenizer.json         TokenizerDocument: the model, steps before and after it, added tokens
    tokenizer_config.json  TokenizerSettings: special tokens and the chat template
    tokenizer.model        the fields of SentencePiece's protocol buffer

A field of the wrong type raises an ExportError that names the file and the field.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scalepoint.errors import DocumentError, ExportError
from scalepoint.support.formatting import to_one_line
from scalepoint.support.untrusted import read_json, read_text

MAX_FILE_BYTES = 256_000_000
NonNegativeInt = Annotated[int, Field(ge=0)]
T = TypeVar("T", bound=BaseModel)


class _TokenizerModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class TokenizerStep(_TokenizerModel):
    """A normalizer, pre-tokenizer or post-processor, or a sequence of them."""

    type: str | None = None
    pretokenizers: list["TokenizerStep"] | None = None
    normalizers: list["TokenizerStep"] | None = None
    processors: list["TokenizerStep"] | None = None
    prepend_scheme: str | None = "always"
    add_prefix_space: bool | None = False
    use_regex: bool | None = True
    individual_digits: bool | None = False
    pattern: dict[str, str] | None = None
    single: list[dict[str, Any]] | list[str] | None = None

    def parts(self) -> list["TokenizerStep"]:
        """Return the steps of a sequence, or this step alone."""
        steps = self.pretokenizers or self.normalizers or self.processors
        return [part for step in steps for part in step.parts()] if steps else [self]


class AddedToken(_TokenizerModel):
    """An entry of added_tokens in tokenizer.json."""

    id: NonNegativeInt
    content: str
    special: bool = False


class BpeModel(_TokenizerModel):
    """The model of a BPE tokenizer."""

    vocab: dict[str, NonNegativeInt]
    merges: list[str | Annotated[list[str], Field(min_length=2, max_length=2)]] = []
    byte_fallback: bool | None = False
    ignore_merges: bool | None = False

    def pairs(self) -> list[list[str]]:
        """Return the merges as lists of tokens; older files separate the two tokens by a space."""
        return [merge if isinstance(merge, list) else merge.split(" ") for merge in self.merges]


class TokenizerDocument(_TokenizerModel):
    """tokenizer.json; the model is validated later, because its fields depend on its type."""

    model: dict[str, Any] = {}
    added_tokens: list[AddedToken] | None = None
    normalizer: TokenizerStep | None = None
    pre_tokenizer: TokenizerStep | None = None
    post_processor: TokenizerStep | None = None


class SpecialToken(_TokenizerModel):
    """A special token that is stored as an object instead of a text."""

    content: str


class TokenizerSettings(_TokenizerModel):
    """tokenizer_config.json."""

    bos_token: str | SpecialToken | None = None
    eos_token: str | SpecialToken | None = None
    unk_token: str | SpecialToken | None = None
    pad_token: str | SpecialToken | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: Any = None  # one text, or several with names

    def special(self, role: str) -> str | None:
        """Return the text of a special token: bos, eos, unk or pad."""
        token: str | SpecialToken | None = getattr(self, f"{role}_token")
        return token.content if isinstance(token, SpecialToken) else token


def read_document(path: Path) -> TokenizerDocument:
    return validate_as(TokenizerDocument, _read_json(path), path)


def read_settings(path: Path) -> TokenizerSettings:
    return validate_as(TokenizerSettings, _read_json(path), path)


def read_template(path: Path) -> str:
    """Read a chat template, with line ends converted to line feeds."""
    try:
        return io.StringIO(read_text(path, folder=path.parent), newline=None).read()
    except (OSError, DocumentError) as error:
        raise ExportError(f"the chat template cannot be read: {error}") from error


def validate_as(model: type[T], value: Any, path: Path) -> T:
    """Validate a value of a file as one of the classes of this module."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = to_one_line(".".join(map(str, first["loc"][:4])))[:80]
        raise ExportError(f"{path} is not a valid tokenizer file: {field}: {first['msg']}") from error


def check_text(texts: list[str], path: Path) -> None:
    """Raise ExportError for lone surrogates, which JSON allows and UTF-8 does not."""
    try:
        "\n".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ExportError(
            f"{path} contains an incomplete character (a lone surrogate): {error.object[error.start]!r}"
        ) from error


def _read_json(path: Path) -> Any:
    try:
        return read_json(path, MAX_FILE_BYTES, folder=path.parent)
    except DocumentError as error:
        raise ExportError(error.args[0]) from error
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}") from error


def iterate_fields(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield number and value (an integer or bytes) of every field of a protocol buffer message.

    Raises:
        ValueError: The data is not a message.
    """
    if not isinstance(data, bytes):
        raise ValueError("a field is a number instead of a message")
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _read_varint(data, position)
            yield number, value
            continue
        if wire_type == 2:
            size, position = _read_varint(data, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError("a field has an unknown type")
        if position + size > len(data):
            raise ValueError("it ends too early")
        yield number, data[position : position + size]
        position += size


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return an integer and the position after it. Each byte has seven bits, and a flag that another byte follows."""
    number = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("it ends too early")
        byte = data[position]
        number |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return number, position
    raise ValueError("a number has more than 64 bits")
