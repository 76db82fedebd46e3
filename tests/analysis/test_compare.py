"""compare: every number against one computed by hand, and nothing of the caller's changed."""

import gc
import json
import math

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from scalepoint.analysis import compare, sensitivity
from scalepoint.analysis.statistics import ErrorSums, RangeUsage
from scalepoint.errors import CalibrationError, UsageError
from scalepoint.quantize import (
    Override,
    QuantStub,
    TensorQuantConfig,
    coverage,
    disable_fake_quant,
    insert_qdq,
    load,
    quantize,
    save,
)
from scalepoint.spec import QuantizationSpec
from scalepoint.transformation import transform
from tests.analysis.nets import (
    COARSE,
    batches,
    config,
    decibels,
    float_net,
    quantized_net,
    quantizers,
    same,
    snapshot,
    some_models,
)
from tests.errors import raises
from tests.models import with_norm_statistics


@pytest.fixture(scope="module")
def plain():
    return float_net()


@pytest.fixture(scope="module")
def model():
    return quantized_net()


@pytest.fixture(scope="module")
def coarse():
    return quantized_net(COARSE)


@pytest.fixture(scope="module")
def comparison(plain, model):
    return compare(plain, model, batches())


def row_of(comparison, name):
    (result,) = [row for row in comparison.rows if row.name == name]
    return result


def fused_outputs(model, data, start):
    """The outputs on the data of the group whose path starts with `start`, recorded by a hook."""
    (group,) = [
        module for name, module in model.named_modules() if name.startswith(start) and hasattr(module, "wiring")
    ]
    results = []
    handle = group.register_forward_hook(lambda module, inputs, output: results.append(output))
    with torch.no_grad():
        for batch in data:
            model(batch)
    handle.remove()
    return torch.cat(results)


def float_outputs(plain, data):
    """The same values in the float model, computed step by step."""
    with torch.no_grad():
        x = torch.cat(data)
        first = plain.bn(plain.first(x)).relu()
        second = plain.second(first).relu()
        third = plain.third(second.mean((2, 3)))
        fourth = plain.fourth(third)
        return {"first": first, "second": second, "third": third, "fourth": fourth, "fifth": plain.fifth(fourth)}


def fake_quantized(x, quantizer):
    scale = quantizer.scale if quantizer.scale.ndim == 0 else quantizer.scale.view(-1, *(1 for _ in x.shape[1:]))
    low, high = quantizer.spec.quant_min, quantizer.spec.quant_max
    return (x / scale).round().clamp(low, high) * scale


