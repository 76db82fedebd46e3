"""What the fenced blocks of the README and the docs are, and how each is put to the test.

    python               run, in the namespace of its page
    text                 what the block before it printed; `...` stands for anything
    console              `$ command` lines, run in the page's folder; lines after one are what it printed
    any, title="name"    a file of that name in the page's folder
    shell                not run (it installs, or takes minutes): a `make` target must be there
    formula              not code

`<!-- numbers vary -->` before a text or console block: figures are compared as "a number", words as they are.
Each page has an empty folder of its own, which is the current one while its blocks run.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tests.architectures import _torchvision

ROOT = Path(__file__).parents[2]
INFO = re.compile(r'(?P<language>[\w-]*)(?:[ \t]+title="(?P<title>[^"]+)")?[ \t]*$\n', re.MULTILINE)
VARYING = "<!-- numbers vary -->"
NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")
EXACT = re.compile(r"\bexactly\b|\binf dB")  # what another CPU may compute with a last rounding of its own
SPACES = re.compile(r"[ \t]+")
SECONDS = 300
WIDTH = "100"  # of the terminal


class Blocks:
    """Finds every fenced block of a page and says what becomes of it."""

    lexer = RawFencedCodeBlockLexer(INFO)

    def __call__(self, document: Document) -> Iterator[Region]:
        for region in self.lexer(document):
            region.parsed = region.lexemes["source"]
            region.evaluator = self.saved if region.lexemes["title"] else self.by_language(region.lexemes["language"])
            yield region

    def by_language(self, language: str) -> Any:
        known = {
            "python": self.run,
            "text": self.compared,
            "console": self.commanded,
            "shell": self.made,
            "formula": None,
        }
        return known.get(language, self.unknown)

    def saved(self, example: Example) -> None:
        path = Path(example.region.lexemes["title"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example.parsed)
        sys.modules.pop(path.stem, None)  # what another test called so

    def run(self, example: Example) -> None:
        if "transformers" in example.parsed:
            _torchvision()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            PythonEvaluator()(example)
        example.namespace["_printed"] = printed.getvalue()

    def compared(self, example: Example) -> None:
        compare(example.parsed, example.namespace["_printed"], _varies(example))

    def commanded(self, example: Example) -> None:
        for command, expected in commands(example.parsed):
            done = _run(command)
            assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
            if expected.strip():
                compare(expected, done.stdout, _varies(example))

    def made(self, example: Example) -> None:
        rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [line.split()[1] for line in example.parsed.splitlines() if line.startswith("make ")]
        assert set(wanted) <= set(rules), f"no such make target: {set(wanted) - set(rules)}"

    def unknown(self, example: Example) -> None:
        raise AssertionError(f"line {example.line}: a block says what it is: {__doc__}")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each `$ command` with the lines after it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


def compare(expected: str, found: str, varies: bool) -> None:
    """The same words; the width of columns may differ."""
    wanted, seen = (_tidy(text, varies) for text in (expected, found))
    same = doctest.OutputChecker().check_output(wanted, seen, doctest.ELLIPSIS)
    assert same, f"the page says\n{expected}\nbut this was printed\n{found}"


def _tidy(text: str, varies: bool) -> str:
    lines = [SPACES.sub(" ", line).strip() for line in text.strip().splitlines()]
    text = "\n".join(line for line in lines if line) + "\n"
    return NUMBER.sub("#", EXACT.sub("# dB", text)) if varies else text


def _varies(example: Example) -> bool:
    return example.document.text[: example.region.start].rstrip().endswith(VARYING)


def _run(command: str) -> subprocess.CompletedProcess[str]:
    """scalepoint and python of this environment; nothing goes through a shell."""
    name, *arguments = shlex.split(command)
    if name == "scalepoint":
        arguments = ["-m", "scalepoint.cli", *arguments]
    elif name != "python":
        raise AssertionError(f"$ {command}: only scalepoint and python are run; use ```shell for the rest")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(Path.cwd())])}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=SECONDS, check=False
    )


def enter(namespace: dict[str, Any]) -> None:
    """A page begins: a folder of its own, and the same random numbers each time."""
    torch.manual_seed(0)
    folder = tempfile.TemporaryDirectory(prefix="page-")
    namespace["_leave"] = (folder, Path.cwd(), sys.path.copy(), set(sys.modules), os.environ.get("COLUMNS"))
    os.environ["COLUMNS"] = WIDTH
    os.chdir(folder.name)
    sys.path.insert(0, folder.name)


def leave(namespace: dict[str, Any]) -> None:
    """What the page put into this process goes with its folder."""
    folder, before, path, modules, width = namespace["_leave"]
    os.environ.pop("COLUMNS")
    os.environ |= {"COLUMNS": width} if width else {}
    own = Path(folder.name).resolve()
    for name in set(sys.modules) - modules:
        source = getattr(sys.modules[name], "__file__", None)
        if source and Path(source).resolve().is_relative_to(own):
            del sys.modules[name]
    os.chdir(before)
    sys.path[:] = path
    folder.cleanup()
