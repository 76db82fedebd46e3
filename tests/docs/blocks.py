"""What the fenced blocks of the README and the docs are, and how each is put to the test.

    python               run, in the one Python process of its page
    text                 what the block before it printed; `...` stands for anything
    console              `$ command` lines, run in the page's folder; lines after one are what it printed
    any, title="name"    a file of that name in the page's folder
    shell                not run (it installs, or takes minutes): a `make` target must be there
    formula              not code

`<!-- needs package -->` on the first line: the page is skipped where that package is not installed.
`<!-- slow -->` on the first line: the page is read by `make test-all`; faster tests or pages show the same.
`<!-- numbers vary -->` before a text or console block: figures are compared as "a number", words as they are.
Each page is run as a reader runs it: a folder of its own, a Python process of its own that starts there, the package
as it is installed, and nothing of the tests. `pip install` goes into an environment that the page alone has.
"""

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import venv
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from scalepoint.support.cpu import signal_name

ROOT = Path(__file__).parents[2]
INFO = re.compile(r'(?P<language>[\w-]*)(?:[ \t]+title="(?P<title>[^"]+)")?[ \t]*$\n', re.MULTILINE)
VARYING = "<!-- numbers vary -->"
NEEDS = re.compile(r"<!-- needs (\w+) -->")
SLOW = "<!-- slow -->"
NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")
TIME = re.compile(r"(\d) (us|ms|s)\b")  # another CPU, another unit
# What another CPU may compute with a last rounding of its own; and the word that goes with that number.
EXACT = re.compile(r"\bexactly\b|([\d.]+|\binf) dB(, (very good|good|fair|poor)\b)?")
SPACES = re.compile(r"[ \t]+")
SECONDS = 600
WIDTH = "100"  # of the terminal
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")  # all that is needed is here
READING = Path(__file__).with_name("reading.py")


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
        path = page_of(example).folder / example.region.lexemes["title"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example.parsed)

    def run(self, example: Example) -> None:
        """With the lines of the page before it, so that tracebacks and sources are those of the page."""
        source = "\n" * (example.line + example.parsed.line_offset) + example.parsed
        page_of(example).run(source, example.path)

    def compared(self, example: Example) -> None:
        compare(example.parsed, page_of(example).printed, _varies(example))

    def commanded(self, example: Example) -> None:
        for command, expected in commands(example.parsed):
            done = page_of(example).command(command)
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
    return NUMBER.sub("#", TIME.sub(r"\1 time", EXACT.sub("# dB", text))) if varies else text


def _varies(example: Example) -> bool:
    return example.document.text[: example.region.start].rstrip().endswith(VARYING)


class Page:
    """What a page has while it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = sys.executable
        self.printed = ""

    @cached_property
    def reader(self) -> subprocess.Popen[str]:
        """Like `python` in the page's folder, which therefore is the first place of its modules."""
        return subprocess.Popen(
            [self.python, "-c", READING.read_text()],
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, source: str, path: str) -> None:
        limit = threading.Timer(SECONDS, self.reader.kill)
        limit.start()
        assert self.reader.stdin is not None
        assert self.reader.stdout is not None
        print(json.dumps({"source": source, "path": path}), file=self.reader.stdin, flush=True)
        answer = self.reader.stdout.readline()
        limit.cancel()
        assert answer, f"python ended: {signal_name(self.reader.wait()) or self.reader.returncode}"
        found = json.loads(answer)
        assert "failed" not in found, found["failed"]
        self.printed = found["printed"]

    def command(self, text: str) -> subprocess.CompletedProcess[str]:
        """scalepoint, python, torchrun and pip of this environment; nothing goes through a shell."""
        name, *arguments = shlex.split(text)
        if name == "pip":
            self._own_environment()
            arguments += OFFLINE
        known = {
            "python": [self.python],
            "scalepoint": [
                self.python,
                "-P",
                "-m",
                "scalepoint.cli",
            ],  # as installed: no modules from here
            "pip": [sys.executable, "-m", "pip", "--quiet", "--python", self.python],
            "torchrun": [self.python, "-m", "torch.distributed.run"],
        }
        if name not in known:
            raise AssertionError(f"$ {text}: only {', '.join(known)} are run; use ```shell for the rest")
        return subprocess.run(
            [*known[name], *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env=_environment(),
            timeout=SECONDS,
            check=False,
        )

    def _own_environment(self) -> None:
        """One that sees all that is installed here; what is installed into it goes with the page."""
        if self.python != sys.executable:
            return
        folder = self.folder.with_name(f"{self.folder.name}-venv")
        venv.create(folder, with_pip=False)
        here = [each for each in sys.path if each.endswith("site-packages")]
        for packages in folder.glob("lib/*/site-packages"):
            (packages / "here.pth").write_text("".join(f"import site; site.addsitedir({each!r})\n" for each in here))
        self.python = str(folder / "bin" / "python")

    def close(self) -> None:
        if "reader" in vars(self):
            self.reader.kill()
            self.reader.communicate()


def _environment() -> dict[str, str]:
    """One thread, and the package from this folder, as `pip install -e .` has it: not the tests."""
    return {**os.environ, "COLUMNS": WIDTH, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def page_of(example: Example) -> Page:
    page: Page = example.namespace["_page"]
    return page


def read(path: Path) -> None:
    """All blocks of a page, in order; its process and all that it wrote go with it."""
    document = Sybil(parsers=[Blocks()], patterns=["*.md"]).parse(path)
    with tempfile.TemporaryDirectory(prefix="page-") as outer:
        page = document.namespace["_page"] = Page(Path(outer) / "page")
        page.folder.mkdir()
        try:
            for example in document.examples():
                try:
                    example.evaluate()
                except AssertionError as error:
                    raise AssertionError(f"{path}, the block of line {example.line}: {error}") from None
        finally:
            page.close()


class PageTest(pytest.Item):
    """A page is one test: it is read as a whole."""

    def runtest(self) -> None:
        needed = NEEDS.match(self.path.read_text())
        if needed and find_spec(needed[1]) is None:
            pytest.skip(f"{needed[1]} is not installed")
        read(self.path)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if excinfo.errisinstance(AssertionError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, str(self.path.relative_to(ROOT))


class PageFile(pytest.File):
    def collect(self) -> Iterator[PageTest]:
        page = PageTest.from_parent(self, name="page")
        if SLOW in self.path.read_text().partition("\n")[0]:
            page.add_marker(pytest.mark.slow)
        yield page
