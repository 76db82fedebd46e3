"""Apply the table of renames in tools/renames.yaml to the whole project: code, strings and documents.

    python tools/rename.py [--root DIR] [--table FILE] [--only PACKAGE ...] [--check]

The table has one section per package, with four kinds of entries; module paths are relative to the root package:

    root_package: scalepoint
    packages:
      formats:
        modules: {formats.onnx.writing: formats.onnx.write}       # file, its test file, imports, dotted strings, docs
        symbols: {"formats.format:About": FileInfo}               # class, function or constant of a module
        attributes: {"formats.format:FileFormat.about": read_info}  # or {to: read_info, files: ["tests/formats/*"]}
        locals: {"formats.export:export": {found: layers}}        # variables and parameters of one function

libcst resolves names by scope but knows no types. So an attribute is renamed everywhere only if no other class of the
project and no common library type has an attribute of that name; otherwise in its class and in `files`. The tool prints
what it changed and what it left. On a clash (the new name is already bound) it writes nothing and exits with 1.
Entries that are already applied change nothing, so the table can be applied again to a tree that has moved on.
"""

import argparse
import ast
import builtins
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import libcst as cst
import yaml
from libcst import metadata as meta

CODE = ("src", "tests", "bench", "demo", "docs")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "pyproject.toml", "mkdocs.yml", "Makefile")
SKIPPED = ("tests/tools/test_rename.py",)  # it contains old names on purpose
SETTERS = {"setattr", "getattr", "hasattr", "delattr"}
FENCE = re.compile(r"(^[ ]*```(?:python|py)[^\n]*\n)(.*?)(^[ ]*```)", re.MULTILINE | re.DOTALL)
PROVIDERS = (meta.ByteSpanPositionProvider, meta.QualifiedNameProvider, meta.ScopeProvider, meta.ParentNodeProvider)


@dataclass
class Table:
    """The entries of the chosen packages; all module paths absolute and as they are after the module renames."""

    root: str
    modules: dict[str, str] = field(default_factory=dict)
    symbols: dict[tuple[str, str], str] = field(default_factory=dict)
    attributes: dict[tuple[str, str, str], tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    locals: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, only: list[str] | None = None) -> "Table":
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        table = cls(document["root_package"])
        sections = [part for name, part in document["packages"].items() if part and (not only or name in only)]
        for part in sections:
            table.modules |= {
                table._absolute(old): table._absolute(new) for old, new in (part.get("modules") or {}).items()
            }
        for part in sections:
            for key, new in (part.get("symbols") or {}).items():
                table.symbols[table._split(key)] = new
            for key, value in (part.get("attributes") or {}).items():
                module, name = table._split(key)
                owner, _, attribute = name.rpartition(".")
                entry = value if isinstance(value, dict) else {"to": value}
                table.attributes[module, owner, attribute] = entry["to"], tuple(entry.get("files", ()))
            for key, names in (part.get("locals") or {}).items():
                table.locals.setdefault(table._split(key), {}).update(names)
        return table

    def _absolute(self, module: str) -> str:
        return f"{self.root}.{module}" if module else self.root

    def _split(self, key: str) -> tuple[str, str]:
        module, _, name = key.partition(":")
        return self.moved(self._absolute(module)), name

    def moved(self, path: str) -> str:
        """The dotted path after the module renames: the longest renamed prefix is replaced."""
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            new = self.modules.get(".".join(parts[:count]))
            if new is not None:
                return ".".join([new, *parts[count:]])
        return path


@dataclass
class Log:
    """What was changed and what was left."""

    changed: Counter[str] = field(default_factory=Counter)
    remaining: list[str] = field(default_factory=list)
    clashes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass
class Source:
    """One parsed piece of Python: a module, or a fenced block of a document."""

    path: str
    module: str  # dotted name; "" for documents
    text: str
    wrapper: meta.MetadataWrapper
    edits: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)  # byte span -> new text, entry

    def __post_init__(self) -> None:
        maps = self.wrapper.resolve_many(PROVIDERS)
        self.spans, self.names, self.scopes, self.parents = (maps[provider] for provider in PROVIDERS)
        self.nodes = list(_walk(self.wrapper.module))

    def line(self, node: cst.CSTNode) -> int:
        return self.text.encode()[: self.spans[node].start].count(b"\n") + 1

    def where(self, node: cst.CSTNode) -> str:
        return f"{self.path}:{self.line(node)}"

    def qualified(self, node: cst.CSTNode) -> set[str]:
        """Dotted names of a node; names of this module begin with the module's own path."""
        names = self.names.get(node, ())
        names = names() if callable(names) else names
        return {
            qualified_name.name
            if qualified_name.source is not meta.QualifiedNameSource.LOCAL
            else f"{self.module}.{qualified_name.name}"
            for qualified_name in names
        }

    def replace(self, node: cst.CSTNode, new: str, entry: str) -> None:
        span = self.spans[node]
        self.edits[span.start, span.start + span.length] = new, entry

    def edited(self, log: Log) -> str:
        data = self.text.encode()
        for (start, end), (new, entry) in sorted(self.edits.items(), reverse=True):
            data = data[:start] + new.encode() + data[end:]
            log.changed[entry] += 1
        return data.decode()


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


