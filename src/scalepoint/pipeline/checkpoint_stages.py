"""Stages of deploy_checkpoint: read text, build the quantized graph, tune, write, verify, report.

The functions are in the order in which they are called. Weights are loaded block by block; see checkpoints/.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.analysis.statistics import decibels
from scalepoint.checkpoints import QuantizedCheckpoint, Source
from scalepoint.checkpoints.skeleton import CheckpointWeights, build_skeleton, find_head
from scalepoint.checkpoints.text import Text, context_length, load_sequences, load_tokenizer
from scalepoint.errors import CalibrationError, NonFiniteError, ScalepointError, VerificationError
from scalepoint.numerics import dtype_name
from scalepoint.pipeline.build_report import describe_environment
from scalepoint.pipeline.checkpoint_codes import TunedCodes, find_rounding, find_unstorable_layers
from scalepoint.pipeline.checkpoint_job import CheckpointJob, add_layer_overrides
from scalepoint.pipeline.kv_cache import (
    check_cache_fits,
    check_cache_quantizers,
    count_key_value_heads,
    load_cache_scales,
)
from scalepoint.pipeline.perplexity import Evaluation, perplexity
from scalepoint.quantize import coverage, insert_qdq
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantizerBase
from scalepoint.report import Report
from scalepoint.results import DEPARTS, FAILED, LanguageModelResult, Score, TuneReport
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import Status, describe_missing, run_task, total_memory
from scalepoint.runtimes.serving import RuntimeSession
from scalepoint.support.formatting import format_plural
from scalepoint.support.output_folder import WrittenFiles
from scalepoint.transformation import transform
from scalepoint.tuning import tune
from scalepoint.tuning.checkpoint import Checkpoint

MAX_EVALUATED_SEQUENCES = 16  # perplexity is measured on at most this many sequences
PROMPT_TOKENS = 32  # length of the text that the model continues
NEW_TOKENS = 50  # number of tokens to generate
MIN_AGREEMENT_DB = 10  # kernels that round activations to 8 bits stay above 20 dB
MAX_FLOAT_CHECKPOINT_BYTES = 4_000_000_000  # a larger float checkpoint is not run to compare speed and text
FLOAT_RUNTIME = "transformers"


def read_text(job: CheckpointJob, data: Text, judge: Text) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sequences for calibration, and those that perplexity is measured on."""
    length, samples = job.options.length, job.options.samples
    load = partial(load_sequences, source=job.source, length=length)
    if data is None and not job.tuning.steps and not job.cache:
        return [], [] if judge is None else load(judge, count=MAX_EVALUATED_SEQUENCES, what="text")
    if judge is not None:
        calibration = load(data, count=samples, what="calibration data")
        return calibration, load(judge, count=MAX_EVALUATED_SEQUENCES, what="text to judge by")
    sequences = load(data, count=samples + MAX_EVALUATED_SEQUENCES, what="calibration data")
    if len(sequences) < 2:
        raise CalibrationError(
            f"the calibration data is one sequence of {sequences[0].shape[1]} tokens, and perplexity must be measured "
            "on sequences that are not used for calibration: give more data, a shorter length=, or other text as judge="
        )
    count = min(samples, len(sequences) // 2)
    return sequences[:count], sequences[count : count + MAX_EVALUATED_SEQUENCES]


def build_quantized_graph(job: CheckpointJob, tokens: list[Tensor]) -> tuple[fx.GraphModule, CheckpointWeights]:
    """Return the graph with quantizers, whose parameters are not loaded yet, and the object that loads them."""
    tree, weights = build_skeleton(job.source)
    distributed.run_on_main("checking the weights", weights.check_finite)
    example = tokens[0][:1] if tokens else torch.zeros(1, 16, dtype=torch.int64)
    plan = transform(tree, (), target=job.target, kwargs={"input_ids": example}, copy=False)
    if job.cache:
        check_cache_fits(plan.model, job.source, job.target.caches[job.cache])
    config = add_layer_overrides(job.config, find_head(tree), job.target, find_unstorable_layers(job, plan, weights))
    model = insert_qdq(plan.model, plan.matches, config, target=job.target, copy=False).eval()
    if job.cache:
        check_cache_quantizers(model, job.target.caches[job.cache])
    for module in model.modules():
        if isinstance(module, QuantizerBase):
            module.enabled = True
        if isinstance(module, QuantizedLayer):
            module.weight_quant.round_parameters = find_rounding(job, module, weights)
    return model, weights


def tune_blocks(
    job: CheckpointJob,
    model: fx.GraphModule,
    weights: CheckpointWeights,
    data: list[Tensor],
    resume: bool,
    progress: bool | None,
) -> tuple[TuneReport, Checkpoint]:
    """Choose codes block by block. They are stored in the work folder, from which a resumed run reads them."""
    folder = job.workspace.tuning_folder
    batches = [(sequence,) for sequence in data]
    report = tune(model, batches, job.tuning, folder=folder, resume=resume, progress=progress, weight_provider=weights)
    return report, Checkpoint.open_finished(folder)


def write_checkpoint(job: CheckpointJob, model: fx.GraphModule, codes: TunedCodes, tuned: Checkpoint) -> None:
    """Write the target's file or folder from the codes that tuning stored."""
    cache = load_cache_scales(model, tuned, count_key_value_heads(job.source)) if job.cache else None
    checkpoint = QuantizedCheckpoint(job.source, codes, cache=cache)
    job.workspace.write(lambda path: job.format.write(checkpoint, path))


def describe_checkpoint(job: CheckpointJob, evaluation: Evaluation | None) -> LanguageModelResult:
    """Return the sizes of the written files and the agreement of the simulation. The runtime has not run yet."""
    return LanguageModelResult(
        bits=_bits_per_weight(job),
        size=_size_in_bytes(job.path),
        float_size=job.source.size,
        float_dtype=_main_dtype(job.source),
        tokens=0 if evaluation is None else evaluation.tokens,
        logits_db=None if evaluation is None else evaluation.sqnr_db,
        runtime=job.target.runtime or "",
    )


def verify_checkpoint(
    job: CheckpointJob, tokens: list[Tensor], evaluation: Evaluation, result: LanguageModelResult
) -> tuple[LanguageModelResult, Score]:
    """Run the file in its runtime: logits, perplexity, speed.

    Returns:
        The result, extended by the runtime's numbers, and the perplexity, of the runtime if it was measured. A failure
        is recorded as `status`; `LanguageModelResult.check` raises it.
    """
    score, runtime = evaluation.score, find_runtime(job.target.runtime or "")
    if not runtime.is_installed:
        return replace(result, status=Status.UNAVAILABLE.value, message=describe_missing(runtime).message), score
    context = context_length(job.source, PROMPT_TOKENS + NEW_TOKENS)
    prompt = [int(token) for token in tokens[0][0, : min(PROMPT_TOKENS, context // 2)]]
    new_tokens = min(NEW_TOKENS, context - len(prompt))
    decode_text = _make_decoder(job.source)
    result = replace(result, prompt=decode_text(prompt))
    try:
        options = {"cache": job.cache} if job.cache else {}
        with closing(RuntimeSession(runtime, job.path, threads=torch.get_num_threads(), options=options)) as session:
            sqnr = _sqnr_db(evaluation.logits, _run_logits(session, tokens[0]))
            result = replace(result, agreement_db=sqnr)
            if not sqnr >= MIN_AGREEMENT_DB:
                why = (
                    f"its logits are {sqnr:.1f} dB from the simulation's, less than {MIN_AGREEMENT_DB}: it computes "
                    "something else"
                )
                return replace(result, status=DEPARTS, message=why), score
            value = perplexity(lambda batch: _run_logits(session, batch), tokens)
            score = replace(score, value=value, where="runtime", simulated_value=score.value)
            generated, *seconds = session.generate(prompt, new_tokens)
    except NonFiniteError as error:  # the first sequence has finite logits, a later one does not
        return replace(result, status=DEPARTS, message=str(error.args[0])), score
    except VerificationError as error:
        return replace(result, status=FAILED, message=str(error.args[0])), score
    prefill, decode = _tokens_per_second(prompt, generated, seconds)
    continuation = decode_text(generated)
    result = replace(result, status=Status.OK.value, prefill=prefill, decode=decode, continuation=continuation)
    if (run := _run_float(job, prompt, new_tokens)) is not None:
        prefill, decode = _tokens_per_second(prompt, run["tokens"], (run["prefill_seconds"], run["decode_seconds"]))
        result = replace(
            result,
            float_runtime=FLOAT_RUNTIME,
            float_prefill=prefill,
            float_decode=decode,
            float_continuation=decode_text(run["tokens"]),
        )
    return result, score


def _run_float(job: CheckpointJob, prompt: list[int], count: int) -> Mapping[str, Any] | None:
    """Let the float checkpoint continue the prompt. Returns tokens and seconds; None if it is too large to load."""
    runtime = find_runtime(FLOAT_RUNTIME)
    if not runtime.is_installed or job.source.size > min(MAX_FLOAT_CHECKPOINT_BYTES, total_memory() // 4):
        return None
    options = {"threads": torch.get_num_threads()}
    task = {"task": "generate", "paths": [str(job.source.folder)], "options": options, "repeats": 1}
    answer = run_task(runtime, {**task, "tokens": prompt, "count": count})
    return None if answer.data is None else answer.data["files"][0]


def _tokens_per_second(
    prompt: Sequence[int], generated: Sequence[int], seconds: Sequence[float]
) -> tuple[float, float]:
    """Return tokens per second of prefill and of decode."""
    return len(prompt) / max(seconds[0], 1e-9), len(generated) / max(seconds[1], 1e-9)


def _run_logits(session: RuntimeSession, tokens: Tensor) -> Tensor:
    (logits,) = session({"input_ids": tokens.numpy().astype(np.int64)})[:1]
    return torch.from_numpy(logits.astype(np.float32))


def _sqnr_db(expected: Tensor, actual: Tensor) -> float:
    noise = float((actual - expected).double().square().sum())
    return decibels(float(expected.double().square().sum()), noise)


def build_checkpoint_report(
    job: CheckpointJob,
    model: fx.GraphModule,
    codes: TunedCodes,
    tuned: TuneReport,
    score: Score | None,
    result: LanguageModelResult,
    timings: Mapping[str, float],
) -> Report:
    """Collect all results in a Report."""
    return Report(
        title=job.source.folder.resolve().name,
        target=job.target.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coverage=coverage(model),
        environment=describe_environment(job.target),
        config=job.config.to_dict(),
        accuracy=() if score is None else (score,),
        timings=dict(timings),
        tuning=tuned,
        warnings=_wider_storage_warnings(job, codes),
        language=result,
    )


def _make_decoder(source: Source) -> Callable[[Sequence[int]], str]:
    """Return a function that converts tokens to text; without a tokenizer, to a list of numbers."""
    try:
        tokenizer = load_tokenizer(source)
    except ScalepointError:
        return lambda tokens: " ".join(map(str, tokens))
    return lambda tokens: str(tokenizer.decode(list(tokens)))


def _main_dtype(source: Source) -> str:
    """Return the data type that most bytes of the checkpoint have."""
    sizes: Counter[str] = Counter()
    for stored in source.tensors.values():
        sizes[dtype_name(stored.dtype)] += stored.nbytes
    return sizes.most_common(1)[0][0] if sizes else ""


def _bits_per_weight(job: CheckpointJob) -> float:
    """Return the bits of all written tensors divided by the number of weights of the checkpoint.

    Scales, zero points, float tensors and tensors that a format stores twice are included.
    """
    float_tensors = [tensor for tensor in job.source.tensors.values() if tensor.dtype.is_floating_point]
    weights = sum(tensor.nbytes // tensor.dtype.itemsize for tensor in float_tensors)
    count_bytes = _size_in_bytes if job.format.tensor_bytes is None else job.format.tensor_bytes
    return 8 * count_bytes(job.path) / max(weights, 1)


def _wider_storage_warnings(job: CheckpointJob, codes: TunedCodes) -> tuple[str, ...]:
    """Return a warning for every data type whose codes take more bits in the file than the type has."""
    counts = Counter(
        (dtype_name(spec.dtype), why)
        for spec, columns in codes.specs()
        if (why := job.format.describe_wider_type(spec, columns))
    )
    return tuple(
        f"{dtype} codes of {format_plural(count, 'layer')} are stored as {why}"
        for (dtype, why), count in counts.items()
    )


def _size_in_bytes(path: Path) -> int:
    """Return the size of the files that we wrote; a folder may contain other files too."""
    if path.is_file():
        return path.stat().st_size
    return sum(record.size for record in WrittenFiles(path).records.values())