class TestNumbers:
    @pytest.mark.parametrize("name", ["first", "second", "third", "fourth", "fifth"])
    def test_sqnr_and_cosine_are_those_of_all_batches_together(self, plain, model, comparison, name):
        expected, result = float_outputs(plain, batches())[name], fused_outputs(model, batches(), name)
        row = row_of(comparison, name)
        assert row.sqnr_db == pytest.approx(decibels(expected, result), abs=1e-3)
        assert row.cosine == pytest.approx(float(F.cosine_similarity(expected.flatten(), result.flatten(), dim=0)))

    def test_local_error_is_that_of_the_layer_on_float_inputs(self, plain, model, comparison):
        outputs = float_outputs(plain, batches())
        stub = next(stub for stub in model.modules() if isinstance(stub, QuantStub) and "fourth" in stub.consumers)
        weight_quant = next(quantizer for quantizer in quantizers(model) if quantizer.name == "fourth.weight")
        with torch.no_grad():
            weight = fake_quantized(plain.fourth.weight, weight_quant)
            result = F.linear(fake_quantized(outputs["third"], stub), weight, plain.fourth.bias)
        expected = decibels(outputs["fourth"], result)
        assert row_of(comparison, "fourth").local_sqnr_db == pytest.approx(expected, abs=1e-3)

    def test_the_first_layer_has_only_its_own_error(self, comparison):
        row = row_of(comparison, "first")
        assert row.local_sqnr_db == pytest.approx(row.sqnr_db)

    def test_weight_error_is_that_of_the_folded_weight(self, plain, model, comparison):
        s = plain.bn.weight / (plain.bn.running_var + plain.bn.eps).sqrt()
        weight = (plain.first.weight * s.view(-1, 1, 1, 1)).detach()
        quantizer = next(quantizer for quantizer in quantizers(model) if quantizer.name == "first.weight")
        expected = decibels(weight, fake_quantized(weight, quantizer))
        assert row_of(comparison, "first").weight_sqnr_db == pytest.approx(expected, abs=1e-3)

    def test_outputs_are_compared_with_the_float_model_itself(self, plain, model, comparison):
        with torch.no_grad():
            expected = decibels(torch.cat([plain(x) for x in batches()]), torch.cat([model(x) for x in batches()]))
        (output,) = comparison.outputs
        assert output.name == "output"
        assert output.sqnr_db == pytest.approx(expected, abs=1e-3)
        assert comparison.graph_sqnr_db > 100

    def test_another_float_model_is_detected(self, model):
        torch.manual_seed(7)
        other = type(float_net())().eval()
        assert compare(other, model, batches()).graph_sqnr_db < 10

    def test_values_beyond_the_range_are_saturated(self, plain, model):
        stub = next(stub for stub in model.modules() if isinstance(stub, QuantStub) and "first" in stub.consumers)
        data = [3 * batch for batch in batches()]
        x, scale = torch.cat(data), float(stub.scale)
        codes = (x / scale).round()
        row = row_of(compare(plain, model, data), "first")
        assert row.saturation == pytest.approx(float(((codes < -128) | (codes > 127)).float().mean()), abs=1e-3)
        assert row.end_share == pytest.approx(float(((codes <= -128) | (codes >= 127)).float().mean()), abs=1e-3)
        assert row.saturation > 0.05
        assert row.used_range == 1

    def test_a_range_that_is_too_wide_is_little_used(self, plain, model):
        data = [0.25 * batch for batch in batches()]
        x = torch.cat(data)
        stub = next(stub for stub in model.modules() if isinstance(stub, QuantStub) and "first" in stub.consumers)
        row = row_of(compare(plain, model, data), "first")
        assert row.used_range == pytest.approx(float((x.max() - x.min()) / (255 * stub.scale)), rel=1e-4)
        assert row.used_range < 0.3
        assert row.saturation == 0

    def test_zeros_after_a_relu_are_on_the_lowest_code_and_not_saturated(self, plain):
        uint8 = TensorQuantConfig(symmetric=False)
        row = row_of(compare(plain, quantized_net(activation=uint8), batches()), "second")
        assert row.end_share > 0.2
        assert row.saturation == 0

    def test_without_local_it_is_not_measured(self, plain, model, comparison):
        fast = compare(plain, model, batches(), local=False)
        assert all(row.local_sqnr_db is None for row in fast.rows)
        assert [row.sqnr_db for row in fast.rows] == [row.sqnr_db for row in comparison.rows]

    def test_a_layer_before_all_quantizers_is_exact(self, plain):
        model = quantized_net(Override(name="first", activation="float", weight="float"))
        row = row_of(compare(plain, model, batches()), "first")
        assert row.sqnr_db == math.inf
        assert row.precision == "float"
        assert (row.weight_sqnr_db, row.local_sqnr_db, row.saturation) == (None, None, None)

    def test_no_float_model_means_the_graph_itself(self, model, comparison):
        result = compare(None, model, batches())
        assert result.graph_sqnr_db == math.inf
        assert result.outputs[0].sqnr_db == pytest.approx(comparison.outputs[0].sqnr_db, abs=1e-3)


class TestRanking:
    @pytest.mark.parametrize("name", ["first", "second", "third", "fourth", "fifth"])
    def test_the_layer_with_two_bits_is_worst(self, plain, name):
        model = quantized_net(Override(name=name, weight=TensorQuantConfig(n_bits=2, per_channel=True)))
        comparison = compare(plain, model, batches())
        assert comparison.worst(1)[0].name == name
        assert comparison.worst(2)[1].local_sqnr_db > comparison.worst(1)[0].local_sqnr_db + 10

    def test_later_layers_pass_the_error_on(self, plain, coarse):
        comparison = compare(plain, coarse, batches())
        assert row_of(comparison, "fourth").sqnr_db < 25 < row_of(comparison, "fourth").local_sqnr_db

    def test_rows_are_those_of_coverage_in_graph_order(self, comparison, model):
        assert [row.name for row in comparison.rows] == [row.name for row in coverage(model).operations]
        assert [row.macs for row in comparison.rows] == [row.macs for row in coverage(model).operations]

    def test_worst_returns_at_most_all_rows(self, comparison):
        assert len(comparison.worst(100)) == len(comparison.rows)


