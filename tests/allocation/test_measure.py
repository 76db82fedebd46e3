"""Every layer at every width: errors after the solver, costs in bytes, bits and MACs, only what the target runs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint import transform
from scalepoint.allocation import UNCHANGED, Budget, Widths, measure_widths
from scalepoint.errors import TargetError, UsageError
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, coverage, insert_qdq
from scalepoint.targets import find_target
from tests.errors import raises

MINMAX = TensorQuantConfig(symmetric=False)
CONFIG = QuantConfig(activation=MINMAX, weight=TensorQuantConfig(n_bits=4, per_channel=True))


class Net(nn.Module):
    """A small and a large convolution, q, k and v of one tensor, and a head."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, padding=1)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.large(F.relu(self.small(x)))).flatten(2).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)).mean(1))


@pytest.fixture(scope="module")
def data():
    noise = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return list((F.avg_pool2d(noise, 3, 1) * 3).split(8))


@pytest.fixture(scope="module")
def result(data):
    torch.manual_seed(0)
    return transform(Net().eval(), data[0], target="reference")


def measured(result, data, choices, config=CONFIG, target="reference", **more):
    return measure_widths(result, config, find_target(target), choices, data, progress=False, **more)


@pytest.fixture(scope="module")
def widths(result, data):
    return measured(result, data, ("int2", "int4", "int8", "float"))


def table(widths):
    return {row.name: {width.name: width for width in row.widths} for row in widths.rows}


def test_more_bits_have_less_error_and_float_has_none(widths):
    for width in table(widths).values():
        errors = [width[name].error for name in ("int2", "int4", "int8", "float")]
        assert errors == sorted(errors, reverse=True)
        assert errors[0] > 4 * errors[2]
        assert errors[-1] == 0


def test_layers_that_multiply_one_tensor_share_a_precision(widths):
    assert [row.layers for row in widths.rows] == [("small",), ("large",), ("q", "k", "v"), ("head",)]
    assert widths.rows[2].weights == 3 * 16 * 16


def test_sizes_count_codes_and_scales(widths):
    large = table(widths)["large"]
    assert [large[name].size for name in ("int4", "int8", "float")] == [576 + 64, 1152 + 64, 4608]
    everything = sum(row.weights for row in widths.rows) * 4
    biases = 4 * (8 + 16 + 48 + 4)
    assert widths.float_size == everything + biases
    assert widths.rest_size == biases


def test_time_is_macs_times_the_wider_operand(widths):
    large = table(widths)["large"]
    macs = 8 * 36 * 1152  # the samples of the example, the positions of 6 x 6, the weights
    assert (large["int4"].time, large["int8"].time, large["float"].time) == (macs / 4, macs / 4, macs)


def test_the_error_is_measured_after_the_solver(result, data, widths):
    nearest = table(measured(result, data, ("int4",), steps=None))
    solved = table(widths)
    assert all(solved[name]["int4"].error < nearest[name]["int4"].error for name in ("large", "q"))


def test_the_sum_of_errors_is_close_to_the_error_of_the_model(data):
    """The noise of all layers at 8 bits, rounded to nearest, against one run of the model."""
    torch.manual_seed(0)
    net = Net().eval()
    from scalepoint.analysis import compare
    from scalepoint.quantize import quantize

    config = QuantConfig(activation=MINMAX, weight=TensorQuantConfig(n_bits=8, per_channel=True), correct_bias=False)
    model = quantize(net, data[0], config, forward_loop=data, target="reference", progress=False)
    ratio = 10 ** (-compare(net, model, data, progress=False).outputs[0].sqnr_db / 10)
    widths = measured(transform(net, data[0], target="reference"), data, None, config, steps=None)
    expected = sum(width[UNCHANGED].error for width in table(widths).values())
    assert ratio / 4 < expected < ratio * 4


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(bits=1.5), "bits=1.5.*int2, int4, int8, float.*2 bits"),
        (Budget(size=0.01), "the smallest is 0.1"),
        (Budget(speed=9), "fastest is 4 times"),
    ],
    ids=str,
)
def test_an_unreachable_budget_is_an_error_that_names_the_cheapest(widths, budget, message):
    with pytest.raises(UsageError, match=message):
        widths.find_best(budget)


@pytest.mark.parametrize("budget", [Budget(bits=4.5), Budget(size=0.2), Budget(speed=2.5)], ids=str)
def test_a_budget_is_respected_and_no_uniform_width_within_it_is_better(widths, budget):
    result = widths.find_best(budget)
    reached = widths.to_unit(budget.unit, result.cost)
    assert reached >= budget.limit if budget.unit == "speed" else reached <= budget.limit
    items = widths.to_search_items(budget.unit)
    for name in ("int2", "int4", "int8", "float"):
        same = [next(choice for choice in item.choices if choice.name == name) for item in items]
        if sum(choice.cost for choice in same) <= widths.to_cost_limit(budget):
            assert result.error <= 1.01 * sum(choice.error for choice in same)


