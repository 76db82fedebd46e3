"""Perplexity as a score: lower is better, values that are errors, and a file that departs from the simulation."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from scalepoint import deploy_checkpoint, perplexity
from scalepoint.cli.app import run
from scalepoint.cli.exit_codes import Code
from scalepoint.errors import NonFiniteError, ScalepointWarning, StoreError, UsageError, VerificationError
from scalepoint.formats import registry
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.report import Report, compare_runs
from scalepoint.runtimes import Runtime
from scalepoint.support.files import replace_folder

OPTIONS = {"length": 32, "accuracy": "fast", "progress": False, "config": {"weight": {"n_bits": 4, "block_size": 32}}}
TARGET = "compressed-tensors"


def deployed(llama, path, **more):
    folder, _ = llama
    return deploy_checkpoint(folder, path, target=TARGET, **{**OPTIONS, "judge": folder / "judge.txt", **more})


def use_format(monkeypatch, change):
    """A format whose folder holds float weights, each put through `change` as it is written."""

    def write(checkpoint, path):
        def fill(folder):
            tensors = {name: change(checkpoint.source.tensor(name)) for name in checkpoint.source.tensors}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            shutil.copy(checkpoint.source.folder / "config.json", folder / "config.json")

        replace_folder(path, fill)

    monkeypatch.setitem(
        registry._CHECKPOINT_FORMATS.builtin, TARGET, CheckpointFormat(TARGET, "", write, lambda *_: None)
    )


def test_a_lower_perplexity_is_an_improvement_in_every_place_that_shows_it(llama, tmp_path):
    three = {"weight": {"n_bits": 3, "block_size": 64}}
    worse = deployed(llama, tmp_path / "three", verify=False, config=three)
    better = deployed(llama, tmp_path / "eight", verify=False, config={"weight": {"n_bits": 8, "block_size": 32}})
    assert better.score < worse.score
    for done in (worse, better):
        (metric,) = done.report.accuracy
        assert not done.higher_is_better
        assert done.drop == metric.drop == pytest.approx(done.score - done.float_score)
        assert metric.is_within(metric.drop)
        assert not metric.is_within(metric.drop - 0.01)
        assert "lower is better" in str(done)
        assert not Report.from_json((done.path / "report.json").read_text()).accuracy[0].higher_is_better
    numbers = compare_runs(tmp_path / "three", tmp_path / "eight").numbers
    (row,) = (number for number in numbers if number.name == "perplexity")
    assert row.mood == "better"


def test_a_missing_runtime_is_an_error_before_any_work_without_allow_departure(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(Runtime, "is_installed", False)
    with pytest.raises(VerificationError, match="transformers is not installed"):
        deployed(llama, tmp_path / "out")
    options = ["--target", TARGET, "--judge", str(llama[0] / "judge.txt"), "--accuracy", "fast"]
    assert run(["deploy", str(llama[0]), *options, "-o", str(tmp_path / "out")]) == Code.UNVERIFIED
    assert list(tmp_path.iterdir()) == []
    with pytest.warns(ScalepointWarning, match="will not be verified"):
        done = deployed(llama, tmp_path / "out", allow_departure=True)
    assert (done.report.language.status, done.path.is_dir()) == ("unavailable", True)
    assert not deployed(llama, tmp_path / "unasked", verify=False).report.language.status


def test_a_file_that_departs_is_an_error_without_allow_departure(llama, tmp_path, monkeypatch):
    use_format(monkeypatch, lambda weight: weight.roll(1, 0))
    with pytest.raises(VerificationError, match="allow_departure=True") as error:
        deployed(llama, tmp_path / "out")
    assert "departs" in str(error.value)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["language"]["status"] == "departs"


@pytest.mark.slow
def test_a_file_that_departs_is_returned_with_allow_departure(llama, tmp_path, monkeypatch):
    use_format(monkeypatch, lambda weight: weight.roll(1, 0))
    done = deployed(llama, tmp_path / "out", allow_departure=True)
    assert done.report.language.status == "departs"
    assert done.report.accuracy[0].where == "simulation"


@pytest.mark.slow
@pytest.mark.parametrize(("more", "code"), [([], 4), (["--allow-departure"], 0)], ids=["refused", "allowed"])
def test_the_exit_code_depends_on_allow_departure(llama, tmp_path, monkeypatch, capsys, more, code):
    use_format(monkeypatch, lambda weight: weight.roll(1, 0))
    config = tmp_path / "config.yaml"
    config.write_text("quantization: {weight: {n_bits: 4, block_size: 32}}\nlength: 32\naccuracy: fast\n")
    arguments = ["deploy", str(llama[0]), "-c", str(config), "--target", TARGET, "--judge", str(llama[0] / "judge.txt")]
    assert run([*arguments, "-o", str(tmp_path / "out"), *more]) == code
    captured = capsys.readouterr()
    assert "not verified" in captured.err
    assert ("--allow-departure" in captured.err) is (code == 4)
    assert "lower is better" in captured.out


@pytest.mark.slow
def test_a_file_that_gives_nan_departs(llama, tmp_path, monkeypatch):
    use_format(monkeypatch, lambda weight: torch.full_like(weight, torch.nan))
    with pytest.raises(VerificationError, match="departs"):
        deployed(llama, tmp_path / "out")


@pytest.mark.slow
def test_a_file_that_its_runtime_cannot_load_is_an_error(llama, tmp_path, monkeypatch):
    use_format(monkeypatch, lambda weight: weight[..., :8].clone())
    with pytest.raises(VerificationError, match="transformers: failed"):
        deployed(llama, tmp_path / "out")


def test_a_nan_perplexity_is_an_error():
    tokens = [torch.arange(8)[None]]
    with pytest.raises(NonFiniteError, match="NaN"):
        perplexity(lambda batch: torch.full((1, 8, 10), torch.nan), tokens)
    with pytest.raises(UsageError, match="2 tokens"):
        perplexity(lambda batch: torch.zeros(1, batch.shape[1], 10), [torch.zeros(1, 1, dtype=torch.int64)])


def damaged(llama, folder, name, change):
    """The checkpoint with one tensor changed."""
    shutil.copytree(llama[0], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, None


NORM = "model.layers.1.input_layernorm.weight"
DAMAGES = {
    "a norm with NaN": (NORM, lambda value: value.index_fill(0, torch.tensor([3]), torch.nan)),
    "a norm with infinity": (NORM, lambda value: value.index_fill(0, torch.tensor([3]), torch.inf)),
    "a norm of integers": (NORM, lambda value: value.to(torch.int32)),
    "a matrix with NaN": (
        "model.layers.0.mlp.up_proj.weight",
        lambda value: value.index_fill(1, torch.tensor([0]), torch.nan),
    ),
    "a matrix of integers": ("model.layers.0.mlp.up_proj.weight", lambda value: value.to(torch.int8)),
}


@pytest.mark.parametrize("case", DAMAGES)
@pytest.mark.parametrize("judge", [True, False])
def test_a_weight_with_nan_is_refused_by_name(llama, tmp_path, case, judge):
    name, change = DAMAGES[case]
    source = damaged(llama, tmp_path / "source", name, change)
    more = {} if judge else {"judge": None}
    with pytest.raises(StoreError, match=name) as error:
        deployed(source, tmp_path / "out", verify=False, **more)
    assert "NaN or infinity" in str(error.value) or "stored as int" in str(error.value)
    assert "on_nan" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("more", [{"accuracy": "balanced"}, {"accuracy": "fast"}], ids=str)
def test_the_error_for_an_overflow_suggests_existing_options(llama, tmp_path, more):
    def huge(value):
        return torch.full_like(value, 3e38)

    source = damaged(llama, tmp_path / "source", "model.layers.0.input_layernorm.weight", huge)
    data = {} if more["accuracy"] == "fast" else {"data": llama[0] / "calibration.txt"}
    with pytest.raises(NonFiniteError, match="transformers") as error:
        deployed(source, tmp_path / "out", verify=False, **data, **more)
    assert "on_nan" not in str(error.value)


def test_the_report_names_the_type_of_the_float_size_and_says_if_nothing_was_measured(llama, tmp_path):
    done = deployed(llama, tmp_path / "out", judge=None)
    text = "\n".join(done.report.summary())
    assert "smaller than the float32 checkpoint" in text
    assert "nothing was measured" in done.report.verdict()
    assert "simulation" not in done.report.verdict()
    with_text = deployed(llama, tmp_path / "judged", verify=False)
    assert "numbers are of the simulation" in with_text.report.verdict()