class TestModels:
    @pytest.mark.parametrize(("make", "inputs", "target"), some_models())
    def test_every_operation_of_the_coverage_has_a_row(self, make, inputs, target):
        torch.manual_seed(0)
        plain = with_norm_statistics(make())
        model = quantize(plain, inputs, forward_loop=[inputs], target=target).eval()
        comparison = compare(plain, model, [inputs])
        names = [row.name for row in comparison.rows]
        rows = [row.name for row in coverage(model).operations]
        assert [name for name in names if name in rows] == rows
        assert all(row.sqnr_db > 5 for row in comparison.rows)
        with torch.no_grad():
            assert comparison.outputs[0].sqnr_db == pytest.approx(decibels(plain(inputs), model(inputs)), abs=0.01)

    def test_groups_without_weights_have_rows_too(self):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

            def forward(self, x):
                return (self.a(x) + self.b(x)).relu()

        x = torch.randn(2, 3, 8, 8)
        plain = Residual().eval()
        comparison = compare(plain, quantize(plain, x, forward_loop=[x], target="onnxruntime"), [x])
        row = row_of(comparison, "add")
        assert (row.kind, row.precision) == ("add", "x uint8")
        assert row.weight_sqnr_db is None
        assert row.local_sqnr_db > row.sqnr_db

    def test_weight_only_models_are_compared(self, plain):
        model = quantized_net(activation="float")
        row = row_of(compare(plain, model, batches()), "second")
        assert row.saturation is None
        assert row.weight_sqnr_db > 30

    @pytest.mark.parametrize(
        "spec",
        [
            pytest.param(QuantizationSpec(dtype=torch.float8_e4m3fn, qparam_calculator_cls="global_minmax"), id="fp8"),
            pytest.param(QuantizationSpec(dtype=torch.int8, qparam_calculator_cls="dynamic"), id="dynamic"),
        ],
    )
    def test_other_number_formats(self, plain, spec):
        comparison = compare(plain, quantized_net(activation=spec), batches())
        assert all(20 < row.sqnr_db < 60 for row in comparison.rows)

    def test_outputs_in_a_structure_keep_their_names(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

            def forward(self, x, *, scale):
                return {"a": self.a(x) * scale, "rest": [self.b(x), x.argmax(1)]}

        plain = Two().eval()
        batch = {"x": torch.randn(5, 4), "scale": torch.rand(5, 1)}
        model = quantize(plain, (), kwargs=batch, config=config(), forward_loop=[batch])
        comparison = compare(plain, model, [batch])
        assert [output.name for output in comparison.outputs] == ["output['a']", "output['rest'][0]"]
        expected = decibels(plain(**batch)["a"].detach(), model(**batch)["a"].detach())
        assert comparison.outputs[0].sqnr_db == pytest.approx(expected, abs=1e-3)

    def test_a_layer_that_is_called_twice_has_two_rows(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(8, 8)

            def forward(self, x):
                return self.a(self.a(x).relu())

        x = torch.randn(16, 8)
        plain = Twice().eval()
        comparison = compare(plain, quantize(plain, x, config(), forward_loop=[x]), [x])
        assert [row.name for row in comparison.rows] == ["a", "a"]
        assert comparison.rows[1].sqnr_db == pytest.approx(comparison.outputs[0].sqnr_db, abs=1e-3)


class TestData:
    def test_every_form_of_data_gives_the_same_result(self, plain, model, comparison):
        def loop(run):
            for batch in batches():
                run(batch)

        forms = [loop, iter(batches()), [(batch, "label") for batch in batches()], [{"x": b} for b in batches()]]
        for data in forms:
            assert compare(plain, model, data).rows == comparison.rows

    def test_max_batches(self, plain, model):
        data = iter(batches(5))
        assert compare(plain, model, data, max_batches=2).batches == 2
        assert len(list(data)) == 3

    @pytest.mark.usefixtures("fast_gc_collect")
    def test_memory_does_not_depend_on_the_number_of_batches(self, plain, model):
        alive = []

        def stream():
            for batch in batches(6, size=16):
                gc.collect()
                alive.append(sum(tensor.numel() for tensor in gc.get_objects() if type(tensor) is torch.Tensor))
                yield batch

        compare(plain, model, stream())
        assert max(alive[2:]) - min(alive[2:]) < 100

    def test_activations_are_dropped_when_their_last_reader_has_run(self, plain):
        class Deep(nn.Sequential):
            def __init__(self):
                super().__init__(*(nn.Linear(8, 8) for _ in range(12)))

        x = torch.randn(4, 8)
        model = quantize(Deep().eval(), x, config(), forward_loop=[x])
        from scalepoint.analysis.paired_runner import FloatAndQuantizedRunner
        from scalepoint.quantize.shadow_models import wrap_with_signature

        sizes = []
        steps = FloatAndQuantizedRunner(model, lambda node, steps: sizes.append(len(steps.exact) + len(steps.noisy)))
        with torch.no_grad():
            assert torch.equal(wrap_with_signature(model, steps)(x), model(x))
        assert max(sizes) <= 6
        assert not steps.exact

    def test_nan_in_the_data_is_reported(self, plain, model):
        data = batches()
        data[1][0, 0, 0, 0] = math.nan
        comparison = compare(plain, model, data)
        assert math.isnan(comparison.outputs[0].sqnr_db)
        assert math.isnan(comparison.worst(1)[0].sqnr_db)
        assert json.dumps(comparison.to_list(), allow_nan=False)


class TestRestoration:
    @pytest.mark.parametrize("training", [False, True])
    def test_both_models_stay_unchanged(self, training):
        plain, model = float_net().train(training), quantized_net().train(training)
        model.third.training = not training
        before = snapshot(plain), snapshot(model)
        compare(plain, model, batches())
        same(before[0], snapshot(plain))
        same(before[1], snapshot(model))

    def test_both_models_stay_unchanged_if_the_data_raises(self, plain, model):
        def broken():
            yield batches()[0]
            raise OSError("disk")

        plain = float_net().train()
        before = snapshot(plain), snapshot(model)
        with pytest.raises(OSError, match="disk") as caught:
            compare(plain, model, broken())
        assert "batch 1" in caught.value.__notes__[0]
        same(before[0], snapshot(plain))
        same(before[1], snapshot(model))

    def test_both_models_stay_unchanged_if_a_batch_does_not_fit(self, plain, model):
        before = snapshot(model)
        with pytest.raises(RuntimeError):
            compare(plain, model, [torch.randn(2, 5, 6, 6)])
        same(before, snapshot(model))

    def test_a_disabled_quantizer_stays_disabled(self, plain):
        model = quantized_net()
        for quantizer in quantizers(model):
            quantizer.enabled = "first" in quantizer.consumers
        comparison = compare(plain, model, batches())
        assert row_of(comparison, "fourth").local_sqnr_db == math.inf
        assert sum(quantizer.enabled for quantizer in quantizers(model)) == 2

    def test_modes_do_not_change_the_result(self, comparison):
        result = compare(float_net().train(), quantized_net().train(), batches())
        assert [row.sqnr_db for row in result.rows] == pytest.approx([row.sqnr_db for row in comparison.rows], abs=1e-3)

    def test_a_saved_model_compares_as_before(self, plain, comparison, tmp_path):
        save(quantized_net(), tmp_path / "model")
        loaded = load(tmp_path / "model", plain, batches(1)[0])
        assert compare(plain, loaded, batches()).rows == comparison.rows


class TestBadInput:
    def test_uncalibrated(self, plain):
        result = transform(plain, batches()[0])
        with raises(UsageError, "10 quantizers", "calibrate"):
            compare(plain, insert_qdq(result.model, result.matches, config()), batches())

    def test_switched_off(self, plain):
        model = quantized_net()
        disable_fake_quant(model)
        with pytest.raises(UsageError, match="enable_fake_quant"):
            compare(plain, model, batches())

    def test_a_float_model_instead_of_the_quantized_one_is_refused(self, plain):
        with pytest.raises(UsageError, match="insert_qdq"):
            compare(plain, plain, batches())

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ([], "0 batches"),
            (lambda run: None, "never called"),
            (torch.zeros(2, 3, 6, 6), "iterable of batches"),
            (7, "iterable of batches"),
        ],
        ids=["empty", "idle", "tensor", "number"],
    )
    def test_no_data(self, plain, model, data, message):
        with pytest.raises((UsageError, CalibrationError), match=message):
            compare(plain, model, data)

    def test_a_different_float_model_is_refused(self, model):
        with pytest.raises(UsageError, match="not the same model"):
            compare(nn.Flatten(), model, batches())

    def test_a_float_model_that_is_not_callable_is_refused(self, model):
        with pytest.raises(UsageError, match="got 5"):
            compare(5, model, batches())


