"""That the tests of the pages can fail: what a block prints, saves and runs is really looked at."""

from pathlib import Path

import pytest
from sybil import Sybil

from tests.docs.blocks import Blocks, commands, compare, enter, leave


def evaluate(folder: Path, text: str) -> None:
    """All blocks of a page, in order."""
    page = folder / "page.md"
    page.write_text(text)
    document = Sybil(parsers=[Blocks()], patterns=["*.md"]).parse(page)
    enter(document.namespace)
    try:
        for example in document.examples():
            example.evaluate()
    finally:
        leave(document.namespace)


def fenced(info: str, body: str) -> str:
    return f"```{info}\n{body}\n```\n\n"


PRINTS = fenced("python", "print('a', 1)\nprint('b')")


def test_what_a_block_prints_is_compared(tmp_path: Path) -> None:
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
        fenced("", "nobody knows what this is"),
        fenced("console", "$ python -c 'import sys; sys.exit(3)'"),
        fenced("console", "$ python -c 'print(1)'\n2"),
        fenced("console", "$ rm -rf things"),
        fenced("shell", "make no-such-thing"),
    ],
)
def test_a_page_that_is_wrong_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError):
        evaluate(tmp_path, text)


def test_titled_blocks_are_files_of_the_page_and_gone_after_it(tmp_path: Path) -> None:
    own = fenced('python title="nets_of_a_page.py"', "NUMBER = 5")
    use = fenced("python", "from nets_of_a_page import NUMBER\nprint(NUMBER)") + fenced("text", "5")
    run = fenced("console", "$ python -c 'import nets_of_a_page as n; print(n.NUMBER)'\n5")
    before = Path.cwd()
    evaluate(tmp_path, own + use + run)
    assert Path.cwd() == before
    with pytest.raises(ModuleNotFoundError):
        evaluate(tmp_path, use)


def test_commands_are_split_from_what_they_print() -> None:
    assert list(commands("$ one\n1\n2\n$ two\n")) == [("one", "1\n2\n"), ("two", "")]


def test_ellipses_stand_for_anything_and_words_do_not() -> None:
    compare("a ... c", "a b c", varies=False)
    with pytest.raises(AssertionError):
        compare("a ... d", "a b c", varies=False)
