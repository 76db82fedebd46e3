"""Migrations end to end: config, order, data, undoing, save and load, files, reports."""

import copy
import json
from functools import partial
from importlib.metadata import EntryPoint

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scalepoint
from scalepoint.errors import ConfigError, ScalepointError, ScalepointWarning, StoreError, UsageError
from scalepoint.migration_report import MigrationReport
from scalepoint.quantize import (
    QuantConfig,
    QuantStub,
    SmoothQuantConfig,
    TensorQuantConfig,
    calibrate,
    insert_qdq,
    load,
    quantize,
    record_of,
    save,
)
from scalepoint.quantize.config import BUILT_IN_MIGRATIONS as NAMES
from scalepoint.quantize.migrations import MIGRATIONS, Migration, MigrationSites
from scalepoint.transformation import transform
from tests.pace import fast
from tests.quantize.migrations.models import (
    Chain,
    Language,
    done,
    error,
    float_change,
    migrated,
    pictures,
    refusals,
    report,
    rows,
    seeded,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own deepcopy of a graph


class TestTheConfig:
    def test_the_names_in_the_config_are_those_of_the_registry(self):
        assert list(NAMES) == MIGRATIONS.names()

    def test_an_unknown_name_is_an_error_with_the_nearest(self):
        with pytest.raises(ValueError, match=r"no migration 'equalise'.*equalize"):
            QuantConfig(migrate=("equalise",))

    def test_a_repeated_name_is_an_error(self):
        with pytest.raises(ValueError, match="each migration once"):
            QuantConfig(migrate=("awq", "awq"))

    def test_the_config_survives_yaml(self):
        config = QuantConfig(migrate=("rotate", "awq"))
        assert QuantConfig.from_yaml(config.to_yaml()) == config

    def test_smooth_quant_is_the_short_form(self):
        smooth = SmoothQuantConfig(enabled=True)
        assert QuantConfig(smooth_quant=smooth).migrations == ("smooth",)
        assert QuantConfig(smooth_quant=smooth, migrate=("awq",)).migrations == ("smooth", "awq")
        assert QuantConfig(smooth_quant=smooth, migrate=("awq", "smooth")).migrations == ("awq", "smooth")


def test_smooth_does_what_smooth_quant_does():
    model, data = seeded(Language, nn.LayerNorm), tokens()
    short = migrated(model, data, smooth_quant=SmoothQuantConfig(enabled=True, alpha=0.7))
    long = migrated(model, data, "smooth", smooth_quant=SmoothQuantConfig(alpha=0.7))
    assert record_of(short).migrated is None
    assert len(done(long)) == 3
    assert list(short.state_dict()) == list(long.state_dict())
    assert all(torch.equal(value, long.state_dict()[name]) for name, value in short.state_dict().items())


def test_the_order_is_the_given_one():
    model, data = seeded(Language), tokens()
    first, second = (migrated(model, data, *names) for names in (("awq", "rotate"), ("rotate", "awq")))
    assert report(first).done[0].migration == "awq"
    assert report(second).done[0].migration == "rotate"
    assert not torch.equal(first.state_dict()["attention.o.weight"], second.state_dict()["attention.o.weight"])
    for quantized in (first, second):
        assert float_change(model, quantized, data) < 3e-6


class TestTheData:
    def test_weight_only_models_need_data_too(self):
        config = QuantConfig(activation="float", migrate=("equalize",))
        with pytest.raises(UsageError, match="forward_loop"):
            quantize(seeded(Chain), pictures()[0], config)
        quantized = quantize(seeded(Chain), pictures()[0], config, forward_loop=pictures())
        assert done(quantized)

    def test_empty_data_is_an_error(self):
        with pytest.raises(ScalepointError, match="empty"):
            quantize(seeded(Chain), pictures()[0], QuantConfig(migrate=("equalize",)), forward_loop=[])

    def test_an_iterator_is_refused_before_anything_is_written(self):
        with pytest.raises(UsageError, match="more than once"):
            quantize(seeded(Chain), pictures()[0], QuantConfig(migrate=("awq",)), forward_loop=iter(pictures()))

    def test_a_function_works_as_batches_do(self):
        model, data = seeded(Language), tokens()

        def loop(model_to_run):
            for batch in data:
                model_to_run(batch).argmax(-1)

        config = QuantConfig(migrate=("awq", "rotate"), weight=TensorQuantConfig(per_channel=True))
        results = [quantize(model, data[0], config, forward_loop=source).state_dict() for source in (loop, data)]
        assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())

    @pytest.mark.filterwarnings("ignore:.*were skipped")
    def test_batches_that_are_not_finite_are_skipped_with_on_nan_skip(self):
        model, data = seeded(Chain), pictures()
        result = transform(model, data[0])
        quantized = insert_qdq(result.model, result.matches, QuantConfig(migrate=("equalize",)))
        calibrate(quantized, [torch.full_like(data[0], float("nan")), *data], on_nan="skip")
        assert float_change(model, quantized, data) < 2e-6


