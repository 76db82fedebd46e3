"""save and load: bit-equal, refused after any change, and never half-written, even if the process is killed."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import scalepoint
from scalepoint.errors import ScalepointError, StoreError
from scalepoint.quantize import (
    CalibrationMethod,
    Override,
    QuantConfig,
    QuantStub,
    SmoothQuantConfig,
    TensorQuantConfig,
    calibrate,
    disable_observer,
    freeze_bn_stats,
    insert_qdq,
    prepare_qat,
    quantize,
)
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.transformation import apply_transformation_plan, get_transformation_plan, transform
from tests.models import Decoder, ResNet, with_norm_statistics
from tests.warm import warm

ROOT = Path(__file__).parents[2]
MANIFEST = "scalepoint.json"
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # emitted by torch when it copies a graph
W8A8 = QuantConfig(activation=TensorQuantConfig(), weight=TensorQuantConfig(per_channel=True))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))


class Normed(nn.Module):
    """A norm without affine parameters, to which smoothing adds a weight, and one with."""

    def __init__(self):
        super().__init__()
        self.bare, self.norm = nn.LayerNorm(16, elementwise_affine=False), nn.LayerNorm(16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.b(self.norm(self.a(self.bare(x))))


class PreActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(F.relu(self.bn(x)))


def image(batch=2, seed=1, size=8):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def small(seed=0):
    torch.manual_seed(seed)
    return with_norm_statistics(Small())


@functools.cache
def quantized_small(seed=0):
    """Captured without example inputs, which is fast."""
    return quantize(small(seed), None, W8A8, forward_loop=[image()]).eval()


def rows(batch=2, seed=1):
    return torch.randn(batch, 6, 16, generator=torch.Generator().manual_seed(seed))


def tokens(seed=1):
    return torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(seed))


def train(model, x, rate=0.01):
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def cnn():
    model = with_norm_statistics(ResNet((1, 1, 1, 1), 4, 5))
    return model, image(2, size=32), quantize(model, image(2, size=32), W8A8, forward_loop=[image(2, 3, 32)])


def decoder():
    model = Decoder(layers=1).eval()
    return model, tokens(), quantize(model, tokens(), W8A8, forward_loop=[tokens(2)])


def smooth():
    model = Normed().eval()
    config = W8A8.model_copy(update={"smooth_quant": SmoothQuantConfig(enabled=True, alpha="search")})
    return model, rows(), quantize(model, rows(), config, forward_loop=[rows(seed=4)])


def smooth_not_yet_calibrated():
    model = Normed().eval()
    result = transform(model, rows())
    config = W8A8.model_copy(update={"smooth_quant": SmoothQuantConfig(enabled=True)})
    return model, rows(), insert_qdq(result.model, result.matches, config)


def lsq():
    model = with_norm_statistics(Small())
    quantized = quantize(model, image(), W8A8, forward_loop=[image()])
    return model, image(), train(prepare_qat(quantized, learn_scales=True), image(4, 7), 1e-3)


def trained():
    model = with_norm_statistics(Small())
    return model, image(), train(prepare_qat(quantize(model, image(), W8A8, forward_loop=[image()])), image(4, 7))


def observing():
    """Never calibrated: ranges come from training."""
    model = with_norm_statistics(Small())
    result = transform(model, image())
    return model, image(), train(prepare_qat(insert_qdq(result.model, result.matches, W8A8)), image(4, 7))


def observed():
    model, x, quantized = observing()
    disable_observer(quantized)
    return model, x, quantized


def frozen():
    model, x, quantized = trained()
    freeze_bn_stats(quantized)
    return model, x, train(quantized, image(4, 9))


def frozen_outside():
    model = with_norm_statistics(PreActivation())
    quantized = prepare_qat(quantize(model, image(), W8A8, forward_loop=[image()]))
    freeze_bn_stats(quantized)
    return model, image(), train(quantized, image(4, 9))


def int4_blocks():
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
    spec = QuantizationSpec(
        dtype="int4",
        qscheme="symmetric_with_clipping",
        granularity=PerBlockGranularity(axis=1, block_size=8),
        qparam_calculator_cls="static",
    )
    return model, rows(), quantize(model, rows(), QuantConfig(activation="float", weight=spec))


def fp8():
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
    spec = QuantizationSpec(dtype="float8_e4m3fn", qscheme="symmetric")
    return model, rows(), quantize(model, rows(), QuantConfig(activation=spec, weight=spec), forward_loop=[rows()])


def mixed():
    model = with_norm_statistics(Small())
    config = QuantConfig(
        activation=TensorQuantConfig(symmetric=False, calibration_method=CalibrationMethod.HISTOGRAM),
        weight=TensorQuantConfig(per_channel=True, symmetric=False),
        overrides=(
            Override(name="conv", weight=TensorQuantConfig(n_bits=4)),
            Override(name="fc", weight="float", activation="float"),
        ),
    )
    return model, image(), quantize(model, image(), config, forward_loop=[image()])


def live_weights():
    model = with_norm_statistics(Small())
    return model, image(), quantize(model, image(), W8A8, forward_loop=[image()], freeze_weights=False)


def one_match_off():
    model = with_norm_statistics(Small())
    plan = get_transformation_plan(model, image())
    next(match for match in plan.matches if match.name.startswith("fc")).apply = False
    result = apply_transformation_plan(plan)
    return model, image(), calibrate(insert_qdq(result.model, result.matches, W8A8), [image()])


def for_a_target():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    x = torch.randn(4, 32)
    return model, x, quantize(model, x, target="tensorrt", forward_loop=[x])


def half():
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval().to(torch.bfloat16)
    x = rows().to(torch.bfloat16)
    return model, x, quantize(model, x, W8A8, forward_loop=[x])


def shared_layer():
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer).eval()
    return model, rows(), quantize(model, rows(), W8A8, forward_loop=[rows()])


CASES = {
    "CNN": cnn,
    "decoder with a tied head": decoder,
    "smoothed": smooth,
    "to be smoothed": smooth_not_yet_calibrated,
    "learned scales": lsq,
    "trained": trained,
    "trained with observers": observed,
    "statistics frozen": frozen,
    "statistics frozen outside a group": frozen_outside,
    "int4 blocks": int4_blocks,
    "fp8": fp8,
    "mixed": mixed,
    "live weights": live_weights,
    "one match off": one_match_off,
    "TensorRT": for_a_target,
    "bfloat16": half,
    "one layer twice": shared_layer,
}


def same_state(first, second):
    one, two = first.state_dict(), second.state_dict()
    assert list(one) == list(two)
    names = [name for name in one if not name.endswith("observed_batches")]  # a counter of the observers
    assert [name for name in names if not torch.equal(_bytes(one[name]), _bytes(two[name]))] == []


def _bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def output(model, x):
    return model(x)


class TestBitEqual:
    @pytest.mark.parametrize("case", CASES)
    def test_the_loaded_model_computes_the_same(self, case, tmp_path):
        torch.manual_seed(0)
        model, x, quantized = CASES[case]()
        quantized.eval()
        expected = output(quantized, x)
        scalepoint.save(quantized, tmp_path / "kept")
        loaded = scalepoint.load(tmp_path / "kept", model, x)
        assert torch.equal(output(loaded, x), expected)
        assert torch.equal(output(quantized, x), expected)  # saving changed nothing
        assert not loaded.training
        same_state(quantized, loaded)

    @pytest.mark.parametrize(
        "case",
        [
            "smoothed",
            "learned scales",
            "statistics frozen",
            pytest.param("decoder with a tied head", marks=pytest.mark.slow),
        ],
    )
    def test_a_loaded_model_is_saved_and_loaded_again(self, case, tmp_path):
        torch.manual_seed(0)
        model, x, quantized = CASES[case]()
        scalepoint.save(quantized.eval(), tmp_path / "one")
        first = scalepoint.load(tmp_path / "one", model, x)
        scalepoint.save(first, tmp_path / "two")
        second = scalepoint.load(tmp_path / "two", model, x)
        assert torch.equal(output(second, x), output(quantized, x))
        same_state(quantized, second)

    def test_a_model_saved_in_training_is_what_eval_gives(self, tmp_path):
        torch.manual_seed(0)
        model, x, quantized = trained()
        assert quantized.training
        scalepoint.save(quantized, tmp_path)
        assert quantized.training
        assert torch.equal(output(scalepoint.load(tmp_path, model, x), x), output(quantized.eval(), x))

    @pytest.mark.parametrize("prepare", [observing, frozen, frozen_outside, lsq], ids=lambda prepare: prepare.__name__)
    def test_training_continues_after_a_load(self, prepare, tmp_path):
        torch.manual_seed(0)
        model, x, quantized = prepare()
        scalepoint.save(quantized, tmp_path)
        loaded = scalepoint.load(tmp_path, model, x).train()
        train(quantized.train(), image(4, 20), 1e-3)
        train(loaded, image(4, 20), 1e-3)
        same_state(quantized, loaded)

    def test_tied_weights_are_stored_once_and_stay_tied(self, tmp_path):
        torch.manual_seed(0)
        model, x, quantized = decoder()
        scalepoint.save(quantized, tmp_path)
        stored = load_file(next(tmp_path.glob("*.safetensors")))
        assert ("lm_head.weight" in stored) + ("embed_tokens.weight" in stored) == 1
        loaded = scalepoint.load(tmp_path, model, x)
        state = loaded.state_dict()
        pointers = {state[name].data_ptr() for name in ("lm_head.weight", "embed_tokens.weight")}
        assert len(pointers) == 1

    def test_saving_twice_gives_the_same_file(self, tmp_path):
        quantized = quantized_small()
        for name in ("one", "two"):
            scalepoint.save(quantized, tmp_path / name)
        one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
        assert one == two

    def test_fixed_and_skipped_stubs_are_saved(self, tmp_path):
        class Branch(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, x, y=None):
                return self.a(x)

        torch.manual_seed(0)
        model = Branch().eval()
        result = transform(model, rows())
        quantized = insert_qdq(result.model, result.matches, W8A8)
        stub = next(module for module in quantized.modules() if isinstance(module, QuantStub))
        stub.fixed_calibration = (0.25, 3)
        stub._set_fixed_parameters((0.25, 3))
        calibrate(quantized, [rows()])
        scalepoint.save(quantized, tmp_path)
        loaded = scalepoint.load(tmp_path, model, rows())
        assert torch.equal(output(loaded, rows()), output(quantized.eval(), rows()))
        calibrate(loaded, [rows() * 9])
        assert float(loaded.get_submodule(stub.name).scale) == 0.25

    def test_loading_changes_neither_calibration_nor_the_callers_model(self, tmp_path, monkeypatch):
        model = small()
        quantized = quantized_small()
        expected = output(quantized, image())
        scalepoint.save(quantized, tmp_path)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.train()

        def never(*args, **kwargs):
            raise AssertionError("calibrated")

        monkeypatch.setattr(QuantStub, "compute_parameters", never)
        monkeypatch.setattr(sys.modules["scalepoint.quantize.calibrate"], "calibrate", never)
        loaded = scalepoint.load(tmp_path, model)
        assert torch.equal(output(loaded, image()), expected)
        assert model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_only_models_of_insert_qdq_are_saved(self, tmp_path):
        with pytest.raises(ScalepointError, match="insert_qdq"):
            scalepoint.save(small(), tmp_path / "no")
        assert not (tmp_path / "no").exists()


class TestNothingIsUnpickled:
    def test_loading_never_calls_pickle(self, saved, monkeypatch):
        def never(*args, **kwargs):
            raise AssertionError("unpickled")

        for module, name in ((torch, "load"), (pickle, "loads"), (pickle, "load"), (pickle, "Unpickler")):
            monkeypatch.setattr(module, name, never)
        monkeypatch.setattr(torch.serialization, "load", never)
        assert torch.equal(output(scalepoint.load(saved.folder, saved.model), image()), saved.expected)

    def test_the_package_does_not_mention_pickle(self):
        words = re.compile(
            r"\bpickle\.|import pickle|torch\.load\(|torch\.export\.load|\beval\(\s*[\"'a-z]|\bexec\(|shell=True"
        )
        sources = sorted((ROOT / "src" / "scalepoint").rglob("*.py"))
        matches = [
            f"{path.name}:{number}: {line.partition('#')[0].strip()}"
            for path in sources
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if words.search(line.partition("#")[0])
        ]
        assert len(sources) > 30
        allowed = {
            "return torch.export.load(path)",  # a .pt2 file, only if the user trusts it
            'state = torch.load(path, map_location="cpu", weights_only=True)',  # tensors only, nothing is unpickled
        }
        assert [line for line in matches if line.partition(": ")[2] not in allowed] == []


class SavedModel:
    """A saved model, with its files and its output."""

    def __init__(self, folder):
        self.folder = folder
        self.model = small()
        quantized = quantized_small()
        self.expected = output(quantized, image())
        scalepoint.save(quantized, folder)
        self.manifest = folder / MANIFEST
        self.tensors = next(folder.glob("*.safetensors"))
        self.original = {path: path.read_bytes() for path in (self.manifest, self.tensors)}

    def restore(self):
        for path, content in self.original.items():
            path.write_bytes(content)

    def load(self):
        return scalepoint.load(self.folder, self.model)

    def reseal(self, change):
        """Change the manifest, and make its checksum valid."""
        manifest = json.loads(self.original[self.manifest])["manifest"]
        change(manifest)
        body = json.dumps(manifest, sort_keys=True)
        sealed = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": manifest}
        self.manifest.write_text(json.dumps(sealed))


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    return SavedModel(tmp_path_factory.mktemp("kept") / "model")


@pytest.fixture
def saved(saved_once):
    saved_once.restore()
    yield saved_once
    saved_once.restore()


class TestAnotherFloatModel:
    def check(self, saved, model, *names):
        with pytest.raises(StoreError) as error:
            scalepoint.load(saved.folder, model)
        for name in names:
            assert name in str(error.value)

    @pytest.mark.parametrize("name", ["conv.weight", "conv.bias", "bn.running_var", "bn.weight", "fc.bias"])
    def test_other_values_are_refused(self, saved, name):
        model = small()
        with torch.no_grad():
            model.state_dict()[name].view(-1)[0] += 1e-6
        self.check(saved, model, name)

    def test_another_shape_is_refused(self, saved):
        model = small()
        model.fc = nn.Linear(4, 5)
        self.check(saved, model, "fc.weight", "[3, 4]", "[5, 4]")

    def test_another_dtype_is_refused(self, saved):
        with pytest.raises(StoreError, match="float64"):
            scalepoint.load(saved.folder, small().double())

    def test_a_missing_layer_is_refused(self, saved):
        model = small()
        model.fc = nn.Identity()
        self.check(saved, model, "fc.weight")

    def test_a_new_layer_is_refused(self, saved):
        model = small()
        model.fc = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
        self.check(saved, model, "fc")

    def test_another_order_of_computation_is_refused(self, saved):
        class Other(Small):
            def forward(self, x):
                return self.fc(F.relu(self.conv(x)).mean((2, 3))) + self.bn(self.conv(x)).mean()

        torch.manual_seed(0)
        model = with_norm_statistics(Other())
        self.check(saved, model)

    def test_another_seed_is_refused(self, saved):
        self.check(saved, small(5), "conv.weight")


def refused_or_equal(saved):
    """Return whether loading gives the same model; a StoreError is fine, anything else fails the test."""
    try:
        loaded = saved.load()
    except StoreError:
        return False
    assert torch.equal(output(loaded, image()), saved.expected)
    return True


class TestDamage:
    @pytest.mark.parametrize("which", ["manifest", "tensors"])
    def test_truncated_files_are_refused(self, saved, which):
        path = getattr(saved, which)
        content = saved.original[path]
        points = sorted({0, 1, 2, 7, 8, 9, len(content) - 1, *(len(content) * step // 40 for step in range(40))})
        for point in points:
            path.write_bytes(content[:point])
            with pytest.raises(StoreError):
                saved.load()

    @pytest.mark.parametrize("which", ["manifest", "tensors"])
    def test_longer_files_are_refused(self, saved, which):
        path = getattr(saved, which)
        path.write_bytes(saved.original[path] + b"\0garbage")
        with pytest.raises(StoreError):
            saved.load()

    @pytest.mark.parametrize("which", ["manifest", "tensors"])
    def test_flipped_bytes_are_refused(self, saved, which):
        path = getattr(saved, which)
        content, chance = saved.original[path], random.Random(0)  # noqa: S311  # no secret
        equal = 0
        for _ in range(100):
            position = chance.randrange(len(content))
            changed = bytearray(content)
            changed[position] ^= 1 << chance.randrange(8)
            path.write_bytes(bytes(changed))
            equal += refused_or_equal(saved)
        assert equal < 40  # white space of the manifest may change

    @pytest.mark.parametrize(
        "text",
        ["", "{", "null", "[]", "17", '"a"', "{}", '{"manifest": 3}', '{"manifest": {}}', "[" * 100_000, "\0", "NaN"],
        ids=range(12),
    )
    def test_another_manifest_text_is_refused(self, saved, text):
        saved.manifest.write_text(text)
        with pytest.raises(StoreError):
            saved.load()

    @pytest.mark.parametrize(
        "content", [b"\xff\xfe\x00", b"\x80abc", os.urandom(64) + b"\xff"], ids=["bom", "80", "noise"]
    )
    def test_a_manifest_that_is_not_text_is_refused(self, saved, content):
        saved.manifest.write_bytes(content)
        with pytest.raises(StoreError):
            saved.load()

    def test_a_tampered_value_is_refused(self, saved):
        text = saved.original[saved.manifest].decode()
        assert '"n_bits"' in text or '"per_channel": true' in text
        saved.manifest.write_text(text.replace('"per_channel": true', '"per_channel": false'))
        with pytest.raises(StoreError, match="check"):
            saved.load()

    @pytest.mark.parametrize("version", [2, 99, 0, "1", None, [1], True])
    def test_another_format_version_is_refused(self, saved, version):
        saved.reseal(lambda manifest: manifest.update(format=version))
        if version is True:  # equal to 1 in Python
            assert refused_or_equal(saved) in (True, False)
            return
        with pytest.raises(StoreError, match="format"):
            saved.load()

    def test_the_error_for_a_newer_format_names_the_version_that_wrote_it(self, saved):
        saved.reseal(lambda manifest: manifest.update(format=2, versions={"scalepoint": "9.8.7"}))
        with pytest.raises(StoreError, match=r"9\.8\.7"):
            saved.load()

    KEYS = ("target", "leave", "plan", "config", "float", "calculators", "fixed", "skipped", "aliases", "tensors")

    @pytest.mark.parametrize("key", [*KEYS, "smoothed", "is_norm_frozen"])
    def test_an_invalid_manifest_with_a_valid_checksum_is_refused(self, saved, key):
        saved.reseal(lambda manifest: manifest.pop(key))
        wrong_values = []
        for value in (None, 3, "text", [["a", "b"]], {"conv": "x"}):
            if value is not None:
                saved.reseal(lambda manifest, value=value: manifest.update({key: value}))
            try:
                loaded = saved.load()
            except ScalepointError:
                continue
            except Exception as error:  # collected, so that the failure names all of them
                wrong_values.append(f"{value}: {error!r}")
            else:
                assert torch.equal(output(loaded, image()), saved.expected)
        assert wrong_values == []

    def test_an_alias_of_a_missing_tensor_is_refused(self, saved):
        saved.reseal(lambda manifest: manifest.update(aliases={"fc.bias": "nowhere"}))
        with pytest.raises(StoreError):
            saved.load()

    def test_tensors_of_another_shape_are_refused(self, saved):
        tensors = load_file(saved.tensors)
        tensors["fc.weight"] = torch.zeros(7, 7)
        save_file(tensors, saved.tensors)
        digest = hashlib.sha256(saved.tensors.read_bytes()).hexdigest()
        saved.reseal(lambda manifest: manifest["tensors"].update(sha256=digest))
        with pytest.raises(StoreError):
            saved.load()

    @pytest.mark.parametrize(
        "name", ["../outside.safetensors", "{}/outside.safetensors", "a/../../outside.safetensors"]
    )
    def test_a_path_outside_of_the_folder_is_refused(self, saved, name):
        outside = saved.folder.parent / "outside.safetensors"
        shutil.copy(saved.tensors, outside)
        saved.reseal(lambda manifest: manifest["tensors"].update(file=name.format(outside.parent)))
        with pytest.raises(StoreError):
            saved.load()
        outside.unlink()

    @pytest.mark.parametrize("name", ["", ".", "..", "/", "\0", "x" * 5000], ids=range(6))
    def test_an_invalid_tensor_file_name_is_refused(self, saved, name):
        saved.reseal(lambda manifest: manifest["tensors"].update(file=name))
        with pytest.raises(StoreError):
            saved.load()

    @pytest.mark.parametrize("which", ["manifest", "tensors"])
    def test_a_missing_file_is_an_error(self, saved, which):
        path = getattr(saved, which)
        path.unlink()
        with pytest.raises(StoreError) as error:
            saved.load()
        assert path.name in str(error.value)

    def test_a_missing_folder_is_an_error(self, saved, tmp_path):
        with pytest.raises(StoreError):
            scalepoint.load(tmp_path / "nowhere", saved.model, image())

    def test_a_folder_in_place_of_the_manifest_is_an_error(self, saved):
        saved.manifest.unlink()
        saved.manifest.mkdir()
        try:
            with pytest.raises(StoreError):
                saved.load()
        finally:
            saved.manifest.rmdir()

    def test_a_malicious_pickle_in_place_of_the_tensors_is_refused(self, saved, tmp_path):
        class Evil:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "marker",))

        torch.save({"a": Evil()}, saved.tensors)
        digest = hashlib.sha256(saved.tensors.read_bytes()).hexdigest()
        saved.reseal(lambda manifest: manifest["tensors"].update(sha256=digest))
        with pytest.raises(StoreError):
            saved.load()
        assert not (tmp_path / "marker").exists()


def listing(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


class TestTheFolder:
    def test_the_folder_may_be_a_string_and_is_created_with_its_parents(self, tmp_path):
        folder = tmp_path / "a" / "b"
        assert Path(scalepoint.save(quantized_small(), str(folder))) == folder
        assert MANIFEST in listing(folder)

    @pytest.mark.parametrize("under", ["", "/inside"])
    def test_a_file_in_place_of_the_folder_is_an_error(self, saved, tmp_path, under):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(StoreError):
            scalepoint.save(quantized_small(), f"{tmp_path}/file{under}")
        with pytest.raises(StoreError):
            scalepoint.load(f"{tmp_path}/file{under}", saved.model, image())
        assert (tmp_path / "file").read_text() == "mine"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_read_only_folder_is_an_error(self, tmp_path):
        tmp_path.chmod(0o500)
        with pytest.raises(StoreError):
            scalepoint.save(quantized_small(), tmp_path)
        tmp_path.chmod(0o700)

    def test_the_new_model_replaces_the_old(self, tmp_path):
        for seed in (0, 1, 0):
            quantized = quantized_small(seed)
            scalepoint.save(quantized, tmp_path)
            assert torch.equal(output(scalepoint.load(tmp_path, small(seed)), image()), output(quantized, image()))
            assert len(listing(tmp_path)) == 2

    def test_files_of_other_programs_stay(self, tmp_path):
        mine = {
            "notes.txt": b"mine",
            "model-00001-of-00002.safetensors": b"a checkpoint",
            "model.safetensors": b"other",
        }
        for name, content in mine.items():
            (tmp_path / name).write_bytes(content)
        scalepoint.save(quantized_small(), tmp_path)
        assert {name: (tmp_path / name).read_bytes() for name in mine if (tmp_path / name).exists()} == mine

    @pytest.mark.parametrize("name", [".tmp-123-scalepoint.json/file", ".tmp-123-tensors/.tmpjhapgb"])
    def test_files_left_by_a_killed_process_are_deleted(self, tmp_path, name):
        """The second name is one of safetensors, which writes next to its target file."""
        scalepoint.save(quantized_small(), tmp_path)
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("half")
        scalepoint.save(quantized_small(1), tmp_path)
        assert len(listing(tmp_path)) == 2

    def test_temporary_files_of_other_programs_stay(self, tmp_path):
        foreign_names = (".tmp-123", ".tmp-mine", ".tmpabcdef", ".tmp-123-mine")
        for name in foreign_names:
            (tmp_path / name).write_text("mine")
        for seed in (0, 1):
            scalepoint.save(quantized_small(seed), tmp_path)
        assert [(tmp_path / name).read_text() for name in foreign_names] == ["mine"] * 4

    def test_a_second_writer_gets_an_error(self, saved):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(saved.folder / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            holder.stdout.readline()
            with pytest.raises(StoreError, match="another process"):
                scalepoint.save(quantized_small(1), saved.folder)
            assert refused_or_equal(saved)  # the old model is intact, and reading needs no lock
        finally:
            holder.communicate(b"go\n", timeout=10)
        scalepoint.save(quantized_small(), saved.folder)
        assert refused_or_equal(saved)

    def test_the_lock_is_released_after_a_save(self, saved):
        handle = os.open(saved.folder / ".lock", os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
"""


