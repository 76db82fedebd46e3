"""An .aimodel equals the model bit by bit, and Core AI's own runtime computes what the model computes."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint import export
from scalepoint.errors import ExportError, StoreError, TargetError, VerificationError
from scalepoint.formats import find_format
from scalepoint.formats.apple.coreai.elements import from_bytes, to_bytes
from scalepoint.formats.apple.coreai.package import PROGRAM_FILE, read_program, write_package
from scalepoint.quantize import QuantConfig, bits_per_weight
from scalepoint.quantize.presets import COREAI_IOS, COREAI_MACOS, MXFP4, NVFP4
from scalepoint.quantize.quantize_model import quantize
from scalepoint.runtimes import find_runtime
from scalepoint.spec import (
    ExtendedQuantizationSpec,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationSpec,
)
from scalepoint.spec.palette import INDEX_BITS, palette_spec
from scalepoint.support.coreai_text import ProgramText, convert_floats, find_products, product_name
from scalepoint.support.files import compute_digest
from scalepoint.verification import Status, Verification
from scalepoint.verification.products import simulate_products
from tests.errors import raises
from tests.formats.apple.conftest import CONFIGS, net, pictures, quantized

COREAI = find_format("coreai")
FAST = ("int8", "weights uint4 per channel", "palettes of 3 bits per group", "weights int4 in blocks")


@cache
def _export_once(config: str, **options) -> tuple[tempfile.TemporaryDirectory, torch.fx.GraphModule]:
    folder, model = tempfile.TemporaryDirectory(prefix="exported-"), quantized(config, target="coreai")
    export(model, Path(folder.name) / "m.aimodel", pictures(), **options)
    return folder, model


def exported(config: str = "int8", **options) -> tuple[Path, torch.fx.GraphModule]:
    """A file that tests only read, and its model."""
    folder, model = _export_once(config, **options)
    return Path(folder.name) / "m.aimodel", model


def edited(path: Path, edit: Callable[[ProgramText], ProgramText], source: Path) -> Path:
    """Write a copy of a file with a changed program and its right hash."""
    from coreai_torch import TorchConverter  # noqa: F401

    path.mkdir()
    program, metadata = edit(read_program(source)), (source / "metadata.json").read_bytes()
    write_package(path, program, {})
    (path / "metadata.json").write_bytes(metadata)
    return path


def with_changed_byte(name: str, program: ProgramText) -> ProgramText:
    data = bytearray(bytes.fromhex(program.constants[name]))
    data[0] ^= 1
    return replace(program, constants={**program.constants, name: data.hex().upper()})


@pytest.mark.parametrize(
    "config", [config if config in FAST else pytest.param(config, marks=pytest.mark.slow) for config in CONFIGS]
)
def test_a_file_equals_the_model_bit_by_bit_and_runs_as_simulated(config: str) -> None:
    path, model = exported(config)
    result = scalepoint.verify(path, model, pictures())
    assert result.status == Status.OK, result.message
    assert result.differences == ()
    assert result.sqnr > 40
    assert result.low_precision == 3
    assert result.executed.get("lut_to_dense", 0) == (3 if config.startswith("palettes") else 0)
    assert result.executed.get("blockwise_shift_scale", 0) == (0 if config.startswith("palettes") else 3)
    assert result.executed.get("quantize", 0) == (5 if config.startswith("int8") else 0)


def test_a_float32_file_computes_what_the_simulation_computes_and_no_speed_is_claimed() -> None:
    path, model = exported(float_dtype="float32")
    result = scalepoint.verify(path, model, pictures(), float_path=path)
    assert result.sqnr > 100
    assert result.is_run
    assert "on a CPU, not on a device" in result.message
    assert result.latency is None
    assert "xf16>" not in str(read_program(path))
    with raises(VerificationError, "speed cannot be measured", "not on a device"):
        scalepoint.benchmark(path, path)


def test_deploy_writes_a_float16_file_with_float32_inputs_and_metadata(tmp_path: Path) -> None:
    x = pictures()
    done = scalepoint.deploy(
        net(), x, [x], target="coreai", output=tmp_path / "out", metadata={"labels": ["cat"]}, progress=False
    )
    assert done.path == tmp_path / "out" / "model.aimodel"
    assert done.verification.holds
    info = COREAI.about(done.path)
    assert [(value.name, value.dtype, value.shape) for value in info.inputs] == [("input", "float32", (2, 3, 16, 16))]
    assert info.made_for == {"target": "coreai"}
    assert info.metadata["labels"] == '["cat"]'
    assert done.verification.float_size == COREAI.about(done.float_path).size
    header, *lines = (line for line in read_program(done.path).lines if line.startswith("  ") and "cast" not in line)
    assert "xf32>" in header
    assert not any("xf32>" in line for line in lines if "output" not in line)
    assert "scalepoint bench" not in str(done.report)


class WithoutBatch(nn.Module):
    """A network for one batch size: the batch is part of a shape that is written as a number."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.last, self.rows = nn.Linear(1024, 1024), nn.Linear(1024, 1024), rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)).reshape(self.rows, 1024))