class Project:
    """All files as text. Nothing is written before every rename has been computed."""

    def __init__(self, root: Path, table: Table) -> None:
        self.root, self.table, self.log = root, table, Log()
        self.moves: dict[str, str] = {}
        self.origin: dict[str, str] = {}  # name -> where it is imported from
        self.texts: dict[str, str] = {}
        for folder in CODE:
            for path in sorted((root / folder).rglob("*")):
                if path.suffix in (".py", ".md", ".j2", ".yaml", ".toml") and "__pycache__" not in path.parts:
                    self._read(path)
        for name in DOCUMENTS:
            if (root / name).is_file():
                self._read(root / name)
        self.before = dict(self.texts)

    def _read(self, path: Path) -> None:
        name = path.relative_to(self.root).as_posix()
        if name not in SKIPPED:
            self.texts[name] = path.read_text(encoding="utf-8")

    def module_of(self, path: str) -> str:
        """Dotted name of a file below src; "" for any other."""
        if not path.startswith("src/") or not path.endswith(".py"):
            return ""
        return path[4:-3].replace("/", ".").removesuffix(".__init__")

    # -- modules ------------------------------------------------------------------------------------------------------

    def rename_modules(self) -> None:
        for old, new in self.table.modules.items():
            moved = self._moves_of(old, new)
            if not moved and not self._moves_of(new, new):
                self.log.missing.append(f"module {old}")
            for source, target in moved.items():
                if target in self.texts:
                    self.log.clashes.append(f"{source}: {target} exists already")
                self.moves[source] = target
                self.log.changed[f"module {old}"] += 1
        self.texts = {self.moves.get(path, path): text for path, text in self.texts.items()}
        if self.table.modules:
            for path, text in self.texts.items():
                self.texts[path] = self._rename_paths(path, text)

    def _moves_of(self, old: str, new: str) -> dict[str, str]:
        """Files of a module or package and the tests that mirror it, old path -> new path."""
        old_path, new_path = (f"src/{module.replace('.', '/')}" for module in (old, new))
        moves = {f"{old_path}.py": f"{new_path}.py"} if f"{old_path}.py" in self.texts else {}
        moves |= {path: new_path + path[len(old_path) :] for path in self.texts if path.startswith(f"{old_path}/")}
        tests, other = (f"tests/{'/'.join(module.split('.')[1:])}" for module in (old, new))
        mirror, target = (
            f"{module.rpartition('/')[0]}/test_{module.rpartition('/')[2]}.py" for module in (tests, other)
        )
        if moves and mirror in self.texts and (mirror == target or target not in self.texts):
            moves[mirror] = target
        if moves and f"{old_path}.py" not in moves:
            moves |= {path: other + path[len(tests) :] for path in self.texts if path.startswith(f"{tests}/")}
        return moves

    def _rename_paths(self, path: str, text: str) -> str:
        root = self.table.root
        text = re.sub(rf"(?<![\w.]){root}(?:\.\w+)+", lambda match: self.table.moved(match[0]), text)
        for old, new in sorted(self.table.modules.items(), key=lambda item: -len(item[0])):
            old_path, new_path = (module.split(".", 1)[1].replace(".", "/") for module in (old, new))
            text = re.sub(
                rf"(?<![\w/])((?:src/)?(?:{root}/)?){re.escape(old_path)}(?=\.py\b|/\w)", rf"\g<1>{new_path}", text
            )
            package, _, name = old.rpartition(".")
            if new.rpartition(".")[0] == package:
                text = self._rename_submodule(path, text, package, name, new.rpartition(".")[2])
            elif re.search(rf"from {re.escape(package)} import [^\n]*\b{name}\b", text):
                self.log.remaining.append(f"{path}: from {package} import {name} (the package changes)")
        for source, target in self.moves.items():
            if source.startswith("tests/"):
                text = re.sub(rf"(?<![\w/]){re.escape(source)}\b", target, text)
        return text

    def _rename_submodule(self, path: str, text: str, package: str, name: str, new: str) -> str:
        """`from package import module`, its uses, and the values of a lazy table in the package's __init__."""
        if path == f"src/{package.replace('.', '/')}/__init__.py":
            text = re.sub(rf'(?m)^(\s+"\w+": )"{name}"(,?)$', rf'\1"{new}"\2', text)
        if (
            not path.endswith(".py")
            or f"from {package} import" not in text
            or not re.search(rf"from {re.escape(package)} import[^#]*?\b{name}\b", text)
        ):
            return text
        source = self._parse(path, text)
        if source is None:
            return text
        self._edit_references(source, {f"{package}.{name}": new}, f"module {package}.{name}")
        return source.edited(self.log)

    # -- names --------------------------------------------------------------------------------------------------------

    def _parse(self, path: str, text: str) -> Source | None:
        try:
            return Source(
                path, self.module_of(path), text, meta.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
            )
        except cst.ParserSyntaxError:
            self.log.remaining.append(f"{path}: not parsed")
            return None

    def rename_names(self) -> None:
        self._bindings()
        words = {name for _, name in self.table.symbols} | {name for *_, name in self.table.attributes}
        words |= {name.rpartition(".")[2] for name in words}
        functions = {module for module, _ in self.table.locals}
        keywords = {old for names in self.table.locals.values() for old in names}
        pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(words)))})\b") if words else None
        keyword = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(keywords)))})=[^=]") if keywords else None
        self._check_defined()
        for path, text in self.texts.items():
            if path.endswith(".py") and (
                (pattern and pattern.search(text) and words & _identifiers(text))
                or self.module_of(path) in functions
                or (keyword and keyword.search(text))
            ):
                self.texts[path] = self._rename_in(path, text)
            if pattern and pattern.search(text):
                self.texts[path] = self._rename_in_prose(path, self.texts[path])
                if path.endswith(".md"):
                    self.texts[path] = FENCE.sub(
                        lambda match, path=path: self._rename_in_block(path, match), self.texts[path]
                    )

    def _bindings(self) -> None:
        """What every module binds: definitions, and names that come from elsewhere (re-exports, lazy tables)."""
        self.defined: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, list[str]] = {}
        self.members: dict[str, set[str]] = defaultdict(set)  # class -> attributes
        for path, text in self.texts.items():
            module = self.module_of(path)
            if module:
                tree = cst.parse_module(text)
                is_package = path.endswith("__init__.py")
                self._bind_block(module, tree.body, is_package)
                self._collect_classes(module, tree.body, "")
        self.owners: dict[str, set[str]] = defaultdict(set)
        for owner, names in self.members.items():
            for name in names:
                self.owners[name].add(owner)

    def _bind_block(self, module: str, body: Any, is_package: bool) -> None:
        for statement in body:
            if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
                self.defined[module].add(statement.name.value)
            elif isinstance(statement, (cst.If, cst.Try, cst.With)):
                self._bind_block(module, statement.body.body, is_package)
                following = getattr(statement, "orelse", None)
                if following is not None:
                    self._bind_block(
                        module,
                        getattr(following, "body", following).body if hasattr(following, "body") else [],
                        is_package,
                    )
            elif isinstance(statement, cst.SimpleStatementLine):
                for small in statement.body:
                    self._bind_small(module, small, is_package)

    def _bind_small(self, module: str, small: cst.BaseSmallStatement, is_package: bool) -> None:
        if (
            isinstance(small, cst.ImportFrom)
            and small.module is not None
            and not isinstance(small.names, cst.ImportStar)
        ):
            source = cst.Module([]).code_for_node(small.module)
            for alias in small.names:
                name = alias.evaluated_alias or alias.evaluated_name
                self.origin[f"{module}.{name}"] = f"{source}.{alias.evaluated_name}"
        elif isinstance(small, (cst.Assign, cst.AnnAssign)):
            targets = (
                [assign_target.target for assign_target in small.targets]
                if isinstance(small, cst.Assign)
                else [small.target]
            )
            for target in targets:
                for node in _walk(target):
                    if isinstance(node, cst.Name):
                        self.defined[module].add(node.value)
            if is_package and isinstance(small.value, cst.Dict):
                for element in small.value.elements:
                    key, value = getattr(element, "key", None), element.value
                    if isinstance(key, cst.SimpleString) and isinstance(value, cst.SimpleString):
                        self.origin.setdefault(
                            f"{module}.{key.evaluated_value}", f"{module}.{value.evaluated_value}.{key.evaluated_value}"
                        )

    def _collect_classes(self, module: str, body: Any, prefix: str) -> None:
        for statement in body:
            if not isinstance(statement, cst.ClassDef):
                continue
            name = f"{prefix}{statement.name.value}"
            owner = f"{module}.{name}"
            code = cst.Module([]).code_for_node
            self.bases[owner] = [re.sub(r"\[.*", "", code(part.value)) for part in statement.bases]
            members = self.members[owner]
            for part in statement.body.body:
                if isinstance(part, cst.FunctionDef):
                    members.add(part.name.value)
                    members |= {
                        node.target.attr.value
                        for node in _walk(part)
                        if isinstance(node, (cst.AssignTarget, cst.AnnAssign))
                        and isinstance(node.target, cst.Attribute)
                        and isinstance(node.target.value, cst.Name)
                        and node.target.value.value in ("self", "cls")
                    }
                elif isinstance(part, cst.SimpleStatementLine):
                    for small in part.body:
                        if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                            members.add(small.target.value)
                        elif isinstance(small, cst.Assign):
                            members |= {t.target.value for t in small.targets if isinstance(t.target, cst.Name)}
            self._collect_classes(module, statement.body.body, f"{name}.")

    def resolve(self, path: str) -> str:
        """Follow re-exports to where a dotted name is defined."""
        visited = set()
        while path not in visited:
            visited.add(path)
            if path in self.origin:
                path = self.origin[path]
                continue
            parent, _, name = path.rpartition(".")
            if parent in self.origin and name not in self.defined.get(parent, ()):  # a module named like a function
                path = f"{self.origin[parent]}.{name}"
        return path

    def family(self, owner: str) -> set[str]:
        """A class, its base classes and all that derive from one of them, as far as they are in the project."""
        family = {owner}
        while True:
            more = set()
            for class_path, bases in self.bases.items():
                module = class_path
                while module and module not in self.defined and module not in self.origin:
                    module = module.rpartition(".")[0]
                resolved = {self.resolve(f"{module}.{base}") for base in bases} & self.bases.keys()
                if class_path in family:
                    more |= resolved
                elif resolved & family:
                    more.add(class_path)
            if more <= family:
                return family
            family |= more

    def _check_defined(self) -> None:
        for (module, name), new in self.table.symbols.items():
            if name not in self.defined[module] and new not in self.defined[module]:
                self.log.missing.append(f"symbol {module}:{name}")
            elif name in self.defined[module] and (new in self.defined[module] or f"{module}.{new}" in self.origin):
                self.log.clashes.append(f"{module}:{name} -> {new}: {new} is already bound in {module}")
        self.targets = {
            f"{module}.{name}": new
            for (module, name), new in self.table.symbols.items()
            if name in self.defined[module]
        }
        self.kinds: dict[str, list[tuple[str, str, tuple[str, ...], set[str], bool]]] = defaultdict(list)
        for (module, owner, name), (new, files) in self.table.attributes.items():
            owners = [f"{module}.{candidate}" for candidate in (owner, self.table.symbols.get((module, owner), owner))]
            cls = next((candidate for candidate in owners if candidate in self.bases), None)
            if cls is None:
                self.log.missing.append(f"attribute {module}:{owner}.{name}")
                continue
            family = self.family(cls)
            if not any(name in self.members[candidate] for candidate in family):
                if not any(new in self.members[candidate] for candidate in family):
                    self.log.missing.append(f"attribute {module}:{owner}.{name}")
                continue
            if any(new in self.members[candidate] for candidate in family):
                self.log.clashes.append(f"{module}:{owner}.{name} -> {new}: {new} is already an attribute")
            self.kinds[name].append((cls, new, files, family, False))
        for name, entries in self.kinds.items():
            together = set().union(*(family for *_, family, _ in entries))
            same = len({new for _, new, *_ in entries}) == 1
            unique = same and self.owners[name] <= together and name not in _library_attributes()
            self.kinds[name] = [(cls, new, files, family, unique) for cls, new, files, family, _ in entries]

    def _rename_in(self, path: str, text: str) -> str:
        source = self._parse(path, text)
        if source is None:
            return text
        self._edit_references(source, self.targets, "symbol")
        self._edit_attributes(source)
        self._edit_locals(source)
        return source.edited(self.log)

    def _rename_in_block(self, path: str, match: re.Match[str]) -> str:
        try:
            tree = cst.parse_module(match[2])
        except cst.ParserSyntaxError:
            return match[0]  # an example with "..." or a console session
        source = Source(path, "", match[2], meta.MetadataWrapper(tree, unsafe_skip_copy=True))
        self._edit_references(source, self.targets, "symbol")
        self._edit_attributes(source)
        return match[1] + source.edited(self.log) + match[3]

    # -- references to a module-level name ----------------------------------------------------------------------------

    def _edit_references(self, source: Source, targets: Mapping[str, str], entry: str) -> None:
        words = {path.rpartition(".")[2] for path in targets}
        for node in source.nodes:
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                if isinstance(source.scopes.get(node), meta.GlobalScope):
                    self._edit_name(source, node.name, f"{source.module}.{node.name.value}", targets, entry)
            elif isinstance(node, cst.ImportFrom):
                self._edit_import(source, node, targets, entry)
            elif isinstance(node, cst.Attribute) and node.attr.value in words:
                for path in source.qualified(node):
                    self._edit_name(source, node.attr, path, targets, entry)
            elif isinstance(node, cst.Name) and node.value in words and self._is_reference(source, node):
                for path in source.qualified(node):
                    self._edit_name(source, node, path, targets, entry, is_bound=True)
            elif isinstance(node, cst.NameItem) and node.name.value in words:
                self._edit_name(source, node.name, f"{source.module}.{node.name.value}", targets, entry)
            elif isinstance(node, cst.SimpleString) and node.raw_value in words:
                self._edit_string(source, node, targets, entry)

    def _is_reference(self, source: Source, node: cst.Name) -> bool:
        parent = source.parents[node]
        if isinstance(parent, cst.Attribute) and parent.attr is node:
            return False
        if isinstance(parent, cst.Arg) and parent.keyword is node:
            return False
        return not isinstance(parent, (cst.FunctionDef, cst.ClassDef, cst.ImportAlias, cst.AsName, cst.NameItem))

    def _edit_import(self, source: Source, node: cst.ImportFrom, targets: Mapping[str, str], entry: str) -> None:
        if node.module is None or isinstance(node.names, cst.ImportStar):
            return
        module = cst.Module([]).code_for_node(node.module)
        for alias in node.names:
            if isinstance(alias.name, cst.Name):
                is_bound = alias.asname is None
                self._edit_name(
                    source,
                    alias.name,
                    f"{module}.{alias.name.value}",
                    targets,
                    entry,
                    is_bound=is_bound,
                    scope=source.scopes.get(node),
                )

    def _edit_name(
        self,
        source: Source,
        name: cst.Name,
        path: str,
        targets: Mapping[str, str],
        entry: str,
        *,
        is_bound: bool = False,
        scope: Any = None,
    ) -> None:
        target = path if path in targets else self.resolve(path)
        new = targets.get(target)
        if new is None or name.value == new or name.value != target.rpartition(".")[2]:
            return
        if is_bound:
            scope = scope or source.scopes.get(name)
            bound = [
                assignment
                for assignment in (scope[new] if scope is not None else ())
                if not isinstance(assignment, meta.BuiltinAssignment)
            ]
            if bound or hasattr(builtins, new):
                self.log.clashes.append(f"{source.where(name)}: {name.value} -> {new}: {new} is already bound here")
        source.replace(name, new, f"{entry} {target}" if entry == "symbol" else entry)

    def _edit_string(self, source: Source, node: cst.SimpleString, targets: Mapping[str, str], entry: str) -> None:
        """A name as a string: in __all__, as a key of a lazy table, as the second argument of setattr."""
        value = node.raw_value
        paths = {f"{source.module}.{value}"}
        parent = source.parents[node]
        is_known = source.module and (
            _is_in_all(source, node)
            or (source.path.endswith("__init__.py") and isinstance(parent, cst.DictElement) and parent.key is node)
        )
        call = source.parents.get(parent) if isinstance(parent, cst.Arg) else None
        if isinstance(call, cst.Call) and len(call.args) > 1 and call.args[1] is parent and _called(call) in SETTERS:
            paths = {
                f"{self.resolve(qualified_name)}.{value}" for qualified_name in source.qualified(call.args[0].value)
            }
            is_known = True
        for path in paths if is_known else ():
            new = targets.get(self.resolve(path))
            if new is not None:
                quote = node.quote
                source.replace(node, f"{node.prefix}{quote}{new}{quote}", f"{entry} {self.resolve(path)}")

    # -- attributes ---------------------------------------------------------------------------------------------------

    def _edit_attributes(self, source: Source) -> None:
        if not self.kinds:
            return
        for node in source.nodes:
            if isinstance(node, cst.Attribute) and node.attr.value in self.kinds:
                self._edit_attribute(source, node.attr, node)
            elif isinstance(node, cst.FunctionDef) and node.name.value in self.kinds and self._class_of(source, node):
                self._edit_member(source, node.name, self._class_of(source, node))
            elif isinstance(node, cst.Name) and node.value in self.kinds:
                parent = source.parents[node]
                if (
                    isinstance(parent, (cst.AnnAssign, cst.AssignTarget))
                    and parent.target is node
                    and self._class_of(source, node)
                ):
                    self._edit_member(source, node, self._class_of(source, node))
                elif isinstance(parent, cst.Arg) and parent.keyword is node:
                    self._edit_keyword(source, node, source.parents[parent])
            elif isinstance(node, cst.SimpleString) and node.raw_value in self.kinds:
                parent = source.parents[node]
                call = source.parents.get(parent) if isinstance(parent, cst.Arg) else None
                if (
                    isinstance(call, cst.Call)
                    and len(call.args) > 1
                    and call.args[1] is parent
                    and _called(call) in SETTERS
                ):
                    self._edit_named_attribute(source, node, call)
                elif any(unique for *_, unique in self.kinds[node.raw_value]):
                    self.log.remaining.append(f"{source.where(node)}: string {node.value}")

    def _class_of(self, source: Source, node: cst.CSTNode) -> str | None:
        """The class in whose body a name is bound (not in a method of it)."""
        names, parent = [], source.parents.get(node)
        is_direct = True
        while parent is not None and not isinstance(parent, cst.Module):
            if isinstance(parent, cst.FunctionDef) and not names:
                is_direct = False
            if isinstance(parent, cst.ClassDef):
                names.append(parent.name.value)
            parent = source.parents.get(parent)
        return f"{source.module}.{'.'.join(reversed(names))}" if names and is_direct and source.module else None

    def _enclosing_class(self, source: Source, node: cst.CSTNode) -> str:
        names, parent = [], source.parents.get(node)
        while parent is not None:
            if isinstance(parent, cst.ClassDef):
                names.append(parent.name.value)
            parent = source.parents.get(parent)
        return f"{source.module}.{'.'.join(reversed(names))}"

    def _edit_member(self, source: Source, node: cst.Name, owner: str | None) -> None:
        for cls, new, _, family, _ in self.kinds[node.value]:
            if owner in family:
                source.replace(node, new, f"attribute {cls}.{node.value}")

    def _edit_attribute(self, source: Source, attr: cst.Name, node: cst.Attribute) -> None:
        value = node.value
        is_own = isinstance(value, cst.Name) and value.value in ("self", "cls")
        is_own = is_own or (isinstance(value, cst.Call) and _called(value) == "super")
        owner = self._enclosing_class(source, node) if is_own else None
        classes = {self.resolve(qualified_name) for qualified_name in source.qualified(value)}
        for cls, new, files, family, unique in self.kinds[attr.value]:
            if owner in family if is_own else (unique or classes & family or _matches(source.path, files)):
                source.replace(attr, new, f"attribute {cls}.{attr.value}")
                return
        if not is_own:
            self.log.remaining.append(f"{source.where(attr)}: .{attr.value}")

    def _edit_keyword(self, source: Source, node: cst.Name, call: cst.CSTNode) -> None:
        if not isinstance(call, cst.Call):
            return
        called = {self.resolve(qualified_name) for qualified_name in source.qualified(call.func)}
        for cls, new, files, family, unique in self.kinds[node.value]:
            constructed = called & family or (_called(call) == "cls" and self._enclosing_class(source, node) in family)
            copied = _called(call) == "replace" and (unique or _matches(source.path, files))
            if constructed or copied:
                source.replace(node, new, f"attribute {cls}.{node.value}")
                return
        if _called(call) == "replace":
            self.log.remaining.append(f"{source.where(node)}: replace(..., {node.value}=)")

    def _edit_named_attribute(self, source: Source, node: cst.SimpleString, call: cst.Call) -> None:
        classes = {self.resolve(qualified_name) for qualified_name in source.qualified(call.args[0].value)}
        for cls, new, files, family, unique in self.kinds[node.raw_value]:
            if unique or classes & family or _matches(source.path, files):
                source.replace(node, f"{node.prefix}{node.quote}{new}{node.quote}", f"attribute {cls}.{node.raw_value}")
                return
        self.log.remaining.append(f"{source.where(node)}: {_called(call)}(..., {node.value})")

    # -- locals -------------------------------------------------------------------------------------------------------

    def _edit_locals(self, source: Source) -> None:
        self._edit_call_keywords(source)
        entries = {
            name: names for (module, name), names in self.table.locals.items() if module == source.module and module
        }
        if not entries:
            return
        functions = {_qualname(source, node): node for node in source.nodes if isinstance(node, cst.FunctionDef)}
        for name, names in entries.items():
            function = functions.get(name) or functions.get(self._new_qualname(source.module, name))
            if function is None:
                self.log.missing.append(f"locals of {source.module}:{name}")
                continue
            self._edit_function(source, function, name, names)

    def _new_qualname(self, module: str, name: str) -> str:
        """A function's name after the other renames, for a table that is applied again."""
        parts = name.split(".")
        if len(parts) > 1:
            new = self.table.attributes.get((module, parts[0], parts[1]))
            parts[1] = new[0] if new else parts[1]
        parts[0] = self.table.symbols.get((module, parts[0]), parts[0])
        return ".".join(parts)

    def _edit_function(self, source: Source, function: cst.FunctionDef, name: str, names: Mapping[str, str]) -> None:
        scopes = {
            id(scope): scope
            for scope in (source.scopes.get(node) for node in _walk(function))
            if isinstance(scope, (meta.FunctionScope, meta.ComprehensionScope))
            and _function_of(source, scope.node) is function
        }
        for old, new in names.items():
            nodes: list[cst.CSTNode] = []
            for scope in scopes.values():
                bindings = [binding for binding in scope.assignments if binding.name == old and binding.scope is scope]
                nodes += [node for binding in bindings for node in _bound_names(binding.node, old)]
                nodes += [
                    access.node
                    for binding in bindings
                    for access in binding.references
                    if isinstance(access.node, cst.Name)
                ]
            if not nodes:
                if not any(binding.name == new for scope in scopes.values() for binding in scope.assignments):
                    self.log.missing.append(f"locals of {source.module}:{name}: {old}")
                continue
            if new in vars(builtins):
                self.log.clashes.append(f"{source.where(function)}: {name}: {old} -> {new} is a builtin")
            existing = [
                node
                for node in _walk(function)
                if isinstance(node, cst.Name) and node.value == new and self._is_reference(source, node)
            ]
            if existing:
                self.log.clashes.append(f"{source.where(existing[0])}: {name}: {old} -> {new}: {new} is already used")
            for node in nodes:
                source.replace(node, new, f"local {source.module}:{name}.{old}")

    def _edit_call_keywords(self, source: Source) -> None:
        """Keyword arguments at the calls of functions whose parameters are renamed."""
        for node in source.nodes:
            if not isinstance(node, cst.Call):
                continue
            words = [keyword for keyword in node.args if keyword.keyword is not None]
            if not words:
                continue
            target = node.args[0].value if _called(node) == "partial" and node.args else node.func
            for path in {self.resolve(name) for name in source.qualified(target)} | self._methods(source, target):
                for key, names in self._parameters().items():
                    if path == key:
                        for keyword in words:
                            if keyword.keyword is not None and keyword.keyword.value in names:
                                source.replace(
                                    keyword.keyword,
                                    names[keyword.keyword.value],
                                    f"keyword {key}.{keyword.keyword.value}",
                                )

    def _methods(self, source: Source, target: cst.BaseExpression) -> set[str]:
        """Methods that `x.name(...)` can mean: only if one family of classes has that name."""
        if not isinstance(target, cst.Attribute):
            return set()
        return (
            {f"{owner}.{target.attr.value}" for owner in self.owners[target.attr.value]}
            if len(self.owners[target.attr.value]) == 1
            else set()
        )

    def _parameters(self) -> dict[str, dict[str, str]]:
        if not hasattr(self, "_parameter_cache"):
            cache: dict[str, dict[str, str]] = {}
            for (module, name), names in self.table.locals.items():
                path = f"src/{module.replace('.', '/')}"
                text = self.texts.get(f"{path}.py") or self.texts.get(f"{path}/__init__.py") or ""
                for statement in _functions(cst.parse_module(text), name, self._new_qualname(module, name)):
                    parameters = {node.name.value for node in _walk(statement.params) if isinstance(node, cst.Param)}
                    renamed = {old: new for old, new in names.items() if old in parameters}
                    if renamed:
                        cache[f"{module}.{name.removesuffix('.__init__')}"] = renamed
            self._parameter_cache = cache
        return self._parameter_cache

    # -- prose --------------------------------------------------------------------------------------------------------

    def _rename_in_prose(self, path: str, text: str) -> str:
        """Dotted names in strings and documents (`scalepoint.x:Name`), and backticked names."""
        root = self.table.root

        def dotted(match: re.Match[str]) -> str:
            target = self.resolve(match[0].replace(":", "."))
            new = self.targets.get(target)
            if new is None or not re.search(rf"[.:]{target.rpartition('.')[2]}$", match[0]):
                return match[0]
            self.log.changed[f"symbol {target}"] += 1
            return re.sub(r"\w+$", new, match[0])

        text = re.sub(rf"(?<![\w.]){root}(?:\.\w+)+(?::\w+)?", dotted, text)
        for target, new in self.targets.items():
            old = target.rpartition(".")[2]
            if re.fullmatch(r"[a-z]+", old):  # an ordinary word: too ambiguous without its module
                continue
            text = re.sub(rf"(?<=`){re.escape(old)}(?=[`(.])", new, text)
        return text

    # -- the end ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        for source, target in self.moves.items():
            (self.root / target).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", source, target], cwd=self.root, check=True)
        before = {self.moves.get(path, path): text for path, text in self.before.items()}
        for path, text in self.texts.items():
            if text != before.get(path):
                (self.root / path).write_text(text, encoding="utf-8")


