"""Layers that int8 makes slower stay float: predicted times, the minimum cut, and the coverage."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from scalepoint import transform
from scalepoint.operation_coverage import OperationState
from scalepoint.quantize import (
    QuantConfig,
    TensorQuantConfig,
    coverage,
    insert_qdq,
    load,
    quantize,
    save,
    speed_placement,
)
from scalepoint.quantize.insert import make_decisions
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.speed_placement import FLOAT_SIDE, INT8_SIDE, CpuModel, LayerTimes, MinCut
from scalepoint.targets import onnxruntime_target
from scalepoint.targets.kernel_times import KernelTimes, ProductShape, load_kernel_times
from scalepoint.targets.local_times import LocalTimes

VNNI = onnxruntime_target("vnni")
FIRST = QuantConfig(speed_first=True)


class Net(nn.Module):
    """A stem of three channels, which is slow in int8, and convolutions that are fast."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.wide = nn.Conv2d(16, 128, 3, 2, 1)
        self.deep = nn.Conv2d(128, 128, 3, 1, 1)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = torch.relu(self.deep(torch.relu(self.wide(torch.relu(self.stem(x))))))
        return self.head(x.mean((2, 3)))


def inserted(model, x, config=FIRST, target=VNNI):
    result = transform(model.eval(), x, target=target)
    return coverage(insert_qdq(result.model, result.matches, config)).operations


X = torch.randn(2, 3, 64, 64)


def test_a_stem_that_is_slower_in_int8_stays_float_with_the_saved_time():
    rows = {row.name: row for row in inserted(Net(), X)}
    assert rows["stem"].precision == "float"
    assert rows["stem"].is_for_speed
    assert rows["stem"].saves > 0
    assert rows["stem"].reason.startswith("faster in float")
    assert rows["stem"].seconds[0] < rows["stem"].seconds[1]
    assert rows["wide"].state == rows["deep"].state == OperationState.QUANTIZED


def test_the_summary_contains_the_saved_time():
    result = transform(Net().eval(), X, target=VNNI)
    summary = coverage(insert_qdq(result.model, result.matches, FIRST)).summary()
    assert "left float for speed, which saves " in summary


@pytest.mark.parametrize("config", [None, QuantConfig(speed_first=False)], ids=["unsaid", "false"])
def test_without_speed_first_everything_is_quantized(config):
    assert all(row.state == OperationState.QUANTIZED for row in inserted(Net(), X, config))


def test_without_example_inputs_everything_is_quantized():
    assert all(row.state == OperationState.QUANTIZED for row in inserted(Net(), None))


def test_a_network_whose_calls_cost_more_than_its_products_stays_float():
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    rows = inserted(tiny, torch.randn(2, 3, 8, 8))
    assert all(row.state == OperationState.FLOAT and "so small" in row.reason for row in rows)


def test_layers_left_float_for_speed_pass_strict():
    result = transform(Net().eval(), X, target=VNNI)
    insert_qdq(result.model, result.matches, FIRST, strict=True)


def test_after_save_and_load_the_same_layers_are_float(tmp_path):
    torch.manual_seed(0)
    model = Net().eval()
    quantized = quantize(model, X, FIRST, forward_loop=[X], target=VNNI, freeze_weights=True)
    save(quantized, tmp_path / "m")
    loaded = load(tmp_path / "m", model, X, target=VNNI)
    assert coverage(loaded) == coverage(quantized)
    with torch.no_grad():
        assert torch.equal(loaded(X), quantized(X))


def test_predicted_times_do_not_depend_on_the_widened_batch_of_capture():
    one, two = (inserted(Net(), torch.randn(n, 3, 64, 64)) for n in (1, 2))
    assert one[0].saves == pytest.approx(
        two[0].saves / 2, rel=0.45
    )  # the throughput of a kernel varies a little with its size


