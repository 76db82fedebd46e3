"""Architectures of torchvision, transformers and timm with random weights: small configurations, no downloads.

The libraries are imported when a model is built. `make architectures` installs torchvision and timm into a folder of
their own, which only this file reads: the wheel of torchvision is linked against CUDA and can be imported with a CPU
torch only after two operators are declared. In the main environment it would break transformers, which imports
torchvision if it is installed. Use `torchvision_models()` and `timm_models()`, here and in bench/.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A model to build. `quick` models run by default; `cannot` is the reason why torch.export refuses a model."""

    name: str
    make: Callable[[], tuple[nn.Module, Inputs]]
    quick: bool = False
    cannot: str = ""

    def build(self) -> tuple[nn.Module, Inputs]:
        """Build the model in eval mode and inputs of two samples, the same in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, inputs = self.make()
            liven(model)
        return model.eval(), inputs


@torch.no_grad()
def liven(model: nn.Module) -> None:
    """Set parameters as after training: biases and layer scales that start near zero would hide mistakes."""
    for parameter in model.parameters():
        if parameter.abs().max() <= 1e-3:
            parameter.normal_(0, 0.1)
        elif parameter.ndim == 2:
            parameter.mul_(max(1.0, parameter.shape[1] ** -0.5 / float(parameter.abs().mean())))
    for module in model.modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)


# torchvision -----------------------------------------------------------------------------------------------------
FOLDER = Path(__file__).parents[1] / ".architectures"


def _look_in_folder() -> None:
    """Add the folder at the end of sys.path, so that only packages that are missing elsewhere come from it."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if find_spec("torchvision") is None or find_spec("timm") is None:
        raise ModuleNotFoundError(f"torchvision and timm are not in {FOLDER}: make architectures")


@cache
def _torchvision() -> tuple[Any, torch.library.Library]:
    """Return torchvision.models, and the torch library object that must stay alive for its declared operators."""
    _look_in_folder()
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    return torchvision.models, library


def torchvision_models() -> Any:
    """Import torchvision.models with any build of torch."""
    return _torchvision()[0]


def timm_models() -> Any:
    """Import timm, which imports torchvision."""
    _torchvision()
    import timm

    return timm


def _image(side: int) -> Tensor:
    return torch.randn(2, 3, side, side)


def _vision(name: str, side: int, options: Mapping[str, Any]) -> tuple[nn.Module, Inputs]:
    return _torchvision()[0].get_model(name, weights=None, **options), (_image(side),)


def _video(name: str, frames: int, side: int, options: Mapping[str, Any]) -> tuple[nn.Module, Inputs]:
    return _torchvision()[0].get_model(name, weights=None, **options), (torch.randn(2, 3, frames, side, side),)


def _small_vit() -> tuple[nn.Module, Inputs]:
    kind = _torchvision()[0].VisionTransformer
    model = kind(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64)
    return model, (_image(32),)


