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
    lines_by_article: dict[str, list[str]] = {}
    archive = fetch(*TEXTS)
    name = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(member(archive, name))) as files:
        archive_path = next(file_name for file_name in files.getnames() if file_name.endswith(file))
        opened = files.extractfile(archive_path)
        if opened is None:
            raise SystemExit(f"{archive} does not hold {file}")
        for line in opened.read().decode("latin-1").splitlines():
            key, _, sentence = line.split("\t", 2)
            lines_by_article.setdefault(key.partition("_")[0], []).append(sentence.strip())
    return [" ".join(file_name) for file_name in lines_by_article.values()]


def parts() -> dict[str, str]:
    """All texts, every tenth of them apart to judge, another tenth to calibrate."""
    texts = [text for file in FILES for text in articles(file)]
    kinds = {0: "judge", 1: "calibrate"}
    text_by_part: dict[str, list[str]] = {"train": [], "judge": [], "calibrate": []}
    for index, text in enumerate(texts):
        text_by_part[kinds.get(index % 10, "train")].append(text)
    return {kind: "\n\n".join(lines) for kind, lines in text_by_part.items()}
