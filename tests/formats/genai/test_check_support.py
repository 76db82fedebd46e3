"""Unsupported models and precisions are rejected before any work, with what to do instead."""

import json

import pytest
import torch
from safetensors.torch import save_file

from scalepoint.checkpoints import Source
from scalepoint.errors import TargetError
from scalepoint.formats.genai import ORT_GENAI
from scalepoint.spec import QuantizationSpec, default_activation_quantization_spec
from tests.formats.genai.tiny import int_spec, save_model


def source(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    return Source.open(tmp_path)


def test_an_unknown_family_is_rejected_with_the_supported_families(tmp_path):
    with pytest.raises(TargetError, match=r"'mamba' .*gemma2.*llama.*qwen3"):
        ORT_GENAI.check(source(tmp_path, {"model_type": "mamba"}), None, None)


def test_the_error_names_the_key_that_a_config_lacks(tmp_path):
    with pytest.raises(TargetError, match="llama model lacks 'num_attention_heads'"):
        ORT_GENAI.check(source(tmp_path, {"model_type": "llama"}), None, None)


@pytest.mark.parametrize(
    ("weight", "activation", "reason"),
    [
        (int_spec(4), default_activation_quantization_spec(), "does not take quantized activations"),
        (QuantizationSpec(dtype="float8_e4m3fn"), None, "up to 8 bits"),
        (int_spec(4, 24), None, "16, 32, 64, 128, 256"),
    ],
)
def test_specs_without_a_kernel_are_rejected(tmp_path, weight, activation, reason):
    save_model("llama", tmp_path)
    with pytest.raises(TargetError, match=reason):
        ORT_GENAI.check(Source.open(tmp_path), weight, activation)


def test_the_error_names_a_missing_tensor(tmp_path):
    save_model("qwen3_moe", tmp_path)
    complete = Source.open(tmp_path)
    missing = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = {name: stored for name, stored in complete.tensors.items() if name != missing}
    with pytest.raises(TargetError, match=f"no tensor {missing}"):
        ORT_GENAI.check(Source(complete.folder, complete.config, tensors), None, None)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "not 'dynamic'"),
        ({"hidden_act": "tanh"}, "not 'tanh'"),
        ({"head_dim": 24}, "steps of 16 channels"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True, "query_pre_attn_scalar": 8}, "later tokens"),
    ],
)
def test_variants_that_the_kernels_lack_are_rejected(tmp_path, settings, reason):
    save_model("llama", tmp_path)
    llama = Source.open(tmp_path)
    config = {**llama.config, "hidden_activation": "gelu", **settings}
    with pytest.raises(TargetError, match=reason):
        ORT_GENAI.check(Source(llama.folder, config, llama.tensors), None, None)
