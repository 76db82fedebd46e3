"""Configs of older versions of transformers say less: what they leave out is read as their code did."""

import pytest
import transformers

from scalepoint.errors import TargetError
from scalepoint.formats.genai.families import describe_decoder
from tests.formats.genai.tiny import BASE

OLD = ("layer_types", "rope_parameters")


def config_of(kind: str, **further):
    return getattr(transformers, kind)(**{**BASE, "num_hidden_layers": 12, **further}).to_dict()


def windows(config) -> list[bool]:
    return [each.window is not None for each in describe_decoder(config).blocks]


@pytest.mark.parametrize(
    ("kind", "further"),
    [
        ("Gemma2Config", {"sliding_window": 8}),
        ("Gemma3TextConfig", {"sliding_window": 8}),
        ("Olmo3Config", {"sliding_window": 8}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5}),
        ("Qwen3Config", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 5}),
    ],
)
def test_blocks_with_a_window_are_those_of_transformers(kind, further):
    config = config_of(kind, **further)
    wanted = [each == "sliding_attention" for each in config["layer_types"]]
    assert windows(config) == wanted
    assert windows({key: value for key, value in config.items() if key not in OLD}) == wanted


@pytest.mark.parametrize(("window", "has_one"), [(8, True), (None, False)])
def test_mistral_has_a_window_in_all_blocks_or_in_none(window, has_one):
    assert windows(config_of("MistralConfig", sliding_window=window)) == [has_one] * 12


def test_angles_by_their_old_names():
    config = {key: value for key, value in config_of("LlamaConfig").items() if key not in OLD}
    old = {**config, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    [rotary] = {each.rotary.kind: each.rotary for each in describe_decoder(old).blocks}.values()
    assert (rotary.base, rotary.kind, rotary.settings["factor"], rotary.size) == (500.0, "linear", 2.0, 16)


def test_blocks_with_a_window_keep_their_own_angles():
    config = {key: value for key, value in config_of("Gemma3TextConfig", head_dim=32).items() if key not in OLD}
    scaled = {"rope_type": "linear", "factor": 8.0}
    old = {**config, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaled}
    blocks = describe_decoder(old).blocks
    found = {block.window is not None: (block.rotary.base, block.rotary.kind) for block in blocks if block.rotary}
    assert found == {True: (1e4, "default"), False: (1e6, "linear")}


def test_a_part_of_every_head_is_turned():
    config = {key: value for key, value in config_of("GPTNeoXConfig", hidden_size=256).items() if key not in OLD}
    assert describe_decoder({**config, "rotary_pct": 0.25}).blocks[0].rotary.size == 16


def test_gpt2_with_other_arithmetic_is_refused():
    config = transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True).to_dict()
    with pytest.raises(TargetError, match="scale_attn_by_inverse_layer_idx"):
        describe_decoder(config)
