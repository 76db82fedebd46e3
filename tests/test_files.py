"""Folders that are replaced as one."""

import pytest

from scalepoint.errors import StoreError
from scalepoint.files import replace_folder


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path):
    def write(text):
        return lambda folder: (folder / "a.txt").write_text(text)

    path = tmp_path / "deep" / "out"
    replace_folder(path, write("one"))
    (path / "left.txt").write_text("of before")
    replace_folder(path, write("two"))
    assert [each.name for each in path.iterdir()] == ["a.txt"]
    assert (path / "a.txt").read_text() == "two"
    assert [each.name for each in path.parent.iterdir()] == ["out"]


def test_what_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "out"
    replace_folder(path, lambda folder: (folder / "a.txt").write_text("one"))

    def fails(folder):
        (folder / "a.txt").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        replace_folder(path, fails)
    assert (path / "a.txt").read_text() == "one"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