def test_a_file_that_takes_too_long_is_verified_by_one_for_a_smaller_input(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = 10_000  # 21 billion multiplications
    model, x = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).eval(), torch.randn(rows, 1024)
    narrow = quantize(model, x[:4], QuantConfig.weight_only("int8", None), target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x)
    result = scalepoint.verify(path, narrow, x, float_path=path)
    assert result.holds
    assert not result.is_run
    assert result.float_size == result.size
    assert result.sqnr > 40
    assert "21.0 billion multiplications" in result.message
    assert "smaller inputs (1x1024) was run" in result.message
    assert (result.path, result.size) == (str(path), COREAI.about(path).size)
    name = next(name for name in read_program(path).constants if name.endswith(".codes"))
    changed = edited(tmp_path / "changed.aimodel", partial(with_changed_byte, name), path)
    assert not scalepoint.verify(changed, narrow, x).holds


def test_a_file_that_takes_too_long_and_has_one_size_is_not_verified(tmp_path: Path) -> None:
    rows = 10_000
    model, x = WithoutBatch(rows).eval(), torch.randn(rows, 1024)
    config = QuantConfig.weight_only("int8", None)
    with pytest.warns(UserWarning, match="fixed at 10000"):
        narrow = quantize(model, x, config, target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x)
    result = scalepoint.verify(path, narrow, x, float_path=path)
    assert result.status == Status.NOT_VERIFIED
    assert not result.is_refuted
    assert result.float_size == result.size
    assert "billion multiplications" in result.message
    assert "nor was it verified by a file for smaller inputs" in result.message


CHILD = """
import os
import runpy
import time

CHILD = runpy.run_path({child!r})


class File(CHILD["File"]):
    def run(self, feeds):
        (value,) = feeds.values()
        action = {actions!r}.get(value.shape[1], "run")
        if action == "refuse" or action.startswith(f"refuse {{len(value)}}"):
            raise CHILD["TooSlowError"]("it has too many multiplications")
        if action == "fail":
            raise RuntimeError("it cannot be compiled")
        if action == "crash":
            os.abort()
        if action == "wait":
            time.sleep(60)
        outputs = super().run(feeds)
        return [(name, array * (-1 if action.endswith("negate") else 1)) for name, array in outputs]
"""


def verified_with_actions(
    actions: dict[int, str], folder: Path, model: nn.Module | None = None, batch: int = 1
) -> Verification:
    """Verify a small file in a runtime that does something else for inputs of some lengths."""
    torch.manual_seed(0)
    model, x = model or nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(batch, 64, 16)
    config = QuantConfig.weight_only("int8", None)
    narrow = quantize(model.eval(), x, config, target="coreai", freeze_weights=True)
    runtime = find_runtime("coreai")
    (folder / "child.py").write_text(CHILD.format(child=str(runtime.child), actions=actions))
    runtime = replace(runtime, child=folder / "child.py")
    return scalepoint.verify(export(narrow, folder / "m.aimodel", x), narrow, x, runtime=runtime, seconds=15)


@pytest.mark.parametrize("action", ["fail", "crash", "wait"])
def test_a_smaller_file_that_does_not_run_says_nothing_about_the_file(action: str, tmp_path: Path) -> None:
    result = verified_with_actions({64: "refuse", 32: action}, tmp_path)
    assert result.holds
    assert "smaller inputs (1x16x16) was run" in result.message


def test_a_file_is_not_verified_if_no_smaller_one_runs(tmp_path: Path) -> None:
    result = verified_with_actions({64: "refuse", 32: "fail", 16: "fail", 8: "crash"}, tmp_path)
    assert result.status == Status.NOT_VERIFIED
    assert not result.is_refuted
    for reason in ("1x32x16: failed", "it cannot be compiled", "1x16x16: failed", "1x8x16: crashed"):
        assert reason in result.message


def test_smaller_files_that_all_disagree_refute_the_file(tmp_path: Path) -> None:
    result = verified_with_actions({64: "refuse", 32: "negate", 16: "negate", 8: "fail"}, tmp_path)
    assert result.is_refuted
    assert result.status == Status.OK
    assert "smaller inputs (1x32x16) was run" in result.message


@pytest.mark.parametrize(
    "actions",
    [{32: "negate"}, {32: "fail", 16: "fail", 8: "negate"}],
    ids=["another size agrees", "only the smallest size runs"],
)
def test_one_cropped_size_that_disagrees_does_not_refute_the_file(actions: dict[int, str], tmp_path: Path) -> None:
    result = verified_with_actions({64: "refuse", **actions}, tmp_path)
    assert result.status == Status.NOT_VERIFIED
    assert not result.is_refuted
    assert "16: it agrees with the simulation to -" in result.message