class TestDiskFull:
    @pytest.mark.parametrize("call", [1, 2])
    def test_a_failing_rename_leaves_the_old_model(self, saved, monkeypatch, call):
        before, calls, replace = listing(saved.folder), [], os.replace

        def full(*args, **kwargs):
            calls.append(args)
            if len(calls) == call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return replace(*args, **kwargs)

        monkeypatch.setattr(os, "replace", full)
        try:
            with pytest.raises(StoreError, match="space"):
                scalepoint.save(quantized_small(1), saved.folder)
            assert len(calls) >= call
            assert refused_or_equal(saved)
            assert listing(saved.folder) == before
        finally:
            monkeypatch.undo()
            scalepoint.save(quantized_small(), saved.folder)

    @pytest.mark.parametrize("call", [1, 2])
    def test_a_failing_flush_leaves_the_old_model(self, saved, monkeypatch, call):
        before, calls, fsync = listing(saved.folder), [], os.fsync

        def full(handle):
            calls.append(handle)
            if len(calls) == call:
                raise OSError(errno.EIO, "Input/output error")
            return fsync(handle)

        monkeypatch.setattr(os, "fsync", full)
        try:
            with pytest.raises(StoreError):
                scalepoint.save(quantized_small(1), saved.folder)
            monkeypatch.undo()
            assert refused_or_equal(saved)
            assert listing(saved.folder) == before
        finally:
            monkeypatch.undo()
            scalepoint.save(quantized_small(), saved.folder)

    def test_tensors_that_cannot_be_written_leave_the_old_model(self, saved, monkeypatch):
        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        before = listing(saved.folder)
        monkeypatch.setattr("scalepoint.quantize.store.save_file", full)
        with pytest.raises(StoreError, match="space"):
            scalepoint.save(quantized_small(1), saved.folder)
        assert refused_or_equal(saved)
        assert listing(saved.folder) == before

    @pytest.mark.parametrize("share", [0.1, 0.9])
    def test_a_real_disk_limit_leaves_the_old_model(self, saved, share):
        before = listing(saved.folder)
        quantized = quantized_small(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * len(saved.original[saved.tensors])), hard))
        try:
            with pytest.raises(StoreError) as error:
                scalepoint.save(quantized, saved.folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, old)
        assert str(saved.folder) in str(error.value)
        assert refused_or_equal(saved)
        assert listing(saved.folder) == before