def _library_attributes() -> set[str]:
    """Attribute names of types that appear everywhere; torch's too where it is installed."""
    types: list[type] = [str, bytes, int, float, list, dict, set, tuple, Path, re.Match, re.Pattern, Exception]
    try:
        import numpy as np
        import torch

        types += [np.ndarray, torch.Tensor, torch.nn.Module, torch.fx.Node, torch.fx.Graph, torch.fx.GraphModule]
    except ImportError:
        pass
    return {name for kind in types for name in dir(kind)}


def _identifiers(text: str) -> set[str]:
    """All names in a piece of code, and strings that could be one. Much faster than libcst's metadata."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        for value in (getattr(node, key, None) for key in ("id", "attr", "arg", "name", "asname", "value")):
            if isinstance(value, str) and value.isidentifier():
                names.add(value)
        if isinstance(node, ast.alias):
            names |= set(node.name.split("."))
    return names


def _called(call: cst.Call) -> str:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else getattr(call.func, "value", "")


def _matches(path: str, files: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in files)


def _is_in_all(source: Source, node: cst.CSTNode) -> bool:
    parent = source.parents.get(node)
    while parent is not None and not isinstance(parent, (cst.Assign, cst.AugAssign)):
        parent = source.parents.get(parent)
    if parent is None:
        return False
    targets = (
        [parent.target]
        if isinstance(parent, cst.AugAssign)
        else [assign_target.target for assign_target in parent.targets]
    )
    return any(isinstance(assign_target, cst.Name) and assign_target.value == "__all__" for assign_target in targets)


def _function_of(source: Source, node: cst.CSTNode) -> cst.CSTNode | None:
    """The nearest function around a scope's node, or the node itself; lambdas and comprehensions belong to it."""
    current: cst.CSTNode | None = node
    while current is not None and not isinstance(current, cst.FunctionDef):
        current = source.parents.get(current)
    return current


