"""Parses YAML and JSON with limits: a YAML text of 400 bytes can expand to 10^9 items by its aliases."""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from scalepoint.errors import DocumentError

MAX_BYTES = 1_000_000
MAX_ALIASES = 64
MAX_DEPTH = 64
MAX_ITEMS = 100_000
MAX_DIGITS = 100

_BASE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE_LOADER):  # type: ignore[misc]  # the C loader has no stubs
    """The safe loader, with an error for duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in keys:
                raise DocumentError(f"duplicate key {key!r} at line {key_node.start_mark.line + 1}")
            if isinstance(key, str):
                keys.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def parse_yaml(text: str) -> Any:
    """Parse a YAML text without tags, with at most 1 MB, 64 aliases and 64 levels."""
    _check_text(text)
    aliases = depth = 0
    try:
        for event in yaml.parse(text, Loader=_BASE_LOADER):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if aliases > MAX_ALIASES:
                raise DocumentError(f"more than {MAX_ALIASES} aliases: write the values instead")
            if depth > MAX_DEPTH:
                raise DocumentError(f"nested deeper than {MAX_DEPTH} levels")
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _count_expanded(node, {}, set())
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except DocumentError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        raise DocumentError(f"not valid YAML: {error}") from error


def _count_expanded(node: Any, sizes: dict[int, int], open_nodes: set[int]) -> int:
    """Count the items of a node with its aliases expanded. Raises DocumentError for too many, and for a cycle."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in open_nodes:
        raise DocumentError(f"line {node.start_mark.line + 1} contains itself")
    if id(node) not in sizes:
        open_nodes.add(id(node))
        pairs = isinstance(node, yaml.MappingNode)
        children = [child for pair in node.value for child in pair] if pairs else node.value
        sizes[id(node)] = 1 + sum(_count_expanded(child, sizes, open_nodes) for child in children)
        open_nodes.discard(id(node))
    if sizes[id(node)] > MAX_ITEMS:
        raise DocumentError(f"more than {MAX_ITEMS} items after expanding aliases")
    return sizes[id(node)]


class DocumentPositions:
    """Lines and columns of the keys and values of a YAML or JSON text."""

    def __init__(self, text: str) -> None:
        loader = _BASE_LOADER(text.replace("\t", " "))  # JSON allows tabs as indentation, YAML does not
        try:
            self._root = loader.get_single_node()
        except yaml.YAMLError:
            self._root = None
        finally:
            loader.dispose()

    def of(self, path: Sequence[str | int], *, of_key: bool = False) -> tuple[int, int] | None:
        """Return line and column (from 1) of a value or its key.

        If the value does not exist, return those of the innermost part that exists.
        """
        mark = None
        node = self._root
        for step in path:
            mark = node.start_mark if node is not None else mark
            node, key = _find_child(node, step)
            if node is None:
                break
            mark = (key or node).start_mark if of_key else node.start_mark
        if not path and node is not None:
            mark = node.start_mark
        return None if mark is None else (mark.line + 1, mark.column + 1)


def _find_child(node: Any, step: str | int) -> tuple[Any, Any]:
    """Return the child of a node for a key or index, and the node of the key."""
    if isinstance(node, yaml.MappingNode):
        return next(((value, key) for key, value in node.value if key.value == str(step)), (None, None))
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], None
    return None, None


def parse_json(text: str, limit: int = MAX_BYTES) -> Any:
    """Parse a JSON text of at most `limit` bytes."""
    _check_text(text, limit)
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_int=_parse_integer)
    except DocumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not valid JSON: {error}") from error


def _parse_integer(text: str) -> int:
    """Raise DocumentError for very long numbers: float() fails on them."""
    if len(text) > MAX_DIGITS:
        raise DocumentError(f"a number has {len(text)} digits: at most {MAX_DIGITS} are allowed")
    return int(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise DocumentError(f"duplicate key {key!r}")
        mapping[key] = value
    return mapping


def dump_yaml(value: Any) -> str:
    """Write YAML in the order of the value: one key per line, innermost lists and mappings on one line, as [1, 2]."""
    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, allow_unicode=True)
    return text


def _check_text(text: object, limit: int = MAX_BYTES) -> None:
    if not isinstance(text, str):
        raise DocumentError(f"must be a text, got {type(text).__name__}")
    size = len(text.encode(errors="surrogatepass"))
    if size > limit:
        raise DocumentError(f"it has {size} bytes: at most {limit} are allowed")
