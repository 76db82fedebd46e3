"""Untrusted files: what is read, what is an error, and that no other module opens them."""

import ast
import os
from pathlib import Path

import pytest

from scalepoint.errors import DocumentError
from scalepoint.support import untrusted

SOURCE = Path(untrusted.__file__).parents[1]
SPARSE = 5 * 10**9


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE)


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


READERS = {
    "bytes": lambda path: untrusted.read_bytes(path, 1000),
    "text": untrusted.read_text,
    "json": untrusted.read_json,
    "yaml": untrusted.read_yaml,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("make", [fifo, sparse, link_to_zero, folder])
def test_only_small_regular_files_are_read(make, read, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    make(path)
    with pytest.raises(DocumentError, match=r"a\.json cannot be read"):
        read(path)


def test_files_opened_by_libraries_are_checked_first(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    fifo(path)
    with pytest.raises(DocumentError, match="a pipe, a device"), untrusted.open_tensors(path):
        pass
    with pytest.raises(DocumentError, match="a pipe, a device"), untrusted.open_text(path):
        pass


def test_a_missing_file_is_an_os_error_and_a_name_with_nul_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        untrusted.read_text(tmp_path / "none")
    with pytest.raises(DocumentError):
        untrusted.read_text(tmp_path / "a\0b")


def test_a_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(DocumentError, match="UTF-8"):
        untrusted.read_text(tmp_path / "a")


def test_links_out_of_the_folder_are_an_error_and_links_inside_are_followed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "secret").write_text("1")
    (home / "real").write_text("2")
    (home / "out").symlink_to(tmp_path / "secret")
    (home / "in").symlink_to("real")
    (home / "loop").symlink_to("loop")
    assert untrusted.read_json(home / "in", folder=home) == 2
    assert untrusted.read_json(home / "out") == 1  # the user named this file
    with pytest.raises(DocumentError, match="outside of"):
        untrusted.read_json(home / "out", folder=home)
    with pytest.raises(OSError, match="symbolic links"):
        untrusted.read_json(home / "loop", folder=home)


def test_the_cache_of_huggingface_hub_is_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    (snapshot / "onnx").mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "89ab").write_text("3")
    (snapshot / "config.json").symlink_to("../../blobs/89ab")
    (snapshot / "onnx" / "model.onnx").symlink_to("../../../blobs/89ab")
    assert untrusted.read_json(snapshot / "config.json", folder=snapshot) == 3
    assert untrusted.check_file(snapshot / "onnx" / "model.onnx", folder=snapshot / "onnx") == 1


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", "a\0b", "c:\\windows", "..\\a"])
def test_a_name_outside_of_the_folder_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="name of a file"):
        untrusted.file_in(tmp_path, name)


def test_parts_of_large_files_can_be_read(tmp_path: Path) -> None:
    sparse(tmp_path / "a")
    assert untrusted.read_head(tmp_path / "a", 8) == bytes(8)
    assert untrusted.read_part(tmp_path / "a", SPARSE - 2, 2) == bytes(2)
    with pytest.raises(DocumentError):
        untrusted.read_part(tmp_path / "a", 0, SPARSE + 1)


# Names of functions and methods that open or parse a file. Other modules use scalepoint.support.untrusted instead.
OPENING = frozenset(
    ("read_text", "read_bytes", "open", "load", "loads", "safe_open", "load_file", "fromfile", "memmap", "loadtxt")
)
MODULES = frozenset(
    ("json", "yaml", "np", "numpy", "torch", "onnx", "pickle", "safetensors", "os", "io", "mmap", "gzip", "zipfile")
)
ALLOWED = {
    "support/untrusted.py": "the reader itself",
    "support/documents.py": "parses texts that were read with a limit",
    "support/files.py": "hashes, locks and flushes files of our own",
    "support/cpu.py": "/proc/cpuinfo, and the output of a child process",
    "distributed/channel.py": "messages of our own ranks",
    "pipeline/signature.py": "the signature that was just written",
    "report/html.py": "a file of this package",
    "targets/kernel_times.py": "a file of this package",
    "cli/files.py": "the summary of a job in GitHub Actions, opened for writing",
    "cli/init.py": "a file of this package",
    "cli/output.py": "/dev/null",
    "cli/data.py": "numpy and pillow, after check_file; no pickles",
    "cli/library_models.py": "torch.load with weights_only=True, after check_file",
    "tuning/checkpoint.py": "load_file, after check_file",
    "verification/layers.py": "onnx.load, after check_file",
    "formats/onnx/save.py": "reads a file that it has just written",
    "formats/apple/coreml/write.py": "reads a file that it has just written",
    "formats/apple/coreai/package.py": "reads a file that it has just written",
    "formats/checkpoint_folder/shards.py": "opened for writing",
    "formats/genai/initializers.py": "opened for writing",
    "verification/extraction.py": "opened for writing",
    "pipeline/workspace.py": "the log of the run",
    "runtimes/process.py": "output of our own child process",
    "runtimes/serving.py": "output of our own child process",
}


def _opening_calls(path: Path) -> list[str]:
    """Calls that open a file, with their lines."""
    calls = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        base = node.func.value if isinstance(node.func, ast.Attribute) else None
        is_method = name in ("read_text", "read_bytes") and isinstance(base, ast.expr)
        is_of_module = isinstance(base, ast.Name) and base.id in MODULES and name in OPENING
        is_named = base is None and name in OPENING - {"read_text", "read_bytes", "load", "loads"}
        # Source.open and Workspace.open open folders
        is_folder = base is not None and ast.unparse(base).rpartition(".")[2].lower() in ("source", "workspace")
        is_opened = name == "open" and base is not None and not is_folder
        if is_method or is_of_module or is_named or is_opened:
            calls.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node.func)}")
    return calls


def test_no_other_module_opens_files() -> None:
    """A child program (child.py, child_loop.py) imports nothing of ours; its parent checks the file before."""
    calls = [
        line
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in ALLOWED and path.name not in ("child.py", "child_loop.py")
        for line in _opening_calls(path)
    ]
    assert calls == [], "use scalepoint.support.untrusted, or give the reason in ALLOWED"


def test_every_exception_to_the_rule_is_still_needed() -> None:
    assert [name for name in ALLOWED if name != "support/untrusted.py" and not _opening_calls(SOURCE / name)] == []