SERVER = """
import os, signal, sys, time
import scalepoint
from tests.quantize.test_store import two_models
models = two_models()
WATCHED = ("replace", "rename", "open", "fsync", "unlink", "close", "flock", "mkdir", "write")

def save(folder, which, kill_at):
    seen = []
    def watch(frame, event, argument):
        if event in ("c_call", "c_return") and argument.__name__ in WATCHED:
            seen.append(argument.__name__)
            if len(seen) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    started = time.perf_counter()
    if kill_at >= 0:
        sys.setprofile(watch)
    scalepoint.save(models[which], folder)
    sys.setprofile(None)
    return time.perf_counter() - started, len(seen)

print("ready", flush=True)
for line in sys.stdin:
    which, kill_at, folder = line.rstrip().split(" ", 2)
    child = os.fork()
    if child == 0:
        took, points = save(folder, int(which), int(kill_at))
        os.write(1, f"done {took} {points}\\n".encode())
        os._exit(0)
    print("child", child, flush=True)
    _, status = os.waitpid(child, 0)
    print("end", os.waitstatus_to_exitcode(status), flush=True)
"""


def two_models():
    """Two quantized models of one float model, calibrated on different data."""
    return [quantize(small(), None, W8A8, forward_loop=[image() * times]).eval() for times in (1, 3)]


