"""all-MiniLM-L6-v2 on the sentences of the demo: a classifier of its float vectors judges the quantized ones."""

from collections.abc import Iterable

from torch import Tensor

import sentences
from tuned.rows import Limit
from tuned.subject import Subject
from tuned.vision import OF_TRANSFORMERS

JUDGED, CALIBRATION = 4000, 1024  # sentences; others than those that train the classifier
MORE_DECIBELS = (Limit("decibels", 0.0, "nearest"), Limit("decibels", 0.0, "gptq + intercept"))


def minilm() -> Subject:
    model, tokenizer = sentences.load()
    train, test = sentences.TRAIN, sentences.TRAIN + JUDGED
    texts, positive = sentences.sentences(test + CALIBRATION)
    head = sentences.classifier(sentences.vectors(model, sentences.batches(tokenizer, texts[:train])), positive[:train])
    by_length = sorted(range(train, test), key=lambda each: len(texts[each]))  # of a length together: little is padded
    judged = sentences.batches(tokenizer, [texts[each] for each in by_length])
    held_out = list(zip(judged, positive[by_length].split(32), strict=True))
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
