"""YAML and JSON texts, read with limits: a 400-byte YAML can expand to 10^9 items once anything walks it."""

import json
from typing import Any

import yaml

from scalepoint.errors import DocumentError

MAX_BYTES = 1_000_000
MAX_ALIASES = 64
MAX_DEPTH = 64

_BASE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE_LOADER):  # type: ignore[misc]  # the C loader has no stubs
    """The safe loader that also refuses a key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise DocumentError(f"{key!r} is given twice, at line {key_node.start_mark.line + 1}")
            if isinstance(key, str):
                seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def parse_yaml(text: str) -> Any:
    """The plain value of a YAML text; no tags, at most 1 MB, 64 aliases and 64 levels."""
    _check_size(text)
    aliases = depth = 0
    try:
        for event in yaml.parse(text, Loader=_BASE_LOADER):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if aliases > MAX_ALIASES:
                raise DocumentError(f"more than {MAX_ALIASES} aliases: write the values out")
            if depth > MAX_DEPTH:
                raise DocumentError(f"nested deeper than {MAX_DEPTH} levels")
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise DocumentError(f"not valid YAML: {error}") from error


def parse_json(text: str) -> Any:
    """The plain value of a JSON text of at most 1 MB."""
    _check_size(text)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DocumentError(f"not valid JSON: {error}") from error


def dump_yaml(value: Any) -> str:
    """Plain block YAML in the order given."""
    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, allow_unicode=True)
    return text


def _check_size(text: str) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise DocumentError(f"{size} bytes: a config has at most {MAX_BYTES}")
