"""Plain English out of a PyPI package: film reviews, newspaper editorials and product reviews, sentence by sentence."""

import io
import tarfile

from registry_data import fetch, member
from sentences import TEXTS

FILES = (
    "nytEditorialSnippets_GroundTruth.txt",
    "movieReviewSnippets_GroundTruth.txt",
    "amazonReviewSnippets_GroundTruth.txt",
)


def articles(file: str) -> list[str]:
    """The texts of a file, each of all its sentences, whose keys are text_sentence or text."""
    found: dict[str, list[str]] = {}
    archive = fetch(*TEXTS)
    name = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(member(archive, name))) as files:
        place = next(each for each in files.getnames() if each.endswith(file))
        opened = files.extractfile(place)
        if opened is None:
            raise SystemExit(f"{archive} does not hold {file}")
        for line in opened.read().decode("latin-1").splitlines():
            key, _, sentence = line.split("\t", 2)
            found.setdefault(key.partition("_")[0], []).append(sentence.strip())
    return [" ".join(each) for each in found.values()]


def parts() -> dict[str, str]:
    """All texts, every tenth of them apart to judge, another tenth to calibrate."""
    texts = [text for file in FILES for text in articles(file)]
    kinds = {0: "judge", 1: "calibrate"}
    found: dict[str, list[str]] = {"train": [], "judge": [], "calibrate": []}
    for index, text in enumerate(texts):
        found[kinds.get(index % 10, "train")].append(text)
    return {kind: "\n\n".join(each) for kind, each in found.items()}