def test_one_whole_sample_that_disagrees_refutes_the_file(tmp_path: Path) -> None:
    result = verified_with_actions({64: "refuse 2, negate"}, tmp_path, batch=2)
    assert result.is_refuted
    assert "smaller inputs (1x64x16) was run" in result.message


class ReadsToken(nn.Module):
    """A model that cannot run with fewer than 61 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, 60]


def test_a_file_of_a_model_that_reads_a_later_token_is_not_verified(tmp_path: Path) -> None:
    result = verified_with_actions({64: "refuse"}, tmp_path, ReadsToken())
    assert result.status == Status.NOT_VERIFIED
    assert "1x32x16: " in result.message


def test_weights_take_the_space_of_their_bits(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    configs = {
        8: QuantConfig.weight_only("int8", None),
        2: QuantConfig.weight_only("int2", None),
        3: QuantConfig.palettes(3),
    }
    for bits, config in configs.items():
        narrow = quantize(model, x, config, target="coreai", freeze_weights=True)
        path = export(narrow, tmp_path / f"{bits}.aimodel", x)
        assert (path / PROGRAM_FILE).stat().st_size == pytest.approx(2 * 256 * 256 * bits / 8, abs=6000)
        assert COREAI.compare(path, narrow) == []


def test_a_changed_code_scale_or_zero_point_is_found_and_named(tmp_path: Path) -> None:
    path, model = exported()
    for name, what in (
        ("layer.4_5.stored_conv.codes", "4_5.stored_conv: 1 of 1152 codes differ in the file"),
        ("layer.4_5.stored_conv.scale", "4_5.stored_conv: 1 of 32 scales differ in the file"),
        ("layer.input_quant.zero_point", "input_quant: 1 of 1 zero points differ in the file"),
    ):
        changed = edited(tmp_path / f"{name}.aimodel", partial(with_changed_byte, name), path)
        (difference,) = COREAI.compare(changed, model)
        assert difference.startswith(what)
        result = scalepoint.verify(changed, model, pictures(), layers=False)
        assert not result.holds
        with raises(VerificationError, "differs from the model", what.partition(":")[0]):
            result.check()


def test_codes_that_are_read_with_the_scale_of_another_layer_are_found(tmp_path: Path) -> None:
    model = quantize(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(2, 8),
        QuantConfig.weight_only("int8", None), target="coreai", freeze_weights=True,
    )  # fmt: skip
    path = export(model, tmp_path / "m.aimodel", torch.randn(2, 8))

    def swap_scales(program: ProgramText) -> ProgramText:
        names = [name for name in program.constants if name.endswith(".scale")]
        swapped = {f"<{names[0]}>": f"<{names[1]}>", f"<{names[1]}>": f"<{names[0]}>"}
        lines = tuple(
            next((line.replace(old, new) for old, new in swapped.items() if old in line), line)
            for line in program.lines
        )
        return replace(program, lines=lines)

    differences = COREAI.compare(edited(tmp_path / "swapped.aimodel", swap_scales, path), model)
    assert len(differences) == 2
    assert all("no operation of the file reads all of its constants" in difference for difference in differences)


def test_the_first_layer_whose_codes_differ_from_the_simulation_is_named(tmp_path: Path) -> None:
    path, model = exported()
    assert set(COREAI.about(path).quantizers) >= {"input_quant/QuantizeLinear", "4_5_quant/QuantizeLinear"}
    assert scalepoint.verify(path, model, pictures()).departure is None
    changed = edited(tmp_path / "m.aimodel", partial(with_halved_constant, "layer.4_5_quant.scale"), path)
    result = scalepoint.verify(changed, model, pictures())
    assert result.departure is not None
    assert result.departure.where == "4_5_quant"


def with_halved_constant(name: str, program: ProgramText) -> ProgramText:
    halved = np.frombuffer(bytes.fromhex(program.constants[name]), np.float16) / 2
    digits = halved.astype(np.float16).tobytes().hex().upper()
    return replace(program, constants={**program.constants, name: digits})


@pytest.mark.parametrize(
    ("config", "constant"), [("weights int4 per channel", "scale"), ("palettes of 3 bits per group", "tables")]
)
def test_the_first_layer_of_a_weight_only_file_whose_product_differs_is_named(
    config: str, constant: str, tmp_path: Path
) -> None:
    path, model = exported(config)
    layers = simulate_products(model, ((pictures(),), {}))
    assert set(find_products(read_program(path))) == {
        product_name(name.rpartition(".")[0] + ".stored_" + name.rpartition(".")[2]) for name in layers
    }
    assert len(layers) == 3
    assert scalepoint.verify(path, model, pictures()).departure is None
    edit = partial(with_halved_constant, f"layer.4_5.stored_conv.{constant}")
    result = scalepoint.verify(edited(tmp_path / "m.aimodel", edit, path), model, pictures())
    assert result.departure is not None
    assert result.departure.where == "4_5.conv"
    assert "4_5.conv" in str(result)


def test_the_products_of_a_convolution_without_a_batch_are_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU()).eval(), torch.randn(3, 20)
    config = QuantConfig.weight_only("int8", None)
    with pytest.warns(UserWarning, match="fixed at 3"):
        narrow = quantize(model, x, config, target="coreai", freeze_weights=True)
    result = scalepoint.verify(export(narrow, tmp_path / "m.aimodel", x), narrow, x)
    assert result.holds
    assert result.departure is None
    (product,) = simulate_products(narrow, ((x,), {})).values()
    expected = torch.conv1d(x, model[0].weight).detach().numpy()
    assert np.abs(product - expected).max() < 0.02 * np.abs(expected).max()


def test_truncated_and_damaged_programs_are_reported_without_a_crash(tmp_path: Path) -> None:
    path, model = exported()
    damaged = Path(tmp_path / "m.aimodel")
    damaged.mkdir()
    for file in path.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    data = (damaged / PROGRAM_FILE).read_bytes()
    (damaged / PROGRAM_FILE).write_bytes(data[: len(data) // 2])
    (difference,) = COREAI.compare(damaged, model)
    assert "damaged" in difference
    (damaged / "main.hash").write_bytes(hashlib.sha256(data[: len(data) // 2]).digest())
    (difference,) = COREAI.compare(damaged, model)
    assert "cannot read" in difference
    result = scalepoint.verify(damaged, model, pictures())
    assert result.status in (Status.CRASHED, Status.FAILED)
    assert not result.holds
    (damaged / PROGRAM_FILE).unlink()
    with pytest.raises(StoreError, match="Core AI package"):
        COREAI.about(damaged)


WRITE = """
import sys, torch
from scalepoint import export
from tests.formats.apple.conftest import pictures, quantized
for config in ("int8", "palettes of 3 bits per group"):
    export(quantized(config, target="coreai"), f"{sys.argv[1]}/{config}.aimodel", pictures())
