"""Reports made up for the tests: an ordinary one, a bare one, a large one, one with names meant to break things."""

import math
import random
from dataclasses import replace

from scalepoint.operation_coverage import Coverage, CoverageRow, OperationState
from scalepoint.report import GraphNode, Report, Reproduction
from scalepoint.results import (
    FrontPoint,
    LayerError,
    LayerPrecision,
    PrecisionAllocation,
    PrecisionChange,
    Score,
    TensorHistogram,
    TrialSummary,
    TunedLayer,
    TuneReport,
)
from scalepoint.verification import Agreement, Benchmark, Departure, LayerTime, Status, Verification

LOW = "w int8 per_channel, x uint8"
CREATED = "2026-11-16T03:00:00+00:00"
EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "</script><script>document.title='owned'</script>",
    "'onmouseover='alert(1)",
    "[bold red]markup[/bold red] [link=x]",
    "שלום.עולם",
    "right\u202eto-left",
    "new\nline\ttab\x1b[31m\x00",
    "long." * 2000,
    "line\u2028separator\u2029 & &amp; <!--",
    "half a pair \ud800",
    "{{ 7 * 7 }} ${7*7}",
    "",
)


def operation(
    name: str, kind: str = "conv2d", macs: int | None = 1_000_000, parameters: int = 9216, **other
) -> CoverageRow:
    values = {"state": OperationState.QUANTIZED, "how": LOW, "reason": "", "is_asked": False} | other
    return CoverageRow(
        name, kind, values["state"], values["how"], values["reason"], parameters, macs, values["is_asked"]
    )


def float_row(name: str, reason: str, kind: str = "layer_norm", macs: int | None = 20_000, is_asked: bool = False):
    return operation(name, kind, macs, 384, state=OperationState.FLOAT, how="", reason=reason, is_asked=is_asked)


def verification(ratio: float = 1.87, sqnr: float = 41.3) -> Verification:
    return Verification(
        "out/model.onnx",
        "onnxruntime",
        Status.OK,
        "",
        (Agreement("logits", sqnr, 0.043, 0.998),),
        (Agreement("logits", math.inf, 0.0, 1.0),),
        {"QLinearConv": 20, "QGemm": 1, "QLinearAdd": 8, "MaxPool": 1, "Softmax": 1, "Conv": 1},
        21,
        ("layer4.1.conv2 (Conv)",),
        None,
        11_830_000,
        46_750_000,
        Benchmark(ratio, (0.0312, 0.0312 / ratio), 1, 50, "onnxruntime"),
        times=times(ratio),
    )


def times(ratio: float = 1.87) -> tuple[LayerTime, ...]:
    """Twelve layers, of which one is slower than in float, and a conversion."""
    rows = [
        LayerTime(
            f"layer{n // 4 + 1}.{n % 4}.conv", 2e-3 / ratio / (n + 1), 2e-3 / (n + 1), ("QLinearConv",), ("Conv",)
        )
        for n in range(10)
    ]
    rows.insert(1, LayerTime("layer2.0.downsample", 9e-4, 4e-4, ("QLinearConv", "Transpose"), ("Conv",)))
    return (*rows, LayerTime("x_quant", 1e-4, None, ("QuantizeLinear",)))


def layer_error(name: str, sqnr_db: float, *more: float | None) -> LayerError:
    """Only the error, and cosine, local and weight SQNR, saturation and so on if given."""
    return LayerError(name, "conv2d", LOW, sqnr_db, *more)


def tuned_layer(name: str, before: float, after: float, moved: float, step: str, notes: str) -> TunedLayer:
    return TunedLayer(name, "conv2d", 4096, 576, before, after, before, after, moved, step, notes, 0.5)


def bell(layer: str, kind: str, scale: float, low: float, high: float, outliers: bool = False) -> TensorHistogram:
    edges = tuple(-4 * scale + index * scale / 16 for index in range(129))
    counts = [int(40_000 * math.exp(-(((a + scale / 32) / scale) ** 2) * 1.4)) for a in edges[:-1]]
    if outliers:
        counts[-3:] = [12, 5, 31]
    if kind == "activation":
        counts = [0 if a < 0 else number for a, number in zip(edges, counts, strict=False)]
    return TensorHistogram(layer, "weight" if kind == "weight" else "input", "x_quant", edges, tuple(counts), low, high)


