"""Architectures of timm, transformers and torchvision beyond those of the tests: tiny, with random weights.

FURTHER: relative positions, computed biases and weights, gates, experts, windows, re-parametrized branches, memories.
MORE: more families of the same libraries, and the models of handwritten_models.py.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from architectures import (
    BLOCKS,
    DECODER,
    ENCODER,
    GPT,
    GROUPED,
    PATCHES,
    RESNET,
    SEQ2SEQ,
    STAGES,
    T5,
    TEXT_TOWER,
    TOKENS,
    TOWERS,
    WAVES,
    WINDOWS,
    Architecture,
    Inputs,
    _backbone,
    timm_models,
    torchvision_models,
    transformer,
)
from handwritten_models import MODELS

VIT = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}
SWIN = {"img_size": 64, "embed_dim": 24, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 3, 6)}
# name: (timm's name, side of the image, options)
FURTHER_TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
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


def timm_model(name: str, side: int, options: Mapping[str, Any]) -> tuple[nn.Module, Inputs]:
    model = timm_models().create_model(name, pretrained=False, num_classes=10, **options)
    return model, (torch.randn(2, 3, side, side),)


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
FURTHER_TRANSFORMERS: dict[str, tuple[Any, ...]] = {
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


def _further() -> dict[str, Architecture]:
    models: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}
    models |= {name: partial(timm_model, *setup) for name, setup in FURTHER_TIMM.items()}
    models |= {name: partial(transformer, *setup) for name, setup in FURTHER_TRANSFORMERS.items()}
    return {name: Architecture(name, make) for name, make in models.items()}


FURTHER = _further()


# name: (side of the image, options)
MORE_TIMM: dict[str, tuple[int, dict[str, Any]]] = {
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


def _wave(length: int = 800) -> Inputs:
    return {"input_values": torch.randn(2, length)}


def _both() -> Inputs:
    return {**_text(), **_pixels()}


def _queries() -> Inputs:
    ids = torch.randint(3, 100, (4, 6))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_pixels()}


def _boxes() -> Inputs:
    return {**_text(), "bbox": torch.tensor([1, 2, 30, 40]).repeat(2, 9, 1)}


def _features(name: str, *shape: int) -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(2, *shape)}


SEW = {**WAVES, "squeeze_factor": 2}
SPEECH_TO_TEXT = {
    **SEQ2SEQ,
    "input_feat_per_channel": 16,
    "conv_channels": 16,
    "max_source_positions": 64,
    "max_target_positions": 32,
}
OWL = {
    "text_config": {**BLOCKS, "vocab_size": 100, "max_position_embeddings": 16},
    "vision_config": PATCHES,
    "projection_dim": 32,
}
PATCHED_SERIES = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "d_model": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "ffn_dim": 32,
    "prediction_length": 8,
}
MASKED = {
    "backbone_config": _backbone("Swin", ["stage1", "stage2"], **WINDOWS),
    "decoder_config": _backbone("Detr", [], d_model=32),
}
# name: (class prefix, configuration, inputs[, head])
MORE_TRANSFORMERS: dict[str, tuple[Any, ...]] = {
    # text
    "camembert": ("Camembert", ENCODER, _text, "ForTokenClassification"),
    "xlm_roberta_pair": ("XLMRoberta", ENCODER, _text, "ForQuestionAnswering"),
    "electra_pretrain": ("Electra", {**ENCODER, "embedding_size": 16}, _text, "ForPreTraining"),
    "ernie": ("Ernie", ENCODER, _text),
    "megatron_bert": ("MegatronBert", ENCODER, _text),
    "rembert": ("RemBert", {**ENCODER, "input_embedding_size": 16, "output_embedding_size": 16}, _text, "ForMaskedLM"),
    "roformer": ("RoFormer", ENCODER, _text),
    "squeezebert": ("SqueezeBert", {**ENCODER, "embedding_size": 32}, _text),
    "ibert": ("IBert", ENCODER, _text),
    "nomic_bert": ("NomicBert", ENCODER, _text),
    "canine": ("Canine", {**ENCODER, "local_transformer_stride": 4, "upsampling_kernel_size": 4}, partial(_text, 16)),
    "flaubert": ("Flaubert", {**TOKENS, "emb_dim": 32, "n_layers": 2, "n_heads": 4}, _text),
    "layoutlmv3": ("LayoutLMv3", {**ENCODER, "input_size": 32, "coordinate_size": 5, "shape_size": 6}, _boxes),
    "lilt": ("Lilt", {**ENCODER, "hidden_size": 48}, _boxes),
    "tapas": ("Tapas", {**ENCODER, "type_vocab_sizes": [3, 4, 4, 2, 4, 4, 4]}, _text),
    "longformer_masked": ("Longformer", {**ENCODER, "attention_window": 4}, partial(_ids, 8)),
    "led": ("LED", {**SEQ2SEQ, "attention_window": 4, "max_encoder_position_embeddings": 64}, _pair),
    "m2m100": ("M2M100", SEQ2SEQ, _pair),
    "blenderbot": ("Blenderbot", SEQ2SEQ, _pair),
    "mt5_encoder": ("MT5", T5, _ids, "EncoderModel"),
    "umt5": ("UMT5", T5, _pair),
    "t5_generation": ("T5", T5, _pair, "ForConditionalGeneration"),
    "reformer": (
        "Reformer",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "attention_head_size": 16,
            "attn_layers": ["local", "local"],
            "local_attn_chunk_length": 4,
            "axial_pos_embds": False,
            "feed_forward_size": 64,
            "max_position_embeddings": 64,
            "use_cache": False,
        },
        partial(_ids, 8),
    ),
    "codegen": (
        "CodeGen",
        {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "use_cache": False},
        _ids,
    ),
    "biogpt": ("BioGpt", DECODER, _ids),
    "granite_moe": ("GraniteMoe", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, _ids),
    "recurrent_gemma": (
        "RecurrentGemma",
        {**GROUPED, "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        _ids,
    ),
    "xlstm": ("xLSTM", {**TOKENS, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 1, "use_cache": False}, _ids),
    "lfm2": ("Lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, _ids),
    # speech and sound
    "sew": ("SEW", SEW, _wave),
    "sew_d": ("SEWD", {**SEW, "position_buckets": 8, "max_position_embeddings": 64}, _wave),
    "data2vec_audio": ("Data2VecAudio", WAVES, _wave),
    "unispeech": ("UniSpeech", WAVES, _wave, "ForCTC"),
    "wav2vec2_bert": (
        "Wav2Vec2Bert",
        {**BLOCKS, "feature_projection_input_dim": 16},
        _features("input_features", 20, 16),
    ),
    "speech_to_text": (
        "Speech2Text",
        SPEECH_TO_TEXT,
        lambda: {"input_features": torch.randn(2, 40, 16), "decoder_input_ids": torch.randint(3, 100, (2, 7))},
    ),
    "moonshine": (
        "Moonshine",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 64,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "use_cache": False,
        },
        lambda: {"input_values": torch.randn(2, 4000), "decoder_input_ids": torch.randint(3, 100, (2, 7))},
    ),
    "clap_audio": (
        "ClapAudio",
        {
            "spec_size": 32,
            "num_mel_bins": 8,
            "patch_embeds_hidden_size": 16,
            "depths": [1, 1],
            "hidden_size": 32,
            "num_attention_heads": [2, 2],
            "window_size": 4,
            "patch_size": 4,
            "patch_stride": [4, 4],
            "num_hidden_layers": 2,
            "enable_fusion": False,
            "num_classes": 10,
        },
        _features("input_features", 1, 128, 8),
        "Model",
    ),
    "encodec": (
        "Encodec",
        {
            "num_filters": 4,
            "hidden_size": 16,
            "codebook_size": 16,
            "codebook_dim": 16,
            "upsampling_ratios": [4, 2],
            "num_lstm_layers": 1,
            "target_bandwidths": [1.5],
            "sampling_rate": 800,
        },
        _features("input_values", 1, 160),
    ),
    "dac": (
        "Dac",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "n_codebooks": 2,
            "codebook_size": 16,
            "codebook_dim": 4,
        },
        _features("input_values", 1, 160),
    ),
    "speecht5_vocoder": (
        "SpeechT5HifiGan",
        {"model_in_dim": 8, "upsample_initial_channel": 16, "upsample_rates": [4, 2], "upsample_kernel_sizes": [8, 4]},
        _features("spectrogram", 10, 8),
        "",
    ),
    # vision
    "vit_mae_encoder": ("ViTMSN", PATCHES, _pixels),
    "dinov2_registers": ("Dinov2WithRegisters", {**PATCHES, "image_size": 28, "patch_size": 14}, partial(_pixels, 28)),
    "dinov3": ("DINOv3ViT", {**PATCHES, "num_register_tokens": 2}, _pixels),
    "ijepa": ("IJepa", PATCHES, _pixels),
    "hiera_hf": (
        "Hiera",
        {
            "embed_dim": 16,
            "image_size": [32, 32],
            "patch_stride": [4, 4],
            "patch_kernel": [7, 7],
            "depths": [1, 1, 1],
            "patch_padding": [3, 3],
            "num_heads": [1, 2, 4],
            "masked_unit_size": [4, 4],
            "query_stride": [2, 2],
            "num_query_pool": 1,
        },
        _pixels,
    ),
    "mobilenet_v1_hf": ("MobileNetV1", {"image_size": 64, "depth_multiplier": 0.25}, partial(_pixels, 64)),
    "mobilevitv2_hf": (
        "MobileViTV2",
        {"image_size": 64, "width_multiplier": 0.25},
        partial(_pixels, 64),
        "ForSemanticSegmentation",
    ),
    "efficientnet_hf": (
        "EfficientNet",
        {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
        partial(_pixels, 64),
    ),
    "bit": (
        "Bit",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_groups": 4},
        partial(_pixels, 64),
    ),
    "regnet_hf": (
        "RegNet",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "groups_width": 4},
        partial(_pixels, 64),
    ),
    "swiftformer_hf": (
        "SwiftFormer",
        {"image_size": 64, "depths": [1] * 4, "embed_dims": [8, 16, 24, 32]},
        partial(_pixels, 64),
    ),
    "depth_anything": (
        "DepthAnything",
        {
            "backbone_config": _backbone(
                "Dinov2",
                ["stage1", "stage2"],
                **{**PATCHES, "image_size": 28, "patch_size": 14},
                reshape_hidden_states=False,
            ),
            "neck_hidden_sizes": [8, 16],
            "reassemble_factors": [2, 1],
            "fusion_hidden_size": 8,
            "head_hidden_size": 8,
            "reassemble_hidden_size": 32,
        },
        partial(_pixels, 28),
        "ForDepthEstimation",
    ),
    "upernet": (
        "UperNet",
        {
            "backbone_config": _backbone("ConvNext", ["stage1", "stage2", "stage3", "stage4"], **STAGES),
            "hidden_size": 16,
            "auxiliary_in_channels": 24,
            "num_labels": 5,
        },
        partial(_pixels, 64),
        "ForSemanticSegmentation",
    ),
    "vitmatte": (
        "VitMatte",
        {
            "backbone_config": _backbone(
                "VitDet", ["stage2"], **{**PATCHES, "num_channels": 4, "pretrain_image_size": 32}
            ),
            "hidden_size": 32,
            "convstream_hidden_sizes": [4, 8],
            "fusion_hidden_sizes": [16, 8, 4],
        },
        _features("pixel_values", 4, 32, 32),
        "ForImageMatting",
    ),
    "vitpose": (
        "VitPose",
        {
            "backbone_config": _backbone(
                "VitPoseBackbone", ["stage2"], **{**BLOCKS, "image_size": [32, 32], "patch_size": [8, 8]}
            ),
            "num_labels": 5,
        },
        _pixels,
        "ForPoseEstimation",
    ),
    "superpoint": (
        "SuperPoint",
        {
            "encoder_hidden_sizes": [8, 8, 16, 16],
            "decoder_hidden_size": 16,
            "keypoint_decoder_dim": 65,
            "descriptor_decoder_dim": 16,
        },
        partial(_pixels, 64),
        "ForKeypointDetection",
    ),
    "owlvit": ("OwlViT", OWL, _queries, "ForObjectDetection"),
    "owlv2_vision": ("Owlv2Vision", PATCHES, _pixels),
    "siglip2_vision": ("SiglipVision", PATCHES, _pixels),
    "table_transformer": (
        "TableTransformer",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "num_queries": 5,
            "d_model": 32,
            **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
            "backbone_config": _backbone("ResNet", ["stage4"], **RESNET),
        },
        partial(_pixels, 64),
        "ForObjectDetection",
    ),
    "blip_vision": ("BlipVision", PATCHES, _pixels),
    "chinese_clip": ("ChineseCLIP", TOWERS, _both),
    "groupvit": (
        "GroupViT",
        {
            "text_config": TEXT_TOWER,
            "vision_config": {**PATCHES, "depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 2]},
            "projection_dim": 16,
            "projection_intermediate_dim": 32,
        },
        _both,
    ),
    "vilt": ("Vilt", {**ENCODER, "image_size": 32, "patch_size": 8}, _both),
    "git_vision": ("GitVision", PATCHES, _pixels),
    "vivit": (
        "Vivit",
        {**PATCHES, "num_frames": 4, "tubelet_size": [2, 8, 8]},
        _features("pixel_values", 4, 3, 32, 32),
    ),
    "vjepa2": (
        "VJEPA2",
        {
            "patch_size": 8,
            "crop_size": 32,
            "frames_per_clip": 4,
            "tubelet_size": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "pred_hidden_size": 32,
            "pred_num_attention_heads": 4,
            "pred_num_hidden_layers": 1,
        },
        _features("pixel_values_videos", 4, 3, 32, 32),
    ),
    "perceiver": (
        "Perceiver",
        {
            "num_latents": 6,
            "d_latents": 16,
            "d_model": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
        },
        _features("inputs", 9, 16),
    ),
    # series
    "patchtst": ("PatchTST", PATCHED_SERIES, _features("past_values", 32, 3), "ForPrediction"),
    "patchtsmixer": ("PatchTSMixer", PATCHED_SERIES, _features("past_values", 32, 3), "ForPrediction"),
}


def _ssdlite() -> tuple[nn.Module, Inputs]:
    models = torchvision_models()
    head = models.detection.ssdlite.SSDLiteHead([16, 32], [6, 6], 5, partial(nn.BatchNorm2d, eps=0.001))
    return head, ([torch.randn(2, 16, 8, 8), torch.randn(2, 32, 4, 4)],)


def _region_proposals() -> tuple[nn.Module, Inputs]:
    head = torchvision_models().detection.rpn.RPNHead(16, 3)
    return head, ([torch.randn(2, 16, 8, 8), torch.randn(2, 16, 4, 4)],)


def _mask_head() -> tuple[nn.Module, Inputs]:
    masks = torchvision_models().detection.mask_rcnn
    model = nn.Sequential(masks.MaskRCNNHeads(16, (16, 16), 1), masks.MaskRCNNPredictor(16, 16, 5))
    return model, (torch.randn(2, 16, 14, 14),)


MORE_TORCHVISION: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "ssdlite_head": _ssdlite,
    "rpn_head": _region_proposals,
    "mask_head": _mask_head,
}


def _more() -> dict[str, Architecture]:
    models = {**MODELS, **MORE_TORCHVISION}
    models |= {f"timm_{name}": partial(timm_model, name, *setup) for name, setup in MORE_TIMM.items()}
    models |= {name: partial(transformer, *setup) for name, setup in MORE_TRANSFORMERS.items()}
    return {name: Architecture(name, make) for name, make in models.items()}


MORE = _more()
