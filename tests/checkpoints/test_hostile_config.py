"""A config.json with arbitrary values gives a model or a ScalepointError, and never takes forever."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from scalepoint.checkpoints.skeleton import build_skeleton
from scalepoint.checkpoints.source import Source
from scalepoint.errors import ScalepointError, StoreError
from scalepoint.pipeline.checkpoint_job import prepare_checkpoint_job
from tests.formats.gguf.checkpoints import save_checkpoint

TARGETS = ("gguf", "compressed-tensors", "ort-genai")
VALUES = (
    None, True, 0, -1, 3, 2**31, 2**63, 10**40, 1.5, float("nan"), float("inf"), "", "a", "\ud800", [], {}, [None],
    {"a": None}, [1, 2],
)  # fmt: skip


def is_accepted(folder: Path, config: Any, target: str) -> bool:
    """Whether the folder can be deployed; any exception other than a ScalepointError fails the test."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        prepare_checkpoint_job(folder, folder.parent / "out", target=target, config=None, accuracy="fast")
        build_skeleton(Source.open(folder))
    except ScalepointError:
        return False
    return True


def test_any_value_for_any_key_of_config_json_gives_a_model_or_our_error(tmp_path: Path) -> None:
    folder = save_checkpoint("llama, tied", tmp_path / "m").folder
    config = json.loads((folder / "config.json").read_text())
    rng = random.Random(0)  # noqa: S311  # no secret
    accepted = 0
    for _ in range(60):
        key = rng.choice(list(config))
        accepted += is_accepted(folder, {**config, key: rng.choice(VALUES)}, rng.choice(TARGETS))
    assert 0 < accepted < 60


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_local_experts"])
def test_more_layers_than_the_checkpoint_has_weights_for_are_rejected(key: str, tmp_path: Path) -> None:
    folder = save_checkpoint("llama, tied", tmp_path / "m").folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: 2**31}))
    with pytest.raises(StoreError, match=f"{key} is {2**31}"):
        build_skeleton(Source.open(folder))
