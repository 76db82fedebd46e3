"""Rules for the source code that ruff cannot check."""

import ast
import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("plain_code", Path(__file__).parents[1] / "tools" / "plain_code.py")
plain_code = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plain_code)

ROOT = Path(__file__).parent.parent / "src" / "scalepoint"
LIBRARIES = {"torch", "onnx", "onnxscript", "onnx_ir", "transformers", "executorch"}
MODULES = sorted(path for path in ROOT.rglob("*.py") if "compat" not in path.parts)
ALLOWED = {
    ("runtimes/executorch/child.py", "executorch.extension.pybindings.portable_lib._unsafe_reset_threadpool"): (
        "a child program imports nothing from scalepoint, and ExecuTorch 1.5 has no public way to set its threads"
    ),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_names(tree: ast.Module) -> set[str]:
    """The private names of the libraries that a module imports, or reads as attributes of an imported name."""
    imported: dict[str, str] = {}  # local name -> full name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    used = set(imported.values())
    used |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in imported and rest.replace(".", "").isidentifier():
                used.add(f"{imported[first]}.{rest}")
    return {name for name in used if name.partition(".")[0] in LIBRARIES and any(map(is_private, name.split(".")))}


def is_operator(name: str) -> bool:
    """Whether a name is one of an operator (torch.ops.aten._grouped_mm). They do not change between versions."""
    return name.startswith("torch.ops.")


def test_private_names_of_other_libraries_are_used_in_compat_only():
    used = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in MODULES
        for name in private_names(ast.parse(path.read_text()))
        if not is_operator(name)
    }
    assert used == set(ALLOWED)


def test_a_private_name_is_found_however_it_is_written():
    code = """
import torch, torch._dynamo.config
import onnx_ir as ir
from torch.utils import _pytree as pytree
from onnxscript.rewriter._pattern_ir import NodeOutputPattern
torch._C._get_tracing_state()
ir._convenience.x
torch.ops.aten._grouped_mm
torch.__version__
self._private
"""
    names = {name for name in private_names(ast.parse(code)) if not is_operator(name)}
    assert names >= {
        "torch._dynamo.config",
        "torch.utils._pytree",
        "torch._C._get_tracing_state",
        "onnx_ir._convenience",
    }
    assert "onnx_ir._convenience" in names
    assert "onnxscript.rewriter._pattern_ir.NodeOutputPattern" in names
    assert not any("__version__" in name or "_grouped_mm" in name for name in names)


def test_names_say_what_a_value_is():
    """For example `config` instead of `given`. A name that has to stay needs a reason in tools/plain_code.py."""
    lines, used = plain_code.find_vague_names()
    assert lines == []
    assert used == set(plain_code.ALLOWED_NAMES), "these entries of ALLOWED_NAMES are not needed"


def test_names_of_tests_are_plain_sentences():
    assert plain_code.find_unclear_tests() == []


def test_no_two_classes_of_the_package_have_the_same_name():
    assert set(plain_code.find_repeated_classes()) == set(plain_code.ALLOWED_CLASSES)


def test_exported_names_have_a_docstring():
    assert plain_code.find_undocumented() == []


def test_vague_names_are_found_wherever_they_are_defined():
    code = """
def told(given, *, _how=None):
    for each in given:
        self.kept = [found for found in each]
    try:
        import numpy as own
    except OSError as SAID:
        left, right = 1, 2
    lambda made: made
"""
    names = [name for name, _ in plain_code.vague_names(ast.parse(code))]
    assert sorted(names) == ["each", "found", "given", "how", "kept", "made", "own", "said", "told"]
    assert plain_code.vague_names(ast.parse("left = 1")) == [("left", 1)]
