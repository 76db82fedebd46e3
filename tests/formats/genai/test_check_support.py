"""What cannot be written is refused before any work, with the way out."""

import json

import pytest
import torch
from safetensors.torch import save_file

from scalepoint.checkpoints import Source
from scalepoint.errors import TargetError
from scalepoint.formats.genai import ORT_GENAI
from scalepoint.spec import QuantizationSpec, default_activation_quantization_spec
from tests.formats.genai.tiny import int_spec, make


def source(tmp_path, config, tensors=None):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors or {"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    return Source.open(tmp_path)


def test_an_unknown_family_is_refused_with_those_that_can_be_written(tmp_path):
    with pytest.raises(TargetError, match=r"'mamba' .*gemma2.*llama.*qwen3"):
        ORT_GENAI.check(source(tmp_path, {"model_type": "mamba"}), None, None)


def test_a_config_that_lacks_a_size_is_refused_by_its_name(tmp_path):
    with pytest.raises(TargetError, match="llama model lacks 'num_attention_heads'"):
        ORT_GENAI.check(source(tmp_path, {"model_type": "llama"}), None, None)


@pytest.mark.parametrize(
    ("weight", "activation", "why"),
    [
        (int_spec(4), default_activation_quantization_spec(), "takes no quantized activations"),
        (QuantizationSpec(dtype="float8_e4m3fn"), None, "up to 8 bits"),
        (int_spec(4, 24), None, "16, 32, 64, 128, 256"),
    ],
)
def test_specs_that_no_kernel_takes_are_refused(tmp_path, weight, activation, why):
    make("llama", tmp_path)
    with pytest.raises(TargetError, match=why):
        ORT_GENAI.check(Source.open(tmp_path), weight, activation)


def test_a_missing_tensor_is_named(tmp_path):
    make("qwen3_moe", tmp_path)
    found = Source.open(tmp_path)
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    kept = {name: each for name, each in found.tensors.items() if name != lost}
    with pytest.raises(TargetError, match=f"no tensor {lost}"):
        ORT_GENAI.check(Source(found.folder, found.config, kept), None, None)


@pytest.mark.parametrize(
    ("further", "why"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "not 'dynamic'"),
        ({"hidden_act": "tanh"}, "not 'tanh'"),
        ({"head_dim": 24}, "steps of 16 channels"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True, "query_pre_attn_scalar": 8}, "later words"),
    ],
)
def test_variants_that_the_kernels_lack_are_refused(tmp_path, further, why):
    make("llama", tmp_path)
    found = Source.open(tmp_path)
    config = {**found.config, "hidden_activation": "gelu", **further}
    with pytest.raises(TargetError, match=why):
        ORT_GENAI.check(Source(found.folder, config, found.tensors), None, None)
