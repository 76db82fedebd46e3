"""Calibration: forms of data, unchanged inputs of the caller, errors, ranges, and the example of the contract."""

import copy
import importlib
import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scalepoint.errors import CalibrationError, NonFiniteError, ScalepointError, UsageError
from scalepoint.quantize import (
    CalibrationMethod,
    QuantConfig,
    QuantStub,
    TensorQuantConfig,
    WeightFakeQuantize,
    calibrate,
    coverage,
    freeze,
    insert_qdq,
    quantize,
)
from scalepoint.spec import QuantizationSpec
from scalepoint.transformation import transform
from tests.errors import raises
from tests.models import ResNet, with_norm_statistics

LEAF_SPEC = "ignore:.*LeafSpec.*:FutureWarning"  # emitted by torch when it copies a graph
pytestmark = pytest.mark.filterwarnings(LEAF_SPEC)

CONFIG = QuantConfig(activation=TensorQuantConfig(), weight=TensorQuantConfig(per_channel=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.drop(self.bn(self.conv(x)).relu().mean((2, 3))))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(6, 3)

    def forward(self, a, b):
        return self.left(a).sum(0) + self.right(b).sum(0)


@pytest.fixture(scope="module")
def float_model():
    torch.manual_seed(0)
    return with_norm_statistics(Net())


@pytest.fixture(scope="module")
def transformed(float_model):
    return transform(float_model, torch.randn(2, 3, 6, 6))


@pytest.fixture(scope="module")
def transformed_two():
    torch.manual_seed(0)
    return transform(TwoInputs().eval(), (torch.randn(2, 4), torch.randn(2, 6)))


@pytest.fixture
def model(transformed):
    return insert_qdq(transformed.model, transformed.matches, CONFIG)


@pytest.fixture
def two(transformed_two):
    return insert_qdq(transformed_two.model, transformed_two.matches, CONFIG)


@pytest.fixture
def batches():
    return [torch.randn(count, 3, 6, 6) * (count + 1) for count in (2, 5, 1)]


def stubs_of(model):
    return [module for module in model.modules() if isinstance(module, QuantStub)]


def parameters_of(model):
    return {stub.name: (float(stub.scale), int(stub.zero_point)) for stub in stubs_of(model)}


def first_of(model):
    (stub,) = [stub for stub in stubs_of(model) if "conv" in stub.consumers]
    return stub


def with_activation(transformed, **fields):
    config = QuantConfig(activation=TensorQuantConfig(**fields), weight=TensorQuantConfig(per_channel=True))
    return insert_qdq(transformed.model, transformed.matches, config)


class TestData:
    def test_the_ranges_are_those_of_the_float_model(self, model, float_model, batches):
        calibrate(model, batches)
        with torch.no_grad():
            pooled = [float_model.bn(float_model.conv(x)).relu().mean((2, 3)) for x in batches]
        expected = [max(float(x.abs().max()) for x in data) / 127.5 for data in (batches, pooled)]
        assert sorted(scale for scale, _ in parameters_of(model).values()) == pytest.approx(sorted(expected), rel=1e-5)

    def test_calibrate_returns_the_model_with_all_quantizers_enabled(self, model, batches):
        assert calibrate(model, batches) is model
        assert all(stub.enabled and not stub.calibrating for stub in stubs_of(model))
        assert all(quantizer.enabled for quantizer in model.modules() if isinstance(quantizer, WeightFakeQuantize))

    @pytest.mark.parametrize(
        "form",
        [
            pytest.param(lambda data: lambda model: [model(x) for x in data], id="loop"),
            pytest.param(list, id="list"),
            pytest.param(tuple, id="tuple"),
            pytest.param(iter, id="iterator"),
            pytest.param(lambda data: (x for x in data), id="generator"),
            pytest.param(lambda data: [(x, torch.zeros(len(x))) for x in data], id="with-labels"),
            pytest.param(lambda data: [[x, torch.zeros(len(x)), "name"] for x in data], id="with-extras"),
            pytest.param(lambda data: [{"x": x} for x in data], id="dict"),
            pytest.param(lambda data: [{"label": 3, "x": x} for x in data], id="dict-with-labels"),
            pytest.param(lambda data: [x.numpy() for x in data], id="numpy"),
            pytest.param(lambda data: [{"x": x.numpy()} for x in data], id="dict-of-numpy"),
        ],
    )
    def test_every_form_of_data_gives_the_same_scales(self, transformed, batches, form):
        reference, model = (insert_qdq(transformed.model, transformed.matches, CONFIG) for _ in range(2))
        with torch.no_grad():
            calibrate(reference, batches)
        calibrate(model, form(batches))
        assert parameters_of(model) == parameters_of(reference)

    def test_a_data_loader_with_labels(self, model, transformed):
        images = torch.randn(10, 3, 6, 6)
        loader = DataLoader(TensorDataset(images, torch.arange(10)), batch_size=4)
        calibrate(model, loader)
        reference = insert_qdq(transformed.model, transformed.matches, CONFIG)
        calibrate(reference, [images])
        assert float(first_of(model).scale) == float(first_of(reference).scale)

    @pytest.mark.parametrize(
        "form",
        [
            pytest.param(lambda a, b: (a, b), id="tuple"),
            pytest.param(lambda a, b: [a, b], id="list"),
            pytest.param(lambda a, b: (a, b, torch.zeros(3)), id="with-labels"),
            pytest.param(lambda a, b: {"b": b, "a": a}, id="dict-in-another-order"),
            pytest.param(lambda a, b: (a.numpy(), b), id="mixed"),
        ],
    )
    def test_several_inputs(self, two, form):
        pairs = [(torch.randn(3, 4), torch.randn(3, 6) * 7), (torch.randn(1, 4), torch.randn(1, 6))]
        calibrate(two, [form(a, b) for a, b in pairs])
        by_reader = {stub.consumers[0]: float(stub.scale) * 127.5 for stub in stubs_of(two)}
        expected = [max(float(pair[index].abs().max()) for pair in pairs) for index in (0, 1)]
        assert [by_reader["left"], by_reader["right"]] == pytest.approx(expected, rel=1e-5)

    def test_a_batch_with_too_few_inputs_is_an_error(self, two):
        with pytest.raises(CalibrationError, match=r"1 inputs.*a, b"):
            calibrate(two, [(torch.randn(3, 4),)])
        with pytest.raises(CalibrationError, match="b"):
            calibrate(two, [{"a": torch.randn(3, 4)}])

    @pytest.mark.parametrize("data", [3, None, "words", torch.randn(2, 3, 6, 6), {"x": torch.randn(2, 3, 6, 6)}])
    def test_invalid_data_is_refused(self, model, data):
        with pytest.raises(ScalepointError):
            calibrate(model, data)

    def test_a_batch_that_a_model_cannot_take_is_refused(self, model):
        with pytest.raises(CalibrationError, match="tensors or arrays"):
            calibrate(model, [object()])

    def test_the_error_for_a_wrong_shape_contains_the_shape_of_the_batch(self, model):
        with pytest.raises(RuntimeError) as caught:
            calibrate(model, [torch.randn(2, 3, 6, 6), torch.randn(2, 7, 6, 6)])
        message = str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
        assert "batch 1" in message
        assert "7, 6, 6" in message

    def test_the_error_for_a_wrong_shape_contains_the_captured_shape(self, float_model):
        captured = transform(float_model, torch.randn(2, 3, 6, 6))
        model = insert_qdq(captured.model, captured.matches, QuantConfig())
        with raises(CalibrationError, "batch 0", "unlike the example") as caught:
            calibrate(model, [torch.randn(2, 7, 6, 6)])
        assert "captured with x (*, 3, 6, 6) torch.float32" in str(caught.value)

    def test_an_infinite_iterator_ends_at_max_batches(self, model, batches):
        read_batches = []

        def endless():
            for x in itertools.cycle(batches):
                read_batches.append(x)
                yield x

        calibrate(model, endless(), max_batches=4)
        assert len(read_batches) in (4, 5)
        assert first_of(model).enabled

    def test_an_infinite_iterator_without_a_limit_is_an_error(self, model, monkeypatch):
        module = importlib.import_module("scalepoint.quantize.feeding")
        monkeypatch.setattr(module, "MAX_BATCHES", 3)
        with pytest.raises(CalibrationError, match="max_batches"):
            calibrate(model, itertools.repeat(torch.randn(1, 3, 6, 6)))

    def test_max_batches_counts(self, model, batches):
        calibrate(model, batches, max_batches=1)
        assert float(first_of(model).scale) == pytest.approx(float(batches[0].abs().max()) / 127.5)

    def test_without_a_terminal_progress_is_one_line(self, model, batches, capfd):
        calibrate(model, batches)
        output = capfd.readouterr()
        assert output.out == ""
        assert re.fullmatch(r"calibrating: \d+ batches in [\d.]+ s\n", output.err)
        calibrate(model, batches, progress=False)
        assert capfd.readouterr() == ("", "")

    def test_a_model_with_quantized_weights_only_needs_no_data(self, transformed, float_model):
        config = QuantConfig(activation="float", weight=TensorQuantConfig(per_channel=True))
        model = insert_qdq(transformed.model, transformed.matches, config)
        calibrate(model, [])
        x = torch.randn(2, 3, 6, 6)
        with torch.no_grad():
            assert not torch.equal(model(x), float_model(x))


def noticed(model):
    """Return everything of a model that a caller can observe, except its quantizers."""
    return (
        {name: module.training for name, module in model.named_modules()},
        {name: value.requires_grad for name, value in model.named_parameters()},
        {
            name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for name, m in model.named_modules()
        },
        {name: value.clone() for name, value in model.named_parameters()},
        {name: value.clone() for name, value in model.named_buffers() if "running" in name and "quant" not in name},
    )


def same(before, after):
    for one, other in zip(before, after, strict=True):
        assert list(one) == list(other)
        for name, value in one.items():
            assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


def broken(batches, at):
    for index, x in enumerate(batches):
        if index == at:
            raise OSError("the disk is gone")
        yield x


class TestNothingElseChanges:
    def prepared(self, model):
        """Set modes and gradients that differ from all defaults."""
        model.train()
        model.get_submodule("bn").eval()
        model.get_parameter("fc.weight").requires_grad_(False)
        model.get_submodule("fc").register_forward_hook(lambda *_: None)
        return model

    def test_modes_gradients_hooks_and_statistics_are_restored(self, model, batches):
        before = noticed(self.prepared(model))
        calibrate(model, batches)
        same(before, noticed(model))
        assert all(value.grad is None for value in model.parameters())

    @pytest.mark.parametrize("kind", ["data", "loop", "shape"])
    def test_modes_are_restored_when_calibration_fails(self, model, batches, kind):
        before = noticed(self.prepared(model))
        data = {
            "data": broken(batches, 2),
            "loop": lambda model: [model(x) for x in broken(batches, 2)],
            "shape": [*batches[:2], torch.randn(1, 9, 6, 6)],
        }[kind]
        with pytest.raises((OSError, RuntimeError)):
            calibrate(model, data)
        same(before, noticed(model))
        assert not any(stub.enabled or stub.calibrating for stub in stubs_of(model))
        assert not any(quantizer.enabled for quantizer in model.modules() if isinstance(quantizer, WeightFakeQuantize))

    def test_ranges_of_a_model_in_train_mode_are_those_of_eval(self, transformed, batches):
        one, other = (insert_qdq(transformed.model, transformed.matches, CONFIG) for _ in range(2))
        calibrate(one.train(), batches)
        calibrate(other.eval(), batches)
        assert parameters_of(one) == parameters_of(other)

    def test_the_random_state_does_not_change(self, model, batches):
        state = torch.get_rng_state()
        numpy_state = np.random.get_state()[1].copy()
        calibrate(model, batches)
        assert torch.equal(torch.get_rng_state(), state)
        assert (np.random.get_state()[1] == numpy_state).all()

    def test_the_callers_batches_do_not_change(self):
        class InPlace(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                x.mul_(3.0)
                return self.fc(x)

        result = transform(InPlace().eval(), torch.randn(2, 4))
        model = insert_qdq(result.model, result.matches, CONFIG)
        data = [torch.randn(2, 4)]
        before, version = data[0].clone(), data[0]._version
        calibrate(model, data)
        assert torch.equal(data[0], before)
        assert data[0]._version == version
        assert float(stubs_of(model)[0].scale) == pytest.approx(float(before.abs().max()) * 3 / 127.5, rel=1e-5)

    def test_no_gradient_is_recorded(self, model, batches):
        recorded = []

        def loop(model):
            recorded.extend(model(x.requires_grad_()) for x in batches)

        calibrate(model, loop)
        assert not any(y.requires_grad for y in recorded)

    def test_grad_mode_is_restored(self, model, batches):
        with pytest.raises(OSError, match="disk"):
            calibrate(model, broken(batches, 1))
        assert torch.is_grad_enabled()

    def test_a_failed_calibration_leaves_the_previous_one_in_effect(self, model, batches):
        calibrate(model, batches)
        x = torch.randn(2, 3, 6, 6)
        with torch.no_grad():
            before, parameters = model(x), parameters_of(model)
            with pytest.raises(OSError, match="disk"):
                calibrate(model, broken([100 * x for x in batches], 2))
            assert torch.equal(model(x), before)
        assert parameters_of(model) == parameters
        assert all(stub.enabled for stub in stubs_of(model))


class TestFailures:
    @pytest.mark.parametrize(
        "form",
        [
            pytest.param(broken, id="data"),
            pytest.param(lambda batches, at: lambda model: [model(x) for x in broken(batches, at)], id="loop"),
        ],
    )
    def test_an_exception_of_the_data_is_kept_with_the_index_of_the_batch(self, model, batches, form):
        with pytest.raises(OSError, match="the disk is gone") as caught:
            calibrate(model, form(batches, 2))
        assert any("batch 2" in note for note in getattr(caught.value, "__notes__", []))

    def test_an_exception_of_the_model_is_kept_with_the_index_of_the_batch(self, model, batches):
        def fails(module, args):
            if len(args[0]) == 5:
                raise ZeroDivisionError("mine")

        model.get_submodule(first_of(model).name).register_forward_pre_hook(fails)
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            calibrate(model, batches)
        assert any("batch 1" in note for note in caught.value.__notes__)

    @pytest.mark.parametrize(
        "data", [[], (), iter([]), (x for x in [])], ids=["list", "tuple", "iterator", "generator"]
    )
    def test_empty_data_is_an_error(self, model, data):
        with pytest.raises(CalibrationError, match="0 batches"):
            calibrate(model, data)

    def test_an_exhausted_generator_is_an_error(self, transformed, batches):
        one, other = (insert_qdq(transformed.model, transformed.matches, CONFIG) for _ in range(2))
        data = (x for x in batches)
        calibrate(one, data)
        with pytest.raises(CalibrationError, match="only once"):
            calibrate(other, data)

    @pytest.mark.parametrize("calls_original", [False, True], ids=["never", "original"])
    def test_a_loop_that_does_not_call_the_model_is_an_error(self, model, float_model, batches, calls_original):
        with pytest.raises(CalibrationError, match="never called the model"):
            calibrate(model, lambda _: float_model(batches[0]) if calls_original else None)

    def test_a_float_model_is_refused(self, float_model, batches):
        with pytest.raises(UsageError, match="insert_qdq"):
            calibrate(float_model, batches)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("form", ["list", "loop"])
    def test_the_error_for_nan_names_the_module_and_the_batch(self, model, batches, value, form):
        batches[1][0, 0, 0, 0] = value
        data = batches if form == "list" else lambda model: [model(x) for x in batches]
        with pytest.raises(NonFiniteError, match="batch 1") as caught:
            calibrate(model, data)
        assert first_of(model).name in str(caught.value)
        assert f"of {batches[1].numel()} values" in str(caught.value)  # the error contains the number of values
        assert not any(stub.enabled or stub.calibrating for stub in stubs_of(model))

    def test_the_error_distinguishes_nan_in_the_data_from_nan_computed_by_the_model(self):
        x = torch.randn(2, 4)
        bad = x.clone()
        bad[0, :3] = math.nan
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
        nn.init.constant_(net[0].weight, 10.0)
        result = transform(net, x, target="reference")
        with raises(NonFiniteError, "batch 1", "3 of the 8 values"):
            calibrate(insert_qdq(result.model, result.matches, CONFIG), [x, bad])
        with raises(NonFiniteError, "batch 1", "inputs are finite"):
            calibrate(insert_qdq(result.model, result.matches, CONFIG), [x, x.clamp(-1, 1) * 3e38])

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_batches_with_nan_can_be_skipped(self, transformed, batches, value):
        one, other = (insert_qdq(transformed.model, transformed.matches, CONFIG) for _ in range(2))
        bad = torch.randn(2, 3, 6, 6) * 1000
        bad[0, 0, 0, 0] = value
        with pytest.warns(UserWarning, match="batch|NaN"):
            calibrate(one, [batches[0], bad, *batches[1:]], on_nan="skip")
        calibrate(other, batches)
        assert parameters_of(one) == parameters_of(other)

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_a_skipped_batch_changes_no_range(self):
        """A clamp makes infinity finite, but the batch must be skipped all the same."""

        class Clamped(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                return self.a(x).sum() + self.b(x.clamp(-50, 50)).sum()

        result = transform(Clamped().eval(), torch.randn(2, 4))
        model = insert_qdq(result.model, result.matches, CONFIG)
        good, bad = torch.randn(2, 4), torch.full((2, 4), math.inf)
        calibrate(model, [good, bad], on_nan="skip")
        top = float(good.abs().max()) / 127.5
        assert [float(stub.scale) for stub in stubs_of(model)] == pytest.approx([top, top], rel=1e-5)

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_data_of_nan_batches_only_is_an_error(self, model):
        with pytest.raises(CalibrationError, match="NaN"):
            calibrate(model, [torch.full((2, 3, 6, 6), math.nan)], on_nan="skip")

    def test_a_stub_that_observed_nothing_is_an_error_that_names_it(self, two):
        with pytest.raises(CalibrationError, match=r"1 of 2 quantizers.*right"):
            calibrate(two, [(torch.randn(3, 4), torch.empty(0, 6))])
        assert not any(stub.enabled for stub in stubs_of(two))

    def test_a_stub_that_observed_nothing_can_stay_float_and_appears_in_the_coverage(self, two):
        calibrate(two, [(torch.randn(3, 4), torch.empty(0, 6))], on_unseen="skip")
        by_reader = {stub.consumers[0]: stub.enabled for stub in stubs_of(two)}
        assert by_reader == {"left": True, "right": False}
        (row,) = [operation for operation in coverage(two).operations if operation.name == "right"]
        assert "x int8" not in row.how
        assert row.reason

    @pytest.mark.parametrize("option", ["on_unseen", "on_nan"])
    def test_an_unknown_policy_is_refused(self, model, batches, option):
        with pytest.raises(ScalepointError, match=option):
            calibrate(model, batches, **{option: "ignore"})

    @pytest.mark.parametrize("count", [0, -1])
    def test_an_invalid_number_of_batches_is_refused(self, model, batches, count):
        with pytest.raises((ScalepointError, ValueError, TypeError)):
            calibrate(model, batches, max_batches=count)


class TestRanges:
    @pytest.mark.parametrize("method", list(CalibrationMethod))
    def test_calibrating_twice_gives_the_same_ranges(self, transformed, batches, method):
        model = with_activation(transformed, calibration_method=method)
        calibrate(model, [100 * x for x in batches])
        wide = parameters_of(model)
        calibrate(model, batches)
        first = parameters_of(model)
        calibrate(model, batches)
        assert parameters_of(model) == first != wide

    @pytest.mark.parametrize("symmetric", [False, True])
    def test_min_max_does_not_depend_on_the_order(self, transformed, batches, symmetric):
        results = []
        for order in itertools.permutations(batches):
            model = with_activation(transformed, symmetric=symmetric)
            calibrate(model, order)
            results.append(parameters_of(model))
        assert all(result == results[0] for result in results)

    @pytest.mark.parametrize(
        "method", [CalibrationMethod.HISTOGRAM, CalibrationMethod.PERCENTILE, CalibrationMethod.ENTROPY]
    )
    def test_a_histogram_hardly_depends_on_the_order(self, transformed, method):
        data = [torch.randn(8, 3, 6, 6) * size for size in (0.5, 1, 3)]
        scales = []
        for order in (data, data[::-1]):
            model = with_activation(transformed, calibration_method=method)
            calibrate(model, order)
            scales.append(float(first_of(model).scale))
        assert scales[0] == pytest.approx(scales[1], rel=0.05)

    @pytest.mark.parametrize("method", list(CalibrationMethod))
    def test_memory_does_not_grow_with_the_batches(self, transformed, method):
        def room(count):
            model = with_activation(transformed, calibration_method=method)
            calibrate(model, (torch.randn(4, 3, 6, 6) * (index + 1) for index in range(count)))
            tensors = list(model.state_dict().values())
            for stub in stubs_of(model):
                tensors += [value for value in vars(stub.calculator).values() if isinstance(value, torch.Tensor)]
            lists = sum(
                len(value)
                for stub in stubs_of(model)
                for value in vars(stub.calculator).values()
                if isinstance(value, list)
            )
            return sum(value.numel() for value in tensors) + lists

        assert room(30) == room(3)

    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize("method", list(CalibrationMethod))
    def test_every_method_gives_a_sane_range(self, transformed, method, symmetric):
        data = [torch.randn(16, 3, 6, 6) for _ in range(4)]
        model = with_activation(transformed, calibration_method=method, symmetric=symmetric)
        calibrate(model, data)
        stub = first_of(model)
        values = torch.cat(data)
        width = float(stub.scale) * 255
        assert 0.4 * 2 * 3 < width <= 1.01 * 2 * float(values.abs().max())
        error = (stub(values) - values).pow(2).mean()
        assert error < 0.01

    @pytest.mark.parametrize("method", [CalibrationMethod.PERCENTILE, CalibrationMethod.ENTROPY])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_percentile_and_entropy_clip_an_outlier(self, transformed, method, bits):
        """One value of 1000 among 86,000 of about 1: min-max would give nearly all of them the code 0."""
        data = [torch.randn(100, 3, 12, 12) for _ in range(2)]
        data[1][0, 0, 0, 0] = 1000 if bits == 4 else 200
        model = with_activation(transformed, calibration_method=method, n_bits=bits)
        calibrate(model, data)
        top = float(first_of(model).scale) * (2**bits - 1) / 2
        assert 1.5 < top < 100

    @pytest.mark.parametrize("method", [CalibrationMethod.MSE, CalibrationMethod.HISTOGRAM])
    @pytest.mark.parametrize(("bits", "outlier"), [(4, 30.0), (4, 1000.0), (8, 30.0), (8, 200.0)])
    def test_mse_finds_the_range_of_least_error(self, transformed, method, bits, outlier):
        """Compared with trying 400 ranges on the values themselves; the histogram may have 5 % more error."""
        data = [torch.randn(100, 3, 12, 12) for _ in range(2)]
        data[1][0, 0, 0, 0] = outlier
        model = with_activation(transformed, calibration_method=method, n_bits=bits)
        calibrate(model, data)
        values = torch.cat(data).numpy().ravel().astype(np.float64)

        def error(scale):
            codes = np.clip(np.round(values / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            return float(np.mean((codes * scale - values) ** 2))

        half = (2**bits - 1) / 2
        best = min(error(top / half) for top in np.linspace(0.5, outlier, 400))
        chosen_error = error(float(first_of(model).scale))
        assert chosen_error <= 1.05 * best
        if outlier == 30:
            assert chosen_error < error(outlier / half)

    def test_min_max_keeps_the_outlier(self, transformed):
        data = [torch.randn(10, 3, 6, 6)]
        data[0][0, 0, 0, 0] = 1000
        model = with_activation(transformed)
        calibrate(model, data)
        assert float(first_of(model).scale) == pytest.approx(1000 / 127.5)

    def test_the_moving_average_follows_the_formula(self, transformed, batches):
        model = with_activation(transformed, calibration_method=CalibrationMethod.MOVING_AVERAGE_MINMAX)
        calibrate(model, batches)
        low, high = float(batches[0].min()), float(batches[0].max())
        for x in batches[1:]:
            low, high = 0.99 * low + 0.01 * float(x.min()), 0.99 * high + 0.01 * float(x.max())
        assert float(first_of(model).scale) == pytest.approx(max(-low, high) / 127.5, rel=1e-4)

    @pytest.mark.parametrize("method", list(CalibrationMethod))
    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-30, 1e30])
    def test_constant_tiny_and_huge_activations_are_defined(self, method, symmetric, value):
        result = TINY_NET.get("result") or TINY_NET.setdefault(
            "result", transform(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4))
        )
        model = with_activation(result, calibration_method=method, symmetric=symmetric)
        x = torch.full((2, 4), value)
        calibrate(model, [x, x])
        (stub,) = stubs_of(model)
        assert 0 < float(stub.scale) < math.inf
        y = model(x)
        assert torch.isfinite(y).all()
        expected = result.model(x)
        assert (y - expected).abs().max() <= 0.02 * expected.abs().max() + 1e-6

    def test_a_fixed_stub_does_not_change(self, model, batches):
        stub = first_of(model)
        parent, _, name = stub.name.rpartition(".")
        fixed = QuantStub(stub.consumers, fixed_calibration=(0.125, 0))
        fixed.name = stub.name
        setattr(model.get_submodule(parent), name, fixed)
        calibrate(model, batches)
        calibrate(model, [100 * x for x in batches])
        assert (float(fixed.scale), int(fixed.zero_point)) == (0.125, 0)
        assert fixed.enabled

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_data_gives_close_ranges(self, dtype):
        net = nn.Sequential(nn.Linear(4, 4)).eval().to(dtype)
        x = torch.randn(64, 4).to(dtype)
        result = transform(net, x)
        model = insert_qdq(result.model, result.matches, CONFIG)
        calibrate(model, [x])
        (stub,) = stubs_of(model)
        assert stub.scale.dtype == torch.float32
        assert float(stub.scale) == pytest.approx(float(x.abs().max()) / 127.5, rel=1e-6)


TINY_NET = {}


class TestWeights:
    def error_of(self, method, bits, per_channel):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(256, 16, bias=False)).eval()
        with torch.no_grad():
            net[0].weight.copy_(torch.distributions.Laplace(0.0, 1.0).sample((16, 256)))
        result = transform(net, torch.randn(2, 256))
        weight = TensorQuantConfig(n_bits=bits, per_channel=per_channel, calibration_method=method)
        model = insert_qdq(result.model, result.matches, QuantConfig(activation="float", weight=weight))
        calibrate(model, [], freeze_weights=True)
        (quantizer,) = [module for module in model.modules() if isinstance(module, WeightFakeQuantize)]
        with torch.no_grad():
            return float((quantizer(net[0].weight) - net[0].weight).pow(2).mean())

    @pytest.mark.parametrize("per_channel", [False, True])
    @pytest.mark.parametrize("bits", [2, 4])
    def test_the_searched_range_has_less_error_than_min_max(self, bits, per_channel):
        searched = self.error_of(CalibrationMethod.MSE, bits, per_channel)
        assert searched < 0.9 * self.error_of(CalibrationMethod.MINMAX, bits, per_channel)

    def test_with_eight_bits_the_searched_range_is_never_worse(self):
        assert (
            self.error_of(CalibrationMethod.MSE, 8, True) <= self.error_of(CalibrationMethod.MINMAX, 8, True) * 1.0001
        )

    def test_weights_are_frozen_only_on_request(self, transformed, batches):
        for freezes in (False, True):
            model = insert_qdq(transformed.model, transformed.matches, CONFIG)
            calibrate(model, batches, freeze_weights=freezes)
            frozen = [quantizer.frozen for quantizer in model.modules() if isinstance(quantizer, WeightFakeQuantize)]
            assert frozen == [freezes, freezes]

    def test_freezing_keeps_scales_when_weights_change_later(self, model, batches):
        calibrate(model, batches)
        with torch.no_grad():
            before = model(batches[0])
            freeze(model)
            assert torch.equal(model(batches[0]), before)
            scales = [
                quantizer.scale.clone() for quantizer in model.modules() if isinstance(quantizer, WeightFakeQuantize)
            ]
            model.get_parameter("fc.weight").mul_(10)
            model(batches[0])
        after = [quantizer.scale for quantizer in model.modules() if isinstance(quantizer, WeightFakeQuantize)]
        assert all(map(torch.equal, scales, after))

    def test_calibrating_a_frozen_model_again_uses_its_current_weights(self, model, transformed, batches):
        """A second freeze computes the scales again."""
        calibrate(model, batches, freeze_weights=True)
        with torch.no_grad():
            model.get_parameter("fc.weight").mul_(10)
        calibrate(model, batches, freeze_weights=True)
        (quantizer,) = [e for e in model.modules() if isinstance(e, WeightFakeQuantize) and e.consumers == ["fc"]]
        expected = model.get_parameter("fc.weight").detach().abs().amax(1) / 127.5
        torch.testing.assert_close(quantizer.scale, expected)


class TestOneCall:
    def test_quantize_runs_all_steps(self, float_model, batches):
        model = quantize(float_model, batches[0], CONFIG, forward_loop=batches)
        with torch.no_grad():
            expected = float_model(batches[0])
            assert 0 < (model(batches[0]) - expected).abs().max() < 0.1 * expected.abs().max()
        assert all(quantizer.frozen for quantizer in model.modules() if isinstance(quantizer, WeightFakeQuantize))

    def test_activations_without_data_are_an_error(self, float_model, batches):
        with pytest.raises(UsageError, match="forward_loop"):
            quantize(float_model, batches[0], CONFIG)

    def test_float8_calibrates_too(self, transformed, float_model, batches):
        fp8 = QuantizationSpec(dtype="float8_e4m3fn")
        model = insert_qdq(transformed.model, transformed.matches, QuantConfig(activation=fp8, weight=fp8))
        calibrate(model, batches)
        with torch.no_grad():
            expected = float_model(batches[0])
            assert 0 < (model(batches[0]) - expected).abs().max() < 0.2 * expected.abs().max()


class TestTheGuide:
    @pytest.mark.slow  # fast alternative: tests/formats/onnx/test_plain_export.py exports a smaller net
    @pytest.mark.filterwarnings(
        "ignore:.*dynamic_axes.*:UserWarning",  # in the contract; torch's exporter prefers dynamic_shapes
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore::UserWarning:torch",
    )
    def test_the_example_of_the_contract_runs_as_written(self, tmp_path, monkeypatch):
        onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
        monkeypatch.chdir(tmp_path)
        model, example = with_norm_statistics(ResNet((1, 1, 1, 1), 8, 10)), torch.randn(2, 3, 64, 64)
        data = [torch.randn(4, 3, 64, 64) for _ in range(2)]

        def forward_loop(model):
            for batch in data:
                model(batch)

        quantized = guide(model, forward_loop, example)

        graph = onnx.load("model.onnx").graph
        onnx.checker.check_model("model.onnx")
        kinds = Counter(node.op_type for node in graph.node)
        count = len(stubs_of(quantized))
        assert kinds["QuantizeLinear"] >= count
        assert kinds["DequantizeLinear"] >= count + 18
        constants = {tensor.name for tensor in graph.initializer} | {
            node.output[0] for node in graph.node if node.op_type == "Constant"
        }
        for node in graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                assert node.input[1] in constants, f"{node.name} has a scale that is no constant"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
        for x in (example, torch.randn(5, 3, 64, 64)):
            with torch.no_grad():
                expected = quantized(x).numpy()
                real = model(x).numpy()
            (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            noise = np.linalg.norm(expected - real, axis=1)
            differs = np.linalg.norm(output - expected, axis=1)
            # sums that differ in the last bit rarely round to another code, and by less than the quantization error
            assert (differs < 1e-4 * noise).mean() > 0.6
            assert (differs < noise).all()


def guide(model, forward_loop, example):
    """The example of contract part B, except for options of torch's exporter."""
    from scalepoint import transform
    from scalepoint.quantize import (
        QuantConfig,
        TensorQuantConfig,
        calibrate,
        insert_qdq,
    )
    from scalepoint.tensorrt import TENSORRT_PATTERNS

    result = transform(model, patterns=TENSORRT_PATTERNS)
    quantized = insert_qdq(
        result.model,
        result.matches,
        config=QuantConfig(
            activation=TensorQuantConfig(n_bits=8, symmetric=True),
            weight=TensorQuantConfig(n_bits=8, symmetric=True, per_channel=True),
            skip_weight_quant_for=(nn.LayerNorm,),
        ),
    )
    calibrate(quantized, forward_loop)
    axes = {"x": {0: "batch"}}
    torch.onnx.export(
        quantized.cpu().eval(), example, "model.onnx", dynamic_axes=axes, input_names=["x"], verbose=False
    )
    return quantized


def test_models_calibrate_side_by_side(transformed, batches):
    """Models do not share state."""
    one, other = (insert_qdq(transformed.model, transformed.matches, CONFIG) for _ in range(2))
    calibrate(one, batches)
    before = parameters_of(one)

    def loop(model):
        for x in batches:
            model(x * 50)
            one(x)

    calibrate(other, loop)
    assert parameters_of(one) == before
    assert parameters_of(other) != before


def test_a_deep_copy_calibrates_alone(model, batches):
    twin = copy.deepcopy(model)
    calibrate(twin, batches)
    assert not any(stub.enabled for stub in stubs_of(model))
    assert {scale for scale, _ in parameters_of(model).values()} == {1.0}