"""


@pytest.mark.slow
def test_three_processes_write_the_same_bytes(tmp_path: Path) -> None:
    digests = []
    for seed in ("0", "1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", WRITE, str(folder)], env=environment, check=True, capture_output=True)
        digests.append([compute_digest(path) for path in sorted(folder.iterdir())])
    assert digests[0] == digests[1] == digests[2]


def test_names_of_constants_do_not_come_from_the_process() -> None:
    path, _ = exported()
    names = read_program(path).constants
    assert names
    assert all(name.startswith(("layer.", "constant.")) for name in names)


def test_export_without_coreai_torch_says_how_to_install_it(tmp_path: Path, monkeypatch) -> None:
    model = quantized(target="coreai")
    monkeypatch.setitem(sys.modules, "coreai_torch", None)
    with pytest.raises(ExportError, match=r"pip install 'scalepoint\[coreai\]'"):
        export(model, tmp_path / "m.aimodel", pictures())
    assert not (tmp_path / "m.aimodel").exists()


GRANULARITIES = {
    "tensor": PerTensorGranularity(),
    "channel": PerChannelGranularity(),
    "input channel": PerChannelGranularity(axis=1),
    "blocks of inputs": PerBlockGranularity(block_size=8),
    "blocks of outputs": PerBlockGranularity(axis=0, block_size=8),
    "tiles": PerBlockGranularity(block_size=(4, 2, -1, -1)),
}
INTEGERS = ("int8", "int4", "int2", "uint8", "uint4", "uint2")
FLOATS = ("float8_e4m3fn", "float8_e5m2")
FP4, E8M0 = "float4_e2m1fn_x2", "float8_e8m0fnu"


def weight_specs() -> dict[str, QuantizationSpec]:
    """Every dtype x granularity x formulation x scale dtype of weights that Core AI stores."""
    specs = {}
    for granularity, value in GRANULARITIES.items():
        for dtype in INTEGERS:
            for formulation in ("zp", "minval"):
                specs[f"{dtype}, {granularity}, {formulation}"] = QuantizationSpec(
                    dtype=dtype, qscheme="asymmetric", qformulation=formulation, granularity=value
                )
        for dtype in FLOATS:
            specs[f"{dtype}, {granularity}"] = QuantizationSpec(dtype=dtype, granularity=value)
        for dtype in (*FLOATS, FP4):
            specs[f"{dtype}, {granularity}, e8m0 scales"] = QuantizationSpec(
                dtype=dtype, scale_dtype=E8M0, granularity=value
            )
        for dtype in ("int8", "uint8"):
            specs[f"{dtype}, {granularity}, pruned"] = ExtendedQuantizationSpec(
                dtype=dtype, qscheme="symmetric", granularity=value, sparsity="2:4"
            )
    for bits in INDEX_BITS:
        for group_size in (None, 4):
            specs[f"palette of {bits} bits, groups of {group_size}"] = palette_spec(bits, group_size)
        specs[f"palette of {bits} bits, vectors"] = palette_spec(bits, 8, cluster_dim=2)
        specs[f"palette of {bits} bits, pruned"] = palette_spec(bits, 8, sparsity=0.5)
    return specs


def activation_specs() -> dict[str, QuantizationSpec]:
    specs = {}
    for name, granularity in (("tensor", PerTensorGranularity()), ("channel", PerChannelGranularity(axis=1))):
        for dtype in ("uint8", "int8", "uint4", "int4"):
            for formulation in ("zp", "minval"):
                specs[f"{dtype}, {name}, {formulation}"] = QuantizationSpec(
                    dtype=dtype, qscheme="asymmetric", qformulation=formulation, granularity=granularity,
                    qparam_calculator_cls="global_minmax",
                )  # fmt: skip
        for dtype, scales in (*((dtype, scales) for dtype in FLOATS for scales in (None, E8M0)), (FP4, E8M0)):
            specs[f"{dtype}, {name}{', e8m0 scales' if scales else ''}"] = QuantizationSpec(
                dtype=dtype, scale_dtype=scales, granularity=granularity, qparam_calculator_cls="global_minmax"
            )
    return specs


class Branches(nn.Module):
    """A convolution for each spec, with an input and an output of its own."""

    def __init__(self, specs: dict[str, QuantizationSpec]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({re.sub(r"\W+", "_", name): nn.Conv2d(8, 16, 3) for name in specs})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: layer(x + index / 8) for index, (name, layer) in enumerate(self.layers.items())}


def check_specs(role: str, specs: dict[str, QuantizationSpec], tmp_path: Path) -> None:
    """Write one file with a layer for each spec, and run it: every output must be that of the simulation."""
    model, x = Branches(specs).eval(), torch.randn(2, 8, 6, 6)
    overrides = [
        {"name": f"layers.{name}", role: spec} for name, spec in zip(model.layers, specs.values(), strict=True)
    ]
    config = QuantConfig(activation="float" if role == "weight" else None, overrides=overrides)
    narrow = quantize(model, x, config, forward_loop=[x], target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x, float_dtype="float32")
    result = scalepoint.verify(path, narrow, x, layers=False)
    assert result.status == Status.OK, result.message
    assert result.differences == ()
    assert result.low_precision == len(specs)
    assert len(result.optimized) == len(specs)
    assert {output.output: output.sqnr for output in result.optimized if output.sqnr < 100} == {}


def test_every_weight_that_the_target_accepts_is_stored_and_runs(tmp_path: Path) -> None:
    check_specs("weight", weight_specs(), tmp_path)


def test_every_activation_that_the_target_accepts_runs(tmp_path: Path) -> None:
    check_specs("input", activation_specs(), tmp_path)


@pytest.mark.parametrize(
    ("role", "fields", "what"),
    [
        # Refused by the compiler.
        *(("weight", {"dtype": dtype}, dtype) for dtype in ("int1", "int3", "int5", "int6", "int7", "int16")),
        *(("weight", {"dtype": dtype}, dtype) for dtype in ("uint1", "uint3", "uint6", "uint16")),
        *(("activation", {"dtype": dtype}, dtype) for dtype in ("int2", "uint2", "int3", "int6", "int16", "uint16")),
        ("activation", {"dtype": "int8", "granularity": PerBlockGranularity(axis=1, block_size=4)}, "per_block"),
        ("activation", {"dtype": FP4, "scale_dtype": "float8_e4m3fn"}, "float8_e4m3fn scales"),
        # The runtime ends its process.
        ("weight", {"dtype": FP4, "scale_dtype": "float8_e4m3fn"}, "float8_e4m3fn scales"),
        # The operation clips to the whole range of the dtype.
        ("activation", {"dtype": "int8", "qscheme": "symmetric_with_clipping"}, "symmetric_with_clipping"),
        # Statistics of one axis; only symmetric ones are written.
        ("activation", {"dtype": "int8", "qparam_calculator_cls": "dynamic"}, "dynamic"),
    ],
)
def test_what_core_ai_does_not_run_is_refused_before_any_work(role: str, fields: dict, what: str) -> None:
    calls: list[torch.Tensor] = []
    spec = ExtendedQuantizationSpec(**fields)
    config = QuantConfig(activation="float", weight=spec) if role == "weight" else QuantConfig(activation=spec)
    with raises(TargetError, "'coreai'", what, role):
        quantize(net(), pictures(), config, forward_loop=calls.append, target="coreai")
    assert calls == []


def test_rows_of_activations_get_their_scales_at_run_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval(), torch.randn(2, 5, 32)
    x[0, 1] = 0  # a row whose scale would be zero
    spec = QuantizationSpec(
        dtype="int8", qscheme="symmetric", granularity=PerTokenGranularity(), qparam_calculator_cls="dynamic"
    )
    narrow = quantize(model, x, QuantConfig(activation=spec), forward_loop=[x], target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x, float_dtype="float32")
    result = scalepoint.verify(path, narrow, 7 * x)
    assert result.executed["symmetric_quantization_statistics"] == 2
    assert result.differences == ()
    assert result.sqnr > 45


def test_pruned_weights_are_stored_without_their_zeros(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    weight = {"n_bits": 8, "per_channel": True, "sparsity": "2:4"}
    narrow = quantize(model, x, QuantConfig(activation="float", weight=weight), target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x)
    assert (path / PROGRAM_FILE).stat().st_size == pytest.approx(2 * 256 * 256 * 5 / 8, abs=6000)
    result = scalepoint.verify(path, narrow, x)
    assert result.executed["sparse_with_bitmask_to_dense"] == 2
    assert result.differences == ()
    assert result.sqnr > 50
    mask = next(name for name in read_program(path).constants if name.endswith(".mask"))
    changed = edited(tmp_path / "changed.aimodel", partial(with_moved_bit, mask), path)
    assert any("mask bits differ" in difference for difference in COREAI.compare(changed, narrow))


def test_pruned_palettes_store_the_indices_of_kept_weights_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    config = QuantConfig.palettes(4, sparsity="2:4")
    narrow = quantize(model, x, config, target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x)
    assert (path / PROGRAM_FILE).stat().st_size == pytest.approx(2 * 256 * 256 * 3 / 8, abs=6000)
    assert bits_per_weight(narrow).bpw == pytest.approx(3, abs=0.01)
    result = scalepoint.verify(path, narrow, x)
    assert result.executed["lut_to_sparse_with_bitmask"] == 2
    assert result.low_precision == 2
    assert result.differences == ()
    assert result.sqnr > 50
    mask = next(name for name in read_program(path).constants if name.endswith(".mask"))
    changed = edited(tmp_path / "changed.aimodel", partial(with_moved_bit, mask), path)
    assert any("mask bits differ" in difference for difference in COREAI.compare(changed, narrow))


@pytest.mark.parametrize(
    "config",
    [
        QuantConfig.palettes(4, sparsity=0.999),
        QuantConfig(activation="float", weight={"n_bits": 8, "per_channel": True, "sparsity": 0.999}),
    ],
    ids=["palette", "int8"],
)
def test_a_layer_whose_weights_are_all_pruned_is_stored_and_runs(config: QuantConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval(), torch.randn(2, 16)
    narrow = quantize(model, x, config, target="coreai", freeze_weights=True)  # 0.256 of 256 weights stay: none
    result = scalepoint.verify(export(narrow, tmp_path / "m.aimodel", x), narrow, x)
    assert result.status == Status.OK, result.message
    assert result.differences == ()
    assert result.sqnr > 50


def test_a_vector_palette_has_one_index_for_two_channels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(1, 256)
    narrow = quantize(model, x, QuantConfig.palettes(4, cluster_dim=2), target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x)
    assert (path / PROGRAM_FILE).stat().st_size == pytest.approx(2 * 256 * 256 * 2 / 8, abs=6000)
    result = scalepoint.verify(path, narrow, x)
    assert result.low_precision == 2
    assert result.differences == ()
    assert result.sqnr > 50
    tables = next(name for name in read_program(path).constants if name.endswith(".tables"))
    changed = edited(tmp_path / "changed.aimodel", partial(with_changed_byte, tables), path)
    assert any("entries differ" in difference for difference in COREAI.compare(changed, narrow))


STEPS_WITH_A_CACHE = """
import asyncio, os, pathlib, sys
import coreai_torch, numpy, torch
from coreai.authoring.asset import AIModelAsset
from coreai.runtime import NDArray


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 2, 4, 8, dtype=torch.int8))

    def forward(self, k, position):
        self.cache.index_copy_(2, position, (k / 0.05).round().clamp(-128, 127).to(torch.int8))
        return (self.cache.to(torch.float32) * 0.05).sum(-1)


