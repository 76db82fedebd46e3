"""Runs the fenced blocks of the README and the docs as tests. The language of a block says how it is tested:

    python               run, in one Python process per page
    text                 compared with the output of the block before it; `...` matches any text
    console              `$ command` lines, run in the folder of the page; the lines after a command are its output
    any, title="name"    written as a file of that name into the folder of the page
    shell                not run (it installs or takes minutes); `make` targets in it must exist
    formula              not code

`<!-- needs package -->` on the first line: the page is skipped if the package is not installed.
`<!-- slow -->` on the first line: the page is run only by `make test-all`.
`<!-- numbers vary -->` before a text or console block: any number matches any number; words must be equal.
A page is run as a reader runs it: in its own empty folder and Python process, with the package as it is installed and
without the tests. `pip install` installs into an environment of that page.
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
TIME = re.compile(r"(\d) (us|ms|s)\b")  # the unit depends on the CPU
# Agreement depends on the rounding of the CPU, and so does the word that describes it.
EXACT = re.compile(r"\bexactly\b|(\bwithin )?([\d.]+|\binf) dB(,? \(?(very good|good|fair|poor)\b)?")
SPACES = re.compile(r"[ \t]+")
TIMEOUT_SECONDS = 600
TERMINAL_WIDTH = "100"
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")  # dependencies are installed already
READING = Path(__file__).with_name("reading.py")


class Blocks:
    """Parser that finds the fenced blocks of a page and chooses how each is tested."""

    lexer = RawFencedCodeBlockLexer(INFO)

    def __call__(self, document: Document) -> Iterator[Region]:
        for region in self.lexer(document):
            region.parsed = region.lexemes["source"]
            title, language = region.lexemes["title"], region.lexemes["language"]
            region.evaluator = self.save if title else self.by_language(language)
            yield region

    def by_language(self, language: str) -> Any:
        evaluators = {
            "python": self.run,
            "text": self.compare_output,
            "console": self.run_commands,
            "shell": self.check_make_targets,
            "formula": None,
        }
        return evaluators.get(language, self.fail_unknown)

    def save(self, example: Example) -> None:
        path = page_of(example).folder / example.region.lexemes["title"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example.parsed)

    def run(self, example: Example) -> None:
        """Run the block after as many empty lines as precede it in the page, so that line numbers are right."""
        source = "\n" * (example.line + example.parsed.line_offset) + example.parsed
        page_of(example).run(source, example.path)

    def compare_output(self, example: Example) -> None:
        compare(example.parsed, page_of(example).printed, _varies(example))

    def run_commands(self, example: Example) -> None:
        for command, expected in commands(example.parsed):
            done = page_of(example).command(command)
            assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
            if expected.strip():
                compare(expected, done.stdout, _varies(example))

    def check_make_targets(self, example: Example) -> None:
        rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = [line.split()[1] for line in example.parsed.splitlines() if line.startswith("make ")]
        assert set(targets) <= set(rules), f"no such make target: {set(targets) - set(rules)}"

    def fail_unknown(self, example: Example) -> None:
        raise AssertionError(f"line {example.line}: the block needs one of these languages: {__doc__}")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each `$ command` with the lines after it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


# A row that is printed only if free sizes cost more than 5 % in this measurement.
FREE_SIZES = re.compile(r"^free sizes .*?--fixed-sizes\)\n", re.MULTILINE | re.DOTALL)


def compare(expected: str, printed: str, varies: bool) -> None:
    """Check that the words are equal. The width of columns may differ."""
    is_equal = doctest.OutputChecker().check_output(_tidy(expected, varies), _tidy(printed, varies), doctest.ELLIPSIS)
    assert is_equal, f"the page says\n{expected}\nbut this was printed\n{printed}"


def _tidy(text: str, varies: bool) -> str:
    lines = [SPACES.sub(" ", line).strip() for line in text.strip().splitlines()]
    text = "\n".join(line for line in lines if line) + "\n"
    if varies:
        text = FREE_SIZES.sub("", text)
    return NUMBER.sub("#", TIME.sub(r"\1 time", EXACT.sub("# dB", text))) if varies else text


def _varies(example: Example) -> bool:
    return example.document.text[: example.region.start].rstrip().endswith(VARYING)


class Page:
    """Folder and Python process of a page while its blocks run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = sys.executable
        self.printed = ""

    @cached_property
    def reader(self) -> subprocess.Popen[str]:
        """Python process in the folder of the page. It imports modules from there first."""
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
        limit = threading.Timer(TIMEOUT_SECONDS, self.reader.kill)
        limit.start()
        assert self.reader.stdin is not None
        assert self.reader.stdout is not None
        print(json.dumps({"source": source, "path": path}), file=self.reader.stdin, flush=True)
        answer = self.reader.stdout.readline()
        limit.cancel()
        assert answer, f"python ended: {signal_name(self.reader.wait()) or self.reader.returncode}"
        result = json.loads(answer)
        assert "failed" not in result, result["failed"]
        self.printed = result["printed"]

    def command(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run scalepoint, python, torchrun or pip of this environment, or openssl, without a shell."""
        name, *arguments = shlex.split(text)
        if name == "pip":
            self._create_environment()
            arguments += OFFLINE
        programs = {
            "python": [self.python],
            "scalepoint": [self.python, "-P", "-m", "scalepoint.cli"],  # -P: no modules of the folder, as installed
            "pip": [sys.executable, "-m", "pip", "--quiet", "--python", self.python],
            "torchrun": [self.python, "-m", "torch.distributed.run"],
            "openssl": ["openssl"],
        }
        if name not in programs:
            raise AssertionError(f"$ {text}: only {', '.join(programs)} are run; use ```shell for the rest")
        return subprocess.run(
            [*programs[name], *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env=_environment(),
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    def _create_environment(self) -> None:
        """Create an environment for this page that also sees the packages of the current environment."""
        if self.python != sys.executable:
            return
        folder = self.folder.with_name(f"{self.folder.name}-venv")
        venv.create(folder, with_pip=False)
        site_packages = [path for path in sys.path if path.endswith("site-packages")]
        for packages in folder.glob("lib/*/site-packages"):
            lines = [f"import site; site.addsitedir({path!r})\n" for path in site_packages]
            (packages / "parent.pth").write_text("".join(lines))
        self.python = str(folder / "bin" / "python")

    def close(self) -> None:
        if "reader" in vars(self):
            self.reader.kill()
            self.reader.communicate()


def _environment() -> dict[str, str]:
    """Return environment variables: one thread, and the package as after `pip install -e .`, without the tests."""
    return {**os.environ, "COLUMNS": TERMINAL_WIDTH, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def page_of(example: Example) -> Page:
    page: Page = example.namespace["_page"]
    return page


def read(path: Path) -> None:
    """Run all blocks of a page in order. Its process and its folder are removed afterwards."""
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
    """One page as a test."""

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
    """Collector of the test of a page."""

    def collect(self) -> Iterator[PageTest]:
        page = PageTest.from_parent(self, name="page")
        if SLOW in self.path.read_text().partition("\n")[0]:
            page.add_marker(pytest.mark.slow)
        yield page
