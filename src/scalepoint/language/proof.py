"""The written file in its runtime: the same logits as the simulation, its perplexity, how it goes on, how fast."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scalepoint.errors import NonFiniteError, VerificationError
from scalepoint.language.settings import Asked
from scalepoint.language.streams import Scored, perplexity
from scalepoint.language.text import context_of
from scalepoint.report.language import DEPARTS
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import Status, all_memory, ask, missing
from scalepoint.runtimes.serving import Served

PROMPT = 32  # tokens of the text that the model goes on from
NEW = 50
LEAST = 10  # dB; kernels that round activations to 8 bits stay above 20
LESS = f"dB from the simulation's, less than {LEAST}: it computes something else"
LARGEST_FLOAT = 4_000_000_000
FLOAT_RUNTIME = "transformers"


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
    float_prefill: float | None = None  # tokens a second of the float model, in FLOAT_RUNTIME
    float_decode: float | None = None


def prove(job: Asked, tokens: list[Tensor], scores: Scored) -> Proof:
    """Run the file in its runtime. A failure is a status of the result; `Language.check` raises it."""
    runtime = find_runtime(job.target.runtime or "")
    if not runtime.is_here:
        return Proof(runtime.name, Status.UNAVAILABLE.value, missing(runtime).message)
    context = context_of(job.source, PROMPT + NEW)
    prompt = tuple(int(each) for each in tokens[0][0, : min(PROMPT, context // 2)])
    new_tokens = min(NEW, context - len(prompt))
    sqnr = loss = None
    try:
        served = Served(runtime, job.path, threads=torch.get_num_threads(), options=_options(job))
        try:
            first = _logits(served, tokens[0])
            sqnr = _sqnr(scores.logits, first)
            if not sqnr >= LEAST:
                return Proof(runtime.name, DEPARTS, f"its logits are {sqnr:.1f} {LESS}", sqnr, prompt=prompt)
            loss = perplexity(lambda own: _logits(served, own), tokens)
            new, *seconds = served.generate(prompt, new_tokens)
        finally:
            served.close()
    except NonFiniteError as error:  # the first sequence has numbers, a later one does not
        return Proof(runtime.name, DEPARTS, str(error.args[0]), sqnr, prompt=prompt)
    except VerificationError as error:
        return Proof(runtime.name, Status.FAILED.value, str(error.args[0]), sqnr, loss, prompt)
    prefill, decode = (len(each) / max(own, 1e-9) for each, own in zip((prompt, new), seconds, strict=True))
    found = (sqnr, loss, prompt, tuple(new), prefill, decode)
    return Proof(runtime.name, Status.OK.value, "", *found, *_float(job, prompt, new_tokens))


def _options(job: Asked) -> dict[str, str]:
    """What the runtime is told when it starts."""
    return {"cache": job.cache} if job.cache else {}


def _float(job: Asked, prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], float | None, float | None]:
    """How the float model goes on, and its tokens a second, where it is small enough to be loaded whole."""
    runtime = find_runtime(FLOAT_RUNTIME)
    if not runtime.is_here or job.source.size > min(LARGEST_FLOAT, all_memory() // 4):
        return (), None, None
    own = {"threads": torch.get_num_threads()}
    task = {"task": "generate", "paths": [str(job.source.folder)], "options": own, "repeats": 1}
    answer = ask(runtime, {**task, "tokens": list(prompt), "count": count})
    if answer.data is None:
        return (), None, None
    made = answer.data["files"][0]
    seconds = (max(made[name], 1e-9) for name in ("prefill_seconds", "decode_seconds"))
    prefill, decode = (tokens / own for tokens, own in zip((len(prompt), len(made["tokens"])), seconds, strict=True))
    return tuple(made["tokens"]), prefill, decode


def _logits(served: Served, tokens: Tensor) -> Tensor:
    (found,) = served({"input_ids": tokens.numpy().astype(np.int64)})[:1]
    return torch.from_numpy(found.astype(np.float32))


def _sqnr(wanted: Tensor, found: Tensor) -> float:
    noise = float((found - wanted).double().square().sum())
    return float("inf") if not noise else 10 * float(np.log10(float(wanted.double().square().sum()) / noise))
