"""Real architectures with unusual layers, with tiny sizes and random weights, from capture to the runtime."""

from functools import partial

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scalepoint.formats import export
from scalepoint.quantize import calibrate, coverage, freeze, insert_qdq
from scalepoint.transformation import transform
from tests.architectures import liven, torchvision_models

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 10}
TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}
GPT = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 16, "use_cache": False}
RELATIVE = {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


def image():
    return {"x": torch.randn(2, 3, 32, 32)}


def tokens():
    return {"input_ids": torch.randint(0, 50, (2, 8)), "attention_mask": torch.ones(2, 8, dtype=torch.long)}


def timm_model(name, **options):
    torchvision_models()
    import timm

    return timm.create_model(name, **options), image()


def transformers_model(name, **options):
    import transformers

    family = name.removesuffix("LMHeadModel").removesuffix("Model")
    return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**options)), tokens()


def nfnet():
    torchvision_models()
    from timm.models.nfnet import NfCfg, NormFreeNet

    config = NfCfg(
        depths=(1, 1, 1, 1),
        channels=(16, 24, 32, 32),
        stem_chs=16,
        num_features=32,
        group_size=8,
        width_factor=1.0,
        bottle_ratio=0.5,
        attn_layer="se",
        attn_kwargs={"rd_ratio": 0.5},
        act_layer="silu",
    )
    return NormFreeNet(config, num_classes=10), {"x": torch.randn(2, 3, 64, 64)}


def resnetv2():
    torchvision_models()
    from timm.layers import GroupNormAct, StdConv2d
    from timm.models.resnetv2 import ResNetV2

    layers = {"conv_layer": partial(StdConv2d, eps=1e-8), "norm_layer": partial(GroupNormAct, num_groups=4)}
    return ResNetV2((1, 1), channels=(32, 64), stem_chs=16, num_classes=10, **layers), image()


SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "num_classes": 10}
MODELS = {  # name -> function that builds it, least share of MACs in low precision
    "swinv2": (lambda: timm_model("swinv2_tiny_window8_256", patch_size=4, **SWIN), 0.9),
    "vit_relpos": (lambda: timm_model("vit_relpos_small_patch16_224", **SMALL), 0.9),
    "beit": (lambda: timm_model("beit_base_patch16_224", **SMALL), 0.9),
    "eva02": (lambda: timm_model("eva02_tiny_patch14_224", **SMALL), 0.9),
    "nfnet": (nfnet, 0.99),
    "resnetv2": (resnetv2, 0.99),
    "gpt2": (lambda: transformers_model("GPT2LMHeadModel", **GPT), 0.9),
    "deberta": (lambda: transformers_model("DebertaModel", **RELATIVE), 0.8),
    "bert": (lambda: transformers_model("BertModel", **TEXT), 0.9),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_is_quantized_and_run_and_its_parameters_are_all_counted(name, tmp_path):
    torch.manual_seed(0)
    make, least = MODELS[name]
    model, inputs = make()
    liven(model)
    model.eval()
    result = transform(model, kwargs=inputs, args=(), target="onnxruntime", check=True)
    quantized = insert_qdq(result.model, result.matches)
    calibrate(quantized, [inputs])
    freeze(quantized)
    rows = coverage(quantized)
    low = sum(share for precision, share in rows.share_of_macs().items() if precision != "float")
    assert low >= least
    counted = sum(row.parameters - row.shared for row in rows.operations)
    assert counted >= sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        expected = next(value for value in pytree.tree_leaves(quantized(**inputs)) if isinstance(value, Tensor))
    export(quantized, tmp_path / "model.onnx", (), kwargs=inputs)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {model_input.name: inputs[model_input.name].numpy() for model_input in session.get_inputs()}
    actual = session.run(None, feeds)[0]
    assert np.linalg.norm(actual - expected.numpy()) <= 1e-2 * np.linalg.norm(expected.numpy())