class Saver:
    """A process that forks one child for each save."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [*warm(), "-c", SERVER],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout.readline() == "ready\n"

    def save(self, which, kill_at=-1, delay=None, folder=None):
        """Start a save; kill it at one of its disk calls or after a delay. Returns exit code and reply."""
        self.process.stdin.write(f"{which} {kill_at} {folder or self.folder}\n")
        reply, code = [], None
        while code is None:
            word, *rest = self.process.stdout.readline().split()
            if word == "child" and delay is not None:
                time.sleep(delay)
                with contextlib.suppress(ProcessLookupError):  # it has finished already
                    os.kill(int(rest[0]), signal.SIGKILL)
            elif word == "done":
                reply = rest
            elif word == "end":
                code = int(rest[0])
        return code, reply

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=20)
        self.process.stdout.close()


class TestKilled:
    @pytest.fixture(scope="class")
    @classmethod
    def saver(cls, tmp_path_factory):
        saver = Saver(tmp_path_factory.mktemp("killed") / "model")
        yield saver
        saver.close()

    @pytest.fixture(scope="class")
    @classmethod
    def outputs(cls):
        return [output(model, image()) for model in two_models()]

    def find_saved_model(self, folder, outputs):
        """Return which of the two models the folder contains; fail if it is neither."""
        loaded_output = output(scalepoint.load(folder, small()), image())
        equal = [torch.equal(loaded_output, output_before) for output_before in outputs]
        assert sum(equal) == 1
        return equal.index(True)

    def test_a_kill_at_any_disk_call_leaves_a_valid_model(self, saver, outputs):
        assert not torch.equal(*outputs)
        assert saver.save(0)[0] == 0
        points = int(saver.save(0, kill_at=0)[1][1])
        assert points > 10
        current, outcomes = 0, set()
        for point in range(1, points + 1):
            other = 1 - current
            assert saver.save(other, kill_at=point)[0] == -signal.SIGKILL
            now = self.find_saved_model(saver.folder, outputs)
            outcomes.add(now == other)
            current = now
        assert outcomes == {True, False}  # some died before the commit, some after
        assert saver.save(1 - current)[0] == 0  # saving works again whatever the killed processes left
        assert self.find_saved_model(saver.folder, outputs) == 1 - current
        assert len(listing(saver.folder)) == 2

    @pytest.mark.parametrize("moments", [25, pytest.param(200, marks=pytest.mark.slow)])
    def test_a_kill_after_any_delay_leaves_a_valid_model(self, saver, outputs, moments):
        assert saver.save(0)[0] == 0
        took = max(float(saver.save(0)[1][0]) for _ in range(3))
        current, killed = 0, 0
        for step in range(moments):
            code, _ = saver.save(1 - current, delay=1.3 * took * step / moments)
            killed += code == -signal.SIGKILL
            current = self.find_saved_model(saver.folder, outputs)
        assert killed >= 5
        assert saver.save(1 - current)[0] == 0
        assert self.find_saved_model(saver.folder, outputs) == 1 - current
        assert len(listing(saver.folder)) == 2

    @pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
    def test_a_kill_during_the_first_save_leaves_nothing_or_everything(self, saver, tmp_path, outputs, step):
        folder = tmp_path / "new"
        points = int(saver.save(0, kill_at=0, folder=folder)[1][1])
        intact = 0
        for point in range(1 + points % step, points + 1, step):  # includes the last point
            shutil.rmtree(folder, ignore_errors=True)
            saver.save(0, kill_at=point, folder=folder)
            if (folder / MANIFEST).exists():
                assert self.find_saved_model(folder, outputs) == 0
                intact += 1
            else:
                with pytest.raises(StoreError, match=MANIFEST):
                    scalepoint.load(folder, small())
        assert 0 < intact < points / step
