"""Print a report: sizes, repeated class names, vague names, unclear test names, exported names without a docstring.

    python tools/plain_code.py

Sizes are information and limit nothing. tests/test_plain_code.py expects the other lists to be empty.
"""

import ast
import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "bench", "demo", "docs", "tools", "conftest.py")
PACKAGE = ROOT / "src" / "scalepoint"

# Names that say how a value arrived, or nothing, instead of what it is.
VAGUE_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        answered asked carried each found given gone handed held how judged kept left made meant named others own place
        placed places said seen settled shown taken there told wanted whole written
        """,
    )
)
UNCLEAR_TEST_WORDS = frozenset(("anew", "asked", "beside", "heeds", "mended", "nobody", "stands", "told", "whoever"))
# "left" is a good name next to one of these.
OPPOSITES = {"left": {"right", "top"}}
# (file, name) -> why the name stays
ALLOWED_NAMES = {
    ("src/scalepoint/analysis/sensitivity.py", "how"): "a public argument",
    ("src/scalepoint/graph/serialization.py", "place"): "a key of saved graphs",
    ("src/scalepoint/operation_coverage.py", "how"): "a public field of the coverage",
    ("src/scalepoint/quantize/record.py", "how"): "the value of CoverageRow.how",
    ("src/scalepoint/results.py", "how"): "a public field of TunedLayer",
    ("src/scalepoint/results.py", "left"): "a public field of TuneReport",
    ("tests/analysis/test_sensitivity.py", "how"): "an argument of sensitivity",
}
BENCH_KEY = "a key of the result files that the benches write"
BENCHES = "accuracy deployed int8_error low_bit mobile onnx_files tuning tuning_cases write_page"
ALLOWED_NAMES |= {(f"bench/{name}.py", "how"): BENCH_KEY for name in BENCHES.split()}
ALLOWED_NAMES |= {(f"bench/{name}.py", "left"): BENCH_KEY for name in ("deployed", "onnx_files", "write_page")}
ALLOWED_CLASSES = {
    "File": "the child program of every runtime has one, with the same methods",
}


def list_files(*folders: str) -> list[Path]:
    """List the Python files of folders of the project."""
    paths = [ROOT / folder for folder in folders or FOLDERS]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the functions, classes, parameters, variables and attributes that code defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno


def vague_names(tree: ast.AST) -> list[tuple[str, int]]:
    """Return the names of VAGUE_NAMES that code defines, with their lines. Underscores and case do not matter."""
    names = [(name.strip("_").lower(), line) for name, line in defined_names(tree)]
    all_names = {name for name, _ in names}
    return [(name, line) for name, line in names if name in VAGUE_NAMES and not OPPOSITES.get(name, set()) & all_names]


def find_vague_names(*folders: str) -> tuple[list[str], set[tuple[str, str]]]:
    """Return the lines that define a vague name, and the entries of ALLOWED_NAMES that were needed."""
    lines: list[str] = []
    used = set()
    for path in list_files(*folders):
        file = path.relative_to(ROOT).as_posix()
        for name, line in vague_names(ast.parse(path.read_text())):
            if (file, name) in ALLOWED_NAMES:
                used.add((file, name))
            else:
                lines.append(f"{file}:{line}: {name}")
    return lines, used


def find_unclear_tests() -> list[str]:
    """Return the tests whose names contain a word of UNCLEAR_TEST_WORDS."""
    return [
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno}: {node.name}"
        for path in list_files("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if UNCLEAR_TEST_WORDS & set(node.name.split("_"))
    ]


def find_repeated_classes() -> dict[str, list[str]]:
    """Return the class names that several classes of the package share, with the places of these classes."""
    locations = defaultdict(list)
    for path in list_files("src"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                locations[node.name].append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}")
    return {name: lines for name, lines in locations.items() if len(lines) > 1}


def find_undocumented() -> list[str]:
    """Return the exported classes and functions, and the public methods of these classes, without a docstring."""
    undocumented = set()
    for file in PACKAGE.rglob("__init__.py"):
        package = ".".join(file.parent.relative_to(PACKAGE.parent).parts)
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value):
                undocumented |= {f"{package}.{name}.{method}" for method in _undocumented_methods(value)}
            if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
                undocumented.add(f"{package}.{name}")
    return sorted(undocumented)


def _undocumented_methods(kind: type) -> Iterator[str]:
    """Yield the public methods of a class that have no docstring, also not in a base class."""
    for name, value in vars(kind).items():
        is_method = (inspect.isfunction(value) and value.__name__ != "<lambda>") or isinstance(
            value, classmethod | staticmethod
        )
        if is_method and not name.startswith("_") and not inspect.getdoc(getattr(kind, name)):
            yield name


def count_lines() -> dict[str, tuple[int, int]]:
    """Return the number of files and of lines in each folder, and in each package of the source."""
    packages = [path for path in sorted(PACKAGE.iterdir()) if path.is_dir() and path.name != "__pycache__"]
    folders = [*FOLDERS, *(path.relative_to(ROOT).as_posix() for path in packages)]
    files = {folder: list_files(folder) for folder in folders}
    return {folder: (len(paths), sum(_lines(path) for path in paths)) for folder, paths in files.items()}


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def longest_functions(count: int = 10) -> list[tuple[int, str]]:
    """Return the longest functions of the package."""
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}")
        for path in list_files("src")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    ]
    return sorted(functions, reverse=True)[:count]


def main() -> int:
    """Print the report. The exit code is 1 if a list that should be empty is not."""
    print(f"{'files':>6} {'lines':>7}")
    for folder, (files, lines) in count_lines().items():
        print(f"{files:6} {lines:7}  {folder}")
    print("\nlongest files of the package:")
    for size, path in sorted(((_lines(path), path) for path in list_files("src")), reverse=True)[:10]:
        print(f"{size:6}  {path.relative_to(ROOT).as_posix()}")
    print("\nlongest functions of the package:")
    for size, function in longest_functions():
        print(f"{size:6}  {function}")
    classes = find_repeated_classes()
    problems = {
        "repeated class names": [f"{name}: {', '.join(classes[name])}" for name in classes.keys() - ALLOWED_CLASSES],
        "vague names": find_vague_names()[0],
        "unclear names of tests": find_unclear_tests(),
        "exported names without docstring": find_undocumented(),
    }
    for title, lines in problems.items():
        print(f"\n{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")
    return int(any(problems.values()))


if __name__ == "__main__":
    sys.exit(main())