class TestTheModel:
    def test_the_model_of_the_caller_is_unchanged(self):
        model = seeded(Language, tied=True).train()
        before = copy.deepcopy(model.state_dict())
        migrated(model, tokens(), "awq", "rotate")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert model.head.weight is model.table.weight
        assert not any(module._forward_hooks for module in model.modules())

    def test_calibrating_again_does_not_migrate_again(self):
        model, data = seeded(Chain), pictures()
        quantized = migrated(model, data, "equalize")
        before = {name: value.clone() for name, value in quantized.state_dict().items()}
        calibrate(quantized, data)
        assert all(torch.equal(quantized.state_dict()[name], before[name]) for name in model.state_dict())

    def test_migrating_a_copy_leaves_the_original_unchanged(self):
        model, data = seeded(Chain), pictures()
        result = transform(model, data[0])
        original = insert_qdq(result.model, result.matches, QuantConfig(migrate=("equalize",)))
        before = original.state_dict()["1.weight"].clone()
        duplicate = calibrate(copy.deepcopy(original), data)
        assert torch.equal(original.state_dict()["1.weight"], before)
        assert not torch.equal(duplicate.state_dict()["1.weight"], before)

    def test_half_precision_changes_within_its_rounding(self):
        model, data = seeded(Language, nn.LayerNorm).bfloat16(), tokens()
        quantized = migrated(model, data, "awq", "rotate")
        assert report(quantized).done
        assert float_change(model, quantized, data) < 0.05

    def test_a_model_that_was_created_in_inference_mode_is_migrated(self):
        with torch.inference_mode():
            model = seeded(Language, nn.LayerNorm, bias=False)
        quantized = migrated(model, tokens(), "awq", "rotate")
        assert float_change(model, quantized, tokens()) < 3e-6

    def test_functional_layers_get_the_parameters_that_they_lack(self, tmp_path):
        class Functional(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
                self.weight, self.matrix = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8, 4))

            def forward(self, x):
                return F.linear(self.norm(self.table(x)), self.weight).relu() @ self.matrix

        model, data = seeded(Functional), tokens()
        quantized = migrated(model, data, "equalize", "rotate")
        assert len(done(quantized)) == 2, refusals(quantized)
        assert any(name.endswith("own_bias") for name in report(quantized).added)
        assert float_change(model, quantized, data) < 3e-6
        save(quantized, tmp_path)
        with torch.no_grad():
            assert torch.equal(load(tmp_path, model, data[0])(data[0]), quantized(data[0]))

    def test_a_group_with_a_given_range_is_refused(self):
        model, data = seeded(Chain), pictures()
        result = transform(model, data[0])
        quantized = insert_qdq(result.model, result.matches, QuantConfig(migrate=("equalize",)))
        stub = next(stub for stub in quantized.modules() if isinstance(stub, QuantStub) and stub.consumers == ["3"])
        stub.fixed_calibration = (0.1, 0)
        calibrate(quantized, data)
        assert "fixed range" in refusals(quantized)["0"]


def _doubling(which):
    """A migration that is wrong at some of its sites."""

    class Site:
        def __init__(self, name, tensor, factor):
            self.name, self.tensor, self.factor = name, tensor, factor

        def tensors(self):
            return [self.tensor]

    def find(context):
        state = dict(context.model.named_parameters())
        return MigrationSites(
            [Site(name, state[name].detach(), 2.0 if name in which else 1.0) for name in ("0.weight", "2.weight")]
        )

    def apply(context, sites):
        for site in sites:
            site.tensor.mul_(site.factor)
        return ["multiplied" for _ in sites]

    return Migration("doubling", find, apply)


@pytest.mark.parametrize("wrong", [("0.weight",), ("2.weight",), ("0.weight", "2.weight")], ids=str)
def test_a_site_that_changes_the_float_output_is_undone_and_listed(wrong, monkeypatch):
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), rows(4)
    monkeypatch.setitem(MIGRATIONS.builtin, "equalize", _doubling(wrong))
    quantized = migrated(model, data, "equalize")
    assert sorted(refusals(quantized)) == sorted(wrong)
    assert all("the float output changes" in why for why in refusals(quantized).values())
    assert len(done(quantized)) == 2 - len(wrong)
    assert all(torch.equal(quantized.state_dict()[name], value) for name, value in model.state_dict().items())


SLOW = pytest.mark.slow
BARE = partial(nn.LayerNorm, elementwise_affine=False)
CASES = {
    "equalize": (lambda: seeded(Chain), pictures, ("equalize",)),
    "smooth, awq of norms without affine": (lambda: seeded(Language, BARE), tokens, ("smooth", "awq")),
    "rotate with biases added": (lambda: seeded(Language, nn.LayerNorm, bias=False), tokens, ("rotate",)),
    "rotate a tied embedding": (lambda: seeded(Language, tied=True), tokens, ("awq", "rotate")),
}


