"""The outside of the package: public names, silent imports, import cost, import cycles, documented errors."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scalepoint
from scalepoint import errors, spec
from scalepoint.spec.onnx_export import in_onnx_export

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def python(code: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)


def test_the_public_names_are_pinned():
    assert sorted(scalepoint.__all__) == [
        "Budget",
        "DeployConfig",
        "Deployment",
        "__version__",
        "allocation",
        "analysis",
        "apply_transformation_plan",
        "benchmark",
        "calibrate",
        "check",
        "checking",
        "checkpoints",
        "compare",
        "coverage",
        "deploy",
        "deploy_checkpoint",
        "errors",
        "export",
        "formats",
        "get_transformation_plan",
        "graph",
        "insert_qdq",
        "inspect",
        "load",
        "numerics",
        "options",
        "patterns",
        "perplexity",
        "pipeline",
        "quantize",
        "report",
        "results",
        "runtimes",
        "save",
        "sensitivity",
        "spec",
        "sweep",
        "targets",
        "tensorrt",
        "transform",
        "transformation",
        "tune",
        "tuning",
        "verification",
        "verify",
    ]
    assert sorted(spec.__all__) == [
        "BlockSizeMismatchError",
        "CompressionTargetTensor",
        "DefaultFakeQuantize",
        "DefaultQParamsCalculator",
        "DynamicQParamsCalculator",
        "EntropyRangeCalculator",
        "ExtendedQuantizationSpec",
        "FakeQuantizeImplBase",
        "GlobalMinMaxQParamsCalculator",
        "HistogramEntropyQParamsCalculator",
        "HistogramMseQParamsCalculator",
        "HistogramPercentileQParamsCalculator",
        "HistogramQParamsCalculator",
        "LearnedScaleQParamsCalculator",
        "MinMaxRangeCalculator",
        "MovingAverageQParamsCalculator",
        "MseRangeCalculator",
        "PairSafeRangeCalculator",
        "PaletteFakeQuantize",
        "PaletteQParamsCalculator",
        "PerBlockGranularity",
        "PerChannelGranularity",
        "PerGroupedChannelGranularity",
        "PerTensorGranularity",
        "PerTokenBlockGranularity",
        "PerTokenGranularity",
        "PercentileRangeCalculator",
        "QParams",
        "QParamsCalculatorBase",
        "QuantizationComponentFactory",
        "QuantizationFormulation",
        "QuantizationGranularity",
        "QuantizationScheme",
        "QuantizationSpec",
        "RangeCalculatorBase",
        "RunningRangeMixin",
        "ScaleRounding",
        "SignedScaleQParamsCalculator",
        "Sparsity",
        "StaticQParamsCalculator",
        "default_activation_quantization_spec",
        "default_weight_quantization_spec",
        "palette_spec",
    ]


@pytest.mark.parametrize("module", [scalepoint, spec, scalepoint.numerics], ids=lambda module: module.__name__)
def test_every_public_name_is_there(module):
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonesuch"):
        scalepoint.nonesuch  # noqa: B018


@pytest.mark.parametrize("module", ["scalepoint", "scalepoint.spec"])
def test_importing_prints_nothing_even_when_warnings_are_errors(module):
    run = python(f"import {module}", "-W", "error")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_importing_the_package_does_not_import_torch():
    assert python("import sys, scalepoint; sys.exit('torch' in sys.modules)").returncode == 0


def test_importing_the_tensor_layer_imports_no_runtime_and_no_torchao():
    heavy = ["onnx", "onnxruntime", "openvino", "torchao", "transformers", "torch._dynamo", "torch._inductor"]
    run = python(f"import sys, scalepoint.spec; print([m for m in {heavy} if m in sys.modules])")
    assert run.stdout == "[]\n"


def test_a_function_is_marked_as_torch_marks_it_without_the_compiler_being_imported():
    assert vars(in_onnx_export) == vars(torch.compiler.assume_constant_result(lambda: False))


MODULES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
}


def imported(module):
    """The modules that one imports, at once or inside a function; a package by name is its __init__."""
    found = {f"scalepoint.{name}" for name in scalepoint._SUBMODULES} if module == "scalepoint" else set()
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # never run
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found & set(MODULES)


def needed(module):
    """The same, with the packages that an import enters: their __init__ runs first."""
    found = set()
    for name in imported(module):
        parts = name.split(".")
        around = {".".join(parts[:count]) for count in range(1, len(parts))}
        found |= {name} | {package for package in around if not f"{module}.".startswith(f"{package}.")}
    return found - {module}


def circles(needs):
    """Every module that needs itself through others."""
    reached = dict(needs)
    for middle in needs:
        for module in needs:
            if middle in reached[module]:
                reached[module] = reached[module] | reached[middle]
    return sorted(module for module in needs if module in reached[module])


def test_no_module_needs_itself_also_not_through_a_package():
    assert circles({module: needed(module) for module in MODULES}) == []


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def error_classes():
    return [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ScalepointError)]


def test_every_error_has_its_own_code_and_is_a_builtin_error_too():
    kinds = [kind for kind in error_classes() if kind is not errors.ScalepointError]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(issubclass(kind, ValueError | RuntimeError) for kind in kinds)
    assert str(errors.SpecError("no such thing")) == "no such thing [SP-A001]"


@pytest.mark.parametrize("kind", error_classes()[1:], ids=lambda kind: kind.__name__)
def test_every_error_is_documented(kind):
    if kind is errors.ScalepointError:
        return
    assert f"| {kind.code} | `{kind.__name__}` |" in (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert kind.code in errors.__doc__


def test_the_version_is_the_one_of_the_changelog():
    assert f"## {scalepoint.__version__}" in (ROOT / "CHANGELOG.md").read_text()
