"""Architectures beyond those of the tests, chosen because they are likely to break something; tiny, at random weights.

Relative positions, computed biases and weights, gates, experts, windows, buckets, re-parametrized branches, memories.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from architectures import (
    DECODER,
    ENCODER,
    GPT,
    PATCHES,
    STAGES,
    T5,
    TEXT_TOWER,
    TOKENS,
    TOWERS,
    WAVES,
    WINDOWS,
    Architecture,
    Inputs,
    torchvision_models,
    transformer,
)

VIT = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}
SWIN = {"img_size": 64, "embed_dim": 24, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 3, 6)}
# name: (timm's name, side of the image, options)
TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "timm_swinv2": ("swinv2_tiny_window8_256", 64, {**SWIN, "window_size": 4}),
    "timm_vit_relpos": ("vit_relpos_small_patch16_224", 64, VIT),
    "timm_vit_srelpos": ("vit_srelpos_small_patch16_224", 64, VIT),
    "timm_beit": ("beit_base_patch16_224", 64, VIT),
    "timm_eva02": ("eva02_tiny_patch14_224", 56, {**VIT, "img_size": 56}),
    "timm_samvit": ("samvit_base_patch16", 64, {**VIT, "global_attn_indexes": (1,), "window_size": 2}),
    "timm_cait": ("cait_xxs24_224", 64, {**VIT, "depth_token_only": 1}),
    "timm_xcit": ("xcit_nano_12_p16_224", 64, VIT),
    "timm_nf_resnet": ("nf_resnet26", 64, {}),
    "timm_resnetv2": ("resnetv2_50", 64, {"layers": (1, 1, 1, 1)}),
    "timm_hgnetv2": ("hgnetv2_b0", 64, {}),
    "timm_mobileone": ("mobileone_s0", 64, {}),
    "timm_repvit": ("repvit_m0_9", 64, {}),
    "timm_repghostnet": ("repghostnet_050", 64, {}),
    "timm_maxvit": ("maxvit_rmlp_pico_rw_256", 64, {"img_size": 64}),
    "timm_coatnet": ("coatnet_pico_rw_224", 64, {"img_size": 64}),
    "timm_coat": ("coat_tiny", 64, {"img_size": 64}),
    "timm_convnext": ("convnext_atto", 64, {}),
    "timm_mobilevit": ("mobilevit_xxs", 64, {}),
    "timm_mobilevitv2": ("mobilevitv2_050", 64, {}),
    "timm_levit": ("levit_128s", 224, {}),
    "timm_fastvit": ("fastvit_t8", 64, {}),
    "timm_edgenext": ("edgenext_xx_small", 64, {}),
    "timm_mixer": ("mixer_s32_224", 224, {}),
    "timm_sequencer": ("sequencer2d_s", 64, {"layers": (1, 1, 1, 1), "img_size": 64}),
    "timm_ghostnet": ("ghostnet_050", 64, {}),
}


def _timm(name: str, side: int, options: Mapping[str, Any]) -> tuple[nn.Module, Inputs]:
    torchvision_models()  # timm imports it
    import timm  # noqa: PLC0415  # slow, and only for these

    return timm.create_model(name, pretrained=False, num_classes=10, **options), (torch.randn(2, 3, side, side),)


def _ids(length: int = 9) -> Inputs:
    return {"input_ids": torch.randint(3, 100, (2, length))}


def _text(length: int = 9) -> Inputs:
    ids = torch.randint(3, 100, (2, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pair() -> Inputs:
    return {"input_ids": torch.randint(3, 100, (2, 9)), "decoder_input_ids": torch.randint(3, 100, (2, 7))}


def _pair_and_masks() -> Inputs:
    pair = _pair()
    masks = {name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in pair.items()}
    return {**pair, **masks}


def _pixels(side: int = 32) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, side, side)}


def _episode() -> Inputs:
    return {
        "states": torch.randn(2, 5, 17),
        "actions": torch.randn(2, 5, 4),
        "rewards": torch.randn(2, 5, 1),
        "returns_to_go": torch.randn(2, 5, 1),
        "timesteps": torch.arange(5).repeat(2, 1),
        "attention_mask": torch.ones(2, 5, dtype=torch.long),
    }


def _film() -> Inputs:
    return {"pixel_values": torch.randn(2, 2, 3, 32, 32)}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
LONG_T5 = {**T5, "local_radius": 4, "global_block_size": 4}
CLIP_SEG = {
    "text_config": TEXT_TOWER,
    "vision_config": {**PATCHES, "num_hidden_layers": 4},
    "projection_dim": 16,
    "extract_layers": [0, 1, 2],
    "reduce_dim": 16,
    "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 32,
    "conditional_layer": 0,
}
ALT_CLIP = {**TOWERS, "text_config": {**TEXT_TOWER, "project_dim": 32}}
XLNET = {**TOKENS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
FUNNEL = {**TOKENS, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]}
FILM = {**PATCHES, "num_frames": 2}
# name: (class prefix, configuration, inputs[, head])
TRANSFORMERS: dict[str, tuple[Any, ...]] = {
    "gpt2_cached": ("GPT2", {**GPT, "use_cache": True}, _ids, "LMHeadModel"),
    "deberta": ("Deberta", DEBERTA, _text),
    "xlnet": ("XLNet", XLNET, _text),
    "nystromformer": (
        "Nystromformer",
        {**ENCODER, "num_landmarks": 4, "segment_means_seq_len": 16},
        partial(_ids, 16),
    ),
    "longformer": ("Longformer", {**ENCODER, "attention_window": 4}, _text),
    "bigbird": ("BigBird", {**ENCODER, "attention_type": "original_full"}, _text),
    "funnel": ("Funnel", FUNNEL, _text),
    "convbert": ("ConvBert", {**ENCODER, "embedding_size": 32}, _text),
    "mobilebert": ("MobileBert", {**ENCODER, "embedding_size": 32, "intra_bottleneck_size": 16}, _text),
    "fnet": ("FNet", ENCODER, _ids),
    "esm": ("Esm", {**ENCODER, "mask_token_id": 4, "position_embedding_type": "rotary"}, _text),
    "gpt_neo": (
        "GPTNeo",
        {**DECODER, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        _ids,
    ),
    "olmoe": ("Olmoe", {**DECODER, **EXPERTS}, _ids),
    "qwen2_moe": ("Qwen2Moe", {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 32}, _ids),
    "mamba2": (
        "Mamba2",
        {
            **TOKENS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "state_size": 16,
            "chunk_size": 8,
            "use_cache": False,
        },
        _ids,
    ),
    "rwkv": (
        "Rwkv",
        {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 16, "use_cache": False},
        _ids,
    ),
    "longt5": ("LongT5", LONG_T5, _pair_and_masks),
    "switch_transformers": ("SwitchTransformers", {**T5, "num_experts": 2}, _pair),
    "decision_transformer": (
        "DecisionTransformer",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 64, "state_dim": 17, "act_dim": 4},
        _episode,
    ),
    "swin2sr": ("Swin2SR", {**WINDOWS, "num_channels": 3, "patch_size": 1}, _pixels),
    "clipseg": ("CLIPSeg", CLIP_SEG, lambda: {**_text(), **_pixels()}, "ForImageSegmentation"),
    "altclip": ("AltCLIP", ALT_CLIP, lambda: {**_text(), **_pixels()}),
    "data2vec_vision": ("Data2VecVision", {**PATCHES, "use_relative_position_bias": True}, _pixels),
    "glpn": (
        "GLPN",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1] * 4,
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 16,
        },
        partial(_pixels, 64),
        "ForDepthEstimation",
    ),
    "focalnet": (
        "FocalNet",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
        _pixels,
    ),
    "cvt": ("Cvt", {"embed_dim": [16, 24, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, partial(_pixels, 64)),
    "convnext_hf": ("ConvNext", STAGES, partial(_pixels, 64)),
    "videomae": ("VideoMAE", {**FILM, "tubelet_size": 2}, _film, "ForVideoClassification"),
    "timesformer": ("Timesformer", FILM, _film),
    "wav2vec2_conformer": (
        "Wav2Vec2Conformer",
        {**WAVES, "conv_depthwise_kernel_size": 7},
        lambda: {"input_values": torch.randn(2, 800)},
    ),
}


def _registry() -> dict[str, Architecture]:
    made: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}
    made |= {name: partial(_timm, *setup) for name, setup in TIMM.items()}
    made |= {name: partial(transformer, *setup) for name, setup in TRANSFORMERS.items()}
    return {name: Architecture(name, make) for name, make in made.items()}


FURTHER = _registry()
