"""The tokenizer files of a checkpoint, with every field checked for its type.

tokenizer.json         Document: the model, steps before and after it, added tokens
tokenizer_config.json  Settings: special tokens and the chat template
tokenizer.model        the fields of SentencePiece's protocol buffer

A field of another type is an ExportError that names the file and the field.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scalepoint.errors import DocumentError, ExportError
from scalepoint.support.formatting import one_line
from scalepoint.support.untrusted import read_json, read_text

MAX_FILE_BYTES = 256_000_000  # bytes
NonNegativeInt = Annotated[int, Field(ge=0)]
T = TypeVar("T", bound=BaseModel)


class _TokenizerModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class TokenizerStep(_TokenizerModel):
    """A normalizer, pre-tokenizer or post-processor, or a sequence of such."""

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
        """The steps of a sequence, or the one step."""
        inner = self.pretokenizers or self.normalizers or self.processors
        return [part for each in inner for part in each.parts()] if inner else [self]


class AddedToken(_TokenizerModel):
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
        """The merges, each of two tokens."""
        return [each if isinstance(each, list) else each.split(" ") for each in self.merges]


class TokenizerDocument(_TokenizerModel):
    """tokenizer.json; its model has a type of its own for each kind."""

    model: dict[str, Any] = {}
    added_tokens: list[AddedToken] | None = None
    normalizer: TokenizerStep | None = None
    pre_tokenizer: TokenizerStep | None = None
    post_processor: TokenizerStep | None = None


class SpecialToken(_TokenizerModel):
    content: str


class TokenizerSettings(_TokenizerModel):
    """tokenizer_config.json."""

    bos_token: str | SpecialToken | None = None
    eos_token: str | SpecialToken | None = None
    unk_token: str | SpecialToken | None = None
    pad_token: str | SpecialToken | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: Any = None  # a text, or several by name

    def special(self, role: str) -> str | None:
        given: str | SpecialToken | None = getattr(self, f"{role}_token")
        return given.content if isinstance(given, SpecialToken) else given


def read_document(path: Path) -> TokenizerDocument:
    return validate_as(TokenizerDocument, _read_json(path), path)


def read_settings(path: Path) -> TokenizerSettings:
    return validate_as(TokenizerSettings, _read_json(path), path)


def read_template(path: Path) -> str:
    """A chat template, with line ends as Python's text files have them."""
    try:
        return io.StringIO(read_text(path, folder=path.parent), newline=None).read()
    except (OSError, DocumentError) as error:
        raise ExportError(f"the chat template cannot be used: {error}") from error


def validate_as(kind: type[T], value: Any, path: Path) -> T:
    """A value of a file as one of the classes here."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = one_line(".".join(map(str, first["loc"][:4])))[:80]
        raise ExportError(f"{path} is not as tokenizers writes it: {where}: {first['msg']}") from error


def check_text(texts: list[str], path: Path) -> None:
    """Refuse half characters (lone surrogates): JSON can hold them, UTF-8 cannot."""
    try:
        "\n".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ExportError(f"{path} has half a character in it: {error.object[error.start]!r}") from error


def _read_json(path: Path) -> Any:
    try:
        return read_json(path, MAX_FILE_BYTES, folder=path.parent)
    except DocumentError as error:
        raise ExportError(error.args[0]) from error
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}") from error


def iterate_fields(data: Any) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer by number: integers, or bytes; ValueError for what is none."""
    if not isinstance(data, bytes):
        raise ValueError("a field is a number instead of a message")
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        if key & 7 == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if key & 7 not in (1, 2, 5):
            raise ValueError("a field has an unknown type")
        size, at = _read_varint(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
        if at + size > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    found = 0
    for shift in range(0, 70, 7):  # at most 64 bits, seven in a byte
        if at >= len(data):
            raise ValueError("it ends too early")
        found |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return found, at
    raise ValueError("a number has more than 64 bits")
