"""Stages of deploy_checkpoint: read text, build the quantized graph, tune, write, verify, report.

Values go from stage to stage in the order of this file. Weights are paged in block by block; see checkpoints/.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.checkpoints import QuantizedCheckpoint, Source
from scalepoint.checkpoints.skeleton import (
    CheckpointWeights as Weights,
)
from scalepoint.checkpoints.skeleton import (
    build_skeleton as skeleton,
)
from scalepoint.checkpoints.skeleton import (
    find_head as head_of,
)
from scalepoint.checkpoints.text import (
    Text,
)
from scalepoint.checkpoints.text import (
    context_length as context_of,
)
from scalepoint.checkpoints.text import (
    load_sequences as sequences,
)
from scalepoint.checkpoints.text import (
    load_tokenizer as tokenizer_of,
)
from scalepoint.errors import CalibrationError, NonFiniteError, ScalepointError, UsageError, VerificationError
from scalepoint.numerics import dtype_name
from scalepoint.pipeline.build_report import environment, tuned_layers
from scalepoint.pipeline.checkpoint_codes import TunedCodes, layers_left_float, storable_qparams
from scalepoint.pipeline.checkpoint_job import CheckpointJob, with_head
from scalepoint.pipeline.kv_cache import check_cached, check_placed, groups_of, stored_cache
from scalepoint.pipeline.perplexity import CheckpointScore, perplexity
from scalepoint.quantize import coverage, insert_qdq
from scalepoint.quantize.stubs import Quantizing
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.report import Language, Metric, Report
from scalepoint.report.language import DEPARTS
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import Status
from scalepoint.runtimes.process import describe_missing as missing
from scalepoint.runtimes.process import run_task as ask
from scalepoint.runtimes.process import total_memory as all_memory
from scalepoint.runtimes.serving import RuntimeSession as Served
from scalepoint.support.formatting import plural
from scalepoint.support.output_folder import WrittenFiles
from scalepoint.transformation import transform
from scalepoint.tuning import TuneReport, tune
from scalepoint.tuning.checkpoint import Checkpoint

MAX_EVALUATED = 16  # sequences that perplexity is measured on, at most
PROMPT_TOKENS = 32  # tokens of the text that the model continues
NEW_TOKENS = 50
MIN_AGREEMENT_DB = 10  # kernels that round activations to 8 bits stay above 20 dB
LARGEST_FLOAT = 4_000_000_000  # bytes of a float checkpoint that is still loaded whole, to compare speed and text
FLOAT_RUNTIME = "transformers"


def read_text(
    job: CheckpointJob, data: Text, judge: Text, length: int, samples: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sequences that calibrate and those that perplexity is measured on."""
    if length < 2 or samples < 1:
        raise UsageError(
            f"length={length}, samples={samples}: sequences have at least 2 tokens, and there is at least one"
        )
    read = partial(sequences, source=job.source, length=length)
    if data is None and not job.tuning.steps and not job.cache:
        return [], [] if judge is None else read(judge, count=MAX_EVALUATED, what="text")
    if judge is not None:
        calibration = read(data, count=samples, what="calibration data")
        return calibration, read(judge, count=MAX_EVALUATED, what="text to judge by")
    both = read(data, count=samples + MAX_EVALUATED, what="calibration data")
    if len(both) < 2:
        raise CalibrationError(
            f"the calibration data is one sequence of {both[0].shape[1]} tokens, and perplexity is measured on other "
            "ones than those that calibrate: give more data, a shorter length=, or other text as judge="
        )
    cut = min(samples, len(both) // 2)
    return both[:cut], both[cut : cut + MAX_EVALUATED]


def quantized_skeleton(job: CheckpointJob, tokens: list[Tensor]) -> tuple[fx.GraphModule, Weights]:
    """Return the graph with its quantizers, over parameters whose values are not loaded, and the loader of these."""
    tree, weights = skeleton(job.source)
    distributed.run_on_main("checking the weights", weights.check_finite)
    example = tokens[0][:1] if tokens else torch.zeros(1, 16, dtype=torch.int64)
    plan = transform(tree, (), target=job.target, kwargs={"input_ids": example}, copy=False)
    if job.cache:
        check_cached(plan.model, job.source, job.target.caches[job.cache])
    config = with_head(job.config, head_of(tree), job.target, layers_left_float(job, plan, weights))
    model = insert_qdq(plan.model, plan.matches, config, target=job.target, copy=False).eval()
    if job.cache:
        check_placed(model, job.target.caches[job.cache])
    for module in model.modules():
        if isinstance(module, Quantizing):
            module.enabled = True
        if isinstance(module, QuantizedWeighted):
            module.weight_quant.as_stored = storable_qparams(job, module, weights)
    return model, weights


def tune_blocks(
    job: CheckpointJob, model: fx.GraphModule, weights: Weights, data: list[Tensor], resume: bool, progress: bool | None
) -> tuple[TuneReport, Checkpoint]:
    """Choose codes block by block. They are stored in the work folder, where a resumed run finds them."""
    folder = job.workspace.tuning_folder
    batches = [(sequence,) for sequence in data]
    report = tune(model, batches, job.tuning, folder=folder, resume=resume, progress=progress, lender=weights)
    return report, Checkpoint.reopened(folder)


def write_checkpoint(job: CheckpointJob, model: fx.GraphModule, codes: TunedCodes, tuned: Checkpoint) -> None:
    """Write the target's file or folder from the stored codes."""
    cache = stored_cache(model, tuned, groups_of(job.source)) if job.cache else None
    checkpoint = QuantizedCheckpoint(job.source, codes, cache=cache)
    job.workspace.write(lambda path: job.format.write(checkpoint, path))


@dataclass(frozen=True)
class RuntimeCheck:
    """What the runtime did with the file. None: not measured.

    Attributes:
        runtime: Name of the runtime.
        status: "ok", "failed", "departs" or "unavailable"; "" if the file was not run.
        message: Why the status is not "ok".
        sqnr_db: The runtime's logits against the simulation's.
        perplexity: Measured in the runtime.
        prompt: Tokens that the model continued.
        tokens: How it continued.
        prefill: Tokens per second while it reads the prompt.
        decode: Tokens per second while it generates.
        float_tokens, float_prefill, float_decode: The same of the float checkpoint, in FLOAT_RUNTIME.
    """

    runtime: str
    status: str
    message: str = ""
    sqnr_db: float | None = None
    perplexity: float | None = None
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    prefill: float | None = None
    decode: float | None = None
    float_tokens: tuple[int, ...] = ()
    float_prefill: float | None = None
    float_decode: float | None = None


def verify_checkpoint(job: CheckpointJob, tokens: list[Tensor], score: CheckpointScore) -> RuntimeCheck:
    """Run the file in its runtime: logits, perplexity, speed. A failure is a status; `Language.check` raises it."""
    runtime = find_runtime(job.target.runtime or "")
    if not runtime.is_here:
        return RuntimeCheck(runtime.name, Status.UNAVAILABLE.value, missing(runtime).message)
    context = context_of(job.source, PROMPT_TOKENS + NEW_TOKENS)
    prompt = tuple(int(token) for token in tokens[0][0, : min(PROMPT_TOKENS, context // 2)])
    count = min(NEW_TOKENS, context - len(prompt))
    sqnr = loss = None
    try:
        options = {"cache": job.cache} if job.cache else {}
        served = Served(runtime, job.path, threads=torch.get_num_threads(), options=options)
        try:
            sqnr = _sqnr(score.logits, _logits(served, tokens[0]))
            if not sqnr >= MIN_AGREEMENT_DB:
                why = (
                    f"its logits are {sqnr:.1f} dB from the simulation's, less than {MIN_AGREEMENT_DB}: it computes "
                    "something else"
                )
                return RuntimeCheck(runtime.name, DEPARTS, why, sqnr, prompt=prompt)
            loss = perplexity(lambda batch: _logits(served, batch), tokens)
            generated, prefill_seconds, decode_seconds = served.generate(prompt, count)
        finally:
            served.close()
    except NonFiniteError as error:  # the first sequence has finite logits, a later one does not
        return RuntimeCheck(runtime.name, DEPARTS, str(error.args[0]), sqnr, prompt=prompt)
    except VerificationError as error:
        return RuntimeCheck(runtime.name, Status.FAILED.value, str(error.args[0]), sqnr, loss, prompt)
    float_tokens, float_prefill, float_decode = _run_float(job, prompt, count)
    return RuntimeCheck(
        runtime=runtime.name,
        status=Status.OK.value,
        sqnr_db=sqnr,
        perplexity=loss,
        prompt=prompt,
        tokens=tuple(generated),
        prefill=len(prompt) / max(prefill_seconds, 1e-9),
        decode=len(generated) / max(decode_seconds, 1e-9),
        float_tokens=float_tokens,
        float_prefill=float_prefill,
        float_decode=float_decode,
    )


def _run_float(
    job: CheckpointJob, prompt: tuple[int, ...], count: int
) -> tuple[tuple[int, ...], float | None, float | None]:
    """How the float checkpoint continues the prompt, and its tokens per second; nothing if it is too large."""
    runtime = find_runtime(FLOAT_RUNTIME)
    if not runtime.is_here or job.source.size > min(LARGEST_FLOAT, all_memory() // 4):
        return (), None, None
    options = {"threads": torch.get_num_threads()}
    task = {"task": "generate", "paths": [str(job.source.folder)], "options": options, "repeats": 1}
    answer = ask(runtime, {**task, "tokens": list(prompt), "count": count})
    if answer.data is None:
        return (), None, None
    result = answer.data["files"][0]
    tokens = tuple(result["tokens"])
    prefill = len(prompt) / max(result["prefill_seconds"], 1e-9)
    return tokens, prefill, len(tokens) / max(result["decode_seconds"], 1e-9)


def _logits(served: Served, tokens: Tensor) -> Tensor:
    (logits,) = served({"input_ids": tokens.numpy().astype(np.int64)})[:1]
    return torch.from_numpy(logits.astype(np.float32))


def _sqnr(expected: Tensor, actual: Tensor) -> float:
    noise = float((actual - expected).double().square().sum())
    return float("inf") if not noise else 10 * float(np.log10(float(expected.double().square().sum()) / noise))


def build_checkpoint_report(
    job: CheckpointJob,
    model: fx.GraphModule,
    codes: TunedCodes,
    tuned: TuneReport,
    score: CheckpointScore | None,
    check: RuntimeCheck | None,
    timings: Mapping[str, float],
) -> Report:
    """Collect all results in a Report."""
    metrics: tuple[Metric, ...] = ()
    if score is not None:
        in_runtime = None if check is None else check.perplexity
        values = (score.float_perplexity, score.perplexity, in_runtime)
        metrics = (Metric("perplexity", *values, higher_is_better=False),)
    return Report(
        title=job.source.folder.resolve().name,
        target=job.target.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coverage=coverage(model),
        environment=environment(job.target),
        config=job.config.to_dict(),
        accuracy=metrics,
        timings=dict(timings),
        tuning=tuned_layers(tuned),
        warnings=_wider(job, codes),
        language=_language(job, score, check),
    )


def _language(job: CheckpointJob, score: CheckpointScore | None, check: RuntimeCheck | None) -> Language:
    shown = check or RuntimeCheck(job.target.runtime or "", "")
    prompt, written, float_written = _texts(job, shown)
    return Language(
        bits=_bits(job),
        size=_size(job.path),
        float_size=job.source.size,
        tokens=0 if score is None else score.tokens,
        logits_db=None if score is None else score.sqnr_db,
        runtime=shown.runtime,
        status=shown.status,
        message=shown.message,
        agreement_db=shown.sqnr_db,
        prefill=shown.prefill,
        decode=shown.decode,
        prompt=prompt,
        written=written,
        float_written=float_written,
        float_dtype=_dtype(job.source),
        float_prefill=shown.float_prefill,
        float_decode=shown.float_decode,
        float_runtime=FLOAT_RUNTIME if shown.float_prefill is not None else "",
    )


def _texts(job: CheckpointJob, check: RuntimeCheck) -> tuple[str, str, str]:
    """Prompt and continuations as text; as token ids if there is no tokenizer."""
    sides = (check.prompt, check.tokens, check.float_tokens)
    if not check.prompt:
        return "", "", ""
    try:
        tokenizer = tokenizer_of(job.source)
    except ScalepointError:
        first, second, third = (" ".join(map(str, each)) for each in sides)
        return first, second, third
    first, second, third = (str(tokenizer.decode(list(each))) for each in sides)
    return first, second, third


def _dtype(source: Source) -> str:
    """The type that most bytes of the checkpoint have."""
    sizes: Counter[str] = Counter()
    for stored in source.tensors.values():
        sizes[dtype_name(stored.dtype)] += stored.nbytes
    return sizes.most_common(1)[0][0] if sizes else ""


def _bits(job: CheckpointJob) -> float:
    """Bits per weight of what was written: the bytes of all its tensors over the weights of the checkpoint.

    Scales, zero points, float tensors and what a format stores twice count.
    """
    stored = [tensor for tensor in job.source.tensors.values() if tensor.dtype.is_floating_point]
    weights = sum(tensor.nbytes // tensor.dtype.itemsize for tensor in stored)
    count = _size if job.format.tensor_bytes is None else job.format.tensor_bytes
    return 8 * count(job.path) / max(weights, 1)


def _wider(job: CheckpointJob, codes: TunedCodes) -> tuple[str, ...]:
    """A warning for every kind of layer whose codes take more bits in the file than their type has."""
    counts = Counter(
        (dtype_name(spec.dtype), why) for spec, columns in codes.specs() if (why := job.format.wider(spec, columns))
    )
    return tuple(
        f"{dtype} codes of {plural(count, 'layer')} are stored as {why}" for (dtype, why), count in counts.items()
    )


def _size(path: Path) -> int:
    """Bytes of the files that we wrote; a folder may contain other files too."""
    return path.stat().st_size if path.is_file() else sum(record.size for record in WrittenFiles(path).records.values())