class TestKept:
    @pytest.mark.parametrize("case", fast(CASES, "equalize", "rotate a tied embedding"))
    def test_save_and_load_give_the_same_model(self, case, tmp_path):
        build, make, names = CASES[case]
        model, data = build(), make()
        quantized = migrated(model, data, *names)
        save(quantized, tmp_path)
        loaded = load(tmp_path, model, data[0])
        assert report(loaded) == report(quantized)
        with torch.no_grad():
            assert torch.equal(loaded(data[0]), quantized(data[0]))
        assert float_change(model, loaded, data) < 5e-6
        calibrate(loaded, data)  # and it does not migrate a second time
        assert float_change(model, loaded, data) < 5e-6

    def test_an_untied_embedding_has_its_own_codes(self, tmp_path):
        model, data = seeded(Language, tied=True), tokens()
        quantized = quantize(model, data[0], QuantConfig(migrate=("rotate",)), forward_loop=data, target="onnxruntime")
        assert "the stream of attention.norm" in done(quantized)
        assert float_change(model, quantized, data) < 5e-6
        save(quantized, tmp_path)
        with torch.no_grad():
            assert torch.equal(load(tmp_path, model, data[0])(data[0]), quantized(data[0]))

    def test_a_manifest_that_names_other_parameters_is_refused(self, tmp_path):
        model, data = seeded(Language, nn.LayerNorm, bias=False), tokens()
        save(migrated(model, data, "rotate"), tmp_path)
        path = tmp_path / "scalepoint.json"
        manifest = json.loads(path.read_text())["manifest"]
        manifest["migrated"]["added"] = ["nowhere.bias"]
        from scalepoint.quantize.store import _serialize_with_checksum  # the forger's tool

        path.write_text(_serialize_with_checksum(manifest))
        with pytest.raises(StoreError, match="migrations"):
            load(tmp_path, model, data[0])

    def test_a_report_survives_json(self):
        result = report(migrated(seeded(Chain), pictures(), "equalize"))
        assert MigrationReport.from_dict(json.loads(json.dumps(result.to_dict()))) == result
        assert "3 done, 1 refused" in str(result)


@pytest.mark.parametrize("case", [pytest.param(name, marks=SLOW if "with" in name else ()) for name in CASES])
def test_the_exported_file_agrees_in_its_runtime(case, tmp_path):
    build, make, names = CASES[case]
    model, data = build(), make()
    quantized = quantize(model, data[0], QuantConfig(migrate=names), forward_loop=data, target="onnxruntime")
    scalepoint.export(quantized, tmp_path / "model.onnx", data[0])
    assert scalepoint.verify(tmp_path / "model.onnx", quantized, data[0], layers=False).holds


def test_a_resumed_run_applies_a_changed_list_of_migrations(tmp_path):
    model, data = seeded(Chain), pictures()
    calls = []

    def evaluate(run):
        calls.append(run)
        if len(calls) == 2:
            raise KeyError("the disk is gone")
        return 1.0

    options = {"output": tmp_path / "out", "smoke": True, "progress": False, "evaluate": evaluate}
    with pytest.raises(KeyError):
        scalepoint.deploy(model, data[0], data, config=QuantConfig(migrate=("smooth",)), **options)
    config = QuantConfig(migrate=("smooth", "equalize"))
    with pytest.warns(ScalepointWarning, match="the config changed"):
        result = scalepoint.deploy(model, data[0], data, config=config, resume=True, **options).report
    assert {row.migration for row in result.migrated.rows} == {"equalize"}
    assert any(line.startswith("migrated") for line in result.summary())
    assert type(result).from_json(result.to_json()).migrated == result.migrated


def test_tuning_works_after_migrations():
    model, data = seeded(Language, nn.LayerNorm, 32), tokens(4)
    quantized = migrated(model, data, "awq", "rotate", weight=TensorQuantConfig(n_bits=4, per_channel=True))
    before = error(model, quantized, data)
    scalepoint.tune(quantized, data, progress=False)
    assert error(model, quantized, data) < before
    assert float_change(model, quantized, data) < 3e-6


NOTHING = _doubling(())
NOT_ONE = "doubling"


class TestOtherPackages:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        values = {"doubling": "NOTHING", "broken": "NOT_ONE"}
        points = [EntryPoint(name, f"{__name__}:{value}", "scalepoint.migrations") for name, value in values.items()]
        monkeypatch.setattr(
            "scalepoint.support.plugins.entry_points", lambda group: [point for point in points if point.group == group]
        )

    def test_migrations_of_other_packages_are_found_by_name(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
        quantized = migrated(model, rows(4), "doubling", "equalize")
        assert done(quantized) == ["0.weight", "2.weight", "0 -> 2"]

    def test_an_entry_point_that_is_not_a_migration_is_refused_with_its_origin(self):
        with pytest.raises(ConfigError, match=r"'broken'.*NOT_ONE"):
            MIGRATIONS.find("broken")
