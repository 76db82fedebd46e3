"""Atomic replacement of files and folders, leftovers of killed processes, and the list of written files."""

import json
import os
import stat

import pytest
from safetensors.numpy import save_file

from scalepoint.errors import StoreError, UsageError
from scalepoint.support.files import folder_locked, remove_leftovers, replace_file, replace_folder, replace_text
from scalepoint.support.output_folder import LIST_FILE, WrittenFiles, check_path, move_into
from tests.errors import raises


def test_a_folder_replaces_the_old_one_in_one_step(tmp_path):
    def write(text):
        return lambda folder: (folder / "a.txt").write_text(text)

    path = tmp_path / "deep" / "out"
    replace_folder(path, write("one"))
    replace_folder(path, write("two"))
    assert [file.name for file in path.iterdir()] == ["a.txt"]
    assert (path / "a.txt").read_text() == "two"
    assert [file.name for file in path.parent.iterdir()] == ["out"]


def test_a_folder_with_files_of_others_is_not_replaced(tmp_path):
    path = tmp_path / "out"
    replace_folder(path, lambda folder: (folder / "a.txt").write_text("one"))
    (path / "mine.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"mine\.txt"):
        replace_folder(path, lambda folder: (folder / "a.txt").write_text("two"))
    assert {file.name: file.read_text() for file in path.iterdir()} == {"a.txt": "one", "mine.txt": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    path = tmp_path / "out"
    replace_folder(path, lambda folder: (folder / "a.txt").write_text("one"))

    def fails(folder):
        (folder / "a.txt").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        replace_folder(path, fails)
    assert (path / "a.txt").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_get_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        replace_text(tmp_path / "text", "a")
        replace_file(tmp_path / "weights", lambda path: save_file({}, path))  # safetensors creates files with mode 600
        with folder_locked(tmp_path):
            pass
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("text", "weights", ".lock"), 0o640)


def test_only_our_own_leftovers_of_killed_processes_are_deleted(tmp_path):
    (tmp_path / ".tmp-77-report.html").mkdir()
    (tmp_path / ".tmp-77-report.html" / "file").write_text("half")
    (tmp_path / ".tmp-78-report.json").write_text("half, written by an older version")
    (tmp_path / ".tmp-79-old-out").mkdir()
    (tmp_path / ".tmp-79-old-out" / "a").write_text("moved away and not replaced")
    foreign_names = {".tmp-mine", ".tmp-77-mine", ".tmpabcdef", ".tmp-report.html"}
    for name in foreign_names:
        (tmp_path / name).write_text("of another program")
    (tmp_path / ".tmp-80-report.html").symlink_to(tmp_path / ".tmp-mine")
    remove_leftovers(tmp_path, ("report.html", "report.json", "out"))
    assert {path.name for path in tmp_path.iterdir()} == {*foreign_names, "out", ".tmp-80-report.html"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_a_long_name_can_be_written(tmp_path):
    replace_text(tmp_path / ("a" * 255), "long")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["long"]


def test_a_lock_file_that_is_a_symbolic_link_is_an_error(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"), folder_locked(tmp_path / "out"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_inside_a_lock_is_not_translated(tmp_path):
    with pytest.raises(BlockingIOError), folder_locked(tmp_path):
        raise BlockingIOError("of the caller")


def test_the_error_of_a_full_disk_contains_the_needed_bytes(tmp_path):
    def full(path):
        path.write_bytes(b"x" * 1000)
        raise OSError(28, "No space left on device")

    with raises(StoreError, "1,000 bytes", "the disk has"):
        replace_file(tmp_path / "a", full)
    with pytest.raises(StoreError, match="needs 5,000 bytes"):
        replace_file(tmp_path / "a", full, 5000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "message"), [("a" * 300, "too long"), ("a\0b", "NUL"), ("a\udcff", "PYTHONUTF8=1")])
def test_an_impossible_path_is_an_error(tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        check_path(tmp_path / name)


def make_folder(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def read_folder(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != LIST_FILE}


def test_moving_files_deletes_only_the_files_of_earlier_runs(tmp_path):
    out = tmp_path / "out"
    move_into(make_folder(tmp_path / "1", a="one", b="one", c="one"), out)
    (out / "c").write_text("edited")
    (out / "mine").write_text("mine")
    move_into(make_folder(tmp_path / "2", a="two"), out)
    assert read_folder(out) == {"a": "two", "c": "edited", "mine": "mine"}
    assert set(json.loads((out / LIST_FILE).read_text())["files"]) == {"a"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "\0", '{"format": 1, "files": {"../mine": {"size": 4, "sha256": "%s"}, "/etc/a": {"size": 1}}}']
)
def test_nothing_is_deleted_with_a_damaged_list(tmp_path, text):
    out = make_folder(tmp_path / "out", a="old")
    (tmp_path / "mine").write_text("mine")
    (out / LIST_FILE).write_text(text)
    move_into(make_folder(tmp_path / "1", b="new"), out)
    assert read_folder(out) == {"a": "old", "b": "new"}
    assert (tmp_path / "mine").read_text() == "mine"


def test_nothing_is_deleted_outside_of_the_folder(tmp_path):
    out = make_folder(tmp_path / "out")
    (tmp_path / "mine").write_text("mine")
    (out / "link").symlink_to(tmp_path)
    written_files = WrittenFiles(out)
    written_files.add([tmp_path / "mine"], tmp_path)
    (record,) = written_files.records.values()
    for name in ("../mine", "link/mine", str(tmp_path / "mine")):
        written_files.records[name] = record
    written_files.remove_all_but(())
    assert (tmp_path / "mine").read_text() == "mine"