def _qualname(source: Source, node: cst.CSTNode) -> str:
    names, current = [], node
    while current is not None:
        if isinstance(current, (cst.FunctionDef, cst.ClassDef)):
            names.append(current.name.value)
        current = source.parents.get(current)
    return ".".join(reversed(names))


def _functions(tree: cst.Module, *names: str) -> Iterator[cst.FunctionDef]:
    def walk(body: Any, prefix: str) -> Iterator[cst.FunctionDef]:
        for node in body:
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                if f"{prefix}{node.name.value}" in names and isinstance(node, cst.FunctionDef):
                    yield node
                yield from walk(getattr(node.body, "body", []), f"{prefix}{node.name.value}.")

    return walk(tree.body, "")


def _bound_names(node: cst.CSTNode, name: str) -> list[cst.Name]:
    """Name nodes of a binding: a target, a parameter, an except clause, an import alias."""
    if isinstance(node, cst.Name):
        return [node]
    if isinstance(node, cst.Param):
        return [node.name]
    return [child for child in _walk(node) if isinstance(child, cst.Name) and child.value == name][:1]


def main(arguments: list[str] | None = None) -> int:
    """Apply the table; 1 on a clash, 0 otherwise."""
    parser = argparse.ArgumentParser(description="Apply tools/renames.yaml to the project.")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", nargs="*", help="packages of the table; all if omitted")
    parser.add_argument("--check", action="store_true", help="print what would change and write nothing")
    options = parser.parse_args(arguments)
    table = Table.read(options.table or options.root / "tools" / "renames.yaml", options.only)
    project = Project(options.root, table)
    project.rename_modules()
    project.rename_names()
    out = sys.stdout.write
    for entry, count in sorted(project.log.changed.items()):
        out(f"changed {count:4d}  {entry}\n")
    for kind, lines in (
        ("left", project.log.remaining),
        ("not found", project.log.missing),
        ("clash", project.log.clashes),
    ):
        for line in sorted(set(lines)):
            out(f"{kind}: {line}\n")
    if project.log.clashes:
        out("nothing was written\n")
        return 1
    if not options.check:
        project.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
