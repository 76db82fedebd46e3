"""all-MiniLM-L6-v2 on the sentences of the demo: a classifier of its float vectors judges the quantized ones."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer
from torch import Tensor

import sentences
from texts import articles
from tuned.rows import Limit
from tuned.subject import Subject
from tuned.vision import OF_TRANSFORMERS

CALIBRATION = 320  # sentences; others than those that train the classifier and those that judge
MORE_DECIBELS = (Limit("decibels", 0.0, "nearest"), Limit("decibels", 0.0, "gptq + intercept"))


def minilm() -> Subject:
    model, tokenizer = sentences.load()
    texts, positive = sentences.sentences()
    train, test = sentences.TRAIN, sentences.TRAIN + sentences.TEST
    head = sentences.classifier(sentences.vectors(model, sentences.batches(tokenizer, texts[:train])), positive[:train])
    held_out = list(zip(sentences.batches(tokenizer, texts[train:test]), positive[train:test].split(32), strict=True))

    def marks(vectors: Tensor, answers: Tensor) -> Tensor:
        return ((head(vectors)[:, 0] > 0) == answers).float()

    def judging() -> Iterable[tuple[dict[str, Tensor], Tensor]]:
        return held_out

    limits = {
        "W4A8": OF_TRANSFORMERS,
        "W3A8": OF_TRANSFORMERS,
        "int3 blocks of 128": MORE_DECIBELS,
        "W4A4": (),
        "int4 blocks of 32": MORE_DECIBELS,
        "int2 blocks of 32": MORE_DECIBELS,
        "int4 blocks of 128": MORE_DECIBELS,
    }
    return Subject("MiniLM", model, calibration(tokenizer, set(texts)), judging, marks, limits)


def calibration(tokenizer: Tokenizer, used: set[str]) -> list[dict[str, Tensor]]:
    """Film reviews that nothing else reads, those of a length together, so that little is padded."""
    free = [text for text in articles("movieReviewSnippets_GroundTruth.txt") if text not in used]
    order = torch.randperm(len(free), generator=torch.Generator().manual_seed(1))[:CALIBRATION].tolist()
    return sentences.batches(tokenizer, sorted((free[index] for index in order), key=len))
