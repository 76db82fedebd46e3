"""Families of timm that neither the tests nor bench/further.py have, in their smallest members."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from architectures import Inputs, timm_models

VIT = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}
# name: (side of the image, options)
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "halonet26t": (256, {}),
    "botnet26t_256": (64, {"img_size": 64}),
    "convit_tiny": (64, {**VIT, "local_up_to_layer": 1}),
    "crossvit_9_240": (240, {"embed_dim": (16, 32), "num_heads": (2, 2)}),
    "cspresnet50": (64, {}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)}),
    "dla34": (64, {}),
    "dpn48b": (64, {}),
    "efficientformer_l1": (224, {}),
    "efficientformerv2_s0": (224, {}),
    "efficientvit_b0": (64, {}),
    "efficientvit_m0": (224, {}),
    "fasternet_t0": (64, {}),
    "gcvit_xxtiny": (224, {}),
    "hardcorenas_a": (64, {}),
    "hiera_tiny_224": (224, {"embed_dim": 24, "stages": (1, 1, 1, 1)}),
    "hrnet_w18_small": (64, {}),
    "inception_next_atto": (64, {}),
    "inception_v4": (96, {}),
    "poolformerv2_s12": (64, {}),
    "caformer_s18": (64, {}),
    "gmlp_ti16_224": (224, {}),
    "resmlp_12_224": (224, {}),
    "mobilenetv4_conv_small": (64, {}),
    "mobilenetv4_hybrid_medium": (64, {}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "nest_tiny": (64, {"img_size": 64}),
    "nextvit_small": (64, {}),
    "pit_ti_224": (64, {"img_size": 64, "depth": (1, 1, 1)}),
    "rdnet_tiny": (64, {}),
    "res2net50_14w_8s": (64, {}),
    "resnest14d": (64, {}),
    "rexnet_100": (64, {}),
    "seresnext26d_32x4d": (64, {}),
    "selecsls42b": (64, {}),
    "shvit_s1": (64, {}),
    "skresnet18": (64, {}),
    "starnet_s1": (64, {}),
    "swiftformer_xs": (224, {}),
    "swinv2_cr_tiny_224": (64, {"img_size": 64, "window_size": 4, "depths": (1, 2, 1, 1), "embed_dim": 24}),
    "tiny_vit_5m_224": (64, {}),
    "tnt_s_legacy_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "tresnet_m": (64, {}),
    "twins_pcpvt_small": (64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    "twins_svt_small": (64, {"img_size": 64, "depths": (1, 1, 1, 2)}),
    "visformer_tiny": (64, {"img_size": 64, "depth": (1, 1, 1)}),
    "volo_d1_224": (64, {"img_size": 64}),
    "ese_vovnet19b_dw": (64, {}),
    "xception41": (96, {}),
    "eca_nfnet_l0": (64, {}),
    "ecaresnet26t": (64, {}),
    "gernet_s": (64, {}),
    "lcnet_050": (64, {}),
    "tinynet_e": (64, {}),
    "mixnet_s": (64, {}),
    "spnasnet_100": (64, {}),
    "vit_base_r26_s32_224": (64, {"img_size": 64, "depth": 1}),
    "vitamin_small_224": (64, {"img_size": 64}),
}


def timm_model(name: str, side: int, options: Mapping[str, Any]) -> tuple[nn.Module, Inputs]:
    return timm_models().create_model(name, pretrained=False, num_classes=10, **options), (
        torch.randn(2, 3, side, side),
    )
