"""The tests of the pages can fail: the output, files and commands of blocks are really checked."""

import os
from pathlib import Path

import pytest

from tests.docs.blocks import commands, compare, read


def evaluate(folder: Path, text: str) -> None:
    (folder / "page.md").write_text(text)
    read(folder / "page.md")


def fenced(info: str, body: str) -> str:
    return f"```{info}\n{body}\n```\n\n"


PRINTS = fenced("python", "print('a', 1)\nprint('b')")


def test_the_output_of_a_block_is_compared(tmp_path: Path) -> None:
    evaluate(tmp_path, PRINTS + fenced("text", "a 1\nb"))
    evaluate(tmp_path, PRINTS + fenced("text", "a   1\n..."))
    evaluate(tmp_path, PRINTS + "<!-- numbers vary -->\n" + fenced("text", "a 2.5e-3\nb"))


@pytest.mark.parametrize(
    "text",
    [
        PRINTS + fenced("text", "a 2\nb"),
        PRINTS + fenced("text", "a 1"),
        PRINTS + "<!-- numbers vary -->\n" + fenced("text", "c 1\nb"),
        fenced("python", "assert False"),
        fenced("", "a block without a language"),
        fenced("console", "$ python -c 'import sys; sys.exit(3)'"),
        fenced("console", "$ python -c 'print(1)'\n2"),
        fenced("console", "$ rm -rf things"),
        fenced("shell", "make no-such-thing"),
    ],
)
def test_a_wrong_page_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError):
        evaluate(tmp_path, text)


def test_blocks_with_a_title_are_files_that_are_removed_after_the_page(tmp_path: Path) -> None:
    file = fenced('python title="nets_of_a_page.py"', "NUMBER = 5")
    use = fenced("python", "from nets_of_a_page import NUMBER\nprint(NUMBER)") + fenced("text", "5")
    run = fenced("console", "$ python -c 'import nets_of_a_page as n; print(n.NUMBER)'\n5")
    evaluate(tmp_path, file + use + run)
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        evaluate(tmp_path, use)


def test_a_page_runs_in_one_process_without_modules_of_the_tests(tmp_path: Path) -> None:
    same_process = fenced("python", "import os\nnumber = os.getpid()") + fenced(
        "python", "assert os.getpid() == number"
    )
    clean_process = f"import os, sys\nassert os.getpid() != {os.getpid()}\nassert 'torch' not in sys.modules"
    evaluate(tmp_path, same_process + fenced("python", clean_process))
    for name in ("tests", "architectures", "torchvision", "timm"):
        with pytest.raises(AssertionError, match=f"ModuleNotFoundError.*{name}"):
            evaluate(tmp_path, fenced("python", f"import {name}"))


def test_transformers_can_be_imported_on_a_page(tmp_path: Path) -> None:
    """transformers imports torchvision if it is installed, and fails if that was built for another torch."""
    evaluate(tmp_path, fenced("python", "from transformers import LlamaForCausalLM"))


def test_a_block_that_kills_its_process_fails_with_the_signal(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="python ended: SIGILL"):
        evaluate(tmp_path, fenced("python", "import os, signal\nos.kill(os.getpid(), signal.SIGILL)"))


def test_a_block_that_fails_names_its_line_in_the_page(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page.md\", line 6, in <module>"):
        evaluate(tmp_path, "a\n\n\n" + fenced("python", "x = 0\n1 / x"))


def test_the_command_does_not_import_modules_of_the_current_folder(tmp_path: Path) -> None:
    file = fenced('python title="rich.py"', "raise SystemExit(3)")
    evaluate(tmp_path, file + fenced("console", "$ scalepoint --version\nscalepoint ..."))


PACKAGE = """[project]
name = "a-package-of-a-page"
version = "1.0"
[project.entry-points."a.page"]
it = "a_package_of_a_page:NUMBER"
"""
LOAD_ENTRY_POINTS = (
    "from importlib.metadata import entry_points\nprint([point.load() for point in entry_points(group='a.page')])"
)


def test_a_package_that_a_page_installs_is_removed_after_it(tmp_path: Path) -> None:
    package = fenced('toml title="pyproject.toml"', PACKAGE) + fenced(
        'python title="a_package_of_a_page.py"', "NUMBER = 5"
    )
    show = fenced("python", LOAD_ENTRY_POINTS)
    evaluate(tmp_path, package + fenced("console", "$ pip install .") + show + fenced("text", "[5]"))
    evaluate(tmp_path, package + show + fenced("text", "[]"))


def test_commands_are_split_from_their_output() -> None:
    assert list(commands("$ one\n1\n2\n$ two\n")) == [("one", "1\n2\n"), ("two", "")]


def test_varying_numbers_may_have_another_agreement_and_unit_of_time() -> None:
    page = "as simulated (exactly)\nlatency 3.48 ms 2.01 ms"
    compare(page, "as simulated (74.8 dB, very good)\nlatency 2.55 ms 952 us", varies=True)
    compare("12 dB", "inf dB", varies=True)
    for printed in ("as simulated (badly)\nlatency 1 ms 2 ms", "as simulated (exactly)\nlatency 1 MB 2 MB"):
        with pytest.raises(AssertionError):
            compare(page, printed, varies=True)


def test_an_ellipsis_matches_any_text() -> None:
    compare("a ... c", "a b c", varies=False)
    with pytest.raises(AssertionError):
        compare("a ... d", "a b c", varies=False)
