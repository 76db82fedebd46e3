"""Configs of older versions of transformers have fewer keys: the missing ones get the values of the old code."""

import pytest
import transformers

from scalepoint.errors import TargetError
from scalepoint.formats.genai.families import describe_decoder
from tests.formats.genai.tiny import BASE

NEW_KEYS = ("layer_types", "rope_parameters")  # not in configs of older versions


def make_config(class_name: str, **settings):
    return getattr(transformers, class_name)(**{**BASE, "num_hidden_layers": 12, **settings}).to_dict()


def blocks_with_window(config) -> list[bool]:
    return [block.window is not None for block in describe_decoder(config).blocks]


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("Gemma2Config", {"sliding_window": 8}),
        ("Gemma3TextConfig", {"sliding_window": 8}),
        ("Olmo3Config", {"sliding_window": 8}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5}),
        ("Qwen3Config", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 5}),
    ],
)
def test_the_same_blocks_have_a_window_as_in_transformers(class_name, settings):
    config = make_config(class_name, **settings)
    expected = [layer_type == "sliding_attention" for layer_type in config["layer_types"]]
    assert blocks_with_window(config) == expected
    assert blocks_with_window({key: value for key, value in config.items() if key not in NEW_KEYS}) == expected


@pytest.mark.parametrize(("window", "has_one"), [(8, True), (None, False)])
def test_mistral_has_a_window_in_all_blocks_or_in_none(window, has_one):
    assert blocks_with_window(make_config("MistralConfig", sliding_window=window)) == [has_one] * 12


def test_rotary_settings_with_their_old_names_are_read():
    config = {key: value for key, value in make_config("LlamaConfig").items() if key not in NEW_KEYS}
    old = {**config, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    [rotary] = {block.rotary.kind: block.rotary for block in describe_decoder(old).blocks}.values()
    assert (rotary.base, rotary.kind, rotary.settings["factor"], rotary.channels) == (500.0, "linear", 2.0, 16)


def test_blocks_with_a_window_have_unscaled_angles():
    config = {key: value for key, value in make_config("Gemma3TextConfig", head_dim=32).items() if key not in NEW_KEYS}
    scaled = {"rope_type": "linear", "factor": 8.0}
    old = {**config, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaled}
    blocks = describe_decoder(old).blocks
    angles = {block.window is not None: (block.rotary.base, block.rotary.kind) for block in blocks if block.rotary}
    assert angles == {True: (1e4, "default"), False: (1e6, "linear")}


def test_rotary_pct_rotates_a_part_of_every_head():
    config = {key: value for key, value in make_config("GPTNeoXConfig", hidden_size=256).items() if key not in NEW_KEYS}
    assert describe_decoder({**config, "rotary_pct": 0.25}).blocks[0].rotary.channels == 16


@pytest.mark.parametrize(
    ("settings", "activation"),
    [({}, "gelu_tanh"), ({"hidden_act": "gelu"}, "gelu_tanh"), ({"hidden_act": "relu"}, "relu")],
)
def test_gemma_has_the_activation_that_transformers_computes(settings, activation):
    config = {key: value for key, value in make_config("GemmaConfig").items() if not key.startswith("hidden_act")}
    assert describe_decoder({**config, **settings}).activation == activation


def test_gpt2_with_scaling_by_layer_index_is_rejected():
    config = transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True).to_dict()
    with pytest.raises(TargetError, match="scale_attn_by_inverse_layer_idx"):
        describe_decoder(config)
