"""The networks that are deployed and measured: well-known ones at random weights, and really trained ones.

Random weights have calibrated ranges and batch norm statistics of random inputs: they show the arithmetic and the
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

from resnet18 import resnet18, with_statistics

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tests know how torchvision is imported
import lite0
import sentences
from architectures import torchvision_models
from registry_data import fetch, member

PICTURES = ("foolbox", "3.3.4", "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb")


@dataclass(frozen=True)
class Subject:
    """A model, the batch that it is judged by, and other batches to calibrate with."""

    title: str
    model: nn.Module
    inputs: Any
    calibration: list[Any]


def noise(count: int = 3, batch: int = 2, side: int = 224) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 3, side, side, generator=generator) for _ in range(count)]


def random_pictures(title: str, model: nn.Module) -> Subject:
    inputs, *calibration = noise()
    return Subject(title, model.eval(), inputs, calibration)


def vision(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision_models().get_model(name, weights=None)
    return with_statistics(model)


def photographs() -> Tensor:
    """Twenty photographs of ImageNet classes, as EfficientNet-Lite0 takes them."""
    archive = fetch(*PICTURES)
    names = [f"foolbox/data/imagenet_{index:02d}_{label}.jpg" for index, label in enumerate(LABELS)]
    arrays = [
        np.asarray(Image.open(io.BytesIO(member(archive, name))).convert("RGB").resize((224, 224))) for name in names
    ]
    return (torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).to(torch.float32) - 127) / 128


LABELS = (243, 559, 438, 990, 949, 853, 609, 609, 915, 455, 541, 630, 741, 471, 129, 99, 251, 22, 317, 305)


def efficientnet_lite0() -> Subject:
    pictures = photographs()
    return Subject("EfficientNet-Lite0 @224, trained", lite0.trained(), pictures[:4], list(pictures[4:].split(4)))


class Encoder(nn.Module):
    """BERT-base: 12 layers of 768, 12 heads; token vectors out."""

    def __init__(self) -> None:
        super().__init__()
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
    return Subject("BERT-base, 128 tokens", model, batches[0], batches[1:])


def minilm() -> Subject:
    encoder, tokenizer = sentences.load()
    texts, _ = sentences.sentences()
    inputs, *calibration = sentences.batches(tokenizer, texts[:96])
    return Subject("MiniLM-L6, trained", encoder, inputs, calibration)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "resnet18": lambda: random_pictures("ResNet-18 @224", resnet18()),
    "resnet50": lambda: random_pictures("ResNet-50 @224", vision("resnet50")),
    "mobilenet": lambda: random_pictures("MobileNetV2 @224", vision("mobilenet_v2")),
    "lite0": efficientnet_lite0,
    "bert": bert_base,
    "minilm": minilm,
    "vit": lambda: random_pictures("ViT-B/16 @224", vision("vit_b_16")),
}
