"""The written file in its runtime: the same logits as the simulation, its perplexity, how it goes on, how fast."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.errors import VerificationError
from scalepoint.language.settings import Asked
from scalepoint.language.streams import Scored, perplexity
from scalepoint.runtimes import Runtime, find_runtime
from scalepoint.runtimes.process import Answer, Status, all_memory, ask, missing
from scalepoint.runtimes.serving import Served

PROMPT = 32  # tokens of the text that the model goes on from
NEW = 50
LEAST = 10  # dB; kernels that round activations to 8 bits stay above 20
DEPARTS = "departs"
LARGEST_FLOAT = 4_000_000_000


@dataclass(frozen=True)
class Proof:
    """What the runtime did with the file; None where it was not asked or could not."""

    runtime: str
    status: str
    message: str = ""
    sqnr_db: float | None = None  # of its logits against the simulation's
    perplexity: float | None = None
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    prefill: float | None = None  # tokens a second
    decode: float | None = None
    float_tokens: tuple[int, ...] = ()  # how the float model goes on


def prove(job: Asked, tokens: list[Tensor], scores: Scored) -> Proof:
    """Run it; what fails is told, not raised."""
    runtime = find_runtime(job.target.runtime or "")
    if not runtime.is_here:
        return Proof(runtime.name, Status.UNAVAILABLE.value, missing(runtime).message)
    prompt = tuple(int(each) for each in tokens[0][0, :PROMPT])
    try:
        served = Served(runtime, job.path, threads=torch.get_num_threads(), options=_options(job))
        try:
            first = _logits(served, tokens[0])
            sqnr = _sqnr(scores.logits, first)
            loss = perplexity(lambda own: _logits(served, own), tokens)
        finally:
            served.close()
    except VerificationError as error:
        return Proof(runtime.name, Status.FAILED.value, str(error), prompt=prompt)
    if not sqnr >= LEAST:
        why = f"its logits are {sqnr:.1f} dB from the simulation's, less than {LEAST}: it computes something else"
        return Proof(runtime.name, DEPARTS, why, sqnr, loss, prompt)
    answer = _goes_on(runtime, job.path, prompt, _options(job))
    if answer.status != Status.OK or answer.data is None:
        return Proof(runtime.name, answer.status.value, answer.message, sqnr, loss, prompt)
    found = answer.data["files"][0]
    new = tuple(found["tokens"])
    speeds = len(prompt) / max(found["prefill_seconds"], 1e-9), len(new) / max(found["decode_seconds"], 1e-9)
    return Proof(runtime.name, Status.OK.value, "", sqnr, loss, prompt, new, *speeds, _float(job, prompt))


def _options(job: Asked) -> dict[str, str]:
    """What the runtime is told when it starts."""
    return {"cache": job.cache} if job.cache else {}


def _goes_on(runtime: Runtime, path: Path, prompt: tuple[int, ...], options: Mapping[str, str]) -> Answer:
    request: dict[str, Any] = {
        "task": "generate",
        "paths": [str(path)],
        "options": {"threads": torch.get_num_threads(), **options},
    }
    return ask(runtime, {**request, "tokens": list(prompt), "count": NEW, "repeats": 1})


def _float(job: Asked, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """How the float model goes on, where it is small enough to be loaded whole."""
    runtime = find_runtime("transformers")
    if not runtime.is_here or job.source.size > min(LARGEST_FLOAT, all_memory() // 4):
        return ()
    answer = _goes_on(runtime, job.source.folder, prompt, {})
    return () if answer.data is None else tuple(answer.data["files"][0]["tokens"])


def _logits(served: Served, tokens: Tensor) -> Tensor:
    (found,) = served({"input_ids": tokens.numpy().astype(np.int64)})[:1]
    return torch.from_numpy(found.astype(np.float32))


def _sqnr(wanted: Tensor, found: Tensor) -> float:
    noise = float((found - wanted).double().square().sum())
    return float("inf") if not noise else 10 * float(np.log10(float(wanted.double().square().sum()) / noise))