async def run(path):
    state, expected = {"cache": NDArray(numpy.zeros((1, 2, 4, 8), numpy.int8))}, Cache()
    async with AIModelAsset.load(path).executable() as model:
        function = model.load_function("main")
        for step in range(2):
            k = torch.randn(1, 2, 1, 8)
            feeds = {"k": NDArray(k.numpy()), "position": NDArray(numpy.array([step], numpy.int32))}
            (output,) = (await function(feeds, state)).values()
            assert numpy.allclose(output.numpy(), expected(k, torch.tensor([step])))
        assert expected.cache[:, :, :2].any() and numpy.array_equal(state["cache"].numpy(), expected.cache)


program = torch.export.export(Cache(), (torch.randn(1, 2, 1, 8), torch.tensor([1])))
converter = coreai_torch.TorchConverter()
converter.add_exported_program(
    program.run_decompositions(coreai_torch.get_decomp_table()), input_names=["k", "position"], state_names=["cache"]
)
converter.to_coreai().save_asset(pathlib.Path(sys.argv[1]))
asyncio.run(run(sys.argv[1]))
print("both steps are equal", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_the_runtime_keeps_an_int8_cache_as_state(tmp_path: Path) -> None:
    """What docs/targets/coreai.md says about caches; scalepoint itself writes no state."""
    command = [sys.executable, "-c", STEPS_WITH_A_CACHE, str(tmp_path / "m.aimodel")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "both steps are equal" in result.stdout, result.stderr


def with_moved_bit(name: str, program: ProgramText) -> ProgramText:
    """Swap the first 0 and the first 1 of a mask, so that it still fits the number of values."""
    data = np.unpackbits(np.frombuffer(bytes.fromhex(program.constants[name]), np.uint8), bitorder="little")
    zero, one = int(np.argmin(data)), int(np.argmax(data))
    data[zero], data[one] = 1, 0
    digits = np.packbits(data, bitorder="little").tobytes().hex().upper()
    return replace(program, constants={**program.constants, name: digits})


def test_palettes_and_int8_activations_are_one_file(tmp_path: Path) -> None:
    x = pictures()
    config = QuantConfig(weight=palette_spec(4, 8))
    narrow = quantize(net(), x, config, forward_loop=[x], target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x)
    result = scalepoint.verify(path, narrow, x)
    assert (result.executed["lut_to_dense"], result.executed["quantize"]) == (3, 5)
    assert result.differences == ()
    assert result.sqnr > 40


@pytest.mark.parametrize(
    ("preset", "operation"),
    [(COREAI_MACOS, "blockwise_shift_scale"), (COREAI_IOS, "lut_to_dense")],
    ids=["macos", "ios"],
)
def test_a_hugging_face_folder_is_deployed_with_the_presets_for_language_models(
    preset: QuantConfig, operation: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    done = scalepoint.deploy(
        model, {"input_ids": torch.randint(0, 256, (1, 12))}, [], target="coreai", config=preset,
        output=tmp_path / "out", progress=False,
    )  # fmt: skip
    assert done.verification.differences == ()
    assert done.verification.sqnr > 40
    has_codes_in_table = operation == "blockwise_shift_scale"
    assert done.verification.executed[operation] == 2 * 7 + 1 + has_codes_in_table


def test_named_axes_are_free_and_all_others_fixed(tmp_path: Path) -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval(),
        torch.randn(1, 3, 12, 8),
    )
    done = scalepoint.deploy(
        model, x, [x], target="coreai", output=tmp_path / "out", dynamic_axes={"input": {0: "many", 2: "height"}},
        progress=False,
    )  # fmt: skip
    assert [value.shape for value in COREAI.about(done.path).inputs] == [(None, 3, None, 8)]
    assert done.verification.resized.sqnr > 30
    assert scalepoint.verify(done.path, done.model, torch.randn(3, 3, 20, 8)).sqnr > 30


def test_unsupported_configs_are_rejected_before_any_work() -> None:
    with raises(TargetError, "'coreai'", "float4_e2m1fn_x2 with float8_e4m3fn scales"):  # the runtime ends its process
        quantize(net(), pictures(), QuantConfig(activation="float", weight=NVFP4.weight), target="coreai")
    with raises(TargetError, "'coreai'", "per_token_block as activation"):
        quantize(net(), pictures(), MXFP4, target="coreai")
    with raises(TargetError, "'coreai'", "float6"):
        quantize(net(), pictures(), QuantConfig(weight=QuantizationSpec(dtype="float6_e2m3fn")), target="coreai")


def test_upsampling_keeps_its_float32_operands_in_a_float16_file(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=1.5, mode="bilinear")).eval(), pictures()
    narrow = quantize(model, x, QuantConfig.weight_only("int8", None), target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x)
    result = scalepoint.verify(path, narrow, x)
    assert result.sqnr > 40, result.message


class Rare(nn.Module):
    """Operations that coreai-torch does not convert."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {
            "elu": nn.functional.elu(y, 0.5),
            "remainder": y % 0.75,
            "variance": torch.var(y, -1, correction=1),
            "deviation": y.std(0),
            "sorted": torch.sort(y, -1, descending=True)[0],
            "ascending": y.sort(0)[0],
        }

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)


class Spectrum(Rare):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.linear(x)).abs()


def test_operations_that_the_converter_lacks_are_decomposed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Rare().eval(), torch.randn(4, 16)
    narrow = quantize(model, x, QuantConfig.weight_only("int8", None), target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x, float_dtype="float32")
    result = scalepoint.verify(path, narrow, x)
    assert len(result.optimized) == 6
    assert result.sqnr > 60


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_as_steps(layer: type[nn.RNNBase], tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer(8, 16, bidirectional=True, batch_first=True), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x)[0])

    torch.manual_seed(0)
    model, x = Recurrent().eval(), torch.randn(2, 3, 8)
    narrow = quantize(model, x, QuantConfig.weight_only("int8", None), target="coreai", freeze_weights=True)
    path = export(narrow, tmp_path / "m.aimodel", x, float_dtype="float32")
    assert scalepoint.verify(path, narrow, x).sqnr > 100


class Warped(Rare):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = self.linear(x).reshape(-1, 4, 2, 2)
        return nn.functional.grid_sample(x.reshape(-1, 1, 4, 4), grid, align_corners=False)


@pytest.mark.parametrize(("kind", "name"), [(Spectrum, "fft"), (Warped, "grid_sampler")])
def test_an_operation_that_cannot_be_written_is_named_with_its_line_before_calibration(
    kind: type[nn.Module], name: str, tmp_path: Path
) -> None:
    calls: list[torch.Tensor] = []
    with raises(TargetError, name, "test_coreai.py:", "'coreai'", "other operations"):
        scalepoint.deploy(kind().eval(), torch.randn(4, 16), calls.append, target="coreai", output=tmp_path / "out")
    assert calls == []


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("kind", ["int", "uint"])
def test_codes_of_every_width_are_packed_and_read_back(kind: str, bits: int) -> None:
    low = -(2 ** (bits - 1)) if kind == "int" else 0
    codes = torch.arange(low, low + 2**bits).repeat(3)[: 3 * 2**bits - 1].to(torch.int8 if low else torch.uint8)
    data = to_bytes(codes, f"{kind}{bits}")
    assert len(data) == -(-len(codes) * bits // 8)
    assert np.array_equal(from_bytes(data, f"{kind}{bits}", codes.shape), codes.numpy())


def test_bytes_that_several_constants_share_are_converted_once() -> None:
    data = np.array([1.5, -2.0], np.float16).tobytes().hex().upper()
    program = ProgramText(
        (
            "module {",
            "    %0 = coreai.constant dense_resource<a> : tensor<2xf16>",
            "    %1 = coreai.constant dense_resource<a> : tensor<2xf16>",
            "    %2 = coreai.constant dense_resource<a> : tensor<2xui16>",
        ),
        {"a": data},
    )
    wide = convert_floats(program, "f16", "f32", keeps_interface=False)
    assert wide.lines[1] == "    %0 = coreai.constant dense_resource<a.f32> : tensor<2xf32>"
    assert wide.lines[3] == program.lines[3]
    assert np.frombuffer(bytes.fromhex(wide.constants["a.f32"]), np.float32).tolist() == [1.5, -2.0]
    assert wide.constants["a"] == data


def test_conversion_to_float16_rounds_and_the_way_back_is_exact() -> None:
    values = np.array([0.1, -1.5, 1e-7, 7e4, np.inf, np.nan, 0.0], np.float32)
    inline = "[1.000000e-01, -1.500000e+00, 1.000000e-07, 7.000000e+04, 0x7F800000, 0x7FC00000, 0.000000e+00]"
    program = ProgramText(
        (
            "module {",
            f"    %0 = coreai.constant dense<{inline}> : tensor<7xf32>",
            f'    %1 = coreai.constant dense<"0x{values.tobytes().hex().upper()}"> : tensor<7xf32>',
            "    %2 = coreai.constant dense_resource<a> : tensor<7xf32>",
            "    %3 = coreai.constant dense<[1, 2]> : tensor<2xui32>",
        ),
        {"a": values.tobytes().hex().upper()},
    )
    half = convert_floats(program, "f32", "f16", keeps_interface=False)
    expected = np.array([0.1, -1.5, 1e-7, 65504, np.inf, np.nan, 0.0]).astype(np.float16)
    assert np.array_equal(np.frombuffer(bytes.fromhex(half.constants["a"]), np.float16), expected, equal_nan=True)
    assert half.lines[2].count(expected.tobytes().hex().upper()) == 1
    assert half.lines[4] == program.lines[4]
    wide = convert_floats(half, "f16", "f32", keeps_interface=False)
    back = np.frombuffer(bytes.fromhex(wide.constants["a"]), np.float32)
    assert np.array_equal(back, expected.astype(np.float32), equal_nan=True)
    numbers = wide.lines[1].partition("[")[2].partition("]")[0].split(", ")
    assert np.array(numbers[:4], np.float32).tolist() == expected[:4].astype(float).tolist()
    assert numbers[4] == "0x7F800000"
