"""Architectures that neither the tests nor bench/further.py have: other families, and models written by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import odd  # noqa: F401  # which fills the list
from architectures import (
    BLOCKS,
    DECODER,
    ENCODER,
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
    torchvision_models,
    transformer,
)
from families import TIMM, timm_model
from handmade import MADE


def _text(length: int = 9) -> Inputs:
    ids = torch.randint(3, 100, (2, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _ids(length: int = 9) -> Inputs:
    return {"input_ids": torch.randint(3, 100, (2, length))}


def _pair() -> Inputs:
    return {"input_ids": torch.randint(3, 100, (2, 9)), "decoder_input_ids": torch.randint(3, 100, (2, 7))}


def _pixels(side: int = 32) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, side, side)}


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
TRANSFORMERS: dict[str, tuple[Any, ...]] = {
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


TORCHVISION: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "ssdlite_head": _ssdlite,
    "rpn_head": _region_proposals,
    "mask_head": _mask_head,
}


def _registry() -> dict[str, Architecture]:
    found = {**MADE, **TORCHVISION}
    found |= {f"timm_{name}": partial(timm_model, name, *setup) for name, setup in TIMM.items()}
    found |= {name: partial(transformer, *setup) for name, setup in TRANSFORMERS.items()}
    return {name: Architecture(name, make) for name, make in found.items()}


STRANGERS = _registry()
