"""Trained networks with their data: CNNs and a small ViT on CIFAR-10, EfficientNet-Lite0, MiniLM, two language models.

The ViT and the small Llama are trained at first use (three minutes of one thread each) and kept in out/cache. SmolLM2
comes from a PyPI package in blocks of 32 on an asymmetric 4-bit grid: its rows compare ways to quantize on other grids,
and are not figures of the published model.
"""

import csv
import io
import json
import math
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F

import lite0 as lite0_network
import resnet8 as resnet8_network
import sentences
import smollm_gguf as gguf
from pictures import PICTURES, labels, pictures
from plain_models import Llama, Sizes, llama
from registry_data import CACHE, fetch, fetch_npm, member
from smollm import MEMBER, SMOLLM
from texts import parts
from tuning_cases import AWQ, BALANCED, BEST, GPTQ, GPTQ_INTERCEPT, NEAREST, Limit, Subject, right

VIT_WIDTH, VIT_HEADS, VIT_BLOCKS, VIT_INNER = 128, 4, 5, 384
TRAINING_SECONDS, VIT_BATCH, VIT_RATE = 180.0, 64, 2e-3  # of the CPU; how long it trains, not how many steps
VIT_FILE = CACHE / "vit-cifar10.safetensors"


class VitAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(VIT_WIDTH, VIT_WIDTH) for _ in range(3))
        self.out = nn.Linear(VIT_WIDTH, VIT_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (VIT_HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        result: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


class VitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(VIT_WIDTH), nn.LayerNorm(VIT_WIDTH)
        self.attention = VitAttention()
        self.up, self.down = nn.Linear(VIT_WIDTH, VIT_INNER), nn.Linear(VIT_INNER, VIT_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class ViT(nn.Module):
    """16 tokens out of three convolutions, pre-norm blocks, the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(64, VIT_WIDTH, 3, 2, 1),
        )
        self.position_embedding = nn.Parameter(0.02 * torch.randn(16, VIT_WIDTH))
        self.blocks = nn.Sequential(*(VitBlock() for _ in range(VIT_BLOCKS)))
        self.norm, self.head = nn.LayerNorm(VIT_WIDTH), nn.Linear(VIT_WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2) + self.position_embedding
        result: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return result


def training_data() -> tuple[Tensor, Tensor]:
    sheets = torch.cat([pictures(f"data_batch_{number}") for number in range(1, 6)])
    with tarfile.open(fetch_npm(*PICTURES)) as files:
        file = files.extractfile("package/train_lables.json")
        if file is None:
            raise SystemExit("the package holds no labels of its training pictures")
        return sheets, torch.tensor(json.loads(file.read()))


def trained_vit() -> ViT:
    """Out of the cache, or trained now."""
    torch.manual_seed(0)
    model = ViT()
    if not VIT_FILE.exists():
        _train_vit(model)
        VIT_FILE.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), VIT_FILE)
    model.load_state_dict(load_file(VIT_FILE))
    return model.eval()


def _train_vit(model: ViT) -> None:
    images, labels = training_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=VIT_RATE, weight_decay=0.05)
    start, step = time.process_time(), 0
    while (done := (time.process_time() - start) / TRAINING_SECONDS) < 1:
        for group in optimizer.param_groups:
            group["lr"] = VIT_RATE * min(1.0, step / 200) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        chosen = torch.randint(0, len(images), (VIT_BATCH,))
        loss = F.cross_entropy(model(_varied(images[chosen])), labels[chosen], label_smoothing=0.1)
        optimizer.zero_grad()
        cast("Tensor", loss).backward()
        optimizer.step()
        step += 1
        if step % 500 == 0:
            print(f"training the ViT: {done:.0%}, loss {loss:.3f}", flush=True)


def _varied(images: Tensor) -> Tensor:
    """Shifted by up to 4 pixels, every other one mirrored."""
    row, column = torch.randint(0, 9, (2,)).tolist()
    moved = F.pad(images, (4, 4, 4, 4), value=-1.0)[:, :, row : row + 32, column : column + 32]
    moved[::2] = moved[::2].flip(3)
    return moved


BATCH, CALIBRATION = 64, 256
MEAN, SPREAD = (
    torch.tensor(channel_values).view(3, 1, 1) for channel_values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)
OF_TRANSFORMERS = (
    Limit("decibels", 6.0, NEAREST),
    Limit("decibels", 0.0, GPTQ_INTERCEPT),
    Limit("score", -0.5, "float"),
)


def zipped(images: Tensor, answers: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(images.split(250), answers.split(250), strict=True)


def resnet8() -> Subject:
    limits = {
        "W4A8": (Limit("score", 81.6),),
        "W3A8": (Limit("score", 79.0),),
        "W4A4": (Limit("score", 78.0),),
        "W8A8": (Limit("decibels", 0.0, NEAREST),),
    }
    judging = partial(zipped, pictures("test_batch"), labels())
    calibration = pictures("data_batch_1", CALIBRATION).split(BATCH)
    network = resnet8_network.trained().eval()
    return Subject("ResNet-8", network, calibration, judging, right, limits, best=("W4A8", "W3A8", "W4A4"))


def vit() -> Subject:
    judging = partial(zipped, pictures("test_batch"), labels())
    calibration = pictures("data_batch_1", 2 * CALIBRATION).split(BATCH)
    limits = {
        "W4A8": OF_TRANSFORMERS,
        "W3A8": OF_TRANSFORMERS,
        "W4A4": (),
        "W8A8": (Limit("decibels", 0.0, NEAREST),),
    }
    return Subject("ViT, CIFAR-10", trained_vit(), calibration, judging, right, limits, best=("W3A8",))


class CifarBlock(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        stride = 1 if inputs == width else 2
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.more = width - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more // 2)) if self.more else x
        return F.relu(y + short)


class CifarResNet(nn.Module):
    """The classic one of 6 n + 2 layers, with shortcuts that only pad."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for stage in range(1, 4):
            inputs = [widths[stage - 1], *[widths[stage]] * (blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(*(CifarBlock(width, widths[stage]) for width in inputs)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        result: Tensor = self.linear(x.mean((2, 3)))
        return result


def cifar(folder: Path, depth: int) -> Subject:
    def normal(sheet: Tensor) -> Tensor:
        return ((sheet * 128 + 128) / 255 - MEAN) / SPREAD

    model = CifarResNet((depth - 2) // 6)
    model.load_state_dict(load_file(folder / f"cifar_resnet{depth}.safetensors"), strict=False)
    calibration = normal(pictures("data_batch_1", CALIBRATION)).split(BATCH)
    limits = {
        "W4A8": (Limit("score", -0.3, "float"),),
        "W3A8": (Limit("score", -1.5, "float"),),
        "W8A8": (Limit("decibels", 0.0, NEAREST),),
    }
    judging = partial(zipped, normal(pictures("test_batch")), labels())
    return Subject(f"CIFAR ResNet-{depth}", model.eval(), calibration, judging, right, limits)


def lite0(folder: Path) -> Subject:
    rows = list(csv.DictReader((folder / "labels.csv").open()))

    def batches(chosen: Sequence[dict[str, str]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            pixels = [np.asarray(Image.open(folder / row["file"]).convert("RGB")).astype(np.float32) for row in part]
            images = torch.from_numpy(((np.stack(pixels) - 127) / 128).transpose(0, 3, 1, 2).copy())
            yield images, torch.tensor([int(row["label"]) for row in part])

    model = lite0_network.trained()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    limits = {
        "W4A8": (
            Limit("score", -4.0, "float", BALANCED),
            Limit("seconds", 120.0, how=BALANCED),
            Limit("score", -2.5, "float", BEST),
        ),
        "W8A8": (Limit("decibels", 0.0, NEAREST),),
    }
    return Subject(
        "EfficientNet-Lite0",
        model,
        [images for images, _ in batches(rows[:128], 16)],
        partial(batches, rows[128:], 32),
        right,
        limits,
        {names[0]: 8, names[-1]: 8},
        (NEAREST, BALANCED),
        best=("W4A8",),
    )


JUDGED_SENTENCES, CALIBRATION_SENTENCES = 4000, 1024  # sentences; others than those that train the classifier
MORE_DECIBELS = (Limit("decibels", 0.0, "nearest"), Limit("decibels", 0.0, "gptq + intercept"))


def minilm() -> Subject:
    model, tokenizer = sentences.load()
    train, test = sentences.TRAIN, sentences.TRAIN + JUDGED_SENTENCES
    texts, positive = sentences.sentences(test + CALIBRATION_SENTENCES)
    head = sentences.classifier(sentences.vectors(model, sentences.batches(tokenizer, texts[:train])), positive[:train])
    by_length = sorted(
        range(train, test), key=lambda index: len(texts[index])
    )  # of a length together: little is padded
    judge_batches = sentences.batches(tokenizer, [texts[index] for index in by_length])
    held_out = list(zip(judge_batches, positive[by_length].split(32), strict=True))
    calibration = sentences.batches(tokenizer, sorted(texts[test:], key=len))

    def marks(vectors: Tensor, answers: Tensor) -> Tensor:
        return ((head(vectors)[:, 0] > 0) == answers).float()

    def judging() -> Iterable[tuple[dict[str, Tensor], Tensor]]:
        return held_out

    limits = {
        "W8A8": MORE_DECIBELS[:1],
        "W4A8": OF_TRANSFORMERS,
        "W3A8": OF_TRANSFORMERS,
        "int3 blocks of 128": MORE_DECIBELS,
        "W4A4": (),
        "int4 blocks of 32": MORE_DECIBELS,
        "int2 blocks of 32": MORE_DECIBELS,
        "int4 blocks of 128": MORE_DECIBELS,
    }
    return Subject("MiniLM", model, calibration, judging, marks, limits, best=("W3A8",))


SMALL_LLAMA = Sizes(hidden=256, mlp=512, layers=4, heads=4, groups=2, words=1024, eps=1e-5)
LLAMA_BATCH, CONTEXT, LLAMA_RATE = 16, 128, 3e-3
LLAMA_FILE, TOKENIZER_FILE = CACHE / "llama-small.safetensors", CACHE / "llama-small-tokenizer.json"
AHEAD = (Limit("score", 0.0, GPTQ),)
LANGUAGE_WAYS = (NEAREST, GPTQ, BALANCED, AWQ)


def sequences(tokens: list[int], length: int, count: int) -> Tensor:
    """Rows of a text, one after another; the last word of each is only asked for."""
    if len(tokens) < count * (length + 1):
        raise ValueError(f"{len(tokens)} tokens are fewer than {count} rows of {length + 1}")
    return torch.tensor(tokens[: count * (length + 1)]).view(count, length + 1)


def losses(outputs: Tensor, answers: Tensor) -> Tensor:
    """(texts, words)."""
    return F.cross_entropy(outputs.flatten(0, 1), answers.flatten(), reduction="none").view_as(answers)


def language_subject(
    name: str, model: Llama, text: tuple[Tensor, Tensor], size: int, precisions: tuple[str, ...], best: tuple[str, ...]
) -> Subject:
    """From rows of tokens that calibrate, and rows that judge; `best` at some of the precisions."""
    calibrating, judge_rows = text

    def judging() -> Iterable[tuple[Tensor, Tensor]]:
        return ((rows[:, :-1], rows[:, 1:]) for rows in judge_rows.split(size))

    calibration = [rows[:, :-1] for rows in calibrating.split(size)]
    limits = dict.fromkeys(precisions, AHEAD)
    return Subject(
        name, model, calibration, judging, losses, limits, {"head": None}, LANGUAGE_WAYS, best, is_perplexity=True
    )


def small_llama() -> Subject:
    model, tokenizer = trained_llama()
    text = parts()
    calibrating = sequences(tokenizer.encode(text["calibrate"]).ids, CONTEXT, 96)
    judge_rows = sequences(tokenizer.encode(text["judge"]).ids, CONTEXT, 128)
    widths = ("8 per channel", "4 per channel", "3 per channel", "3 blocks of 128", "2 blocks of 32")
    precisions = tuple(f"int{width}" for width in widths)
    return language_subject("Llama, 3 M, trained here", model, (calibrating, judge_rows), 16, precisions, precisions)


def trained_llama() -> tuple[Llama, Tokenizer]:
    """Out of the cache, or trained now."""
    model = llama(SMALL_LLAMA)
    if not (LLAMA_FILE.exists() and TOKENIZER_FILE.exists()):
        text = parts()["train"]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=SMALL_LLAMA.words, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(text.split("\n\n"), trainer)
        _train_llama(model, torch.tensor(tokenizer.encode(text).ids))
        LLAMA_FILE.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(TOKENIZER_FILE))
        save_file(model.state_dict(), LLAMA_FILE)
    model.load_state_dict(load_file(LLAMA_FILE))
    return model.eval(), Tokenizer.from_file(str(TOKENIZER_FILE))


def _train_llama(model: Llama, tokens: Tensor) -> None:
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LLAMA_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    start, step = time.process_time(), 0
    while (done := (time.process_time() - start) / TRAINING_SECONDS) < 1:
        for group in optimizer.param_groups:
            group["lr"] = LLAMA_RATE * min(1.0, step / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (LLAMA_BATCH,))
        rows = torch.stack([tokens[begin : begin + CONTEXT + 1] for begin in starts.tolist()])
        loss = losses(model(rows[:, :-1]), rows[:, 1:]).mean()
        optimizer.zero_grad()
        cast("Any", loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"training the small Llama: {done:.0%}, loss {loss:.3f}", flush=True)


def smollm() -> Subject:
    contents = gguf.read(io.BytesIO(member(fetch(*SMOLLM), MEMBER)))
    about, tokenizer = contents.about, gguf.tokenizer(contents.about)
    heads = about["llama.attention.head_count"]
    sizes = Sizes(
        hidden=about["llama.embedding_length"],
        mlp=about["llama.feed_forward_length"],
        layers=about["llama.block_count"],
        heads=heads,
        groups=heads // about["llama.attention.head_count_kv"],
        words=about["llama.vocab_size"],
        is_tied=True,
        base=about["llama.rope.freq_base"],
        eps=about["llama.attention.layer_norm_rms_epsilon"],
    )
    model = Llama(sizes)
    model.load_state_dict(llama_state(contents.tensors, sizes))
    text = parts()
    calibrating = sequences(tokenizer.encode(text["calibrate"]).ids, 512, 16)
    judge_rows = sequences(tokenizer.encode(text["judge"]).ids, 512, 12)
    widths = ("8 per channel", "4 blocks of 64", "3 blocks of 64", "2 blocks of 32", "4 per channel", "3 per channel")
    precisions = tuple(f"int{width}" for width in widths)  # 576 inputs cannot be divided into blocks of 128
    return language_subject("SmolLM2-135M", model.eval(), (calibrating, judge_rows), 1, precisions, precisions[:4])


def llama_state(tensors: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Under our names; the rows of q and k, which GGUF keeps for neighbours that turn together, back in halves."""
    table = tensors["token_embd.weight"]
    state = {"embedding.weight": table, "head.weight": table, "norm.weight": tensors["output_norm.weight"]}
    names = {
        "attn_norm": "norm1", "ffn_norm": "norm2", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj", "attn_output": "attention.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for block in range(sizes.layers):
        for theirs, ours in names.items():
            value = tensors[f"blk.{block}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                value = value.view(-1, sizes.head // 2, 2, sizes.hidden).transpose(1, 2).reshape(value.shape)
            state[f"blocks.{block}.{ours}.weight"] = value
    return state
