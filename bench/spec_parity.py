"""The arithmetic of scalepoint.spec next to that of coreai_opt.quantization.spec on the same tensors.

    PYTHONPATH=FOLDER python bench/spec_parity.py [--show 20]

FOLDER contains the unpacked wheel of coreai-opt 0.3.0 (`pip download --no-deps coreai-opt==0.3.0`); it needs torchao.

A case is a spec, a target (weight or activation), a kind of data and a dtype of the tensors. Both libraries observe
the same three batches. Scale, zero point, minval, codes, output and gradient are compared for equality. Counted apart:
specs that only one of them refuses; and tensors of float16, bfloat16 and float64, for which coreai-opt computes scales
in the dtype of the tensor and scalepoint in float32. Anything else that differs is an error (exit code 1).

The second table compares the accuracy with such tensors: normal data of 64 x 64, ten seeds, all formats, per tensor,
per channel and in blocks of 4. "ratio" is the squared error of scalepoint over that of coreai-opt, +- its standard
error.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from measure import publish
from scalepoint import spec as ours

OUT = Path(__file__).parents[1] / "out" / "spec_parity.json"
E8M0 = "float8_e8m0fnu"
INTEGERS = ("int8", "int4", "int2", "uint8", "uint4", "uint2")
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
SCHEMES = ("symmetric", "symmetric_with_clipping", "asymmetric")
FORMULATIONS = ("zp", "minval")
CALCULATORS = ("static", "moving_average", "global_minmax", "dynamic", "default")
GRANULARITIES: tuple[dict[str, Any], ...] = (
    {"type": "per_tensor"},
    {"type": "per_channel", "axis": 0},
    {"type": "per_channel", "axis": -1},
    {"type": "per_block", "axis": 0, "block_size": 4},
    {"type": "per_block", "axis": 1, "block_size": 4},
    {"type": "per_block", "axis": -1, "block_size": 4},
    {"type": "per_block", "axis": 2, "block_size": 4},
    {"type": "per_block", "block_size": (2, 4)},
)
FLOAT_RANGES = ((-1.0, 1.0), (None, 0.5), (-0.75, None), (0.0, 2.0), (-3.0, 0.0))
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
BATCHES, SEEDS = 3, 10
SHAPE = (4, 8)


def uniform(generator: torch.Generator, low: float, high: float, shape: tuple[int, ...]) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


DATA: dict[str, Callable[[torch.Generator, tuple[int, ...]], Tensor]] = {
    "normal": lambda g, shape: torch.randn(shape, generator=g),
    "zeros": lambda g, shape: torch.zeros(shape),
    "tiny": lambda g, shape: 1e-9 * torch.randn(shape, generator=g),
    "denormal": lambda g, shape: 1e-40 * torch.randn(shape, generator=g),
    "huge": lambda g, shape: 1e30 * torch.randn(shape, generator=g),
    "positive": lambda g, shape: uniform(g, 0.5, 2.0, shape),
    "negative": lambda g, shape: uniform(g, -2.0, -0.5, shape),
    "outlier": lambda g, shape: (
        torch.randn(shape, generator=g) * torch.where(torch.rand(shape, generator=g) < 0.1, 50.0, 1.0)
    ),
}


@dataclass(frozen=True)
class Case:
    """One comparison. `fields` are those of the spec."""

    fields: dict[str, Any]
    target: str
    data: str = "normal"
    dtype: str = "float32"
    shape: tuple[int, ...] = SHAPE


def cases() -> Iterator[Case]:
    formats = [*product(INTEGERS, SCHEMES, FORMULATIONS), *((name, "symmetric", "zp") for name in FLOATS)]
    plain = [{"dtype": dtype, "qscheme": scheme, "qformulation": form} for dtype, scheme, form in formats]
    refused = [
        {"dtype": dtype, "qscheme": scheme, "qformulation": form}
        for dtype, scheme, form in product(FLOATS, SCHEMES, FORMULATIONS)
        if (scheme, form) != ("symmetric", "zp")
    ]
    targets = ("weight", "activation")
    for fields, granularity, calculator, target in product([*plain, *refused], GRANULARITIES, CALCULATORS, targets):
        yield Case({**fields, "granularity": granularity, "qparam_calculator_cls": calculator}, target)
    few = (GRANULARITIES[0], GRANULARITIES[1], GRANULARITIES[4])
    for fields, granularity, calculator, target in product(plain, few, ("moving_average", "global_minmax"), targets):
        for data in list(DATA)[1:]:
            yield Case({**fields, "granularity": granularity, "qparam_calculator_cls": calculator}, target, data)
    for fields, ends, calculator in product(plain, FLOAT_RANGES, CALCULATORS):
        yield Case({**fields, "float_range": list(ends), "qparam_calculator_cls": calculator}, "activation")
    for name, granularity, calculator, target in product(FLOATS, GRANULARITIES, CALCULATORS, targets):
        yield Case(
            {"dtype": name, "scale_dtype": E8M0, "granularity": granularity, "qparam_calculator_cls": calculator},
            target,
        )
    for fields, granularity, dtype in product(plain, few, DTYPES):
        yield Case(
            {**fields, "granularity": granularity, "qparam_calculator_cls": "moving_average"}, "activation", dtype=dtype
        )
    blocks = [entry for entry in GRANULARITIES if isinstance(entry.get("block_size"), int)]
    for fields, granularity, target in product(plain, blocks, targets):
        spec = {**fields, "granularity": granularity, "qparam_calculator_cls": "static"}
        yield Case(spec, target, shape=(4, 8, 4, 4))


@dataclass(frozen=True)
class Result:
    """What a library computed: None for a spec that it refuses."""

    values: dict[str, Tensor | None]
    batch: Tensor

    @property
    def error(self) -> float:
        """Squared error of the output against the given tensor."""
        output = self.values["output"]
        assert output is not None  # always computed
        return float((output - self.batch).square().sum())


def run(library: Any, target: Any, case: Case, seed: int = 0) -> Result | None:
    """Observe three batches of a case, and quantize the last one."""
    generator = torch.Generator().manual_seed(seed)
    batches = [DATA[case.data](generator, case.shape).to(DTYPES.get(case.dtype, torch.float32)) for _ in range(BATCHES)]
    try:
        spec = library.QuantizationSpec(**case.fields)
        quantizer = library.QuantizationComponentFactory.create_fake_quantizer(spec, target(case.target))
        for batch in batches:
            tensor = batch.clone().requires_grad_()
            output = quantizer(tensor)
        if quantizer.is_disabled():
            return None
        calculator = quantizer.qparams_calculator
        scale, zero_point, minval = calculator(batches[-1]) if is_dynamic(case) else calculator.get_qparams()
        codes = quantizer.quantize(batches[-1], scale, zero_point, minval)
    except (ValueError, NotImplementedError, RuntimeError, IndexError):
        return None
    (gradient,) = torch.autograd.grad(output.float().sum(), tensor)
    names = ("scale", "zero_point", "minval", "codes", "output", "gradient")
    values = dict(zip(names, (scale, zero_point, minval, codes, output, gradient), strict=True))
    return Result(
        {name: None if value is None else value.detach().double() for name, value in values.items()},
        batches[-1].double(),
    )


def is_dynamic(case: Case) -> bool:
    return bool(case.fields.get("qparam_calculator_cls") == "dynamic")


def differing(first: Result, second: Result) -> list[str]:
    """Return the names of the values that are not equal."""
    names = []
    for name, value in first.values.items():
        other = second.values[name]
        is_equal = value is other is None
        if value is not None and other is not None:
            is_equal = torch.equal(value.nan_to_num(), other.nan_to_num())
        if not is_equal:
            names.append(name)
    return names


@dataclass
class Row:
    """A number of cases with one outcome."""

    outcome: str
    count: int
    holds: bool = True

    @property
    def name(self) -> str:
        return self.outcome


def compare(theirs: Any, their_target: Any, show: int) -> tuple[list[Row], list[str]]:
    """Compare all cases. Returns the rows, and lines about cases that differ without a documented reason."""
    counts: Counter[str] = Counter()
    surprises: list[str] = []
    for case in cases():
        ours_result, their_result = run(ours, ours.CompressionTargetTensor, case), run(theirs, their_target, case)
        if ours_result is None or their_result is None:
            both = ours_result is None and their_result is None
            reason = "both" if both else "scalepoint" if ours_result is None else "coreai-opt"
            if reason == "coreai-opt" and not is_dynamic(case):
                reason += ", not dynamic"
                surprises.append(f"refused by coreai-opt alone: {case}")
            if reason == "scalepoint":
                surprises.append(f"refused by scalepoint alone: {case}")
            counts[f"refused by {reason}"] += 1
            continue
        names = differing(ours_result, their_result)
        if not names:
            counts["equal in everything"] += 1
        elif case.dtype != "float32":
            counts[f"other numbers, tensors of {case.dtype}"] += 1
        else:
            counts["other numbers, tensors of float32"] += 1
            surprises.append(f"{', '.join(names)} differ: {case}")
    rows = [Row(outcome, count, outcome in DOCUMENTED or "float32" not in outcome) for outcome, count in counts.items()]
    return rows, surprises[:show] + ([f"... {len(surprises) - show} more"] if len(surprises) > show else [])


@dataclass(frozen=True)
class AccuracyRow:
    """The accuracy of a format with tensors of one dtype."""

    dtype: str
    format: str
    granularity: str
    ratio: float
    standard_error: float
    holds: bool = True

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.format} {self.granularity}"


def accuracy(theirs: Any, their_target: Any, dtype: str) -> Iterator[AccuracyRow]:
    formats = [*product(INTEGERS, SCHEMES), *((name, "symmetric") for name in FLOATS)]
    for (name, scheme), granularity in product(formats, (GRANULARITIES[0], GRANULARITIES[2], GRANULARITIES[4])):
        fields = {"dtype": name, "qscheme": scheme, "granularity": granularity, "qparam_calculator_cls": "static"}
        case = Case(fields, "weight", dtype=dtype, shape=(64, 64))
        ratios = []
        for seed in range(SEEDS):
            results = run(ours, ours.CompressionTargetTensor, case, seed), run(theirs, their_target, case, seed)
            assert results[0] is not None  # no such spec is refused
            assert results[1] is not None
            ratios.append(results[0].error / results[1].error)
        values = torch.tensor(ratios, dtype=torch.float64)
        spread = float(values.std() / len(values) ** 0.5)
        yield AccuracyRow(dtype, f"{name} {scheme}", granularity["type"], float(values.mean()), spread)


DOCUMENTED = ("equal in everything", "refused by both", "refused by coreai-opt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--show", type=int, default=10, help="lines about cases that differ without a documented reason"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        from coreai_opt.config.spec import CompressionTargetTensor  # noqa: PLC0415  # optional
        from coreai_opt.quantization import spec as theirs  # noqa: PLC0415
    except ModuleNotFoundError as error:
        parser.error(f"{error}: unpack the wheel of coreai-opt 0.3.0 and put its folder on PYTHONPATH")
    rows, surprises = compare(theirs, CompressionTargetTensor, options.show)
    table = Table(title=f"{sum(1 for _ in cases())} cases")
    for column in ("outcome", "cases"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.outcome, str(row.count))
    holds = publish(table, rows, OUT)
    for line in surprises:
        print(line)
    accuracy_rows = [row for dtype in DTYPES for row in accuracy(theirs, CompressionTargetTensor, dtype)]
    table = Table(title="accuracy with other dtypes, where it differs by more than 1 %")
    for column in ("tensors of", "format", "granularity", "ratio", "+-"):
        table.add_column(column)
    for line in accuracy_rows:
        if abs(line.ratio - 1) > 0.01:
            table.add_row(line.dtype, line.format, line.granularity, f"{line.ratio:.3f}", f"{line.standard_error:.3f}")
    publish(table, accuracy_rows, OUT.with_name("spec_accuracy.json"))
    return int(not holds or bool(surprises))


if __name__ == "__main__":
    sys.exit(main())