def test_a_product_with_a_relu_is_not_int8_before_a_float_reader():
    class Mixed(nn.Module):
        """The second layer is too small for int8, and a runtime fuses the ReLU before it into a float product."""

        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(16, 64, 3)
            self.one, self.two = nn.Linear(64, 512), nn.Linear(512, 2)

        def forward(self, x):
            x = torch.relu(self.body(x)).mean((2, 3))
            return self.two(torch.relu(self.one(x)))

    rows = {row.name: row.precision for row in inserted(Mixed(), torch.randn(2, 16, 32, 32))}
    assert not (rows["one"] != "float" and rows["two"] == "float")


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(8 * 15 * 15, 10))


def test_if_int8_is_never_faster_weights_are_stored_as_int8_and_computed_in_float():
    result = transform(small().eval(), torch.randn(2, 3, 64, 64), target=VNNI)
    report = coverage(insert_qdq(result.model, result.matches, FIRST))
    assert [row.precision for row in report.operations] == ["float", "float"]
    assert {row.stored for row in report.operations} == {"int8 per_channel"}
    assert report.share_of_macs() == {"float": 1.0}
    assert report.share_of_parameters() == {"stored int8 per_channel": 1.0}
    assert not report.is_empty
    assert "with weights stored in int8" in report.summary()


def test_if_int8_is_never_faster_the_largest_weight_is_quantized_on_targets_that_do_not_dequantize_on_load():
    never = replace(VNNI, dequantizes_weights_on_load=False)
    rows = {row.name: row for row in inserted(small(), torch.randn(2, 3, 64, 64), target=never)}
    assert (rows["0"].precision, rows["0"].stored) == ("float", "")
    assert rows["4"].state == OperationState.QUANTIZED


def test_a_weight_computed_in_float_is_not_pair_safe_and_its_bias_is_not_rounded():
    x = torch.randn(2, 3, 64, 64)
    quantized = quantize(small().eval(), x, FIRST, forward_loop=[x], target=onnxruntime_target("avx2"))
    layers = [module for module in quantized.modules() if isinstance(module, QuantizedLayer)]
    assert len(layers) == 2
    for layer in layers:
        assert layer.computes_in_float
        assert layer.input_stub is None
        assert layer.weight_quant.spec.to_dict()["range_calculator_cls"] == "minmax"


def test_a_float_layer_after_int8_layers_keeps_its_float_bias():
    quantized = quantize(Net().eval(), X, FIRST, forward_loop=[X], target=VNNI, freeze_weights=True)
    layers = {layer.weight_quant.name: layer for layer in quantized.modules() if isinstance(layer, QuantizedLayer)}
    assert layers["stem.weight"].computes_in_float
    assert layers["stem.weight"].compute_bias_scale() is None
    assert layers["deep.weight"].compute_bias_scale() is not None


def test_per_tensor_weights_are_stored_as_int8_too():
    config = QuantConfig(speed_first=True, weight=TensorQuantConfig())
    assert {row.stored for row in inserted(small(), torch.randn(2, 3, 64, 64), config)} == {"int8"}


def chain(*prices, border=1.0, quantize_input=0.5):
    """Solve a chain of layers, each (float, int8) seconds, with the same cost for every conversion."""
    cut = MinCut()
    nodes = [cut.add_node() for _ in prices]
    for node, (before, after) in zip(nodes, prices, strict=True):
        cut.add_edge(INT8_SIDE, node, before)
        cut.add_edge(node, FLOAT_SIDE, after)
    for one, two in pairwise(nodes):
        cut.add_edge(one, two, border)
        cut.add_edge(two, one, border)
    cut.add_edge(nodes[0], FLOAT_SIDE, quantize_input)
    paid, in_float = cut.solve()
    return paid, [node in in_float for node in nodes]


def predicted_seconds(activation):
    """Return the predicted time of a network all in int8, with this function between its convolutions."""

    class Activated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = activation(layer(x))
            return x

    result = transform(Activated().eval(), torch.randn(1, 16, 64, 64), target=VNNI)
    decisions, _, _ = make_decisions(result.model, result.matches, QuantConfig(speed_first=False), VNNI)
    times = LayerTimes(load_kernel_times("onnxruntime-vnni-amd"), LocalTimes(), 1.0)
    return CpuModel(result.model, decisions, times, VNNI, ()).predict_seconds(())


