"""Every family through the whole road, and into every format that takes it."""

import pytest
import torch

from scalepoint import deploy_checkpoint, perplexity
from scalepoint.checkpoints import Source
from scalepoint.checkpoints.skeleton import skeleton
from scalepoint.formats import registry
from scalepoint.formats.checkpoint import CheckpointFormat
from tests.checkpoints.test_skeleton import KINDS, saved

FOUR = {"weight": {"n_bits": 4, "block_size": 8}, "activation": "float"}
FAST = ("qwen3_moe",)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS])
def test_a_family_is_tuned_and_simulated_as_it_computes(tmp_path, monkeypatch, kind):
    seen = {}
    form = CheckpointFormat("gptq", "", lambda checkpoint, path: seen.update(checkpoint.packed), lambda *_: None)
    monkeypatch.setitem(registry._OF_CHECKPOINTS.own, "gptq", form)
    model = saved(kind, tmp_path / kind)
    torch.manual_seed(1)
    tokens = [torch.randint(0, 40, (1, 24)) for _ in range(14)]
    done = deploy_checkpoint(
        tmp_path / kind, tmp_path / "out", target="gptq", config=FOUR, data=tokens[:12], judge=tokens[12:],
        verify=False, progress=False,
    )  # fmt: skip
    with torch.no_grad():
        assert done.float_score == pytest.approx(perplexity(lambda own: model(own).logits, tokens[12:]), rel=1e-4)
        tree, weights = skeleton(Source.open(tmp_path / kind))
        weights.load(tree.parameters())
        for parameter in tree.parameters():
            name = weights.name_of(parameter)
            if name in seen:
                values = seen[name].values()
                parameter.copy_(values if values.shape == parameter.shape and kind != "gpt2" else values.T)
        assert done.score == pytest.approx(perplexity(lambda own: tree(own).logits, tokens[12:]), rel=1e-4)
    layers = [name for name in Source.open(tmp_path / kind).tensors if "_proj" in name or ".mlp." in name]
    assert set(seen) >= {name for name in layers if name.endswith("proj.weight")}


def test_what_a_format_cannot_hold_stays_float(tmp_path):
    saved("qwen3_moe", tmp_path / "source")
    config = {"weight": {"n_bits": 4, "block_size": 8}}
    done = deploy_checkpoint(
        tmp_path / "source", tmp_path / "out", target="gptq", config=config, accuracy="fast", progress=False
    )
    rows = {row.name: row.precision for row in done.coverage.operations}
    routers = [name for name in rows if name.endswith("mlp.gate") or ".mlp.gate." in name]
    assert routers
    assert {rows[name] for name in routers} == {"float"}
    assert rows["model.layers.0.mlp.experts.0.up_proj"] != "float"
