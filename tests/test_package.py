"""The package as a whole: public names, import output and cost, import cycles, documented errors."""

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
        "gate",
        "get_transformation_plan",
        "graph",
        "insert_qdq",
        "inspect",
        "load",
        "load_onnx",
        "numerics",
        "onnx_reader",
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
        "sign",
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
        "verify_signature",
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
        "StatefulQParamsCalculatorBase",
        "StatelessQParamsCalculatorBase",
        "StaticQParamsCalculator",
        "default_activation_quantization_spec",
        "default_weight_quantization_spec",
        "fp4_forward",
        "palette_spec",
        "resolve_block_sizes",
    ]


@pytest.mark.parametrize("module", [scalepoint, spec, scalepoint.numerics], ids=lambda module: module.__name__)
def test_every_public_name_exists(module):
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


def test_a_function_is_marked_as_constant_like_torch_does():
    assert vars(in_onnx_export) == vars(torch.compiler.assume_constant_result(lambda: False))


MODULES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
}


def imported_modules(module):
    """The modules that a module imports, at its top or inside a function. A package stands for its __init__."""
    modules = {f"scalepoint.{name}" for name in scalepoint._SUBMODULES} if module == "scalepoint" else set()
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # never run
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if name in MODULES else str(node.module) for name in names}
    return modules & set(MODULES)


def required_modules(module):
    """The imported modules and their packages, whose __init__ runs first."""
    modules = set()
    for name in imported_modules(module):
        parts = name.split(".")
        around = {".".join(parts[:count]) for count in range(1, len(parts))}
        modules |= {name} | {package for package in around if not f"{module}.".startswith(f"{package}.")}
    return modules - {module}


def find_cycles(needs):
    """Every module that imports itself through others."""
    reached = dict(needs)
    for middle in needs:
        for module in needs:
            if middle in reached[module]:
                reached[module] = reached[module] | reached[middle]
    return sorted(module for module in needs if module in reached[module])


def test_there_are_no_import_cycles():
    assert find_cycles({module: required_modules(module) for module in MODULES}) == []


def test_a_cycle_is_found():
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


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
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert scalepoint.__version__ in headings[0]