def test_an_activation_between_int8_layers_converts_without_a_change_of_layout():
    assert predicted_seconds(torch.relu) < predicted_seconds(nn.functional.silu) < predicted_seconds(torch.sin)


def test_a_layer_that_loses_less_than_the_conversions_cost_stays_int8():
    assert chain((5.0, 1.0), (1.0, 2.0), (5.0, 1.0)) == (4.5, [False, False, False])


def test_a_layer_that_loses_more_than_the_conversions_cost_becomes_float():
    assert chain((5.0, 1.0), (1.0, 9.0), (5.0, 1.0)) == (5.5, [False, True, False])


def test_a_chain_that_gains_less_than_the_conversions_cost_becomes_float():
    assert chain((1.0, 3.0), (1.0, 0.8), (1.0, 3.0)) == (3.0, [True, True, True])


def test_with_equal_times_int8_is_chosen():
    assert chain((1.0, 1.0), quantize_input=0.0) == (1.0, [False])


def test_a_cut_is_the_minimum_over_all_assignments():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        prices = [tuple(pair) for pair in torch.rand(6, 2, generator=generator).tolist()]
        border = float(torch.rand((), generator=generator))
        paid, _ = chain(*prices, border=border, quantize_input=0.3)
        sums = []
        for bits in range(2**6):
            is_float = [bool(bits >> i & 1) for i in range(6)]
            total = sum(pair[0] if float_layer else pair[1] for pair, float_layer in zip(prices, is_float, strict=True))
            total += border * sum(one != two for one, two in pairwise(is_float))
            sums.append(total + (0.0 if is_float[0] else 0.3))
        assert paid == pytest.approx(min(sums))


TABLE = KernelTimes(
    [
        {"kind": "conv", "in": 32, "out": 32, "kernel": 3, "groups": 1, "pixels": 256, "float": 100.0, "int8": 40.0},
        {"kind": "conv", "in": 64, "out": 64, "kernel": 1, "groups": 1, "pixels": 256, "float": 30.0, "int8": 10.0},
        {"kind": "conv", "in": 16, "out": 16, "kernel": 3, "groups": 16, "pixels": 256, "float": 5.0, "int8": 9.0},
        {"kind": "quantize", "elements": 1000, "int8": 4.0},
    ]
)


def test_a_measured_shape_has_its_measured_time():
    assert TABLE.product_seconds(ProductShape("conv", 32, 32, 256, 3)) == pytest.approx((100e-6, 40e-6))


def test_time_grows_with_the_work_and_kernel_families_differ():
    before, after = TABLE.product_seconds(ProductShape("conv", 32, 32, 512, 3))
    assert (before, after) == pytest.approx((200e-6, 80e-6))
    assert TABLE.product_seconds(ProductShape("conv", 16, 16, 256, 3, 16)) == pytest.approx((5e-6, 9e-6))
    assert TABLE.product_seconds(ProductShape("conv", 3, 16, 256, 3)) is None  # no stem in this table
    assert TABLE.product_seconds(ProductShape("linear", 8, 8, 1)) is None


def test_conversions_cost_time_per_value_and_per_call():
    assert TABLE.move_seconds("quantize", 2000) == pytest.approx(9e-6)
    assert TABLE.move_seconds("dequantize", 2000) == TABLE.move_seconds("quantize", 2000)
    assert TABLE.move_seconds("quantize", 10) == pytest.approx(2e-6)


@pytest.mark.parametrize("name", [*VNNI.kernel_tables, *onnxruntime_target("avx2").kernel_tables])
def test_each_kernel_table_of_a_target_is_complete(name):
    table = load_kernel_times(name)
    convolutions = {"dense", "pointwise", "depthwise", "stem"}
    ranks = ("", " 1d", " 3d")
    assert {kind + rank for kind in convolutions for rank in ranks} | {"linear"} == set(table.products)
    assert {"quantize", "add"} <= set(table.moves)
    before, after = table.product_seconds(ProductShape("conv", 64, 64, 1024, 3))
    assert after < before  # int8 is faster with many channels
    before, after = table.product_seconds(ProductShape("conv", 3, 16, 4096, 3))
    assert after > before  # and slower with three channels
    before, after = table.product_seconds(ProductShape("conv", 3, 16, 4096, 3, rank=3))
    assert after > 2 * before  # much slower over three axes


