"""GGUF files, as far as a Llama in Q4_1, Q8_0 and float32 needs them: metadata, tensors, and its tokenizer.

Q4_1   blocks of 32: float16 d, float16 m, 16 bytes of two codes each      w = d q + m
Q8_0   blocks of 32: float16 d, 32 int8 codes                              w = d q
"""

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

MAGIC, ALIGNMENT, BLOCK = b"GGUF", 32, 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8


@dataclass(frozen=True)
class Contents:
    about: dict[str, Any]
    tensors: dict[str, Tensor]


def read(file: BinaryIO) -> Contents:
    if file.read(4) != MAGIC:
        raise ValueError("no GGUF file")
    version = _scalar(file, "I")
    if version != 3:
        raise ValueError(f"GGUF of version {version}: this reads version 3")
    tensors, pairs = _scalar(file, "Q"), _scalar(file, "Q")
    about = {}
    for _ in range(pairs):
        name = _text(file)
        about[name] = _value(file, _scalar(file, "I"))
    heads = [_head(file) for _ in range(tensors)]
    start = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    fields = {}
    for name, shape, kind, offset in heads:
        file.seek(start + offset)
        fields[name] = _tensor(file, shape, kind)
    return Contents(about, fields)


def tokenizer(about: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that splits digits, as `smollm` does."""
    words = {word: number for number, word in enumerate(about["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE(vocab=words, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    result.decoder = decoders.ByteLevel()
    return result


def _scalar(file: BinaryIO, kind: str) -> Any:
    return struct.unpack("<" + kind, file.read(struct.calcsize("<" + kind)))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_scalar(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _text(file)
    if kind == ARRAY:
        inner, count = _scalar(file, "I"), _scalar(file, "Q")
        return [_value(file, inner) for _ in range(count)]
    return _scalar(file, SCALARS[kind])


def _head(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _text(file)
    shape = tuple(_scalar(file, "Q") for _ in range(_scalar(file, "I")))
    return name, shape[::-1], _scalar(file, "I"), _scalar(file, "Q")


def _tensor(file: BinaryIO, shape: tuple[int, ...], kind: int) -> Tensor:
    count = int(np.prod(shape))
    if kind == F32:
        values = np.frombuffer(file.read(4 * count), "<f4")
    elif kind in (Q4_1, Q8_0):
        size = 20 if kind == Q4_1 else 34
        raw = np.frombuffer(file.read(count // BLOCK * size), np.uint8).reshape(-1, size)
        values = (_q4_1 if kind == Q4_1 else _q8_0)(raw)
    else:
        raise ValueError(f"tensors of GGUF type {kind} are not read here")
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def _q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    scale, least = (raw[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    codes = np.concatenate((raw[:, 4:] & 15, raw[:, 4:] >> 4), 1)
    return codes.astype(np.float32) * scale + least


def _q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    scale = raw[:, :2].copy().view("<f2").astype(np.float32)
    return raw[:, 2:].copy().view(np.int8).astype(np.float32) * scale