def _small_mvit() -> tuple[nn.Module, Inputs]:
    mvit = _torchvision()[0].video.mvit
    blocks = [
        mvit.MSBlockConfig(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        mvit.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    options = dict.fromkeys(("residual_pool", "rel_pos_embed", "proj_after_attn"), True)
    model = mvit.MViT((32, 32), 4, blocks, residual_with_cls_embed=False, num_classes=10, **options)
    return model, (torch.randn(2, 3, 4, 32, 32),)


def _feature_pyramid() -> tuple[nn.Module, Inputs]:
    models, _ = _torchvision()
    make = models.detection.backbone_utils.resnet_fpn_backbone
    return make(backbone_name="resnet18", weights=None, trainable_layers=5), (_image(64),)


def _retinanet_head() -> tuple[nn.Module, Inputs]:
    models, _ = _torchvision()
    head = models.detection.retinanet.RetinaNetHead(16, num_anchors=3, num_classes=4)
    return head, ([torch.randn(2, 16, 8, 8), torch.randn(2, 16, 4, 4)],)


def _faster_rcnn() -> tuple[nn.Module, Inputs]:
    make = _torchvision()[0].detection.fasterrcnn_mobilenet_v3_large_320_fpn
    return make(weights=None, weights_backbone=None, min_size=64, max_size=64), ([torch.randn(3, 64, 64)] * 2,)


def _optical_flow() -> tuple[nn.Module, Inputs]:
    return _torchvision()[0].get_model("raft_small", weights=None), (_image(128), _image(128), 2)


NO_WEIGHTS = {"weights_backbone": None}
PLAIN = {"init_weights": False}  # the default truncated normal takes longer than everything else
TORCHVISION_IMAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "vgg11_bn": (32, {}),
    "resnet18": (64, {}),
    "resnet50": (64, {}),
    "resnext50_32x4d": (64, {}),
    "wide_resnet50_2": (64, {}),
    "mobilenet_v2": (64, {}),
    "mobilenet_v3_small": (64, {}),
    "mobilenet_v3_large": (64, {}),
    "efficientnet_b0": (64, {}),
    "efficientnet_v2_s": (64, {}),
    "densenet121": (64, {}),
    "inception_v3": (80, PLAIN),
    "googlenet": (64, PLAIN),
    "shufflenet_v2_x0_5": (64, {}),
    "squeezenet1_0": (64, {}),
    "regnet_x_400mf": (64, {}),
    "regnet_y_400mf": (64, {}),
    "mnasnet0_5": (64, {}),
    "convnext_tiny": (64, {}),
    "swin_t": (64, {}),
    "swin_v2_t": (64, {}),
    "maxvit_t": (224, {}),
    "vit_b_32": (224, {}),
    "fcn_resnet50": (64, NO_WEIGHTS),
    "deeplabv3_resnet50": (64, NO_WEIGHTS),
    "deeplabv3_mobilenet_v3_large": (64, NO_WEIGHTS),
    "lraspp_mobilenet_v3_large": (64, NO_WEIGHTS),
}
TORCHVISION_VIDEOS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "r3d_18": (4, 32, {}),
    "mc3_18": (4, 32, {}),
    "r2plus1d_18": (4, 32, {}),
    "s3d": (16, 224, {}),
    "swin3d_t": (4, 64, {}),
}
TORCHVISION_OTHERS = {
    "vit_small": _small_vit,
    "mvit_small": _small_mvit,
    "resnet18_fpn": _feature_pyramid,
    "retinanet_head": _retinanet_head,
    "raft_small": _optical_flow,
    "fasterrcnn_mobilenet_v3": _faster_rcnn,
}

# transformers ----------------------------------------------------------------------------------------------------

TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
ENCODER = {**BLOCKS, **TOKENS, "max_position_embeddings": 64}
DECODER = {**ENCODER, "use_cache": False}
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 8}
GPT = {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
T5 = {**TOKENS, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "use_cache": False}
T5["decoder_start_token_id"] = 0
SEQ2SEQ = {
    **TOKENS,
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
    "use_cache": False,
}
PATCHES = {**BLOCKS, "image_size": 32, "patch_size": 8}
WAVES = {
    **BLOCKS,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
TEXT_TOWER = {**ENCODER, "projection_dim": 16}
WHISPER = {
    **SEQ2SEQ,
    "max_source_positions": 50,
    "max_target_positions": 32,
    "num_mel_bins": 16,
}
SEGFORMER = {
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 3, 4],
    "decoder_hidden_size": 16,
}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
DETECTOR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "num_queries": 5,
    **{key: value for key, value in SEQ2SEQ.items() if key.startswith(("d_model", "encoder", "decoder_"))},
}
DETECTOR.pop("decoder_start_token_id")