def test_convolutions_over_one_and_three_axes_have_predicted_times():
    film = nn.Sequential(nn.Conv3d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 64, 3, 2, 1), nn.ReLU())
    first, second = inserted(film, torch.randn(1, 3, 8, 16, 16))
    assert first.is_for_speed
    assert second.state == OperationState.QUANTIZED
    sound = nn.Sequential(nn.Conv1d(64, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, 64, 5, padding=2))
    assert all(row.state == OperationState.QUANTIZED for row in inserted(sound, torch.randn(1, 64, 500)))


def test_a_layer_without_a_predicted_time_stays_quantized(monkeypatch):
    body = nn.Sequential(nn.Conv2d(16, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 1, 1), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(), *body, nn.Flatten(2), nn.Conv1d(128, 2, 1))
    unknown = KernelTimes([])
    known = load_kernel_times(VNNI.kernel_tables[0])
    unknown.products = {family: rows for family, rows in known.products.items() if not family.endswith("1d")}
    unknown.moves = known.moves
    monkeypatch.setattr(speed_placement, "load_kernel_times", lambda _: unknown)
    rows = inserted(model, X)
    assert rows[0].is_for_speed
    assert rows[-1].state == OperationState.QUANTIZED


def table_of(dense, depthwise):
    """The kernel times of a CPU whose int8 takes these shares of the float time."""
    sizes = {"in": 64, "out": 64, "kernel": 3, "pixels": 1024}
    rows = [
        {"kind": "conv", **sizes, "groups": 1, "float": 1000.0, "int8": 1000.0 * dense},
        {"kind": "conv", **sizes, "groups": 64, "float": 500.0, "int8": 500.0 * depthwise},
        {"kind": "quantize", "elements": 65536, "int8": 5.0},
    ]
    return KernelTimes(rows)


@pytest.mark.parametrize(
    ("one", "other", "float_layers"),
    [
        ((0.5, 0.5), (0.5, 0.5), []),
        ((0.5, 0.5), (0.5, 3.0), ["2"]),
        ((0.2, 0.9), (0.9, 0.9), []),
        ((0.5, 0.5), (3.0, 3.0), ["0", "2", "4"]),
    ],
    ids=["both win", "one loses much on depthwise", "one wins more", "one loses on all"],
)
def test_the_result_is_not_slower_than_float_on_any_cpu(one, other, float_layers, monkeypatch):
    tables = {"one": table_of(*one), "other": table_of(*other)}
    monkeypatch.setattr(speed_placement, "load_kernel_times", tables.__getitem__)
    layers = [nn.Conv2d(64, 64, 3, 1, 1, groups=groups) for groups in (1, 64, 1)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    for names in (("one", "other"), ("other", "one")):
        rows = inserted(model, torch.randn(2, 64, 32, 32), target=replace(VNNI, kernel_tables=names))
        assert [row.name.split("_")[0] for row in rows if row.is_for_speed] == float_layers


def test_a_target_without_tables_quantizes_everything():
    none = replace(VNNI, kernel_tables=())
    assert all(row.state == OperationState.QUANTIZED for row in inserted(Net(), X, target=none))


def test_a_pool_behind_a_float_stem_changes_nothing():
    """The target's rewrites keep the quantizer after the pool."""

    def net(*between):
        body = (nn.Conv2d(16, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 1, 1))
        return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(), *between, *body)

    for model in (net(), net(nn.MaxPool2d(3, 2))):
        rows = inserted(model, X)
        assert rows[0].is_for_speed
        assert sum(row.state == OperationState.QUANTIZED for row in rows) == 2  # both convolutions of the body