class TestShown:
    def test_the_table_fits_40_columns(self, comparison):
        console = Console(width=40, color_system=None)
        with console.capture() as capture:
            console.print(comparison.table())
        text = capture.get()
        assert all(len(line) <= 40 for line in text.splitlines())
        assert "…" not in text
        assert f"{comparison.rows[0].sqnr_db:.1f}" in text

    def test_names_are_not_read_as_markup(self, comparison):
        from dataclasses import replace

        row = replace(comparison.rows[0], name="[red]x")
        console = Console(width=80, color_system=None)
        with console.capture() as capture:
            console.print(comparison.table([row]))
        assert "[red]x" in capture.get()

    def test_json(self, plain):
        model = quantized_net(Override(name="first", activation="float", weight="float"))
        comparison = compare(plain, model, batches())
        rows = json.loads(json.dumps(comparison.to_list(), allow_nan=False))
        assert rows[0]["sqnr_db"] is None
        assert rows[1]["sqnr_db"] == comparison.rows[1].sqnr_db
        assert "5 layers, 3 batches: output" in str(comparison).replace("\n", " ")


class TestSums:
    def test_agreements_merge(self):
        x, y = torch.randn(100), torch.randn(100)
        all_data, one, other = ErrorSums(), ErrorSums(), ErrorSums()
        all_data.add(x, y)
        one.add(x[:30], y[:30])
        other.add(x[30:], y[30:])
        one.merge(other)
        assert one.sqnr_db == pytest.approx(all_data.sqnr_db)
        assert one.cosine == pytest.approx(all_data.cosine)
        assert one.count == all_data.count

    @pytest.mark.parametrize(
        ("x", "y", "level", "cosine"),
        [(0.0, 0.0, math.inf, 1.0), (0.0, 1.0, -math.inf, 0.0), (1.0, 1.0, math.inf, 1.0), (1.0, -1.0, -6.0206, -1.0)],
    )
    def test_decibels_of_zero_signal_or_noise_are_infinite(self, x, y, level, cosine):
        agreement = ErrorSums()
        agreement.add(torch.tensor([x]), torch.tensor([y]))
        assert agreement.sqnr_db == pytest.approx(level, abs=1e-3)
        assert agreement.cosine == pytest.approx(cosine)

    def test_nan_is_worst(self):
        agreement = ErrorSums()
        agreement.add(torch.ones(2), torch.tensor([1.0, math.nan]))
        assert math.isnan(agreement.sqnr_db)

    def test_half_precision_does_not_overflow(self):
        agreement = ErrorSums()
        agreement.add(torch.full((10,), 60000.0, dtype=torch.float16), torch.full((10,), 59968.0, dtype=torch.float16))
        assert agreement.sqnr_db == pytest.approx(20 * math.log10(60000 / 32), abs=0.01)

    def test_range_usages_merge(self):
        x = torch.linspace(-2, 1, 301)
        all_data, one, other = (RangeUsage(-1.0, 1.0, 0.01) for _ in range(3))
        all_data.add(x)
        one.add(x[:100])
        other.add(x[100:])
        other.merge(one)
        assert all_data == other
        assert all_data.saturation == pytest.approx(1 / 3, abs=0.01)
        assert all_data.used == 1


class Neighbours(nn.Module):
    """A module whose name is another's with an ending that groups get."""

    def __init__(self):
        super().__init__()
        self.a, self.a_fused, self.a_fused_1 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.a_fused_1(self.a_fused(self.a(x)))


def test_layers_with_similar_names_are_distinguished():
    x = torch.randn(3, 6)
    model = quantize(Neighbours().eval(), x, forward_loop=[x], target="onnxruntime")
    assert [row.name for row in compare(None, model, [x], progress=False).rows] == ["a", "a_fused", "a_fused_1"]
    assert {row.name for row in sensitivity(model, [x], progress=False)} == {"a", "a_fused", "a_fused_1"}