def test_the_config_has_overrides_for_the_chosen_precisions(widths):
    config = widths.with_overrides(CONFIG, {"small": "int8", "large": "int4", "q": "float", "head": "int2"})
    overrides = {override.name: override for override in config.overrides}
    assert [overrides[name].weight.n_bits for name in ("small", "large", "head")] == [8, 4, 2]
    assert all(overrides[name].weight == overrides[name].activation == "float" for name in "qkv")


def test_layers_without_a_choice_are_part_of_the_cost(result, data, widths):
    eight = Override(name="large", weight=TensorQuantConfig(per_channel=True))
    pinned = measured(result, data, ("int4",), CONFIG.model_copy(update={"overrides": (eight,)}))
    large = table(widths)["large"]["int8"]
    assert pinned.rest_size == widths.rest_size + large.size
    assert pinned.rest_time == widths.rest_time + large.time
    assert (pinned.float_size, pinned.float_time) == (widths.float_size, widths.float_time)


def test_widths_survive_json(widths):
    assert Widths.from_dict(widths.to_dict()) == widths


def test_layers_with_an_override_have_no_choice(result, data):
    config = CONFIG.model_copy(update={"overrides": (Override(name="large", weight="float"),)})
    assert [row.name for row in measured(result, data, ("int8",), config).rows] == ["small", "q", "head"]
    every = CONFIG.model_copy(update={"overrides": (Override(name="*", weight=TensorQuantConfig(per_channel=True)),)})
    with pytest.raises(UsageError, match="no layer"):
        measured(result, data, ("int8",), every)


def test_precisions_that_the_target_does_not_run_are_refused(data):
    torch.manual_seed(0)
    result = transform(Net().eval(), data[0], target="onnxruntime")
    widths = measured(result, data, ("uint4", "int8"), QuantConfig(activation=MINMAX), "onnxruntime")
    names = {row.name: [width.name for width in row.widths] for row in widths.rows}
    assert names == {"small": ["int8"], "large": ["int8"], "q": ["uint4", "int8"], "head": ["uint4", "int8"]}
    assert "cannot run uint4" in widths.rows[0].refused["uint4"]
    with raises(TargetError, "uint8", "small", "'onnxruntime'"):
        measured(result, data, ("int8", "uint8"), QuantConfig(activation=MINMAX), "onnxruntime")
    with raises(TargetError, "small", "uint4"):
        measured(result, data, ("uint4",), QuantConfig(activation=MINMAX), "onnxruntime")


def test_if_blocks_do_not_divide_a_weight_the_granularity_of_the_target_is_used():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    inputs = [torch.randn(16, 6) for _ in range(2)]
    result = transform(net, inputs[0], target="reference")
    widths = measured(result, inputs, ("int4", "float"), QuantConfig.weight_only("int4", block_size=4))
    kinds = [row.widths[0].override["weight"]["granularity"]["type"] for row in widths.rows]
    assert kinds == ["per_channel", "per_block"]
    assert [row.widths[0].size for row in widths.rows] == [32 * 3 + 4 * 32, 32 * 4 + 4 * 64]


def test_higher_precisions_start_from_the_configured_one(result, data):
    config = QuantConfig(
        activation=TensorQuantConfig(n_bits=4, symmetric=False), weight=TensorQuantConfig(n_bits=4, per_channel=True)
    )
    options = table(measured(result, data, None, config))["large"]
    wide = "int8 weights, 8-bit inputs"
    assert list(options) == [UNCHANGED, "8-bit inputs", "int8 weights", wide, "float"]
    assert options[UNCHANGED].error > options["8-bit inputs"].error > options[wide].error > 0
    assert options[UNCHANGED].time * 2 == options["8-bit inputs"].time


def test_one_weight_in_two_layers_has_one_precision():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    torch.manual_seed(0)
    inputs = [torch.randn(32, 8) for _ in range(2)]
    result = measured(transform(Tied().eval(), inputs[0], target="reference"), inputs, ("int4", "int8"))
    assert [len(row.layers) for row in result.rows] == [2]
    assert result.rows[0].weights == 64
    assert result.rows[0].widths[0].size == 32 + 4 * 8


def test_palettes_are_choices_of_a_budget(result, data):
    config = QuantConfig.palettes(4)
    widths = measured(
        result, data, ("palette2", "palette4", "int8"), config, target="coreml", steps=("scale", "descend")
    )
    for row in widths.rows:
        by_name = {width.name: width for width in row.widths}
        assert [by_name[name].bits for name in ("palette2", "palette4", "int8")] == [2, 4, 8]
        assert by_name["palette2"].error > by_name["palette4"].error > by_name["int8"].error
    chosen = widths.find_best(Budget(bits=3.0)).chosen
    assert len(set(chosen.values())) > 1
    assert widths.describe_allocation(chosen, "bits").reached <= 3.0
    precisions = {row.precision for row in measured_config(result, widths, config, chosen)}
    assert {"w palette2", "w palette4"} & precisions


def measured_config(result, widths, config, chosen):
    """The coverage of a model with the chosen precisions."""
    return coverage(
        insert_qdq(result.model, result.matches, widths.with_overrides(config, chosen), target="coreml", copy=True)
    ).operations