def resnet() -> tuple[list[CoverageRow], list[GraphNode]]:
    rows, nodes = [operation("conv1", macs=118_013_952, parameters=9408)], [GraphNode("conv1", "conv2d", ("x",), LOW)]
    nodes.append(GraphNode("maxpool", "max_pool2d", ("conv1",), "int8"))
    before = "maxpool"
    for layer in range(1, 5):
        for block in range(2):
            path = f"layer{layer}.{block}"
            for index in (1, 2):
                name = f"{path}.conv{index}"
                macs = 115_605_504 if layer > 1 or block else 57_802_752
                rows.append(operation(name, macs=macs, parameters=36_864 * 4 ** (layer - 1)))
                nodes.append(GraphNode(name, "conv2d", (before if index == 1 else f"{path}.conv1",), LOW))
            short = before
            if layer > 1 and block == 0:
                short = f"{path}.downsample.0"
                rows.append(operation(short, macs=6_422_528, parameters=8192 * 4 ** (layer - 2)))
                nodes.append(GraphNode(short, "conv2d", (before,), LOW))
            nodes.append(GraphNode(f"{path}.add", "add", (f"{path}.conv2", short), "int8"))
            before = f"{path}.add"
    rows[-1] = float_row(rows[-1].name, "raised: the drop was larger than max_drop=0.1", "conv2d", 115_605_504, True)
    rows.append(float_row("avgpool.norm", "no int8 kernel; Q/DQ around it only costs"))
    rows.append(operation("fc", "linear", 512_000, 513_000))
    nodes += [GraphNode("avgpool.norm", "layer_norm", (before,)), GraphNode("fc", "linear", ("avgpool.norm",), LOW)]
    nodes_with_float_layer = [
        GraphNode(n.name, n.kind, n.inputs, "float") if n.name == rows[-3].name else n for n in nodes
    ]
    return rows, nodes_with_float_layer


def allocated(rows: list[CoverageRow]) -> PrecisionAllocation:
    names = [row.name for row in rows if row.how]
    layers = tuple(
        LayerPrecision(
            name, "conv2d", 1000 * (index + 1), "int4" if index % 3 else "int8",
            {"int4": 1e-3 / (index + 1), "int8": 1e-5 / (index + 1), "float": 0.0},
            {} if index else {"int2": "target 'onnxruntime' cannot run dtype int2 as weight"},
        )
        for index, name in enumerate(names)
    )  # fmt: skip
    points = tuple(
        FrontPoint(0.13 + 0.012 * index, 3e-3 / 1.35**index, {"int4": len(names) - index, "int8": index})
        for index in range(len(names))
    )
    uniform = {"int4": (0.13, 3e-3), "int8": (0.26, 4e-5), "float": (1.0, 0.0)}
    return PrecisionAllocation("size", 0.178, 1.1e-3, layers, points, uniform, limit=0.18)


def tuned(rows: list[CoverageRow]) -> TuneReport:
    layers = tuple(
        tuned_layer(row.name, 2e-3 * (1 + index % 4), 3e-4 * (1 + index % 5), 0.3, "descend", "ridge 0.3")
        for index, row in enumerate(rows)
        if row.how
    )
    unchanged = replace(layers[3], after=layers[3].before, moved=0.0, step="")
    not_tuned = {"fc": "its weight is shared with a layer before it"}
    return TuneReport((*layers[:3], unchanged, *layers[4:]), not_tuned, batches=4, samples=128, seconds=41.0)


def ordinary(ratio: float = 1.87) -> Report:
    rows, nodes = resnet()
    chance = random.Random(3)  # noqa: S311  # the same picture every time
    layers = tuple(
        LayerError(
            row.name,
            row.kind,
            row.precision,
            44 - index * 0.7 - (12 if index in (4, 15) else 0) + chance.uniform(-4, 4) if row.how else 47.0,
            0.9999 - index * 1e-4,
            saturation=chance.choice([0.0, 0.0004, 0.002]),
            used_range=chance.uniform(0.4, 1),
            weight_sqnr_db=chance.uniform(38, 46) if row.how else None,
        )
        for index, row in enumerate(rows)
    )
    return Report(
        title="resnet18",
        target="onnxruntime",
        created=CREATED,
        coverage=Coverage(tuple(rows)),
        environment={
            "scalepoint": "0.1.0",
            "torch": "2.13.0",
            "onnxruntime": "1.31.1",
            "cpu": "avx512_vnni",
            "cores": 2,
        },
        config={
            "target": "onnxruntime",
            "weight": {"dtype": "int8", "axis": 0},
            "activation": "uint8",
            "max_drop": 0.1,
        },
        accuracy=(
            Score("top-1", 0.6958, 0.6976, "runtime", simulated_value=0.6961),
            Score("top-5", 0.8896, 0.8908, "runtime", simulated_value=0.8897),
        ),
        layers=layers,
        histograms=(
            bell("layer4.1.conv2", "weight", 0.02, -0.06, 0.06),
            bell("layer4.1.conv2", "activation", 1.1, 0.0, 3.1, outliers=True),
            bell("layer1.1.conv1", "weight", 0.2, -0.7, 0.7),
            bell("layer1.1.conv1", "activation", 0.6, 0.0, 4.4),
        ),
        verification=verification(ratio),
        timings={"capture": 4.1, "transform": 0.9, "calibrate": 22.4, "export": 3.0, "verify": 9.7},
        warnings=(
            "layer4.1.conv2 stays float: its error cost 0.3 points. Calibrate with more than 32 images to raise it",
        ),
        graph=tuple(nodes),
        trials=(
            TrialSummary(0.6902),
            TrialSummary(0.6921, (PrecisionChange("", "other ranges"),), 0),
            TrialSummary(0.6958, (PrecisionChange("layer4.1.conv2", "float", 0.0031, 0.064),), 1, is_best=True),
        ),
        max_drop=0.002,
        allocation=allocated(rows),
        tuning=tuned(rows),
        reproduction=Reproduction(
            "pip install scalepoint==0.1.0 torch==2.13.0 onnxruntime==1.31.1",
            "import scalepoint\n\ndone = scalepoint.deploy(\n    model,\n    example_inputs,\n    calibration_data,\n)",
            "scalepoint deploy -c out/config.yaml -o again",
            {"model": "5f0c3c0de1a2b3c4", "calibration data": "0123456789abcdef"},
        ),
    )


