"""The schemes of compressed-tensors through the whole pipeline: w8a8, fp8, mxfp4 and nvfp4, as vLLM names them."""

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from scalepoint import deploy_checkpoint, tensorrt
from scalepoint.checkpoints.quantized import outer_scale
from scalepoint.errors import CalibrationError
from scalepoint.numerics import E4M3, QParams
from scalepoint.pipeline.checkpoint_codes import _round_to_two_levels
from scalepoint.quantize import QuantConfig
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, PerTokenGranularity, QuantizationSpec

ROW = PerChannelGranularity(axis=0)
INT8 = QuantizationSpec(dtype="int8", granularity=ROW, qparam_calculator_cls="static")
FLOAT8 = INT8.replace(dtype="float8_e4m3fn")
MXFP4 = QuantizationSpec(dtype="float4_e2m1fn_x2", granularity=PerBlockGranularity(axis=1, block_size=32))
SCHEMES = {
    "w8a8, a scale a token": (INT8, INT8.replace(granularity=PerTokenGranularity(), qparam_calculator_cls="dynamic")),
    "w8a8, stored scales": (INT8, QuantizationSpec(dtype="int8", qparam_calculator_cls="static")),
    "fp8": (FLOAT8, "float"),
    "fp8, a scale a token": (
        FLOAT8,
        FLOAT8.replace(granularity=PerTokenGranularity(), qparam_calculator_cls="dynamic"),
    ),
    "mxfp4": (MXFP4, "float"),
    "nvfp4": (tensorrt.NVFP4.weight, "float"),
    "nvfp4, activations too": (tensorrt.NVFP4.weight, tensorrt.NVFP4.activation),
}


def as_bfloat16(folder, path):
    """The checkpoint in bfloat16, which is what 4-bit floats are unpacked to."""
    shutil.copytree(folder, path)
    file = path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("float32", "bfloat16"))
    return path


def test_without_text_scales_per_token_are_allowed_and_stored_scales_are_not(llama, tmp_path):
    folder, _ = llama
    done = {}
    for name, (weight, activation) in list(SCHEMES.items())[:2]:
        options = {"target": "compressed-tensors", "config": QuantConfig(weight=weight, activation=activation)}
        done[name] = partial(deploy_checkpoint, folder, tmp_path / "out", **options, accuracy="fast", verify=False)
    with pytest.raises(CalibrationError, match="one scale per token"):
        done["w8a8, stored scales"]()
    assert not (tmp_path / "out").exists()
    assert done["w8a8, a scale a token"]().report.language.bits < 16


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_agrees_with_the_simulation(llama, tmp_path, scheme):
    folder, _ = llama
    folder = as_bfloat16(folder, tmp_path / "in") if "fp4" in scheme else folder
    weight, activation = SCHEMES[scheme]
    done = deploy_checkpoint(
        folder,
        tmp_path / "out",
        target="compressed-tensors",
        config=QuantConfig(weight=weight, activation=activation),
        data=folder / "calibration.txt",
        judge=folder / "judge.txt",
        length=32,
        samples=24,
        progress=False,
    )
    result = done.report.language
    assert (result.status, result.message) == ("ok", "")
    assert result.agreement_db > (20 if "nvfp4," in scheme else 35)  # bfloat16 moves what lies between 4-bit codes
    assert done.score < 1.02 * done.float_score


def test_scales_of_blocks_are_float8_times_a_power_of_two():
    generator = torch.Generator().manual_seed(0)
    for factor in (1e-6, 1.0, 3e4):
        scale = torch.rand(8, 16, generator=generator) * factor
        scale[0, 0] = 0.0
        rounded = _round_to_two_levels(QParams(scale)).scale
        outer = outer_scale(rounded)
        assert float(outer.log2()) == round(float(outer.log2()))
        assert torch.equal((rounded / outer).to(E4M3).float() * outer, rounded)
        assert bool((rounded > 0).all())
        assert float(((rounded - scale).abs() / scale.amax()).max()) < 1 / 16