def _text() -> Inputs:
    ids = torch.randint(3, 100, (2, 9))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _padded_text() -> Inputs:
    ids, mask = torch.randint(3, 100, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[:, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _ids() -> Inputs:
    return {"input_ids": torch.randint(3, 100, (2, 9))}


def _pair() -> Inputs:
    return {"input_ids": torch.randint(3, 100, (2, 9)), "decoder_input_ids": torch.randint(3, 100, (2, 7))}


def _pixels(side: int = 32) -> Inputs:
    return {"pixel_values": _image(side)}


def _wave() -> Inputs:
    return {"input_values": torch.randn(2, 800)}


def _spectrum_and_ids() -> Inputs:
    return {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": torch.randint(3, 100, (2, 7))}


def _image_and_text() -> Inputs:
    return {**_text(), **_pixels()}  # type: ignore[dict-item]


def _image_and_mask() -> Inputs:
    return {**_pixels(64), "pixel_mask": torch.ones(2, 64, 64, dtype=torch.long)}  # type: ignore[dict-item]


def _image_and_points() -> Inputs:
    return {**_pixels(64), "input_points": torch.rand(2, 1, 1, 2) * 64}  # type: ignore[dict-item]


def _boxes_of_text() -> Inputs:
    return {**_text(), "bbox": torch.tensor([1, 2, 30, 40]).repeat(2, 9, 1)}  # type: ignore[dict-item]


def transformer(
    prefix: str, config: Mapping[str, Any], inputs: Callable[[], Inputs], head: str = "Model"
) -> tuple[nn.Module, Inputs]:
    _torchvision()  # image models import it
    import transformers

    transformers.logging.set_verbosity_error()
    options = {key: value() if callable(value) else value for key, value in config.items()}
    configuration = getattr(transformers, f"{prefix}Config")(**options)
    return getattr(transformers, f"{prefix}{head}")(configuration), inputs()


def _backbone(prefix: str, stages: list[str], **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, f"{prefix}Config")(out_features=stages, **options)

    return make


RESNET = {"embedding_size": 8, **STAGES, "layer_type": "basic"}
DETECTOR_ON_RESNET = {**DETECTOR, "backbone_config": _backbone("ResNet", ["stage4"], **RESNET)}
RT_DETR = {
    "backbone_config": _backbone("RTDetrResNet", ["stage2", "stage3", "stage4"], **RESNET),
    "encoder_in_channels": [16, 24, 32],
    "encoder_hidden_dim": 32,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "d_model": 32,
    "num_queries": 10,
    "decoder_in_channels": [32, 32, 32],
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "num_denoising": 0,
}
SAM = {
    "vision_config": {
        **BLOCKS,
        "mlp_dim": 64,
        "image_size": 64,
        "patch_size": 8,
        "output_channels": 16,
        "num_pos_feats": 8,
        "global_attn_indexes": [1],
        "window_size": 4,
    },
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
    "mask_decoder_config": {
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    },
}
TOWERS = {"text_config": TEXT_TOWER, "vision_config": {**PATCHES, "projection_dim": 16}, "projection_dim": 16}
SIGLIP = {"text_config": {**TEXT_TOWER, "projection_size": 32}, "vision_config": PATCHES}
DEFORMABLE = {
    **DETECTOR,
    "backbone_config": _backbone("ResNet", ["stage2", "stage3", "stage4"], **RESNET),
    "num_feature_levels": 3,
}
MIX_OF_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
MPT = {**TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "use_cache": False}

# name: (class prefix, configuration, inputs[, head])
TRANSFORMERS: dict[str, tuple[Any, ...]] = {
    # encoders of text
    "bert": ("Bert", ENCODER, _text),
    "bert_masked": ("Bert", ENCODER, _padded_text, "ForMaskedLM"),
    "distilbert": ("DistilBert", {**TOKENS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}, _text),
    "roberta": ("Roberta", ENCODER, _text),
    "albert": ("Albert", {**ENCODER, "embedding_size": 16}, _text),
    "electra": ("Electra", {**ENCODER, "embedding_size": 16}, _text),
    "deberta_v2": (
        "DebertaV2",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        _text,
    ),
    "mpnet": ("MPNet", ENCODER, _text),
    "modernbert": ("ModernBert", {**ENCODER, "cls_token_id": 1, "sep_token_id": 2}, _text),
    "layoutlm": ("LayoutLM", ENCODER, _boxes_of_text),
    # decoders
    "gpt2": ("GPT2", GPT, _ids),
    "gpt_neox": ("GPTNeoX", DECODER, _ids),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}, _ids),
    "bloom": ("Bloom", {**TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}, _text),
    "mpt": ("Mpt", MPT, _ids),
    "opt": ("OPT", {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, _text),
    "llama": ("Llama", GROUPED, _ids, "ForCausalLM"),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 4}, _ids),
    "mixtral": ("Mixtral", MIX_OF_EXPERTS, _ids),
    "qwen2": ("Qwen2", GROUPED, _ids, "ForCausalLM"),
    "qwen3": ("Qwen3", GROUPED, _ids),
    "gemma": ("Gemma", GROUPED, _ids, "ForCausalLM"),
    "gemma2": ("Gemma2", {**GROUPED, "sliding_window": 4}, _ids),
    "phi": ("Phi", DECODER, _ids),
    "phi3": ("Phi3", {**DECODER, "num_key_value_heads": 2}, _ids),
    "falcon": ("Falcon", DECODER, _ids),
    "mamba": ("Mamba", {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False}, _ids),
    # encoder and decoder
    "t5": ("T5", T5, _pair),
    "bart": ("Bart", SEQ2SEQ, _pair),
    "marian": ("Marian", SEQ2SEQ, _pair),
    "pegasus": ("Pegasus", SEQ2SEQ, _pair),
    # vision
    "vit": ("ViT", PATCHES, _pixels, "ForImageClassification"),
    "deit": ("DeiT", PATCHES, _pixels),
    "beit": ("Beit", {**PATCHES, "use_relative_position_bias": True, "vocab_size": 100}, _pixels),
    "dinov2": ("Dinov2", {**PATCHES, "image_size": 28, "patch_size": 14}, partial(_pixels, 28)),
    "swin": ("Swin", WINDOWS, _pixels),
    "swinv2": ("Swinv2", WINDOWS, _pixels),
    "convnextv2": ("ConvNextV2", STAGES, partial(_pixels, 64)),
    "resnet_hf": ("ResNet", RESNET, partial(_pixels, 64)),
    "poolformer": ("PoolFormer", STAGES, partial(_pixels, 64)),
    "mobilevit": ("MobileViT", {"image_size": 64, "hidden_sizes": [16, 24, 32]}, partial(_pixels, 64)),
    "pvt_v2": ("PvtV2", {"image_size": 64, **STAGES, "num_attention_heads": [1, 2, 3, 4]}, partial(_pixels, 64)),
    # segmentation, depth, detection
    "segformer": ("Segformer", SEGFORMER, partial(_pixels, 64), "ForSemanticSegmentation"),
    "dpt": ("DPT", {**PATCHES, "backbone_out_indices": [0, 1], "is_hybrid": False}, _pixels),
    "sam": ("Sam", SAM, _image_and_points),
    "detr": ("Detr", DETECTOR_ON_RESNET, _image_and_mask, "ForObjectDetection"),
    "conditional_detr": ("ConditionalDetr", DETECTOR_ON_RESNET, _image_and_mask, "ForObjectDetection"),
    "deformable_detr": ("DeformableDetr", DEFORMABLE, _image_and_mask, "ForObjectDetection"),
    "rt_detr": ("RTDetr", RT_DETR, partial(_pixels, 64), "ForObjectDetection"),
    "yolos": (
        "Yolos",
        {**PATCHES, "image_size": [32, 32], "num_detection_tokens": 5},
        _pixels,
        "ForObjectDetection",
    ),
    # image and text
    "clip": ("CLIP", TOWERS, _image_and_text),
    "siglip": ("Siglip", SIGLIP, _image_and_text),
    # speech
    "whisper": ("Whisper", WHISPER, _spectrum_and_ids),
    "wav2vec2": ("Wav2Vec2", WAVES, _wave, "ForCTC"),
    "wavlm": ("WavLM", WAVES, _wave),
    "hubert": ("Hubert", WAVES, _wave),
    "audio_spectrogram": (
        "AST",
        {**BLOCKS, "patch_size": 8, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
        lambda: {"input_values": torch.randn(2, 32, 16)},
    ),
}

# timm ------------------------------------------------------------------------------------------------------------

TIMM = (
    "test_byobnet",
    "test_convnext",
    "test_convnext2",
    "test_convnext3",
    "test_efficientnet",
    "test_efficientnet_evos",
    "test_efficientnet_gn",
    "test_efficientnet_ln",
    "test_mambaout",
    "test_nfnet",
    "test_resnet",
    "test_vit",
    "test_vit2",
    "test_vit3",
    "test_vit4",
)


def _timm(name: str) -> tuple[nn.Module, Inputs]:
    model = timm_models().create_model(name, pretrained=False)
    return model, (torch.randn(2, *model.default_cfg["input_size"]),)


# the registry ----------------------------------------------------------------------------------------------------

QUICK = frozenset(("resnet18", "mobilenet_v3_small", "vit_small", "bert"))
CANNOT = {
    "fasterrcnn_mobilenet_v3": "torch.export: proposals are filtered by score, so their number depends on values",
}


def _registry() -> dict[str, Architecture]:
    factories: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}
    factories |= {name: partial(_vision, name, *setup) for name, setup in TORCHVISION_IMAGES.items()}
    factories |= {name: partial(_video, name, *setup) for name, setup in TORCHVISION_VIDEOS.items()}
    factories |= TORCHVISION_OTHERS
    factories |= {name: partial(transformer, *setup) for name, setup in TRANSFORMERS.items()}
    factories |= {name: partial(_timm, name) for name in TIMM}
    return {name: Architecture(name, make, name in QUICK, CANNOT.get(name, "")) for name, make in factories.items()}


ARCHITECTURES = _registry()