def bare() -> Report:
    """No verification, no accuracy, no MACs, no layers."""
    return Report("model", "tensorrt", CREATED, Coverage((operation("fc", "linear", None),)))


def evil() -> Report:
    rows = tuple(operation(name, kind=name[:40], reason=name, how=name[:40]) for name in EVIL)
    verification_result = Verification(
        EVIL[1], EVIL[0], Status.OK, EVIL[0], (Agreement(EVIL[1], math.nan, math.inf, None),),
        executed={EVIL[0]: 1}, fallbacks=EVIL,
        times=tuple(LayerTime(name, 1e-3, None, (name,)) for name in EVIL),
        departure=Departure(EVIL[0], 0.5, 3, EVIL[1], EVIL[2]),
    )  # fmt: skip
    return Report(
        EVIL[0],
        EVIL[1],
        EVIL[2],
        Coverage((*rows, float_row(EVIL[0], EVIL[1]))),
        {name: name for name in EVIL},
        {name: [name, {"a": name}] for name in EVIL},
        tuple(Score(name, -math.inf, math.nan, "runtime", simulated_value=math.inf) for name in EVIL),
        tuple(layer_error(name, value) for name, value in zip(EVIL, [math.nan, math.inf, -math.inf] * 9, strict=False)),
        tuple(TensorHistogram(name, name[:20], name, (0.0, 0.0), (0,), math.nan, math.inf) for name in EVIL),
        verification_result,
        dict.fromkeys(EVIL, 1.0),
        EVIL,
        tuple(GraphNode(name, name[:30], EVIL, name[:30]) for name in EVIL),
        tuple(
            TrialSummary(math.nan, (PrecisionChange(name, name[:30], math.inf, 0.1),), index, True)
            for index, name in enumerate(EVIL)
        ),
        math.nan,
        Reproduction(EVIL[0], EVIL[1], EVIL[2], {name: name for name in EVIL}),
        allocation=evil_allocation(),
        tuning=TuneReport(
            tuple(tuned_layer(name, *ODD, name, name) for name in EVIL), dict.fromkeys(EVIL, EVIL[0]), 0, 0, 0.0
        ),
    )


ODD = (math.nan, -math.inf, math.inf)


def evil_allocation() -> PrecisionAllocation:
    layers = tuple(
        LayerPrecision(name, name[:30], -1, name, dict.fromkeys(EVIL, math.nan), dict.fromkeys(EVIL, name))
        for name in EVIL
    )
    points = tuple(FrontPoint(cost, error, {name: 1}) for name in EVIL for cost in ODD for error in (*ODD, 0.0))
    return PrecisionAllocation(
        EVIL[0], math.nan, math.inf, layers, points, dict.fromkeys(EVIL, (math.inf, math.nan)), 0.5
    )


def large(count: int = 2000) -> Report:
    rows = [
        operation(
            f"blocks.{index // 8}.{('q', 'k', 'v', 'qk', 'av', 'proj', 'up', 'down')[index % 8]}",
            "linear",
            1000 + index,
        )
        if index % 9
        else float_row(f"blocks.{index // 8}.norm{index}", "no int8 kernel")
        for index in range(count)
    ]
    layers = tuple(layer_error(row.name, 20 + (index * 37 % 300) / 10) for index, row in enumerate(rows))
    before = ["", *(row.name for row in rows)]
    nodes = tuple(GraphNode(row.name, row.kind, (before[index],), row.precision) for index, row in enumerate(rows))
    return Report("large", "onnxruntime", CREATED, Coverage(tuple(rows)), layers=layers, graph=nodes)
