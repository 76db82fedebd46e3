"""Files and folders that are replaced as one, what killed processes leave, and the list of files that we wrote."""

import json
import os
import stat

import pytest
from safetensors.numpy import save_file

from scalepoint.errors import StoreError, UsageError
from scalepoint.support.files import folder_locked, remove_leftovers, replace_file, replace_folder, replace_text
from scalepoint.support.output_folder import LIST_FILE, WrittenFiles, check_path, move_into
from tests.errors import raises


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path):
    def write(text):
        return lambda folder: (folder / "a.txt").write_text(text)

    path = tmp_path / "deep" / "out"
    replace_folder(path, write("one"))
    replace_folder(path, write("two"))
    assert [each.name for each in path.iterdir()] == ["a.txt"]
    assert (path / "a.txt").read_text() == "two"
    assert [each.name for each in path.parent.iterdir()] == ["out"]


def test_a_folder_with_files_of_others_is_not_replaced(tmp_path):
    path = tmp_path / "out"
    replace_folder(path, lambda folder: (folder / "a.txt").write_text("one"))
    (path / "mine.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"mine\.txt"):
        replace_folder(path, lambda folder: (folder / "a.txt").write_text("two"))
    assert {each.name: each.read_text() for each in path.iterdir()} == {"a.txt": "one", "mine.txt": "mine"}
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


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


def test_files_get_the_modes_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        replace_text(tmp_path / "text", "a")
        replace_file(tmp_path / "weights", lambda path: save_file({}, path))  # which makes files of mode 600
        with folder_locked(tmp_path):
            pass
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("text", "weights", ".lock"), 0o640)


def test_only_what_killed_processes_left_of_ours_is_swept(tmp_path):
    (tmp_path / ".tmp-77-report.html").mkdir()
    (tmp_path / ".tmp-77-report.html" / "file").write_text("half")
    (tmp_path / ".tmp-78-report.json").write_text("half, as older versions left it")
    (tmp_path / ".tmp-79-old-out").mkdir()
    (tmp_path / ".tmp-79-old-out" / "a").write_text("moved away, and its successor never came")
    others = {".tmp-mine", ".tmp-77-mine", ".tmpabcdef", ".tmp-report.html"}
    for name in others:
        (tmp_path / name).write_text("of another program")
    (tmp_path / ".tmp-80-report.html").symlink_to(tmp_path / ".tmp-mine")
    remove_leftovers(tmp_path, ("report.html", "report.json", "out"))
    assert {each.name for each in tmp_path.iterdir()} == {*others, "out", ".tmp-80-report.html"}
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["a"]


def test_a_long_name_can_be_written(tmp_path):
    replace_text(tmp_path / ("a" * 255), "long")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["long"]


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"), folder_locked(tmp_path / "out"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_inside_a_lock_stays_what_it_is(tmp_path):
    with pytest.raises(BlockingIOError), folder_locked(tmp_path):
        raise BlockingIOError("of the caller")


def test_a_full_disk_says_how_much_is_needed(tmp_path):
    def full(path):
        path.write_bytes(b"x" * 1000)
        raise OSError(28, "No space left on device")

    with raises(StoreError, "1,000 bytes", "the disk has"):
        replace_file(tmp_path / "a", full)
    with pytest.raises(StoreError, match="needs 5,000 bytes"):
        replace_file(tmp_path / "a", full, 5000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "says"), [("a" * 300, "too long"), ("a\0b", "NUL"), ("a\udcff", "PYTHONUTF8=1")])
def test_a_path_that_cannot_be_is_refused(tmp_path, name, says):
    with pytest.raises(UsageError, match=says):
        check_path(tmp_path / name)


def staged(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def texts(folder):
    return {each.name: each.read_text() for each in folder.iterdir() if each.name != LIST_FILE}


def test_moving_files_in_deletes_those_of_earlier_runs_alone(tmp_path):
    out = tmp_path / "out"
    move_into(staged(tmp_path / "1", a="one", b="one", c="one"), out)
    (out / "c").write_text("edited")
    (out / "mine").write_text("mine")
    move_into(staged(tmp_path / "2", a="two"), out)
    assert texts(out) == {"a": "two", "c": "edited", "mine": "mine"}
    assert set(json.loads((out / LIST_FILE).read_text())["files"]) == {"a"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "\0", '{"format": 1, "files": {"../mine": {"size": 4, "sha256": "%s"}, "/etc/a": {"size": 1}}}']
)
def test_a_list_that_is_damaged_deletes_nothing(tmp_path, text):
    out = staged(tmp_path / "out", a="old")
    (tmp_path / "mine").write_text("mine")
    (out / LIST_FILE).write_text(text)
    move_into(staged(tmp_path / "1", b="new"), out)
    assert texts(out) == {"a": "old", "b": "new"}
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_list_deletes_nothing_outside_its_folder(tmp_path):
    out = staged(tmp_path / "out")
    (tmp_path / "mine").write_text("mine")
    (out / "link").symlink_to(tmp_path)
    written = WrittenFiles(out)
    written.add([tmp_path / "mine"], tmp_path)
    (record,) = written.records.values()
    for name in ("../mine", "link/mine", str(tmp_path / "mine")):
        written.records[name] = record
    written.remove_all_but(())
    assert (tmp_path / "mine").read_text() == "mine"
