"""The networks that are deployed and measured: well-known ones at random weights, and really trained ones.

Random weights have calibrated ranges and batch norm statistics as after training: they show the arithmetic and the
speed, not task accuracy. Nothing is downloaded but packages.
"""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from plain_models import resnet18

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tests know how torchvision is imported
import lite0
import sentences
from architectures import liven, torchvision_models
from registry_data import fetch, member

LABELS = (243, 559, 438, 990, 949, 853, 609, 609, 915, 455, 541, 630, 741, 471, 129, 99, 251, 22, 317, 305)
PICTURES = ("foolbox", "3.3.4", "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb")


@dataclass(frozen=True)
class Subject:
    """A model, a batch that it is timed with, others to calibrate with, and one that it is judged by."""

    title: str
    model: nn.Module
    inputs: Any
    calibration: list[Any]
    held_out: Any

    @property
    def is_transformer(self) -> bool:
        return any(isinstance(module, nn.LayerNorm) for module in self.model.modules())


def random_pictures(title: str, model: nn.Module) -> Subject:
    generator = torch.Generator().manual_seed(0)
    held_out, *calibration = (torch.randn(2, 3, 224, 224, generator=generator) for _ in range(3))
    return Subject(title, model.eval(), held_out, calibration, held_out)


def vision(name: str) -> nn.Module:
    """Batch norm statistics near 1 and small biases: normalized to random pictures, a deep net is chaotic instead."""
    torch.manual_seed(0)
    model: nn.Module = torchvision_models().get_model(name, weights=None)
    liven(model)
    return model


def photographs(folder: Path | None) -> Tensor:
    """As EfficientNet-Lite0 takes them: 128 of a folder, or the twenty of ImageNet classes that a package carries."""
    if folder is not None:
        files: list[Any] = sorted(folder.rglob("*.jpg"))[:128]
        if not files:
            raise SystemExit(f"{folder} holds no .jpg pictures")
    else:
        archive = fetch(*PICTURES)
        names = (f"foolbox/data/imagenet_{index:02d}_{label}.jpg" for index, label in enumerate(LABELS))
        files = [io.BytesIO(member(archive, name)) for name in names]
    pictures = [np.asarray(Image.open(file).convert("RGB").resize((224, 224))) for file in files]
    return ((torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).to(torch.float32) - 127) / 128).contiguous()


def efficientnet_lite0(folder: Path | None) -> Subject:
    pictures = photographs(folder)
    calibration, held_out = pictures[: len(pictures) // 2], pictures[len(pictures) // 2 :]
    model = lite0.trained()
    return Subject("EfficientNet-Lite0 @224, trained", model, held_out[:2], list(calibration.split(8)), held_out)


class Encoder(nn.Module):
    """BERT-base: 12 layers of 768, 12 heads; token vectors out."""

    def __init__(self) -> None:
        super().__init__()
        torchvision_models()  # transformers imports torchvision where it is there, which needs what this declares
        import transformers  # noqa: PLC0415

        transformers.logging.set_verbosity_error()
        self.bert = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens: Tensor = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return tokens


def bert_base() -> Subject:
    """Two sequences of 128, of which the second is padded from its 97th token on."""
    torch.manual_seed(0)
    model = Encoder().eval()
    mask = torch.ones(2, 128, dtype=torch.long)
    mask[1, 96:] = 0
    batches = [{"input_ids": torch.randint(1000, 30000, (2, 128)), "attention_mask": mask} for _ in range(3)]
    return Subject("BERT-base, 128 tokens", model, batches[0], batches[1:], batches[0])


def minilm() -> Subject:
    encoder, tokenizer = sentences.load()
    texts, _ = sentences.sentences()
    held_out, *calibration = sentences.batches(tokenizer, texts[:96])
    return Subject("MiniLM-L6, trained", encoder, held_out, calibration, held_out)


def small_vit() -> Subject:
    """6 layers of 192, 3 heads, 64 patches of 4 pixels."""
    torch.manual_seed(0)
    sizes = {"num_layers": 6, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768, "num_classes": 10}
    model = torchvision_models().vision_transformer.VisionTransformer(image_size=32, patch_size=4, **sizes)
    liven(model)
    held_out, *calibration = (torch.randn(2, 3, 32, 32) for _ in range(3))
    return Subject("small ViT @32", model.eval(), held_out, calibration, held_out)


SUBJECTS: dict[str, Callable[[Path | None], Subject]] = {
    "resnet18": lambda _: random_pictures("ResNet-18 @224", resnet18()),
    "resnet50": lambda _: random_pictures("ResNet-50 @224", vision("resnet50")),
    "mobilenet": lambda _: random_pictures("MobileNetV2 @224", vision("mobilenet_v2")),
    "lite0": efficientnet_lite0,
    "bert": lambda _: bert_base(),
    "minilm": lambda _: minilm(),
    "vit": lambda _: random_pictures("ViT-B/16 @224", vision("vit_b_16")),
    "squeezenet": lambda _: random_pictures("SqueezeNet 1.1 @224", vision("squeezenet1_1")),
    "small_vit": lambda _: small_vit(),
}
