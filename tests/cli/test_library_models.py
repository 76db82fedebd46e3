"""Models of libraries by name, weights from a file, `init`, and folders that contain their graph."""

import json
import pickle
import shlex
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

from scalepoint.cli.exit_codes import Code
from scalepoint.cli.library_models import load_weights
from scalepoint.errors import UsageError
from tests.architectures import timm_models


@pytest.fixture
def net(here):
    import nets

    return nets.Net()


def rows(out: str) -> list[str]:
    return [row["name"] for row in json.loads(out)["coverage"]]


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_weights_are_loaded_into_the_model_of_the_factory(call, here, net, ending) -> None:
    state = {name: value + 1 for name, value in net.state_dict().items()}
    path = here / f"w.{ending}"
    save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    load_weights(net, path)
    assert torch.equal(net.conv.weight, state["conv.weight"])
    code, out, err = call("inspect", "nets:net", "--weights", path.name, "--json")
    assert (code, rows(out)) == (0, ["conv", "head"]), err


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("owned"),))


def test_files_without_weights_are_refused_and_run_no_code(call, here, net) -> None:
    torch.save({"conv.weight": Malicious()}, here / "evil.pt")
    (here / "plain.pt").write_bytes(pickle.dumps(Malicious()))
    (here / "half.safetensors").write_bytes(b"\x08\x00\x00\x00")
    save_file({"other": torch.ones(1)}, here / "other.safetensors")
    torch.save([1, 2], here / "list.pt")
    messages = {
        "evil.pt": "could run code",
        "plain.pt": "plain.pt",
        "half.safetensors": "cannot be read",
        "other.safetensors": "does not fit",
        "list.pt": "no state_dict",
        "nowhere.pt": "no such file",
        "net.onnx": "must be a",
    }
    for name, message in messages.items():
        code, _, err = call("inspect", "nets:net", "--weights", name)
        assert (code, message in " ".join(err.split())) == (Code.USAGE, True), (name, err)
    assert not (here / "owned").exists()


@pytest.mark.slow
def test_a_model_of_timm_with_random_weights_is_the_same_at_every_call(call, here) -> None:
    pytest.importorskip("timm") if "timm" in sys.modules else _require_timm()
    code, out, err = call("inspect", "timm:test_resnet", "--random", "--json")
    assert code == 0, err
    assert len(rows(out)) > 5
    code, _, err = call("inspect", "timm:test_resnet", "--json")
    assert (code, "--random" in err) == (Code.USAGE, True)
    code, _, err = call("inspect", "timm:test_resnt", "--random")
    assert (code, "did you mean 'test_resnet'" in err) == (Code.USAGE, True)


def _require_timm() -> None:
    try:
        timm_models()
    except ImportError:
        pytest.skip("timm is not installed")


def test_a_folder_of_transformers_is_a_model(call, here) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=32
    )
    transformers.BertForSequenceClassification(config).save_pretrained(here / "bert")
    code, out, err = call("inspect", "hf:bert", "--json")
    assert code == 0, err
    assert any(name.endswith("classifier") for name in rows(out))
    code, _, err = call("inspect", "hf:nowhere")
    assert (code, "config.json" in err) == (Code.USAGE, True)


def test_the_example_of_a_folder_of_transformers_is_the_first_batch_of_the_data(call, here) -> None:
    """The batch gives the names and the length of the inputs. Labels are left out with a note."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=32, attn_implementation="eager", **small)
    transformers.BertForSequenceClassification(config).save_pretrained(here / "bert")
    ids = np.random.default_rng(0).integers(0, 32, (6, 12))
    mask = (np.arange(12) < np.array([[12], [5], [7], [12], [3], [9]])).astype(np.int64)
    np.savez(here / "tokens.npz", input_ids=ids, attention_mask=mask, labels=np.zeros(6, np.int64))
    arguments = ("--data", "tokens.npz", "--batch-size", "3", "--smoke", "--json", "-o", "out")
    code, out, err = call("deploy", "hf:bert", *arguments)
    assert code == 0, err
    assert "'labels'" in err
    file = onnxruntime.InferenceSession(json.loads(out)["path"])
    assert {node.name for node in file.get_inputs()} == {"input_ids", "attention_mask"}
    feeds = {"input_ids": ids, "attention_mask": mask}
    masked, unmasked = (
        file.run(None, {**feeds, "attention_mask": attention_mask})[0] for attention_mask in (mask, np.ones_like(mask))
    )
    assert abs(masked - unmasked).max() > 1e-6  # random weights attend nearly evenly


def test_a_missing_library_is_named(call, monkeypatch) -> None:
    monkeypatch.setattr("scalepoint.cli.library_models.find_spec", lambda name: None)
    code, _, err = call("inspect", "timm:resnet18")
    assert (code, "pip install timm" in err) == (Code.USAGE, True)


def test_verify_and_compare_need_no_model_if_the_folder_contains_the_graph(call, output_folder) -> None:
    for path in (output_folder, output_folder / "model.onnx"):
        code, out, err = call("verify", path, "--json")
        assert (code, json.loads(out)["holds"]) == (0, True), err
    code, out, err = call("compare", output_folder, "--json")
    assert code == 0, err
    assert {row["name"] for row in json.loads(out)["layers"]} >= {"conv", "head"}


def test_a_state_dict_of_another_shape_is_refused(net, tmp_path) -> None:
    save_file({name: torch.zeros(3) for name in net.state_dict()}, tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match="does not fit"):
        load_weights(net, tmp_path / "w.safetensors")


def test_the_command_that_init_prints_works_from_where_it_is_printed(call, here) -> None:
    """The folder has a space in its name."""
    code, _, err = call("init", "a folder", trust=False)
    assert code == 0, err
    command = shlex.split(" ".join(err.split()).partition("Next: scalepoint ")[2].partition(" scalepoint ")[0])
    assert {"--dry-run", "--trust"} < set(command)
    code, _, err = call(*command, trust=False)
    assert code == 0, err


def test_a_library_that_cannot_be_imported_is_a_usage_error(call, here) -> None:
    (here / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    code, _, err = call("inspect", "timm:resnet18", trust=False)
    assert (code, "add --trust" in " ".join(err.split())) == (Code.USAGE, True)  # it lies in the current folder
    code, _, err = call("inspect", "timm:resnet18")
    assert code == Code.USAGE
    assert "timm is installed and cannot be imported: RuntimeError" in " ".join(err.split())
