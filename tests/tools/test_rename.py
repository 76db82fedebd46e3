"""The rename tool on small projects: each kind of entry, strings, documents, clashes, and a second run."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import yaml

pytest.importorskip("libcst")
SPEC = importlib.util.spec_from_file_location("rename", Path(__file__).parents[2] / "tools" / "rename.py")
rename = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(rename)


@pytest.fixture
def project(tmp_path):
    def build(table, **files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("-", "_")
            path = path.with_suffix(".py") if not path.suffix else path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "renames.yaml").write_text(yaml.safe_dump({"root_package": "pkg", "packages": {"all": table}}))
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
        return tmp_path

    return build


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)


def run(root, *more):
    return rename.main(["--root", str(root), "--table", str(root / "renames.yaml"), *more])


def read(root):
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.parts and path.name != "renames.yaml"
    }


def test_a_module_moves_with_its_test_and_every_mention(project):
    root = project({"modules": {"a.writing": "a.write"}})
    write(
        root,
        {
            "src/pkg/a/__init__.py": '_HOMES = {\n    "save": "writing",\n}\n',
            "src/pkg/a/writing.py": "def save(): ...\n",
            "src/pkg/b.py": 'from pkg.a import writing\nfrom pkg.a.writing import save\nX = "pkg.a.writing:save"\nwriting.save()\n',
            "tests/a/test_writing.py": "import pkg.a.writing\n",
            "docs/page.md": "::: pkg.a.writing\n\nSee a/writing.py and the writing of files.\n",
            "pyproject.toml": 'layers = ["pkg.a.writing | pkg.b"]\n',
        },
    )
    assert run(root) == 0
    files = read(root)
    assert "src/pkg/a/write.py" in files
    assert "src/pkg/a/writing.py" not in files
    assert files["tests/a/test_write.py"] == "import pkg.a.write\n"
    assert files["src/pkg/a/__init__.py"] == '_HOMES = {\n    "save": "write",\n}\n'
    assert (
        files["src/pkg/b.py"]
        == 'from pkg.a import write\nfrom pkg.a.write import save\nX = "pkg.a.write:save"\nwrite.save()\n'
    )
    assert files["docs/page.md"] == "::: pkg.a.write\n\nSee a/write.py and the writing of files.\n"
    assert files["pyproject.toml"] == 'layers = ["pkg.a.write | pkg.b"]\n'


SYMBOL_FILES = {
    "src/pkg/__init__.py": "",
    "src/pkg/a/__init__.py": 'from pkg.a.core import told\n\n__all__ = ["told"]\n',
    "src/pkg/a/core.py": "def told(x):\n    return told(x - 1) if x else 0\n",
    "src/pkg/b.py": "import pkg.a.core\nfrom pkg.a import core, told\nfrom pkg.a.core import told as t\n\n\ndef f(told=1):\n    return told\n\n\nY = told(t(core.told(pkg.a.core.told(1))))\n",
    "tests/test_b.py": 'from pkg.a import core\n\n\ndef test_it(monkeypatch):\n    monkeypatch.setattr("pkg.a.core.told", None)\n    monkeypatch.setattr(core, "told", None)\n    assert "told" != "pkg.a:told"\n',
    "docs/page.md": "```python\nfrom pkg.a import told\ntold(1)\n```\nIt is told in pkg.a.told.\n",
}


def test_a_function_is_renamed_in_imports_strings_and_documents_but_not_where_it_is_shadowed(project):
    root = project({"symbols": {"a.core:told": "broadcast"}})
    write(root, SYMBOL_FILES)
    assert run(root) == 0
    files = read(root)
    assert files["src/pkg/a/__init__.py"] == 'from pkg.a.core import broadcast\n\n__all__ = ["broadcast"]\n'
    assert files["src/pkg/a/core.py"] == "def broadcast(x):\n    return broadcast(x - 1) if x else 0\n"
    assert files["src/pkg/b.py"] == (
        "import pkg.a.core\nfrom pkg.a import core, broadcast\nfrom pkg.a.core import broadcast as t\n\n\n"
        "def f(told=1):\n    return told\n\n\nY = broadcast(t(core.broadcast(pkg.a.core.broadcast(1))))\n"
    )
    assert 'setattr("pkg.a.core.broadcast", None)' in files["tests/test_b.py"]
    assert 'setattr(core, "broadcast", None)' in files["tests/test_b.py"]
    assert 'assert "told" != "pkg.a:broadcast"' in files["tests/test_b.py"]
    assert (
        files["docs/page.md"]
        == "```python\nfrom pkg.a import broadcast\nbroadcast(1)\n```\nIt is told in pkg.a.broadcast.\n"
    )


def test_a_second_run_changes_nothing(project):
    table = {
        "modules": {"a.core": "a.main"},
        "symbols": {"a.core:told": "broadcast"},
        "locals": {"a.core:told": {"x": "depth"}},
    }
    root = project(table)
    write(root, SYMBOL_FILES)
    assert run(root) == 0
    files = read(root)
    assert "depth - 1" in files["src/pkg/a/main.py"]
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    assert run(root) == 0
    assert read(root) == files


ATTRIBUTE_FILES = {
    "src/pkg/__init__.py": "",
    "src/pkg/a.py": (
        "from dataclasses import dataclass, replace\n\n\n@dataclass\nclass Base:\n    blamed: int\n\n    def hollow(self):\n        return self.blamed\n\n\n"
        "class Child(Base):\n    def hollow(self):\n        return super().hollow()\n\n\nclass Other:\n    def kept(self): ...\n\n\nclass Another:\n    def kept(self): ...\n"
    ),
    "src/pkg/b.py": "from dataclasses import replace\nfrom pkg.a import Base, Other\n\n\ndef f(x, y, blamed):\n    y.kept()\n    return replace(Base(blamed=1), blamed=x.blamed).hollow()\n",
}


def test_a_unique_attribute_is_renamed_everywhere_with_overrides_and_keywords(project):
    root = project({"attributes": {"a:Base.blamed": "line", "a:Base.hollow": "release"}})
    write(root, ATTRIBUTE_FILES)
    assert run(root) == 0
    files = read(root)
    assert "    line: int\n\n    def release(self):\n        return self.line\n" in files["src/pkg/a.py"]
    assert "    def release(self):\n        return super().release()\n" in files["src/pkg/a.py"]
    assert "def f(x, y, blamed):" in files["src/pkg/b.py"]
    assert "replace(Base(line=1), line=x.line).release()" in files["src/pkg/b.py"]


def test_an_ambiguous_attribute_is_left_and_reported_unless_its_file_is_listed(project, capsys):
    root = project({"attributes": {"a:Other.kept": "stored"}})
    write(root, ATTRIBUTE_FILES)
    assert run(root) == 0
    assert "left: src/pkg/b.py:6: .kept" in capsys.readouterr().out
    assert "y.kept()" in read(root)["src/pkg/b.py"]
    assert read(root)["src/pkg/a.py"].count("def kept") == 1


def test_files_of_an_ambiguous_attribute(project):
    root = project({"attributes": {"a:Other.kept": {"to": "stored", "files": ["src/pkg/b.py"]}}})
    write(root, ATTRIBUTE_FILES)
    assert run(root) == 0
    assert "y.stored()" in read(root)["src/pkg/b.py"]


LOCAL_FILES = {
    "src/pkg/__init__.py": "",
    "src/pkg/a.py": (
        "found = 1\n\n\ndef f(given, *, made=2):\n    found = [found for found in given]\n    found += [made]\n\n"
        "    def g():\n        return found\n\n    def h(found):\n        return found\n\n    return f'{found} {g()}', h(found=found), given.found\n\n\ndef k():\n    return found\n"
    ),
    "src/pkg/b.py": "from functools import partial\n\nfrom pkg.a import f\n\nf([1], made=3)\npartial(f, made=4)\n",
}


def test_locals_are_renamed_by_scope_and_parameters_at_their_calls(project):
    root = project({"locals": {"a:f": {"found": "rows", "made": "extra"}}})
    write(root, LOCAL_FILES)
    assert run(root) == 0
    files = read(root)
    assert files["src/pkg/a.py"] == (
        "found = 1\n\n\ndef f(given, *, extra=2):\n    rows = [rows for rows in given]\n    rows += [extra]\n\n"
        "    def g():\n        return rows\n\n    def h(found):\n        return found\n\n    return f'{rows} {g()}', h(found=rows), given.found\n\n\ndef k():\n    return found\n"
    )
    assert files["src/pkg/b.py"].endswith("f([1], extra=3)\npartial(f, extra=4)\n")


@pytest.mark.parametrize(
    "table",
    [
        {"locals": {"a:f": {"found": "given"}}},
        {"locals": {"a:f": {"found": "list"}}},
        {"symbols": {"a:f": "k"}},
        {"symbols": {"a:f": "partial"}},
        {"modules": {"a": "b"}},
    ],
    ids=["local", "builtin", "definition", "import", "module"],
)
def test_a_clash_fails_and_writes_nothing(project, capsys, table):
    root = project(table)
    write(root, LOCAL_FILES)
    assert run(root) == 1
    assert "clash:" in capsys.readouterr().out
    assert read(root) == LOCAL_FILES


def test_entries_that_match_nothing_are_reported(project, capsys):
    root = project({"symbols": {"a:gone": "x"}, "locals": {"a:f": {"gone": "x"}}, "modules": {"gone": "x"}})
    write(root, LOCAL_FILES)
    assert run(root) == 0
    out = capsys.readouterr().out
    assert out.count("not found:") == 3
