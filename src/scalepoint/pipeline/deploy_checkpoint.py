"""deploy_checkpoint: quantize a language model's folder for a runtime, with one block of it in memory at a time.

    check arguments -> CheckpointJob
    headers of the shards -> module tree without values -> graph with quantizers       (as for any model)
    tune: load a block -> observe, choose codes -> store them -> release the block     (a resumed run continues here)
    score: float and quantized model on other text -> write the format -> run it in its runtime -> report

With several ranks, each tunes and scores a part of the sequences. Only rank 0 stores codes, writes and runs the file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import fx

from scalepoint import distributed
from scalepoint.checkpoints.skeleton import check_config
from scalepoint.checkpoints.text import Text
from scalepoint.errors import StoreError
from scalepoint.options import Accuracy
from scalepoint.pipeline.checkpoint_codes import TunedCodes
from scalepoint.pipeline.checkpoint_job import CheckpointJob, prepare_checkpoint_job
from scalepoint.pipeline.checkpoint_stages import (
    build_checkpoint_report,
    build_quantized_graph,
    describe_checkpoint,
    read_text,
    tune_blocks,
    verify_checkpoint,
    write_checkpoint,
)
from scalepoint.pipeline.job import check_runtime_installed
from scalepoint.pipeline.perplexity import Evaluation, score_checkpoint
from scalepoint.pipeline.result import Deployment
from scalepoint.quantize import QuantConfig, coverage
from scalepoint.report import Report
from scalepoint.results import TuneReport
from scalepoint.support.files import describe_needed_space, is_disk_full
from scalepoint.support.progress import timed_phase
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target


@serialized
@distributed.participating()
def deploy_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    target: str | Target,
    config: QuantConfig | Mapping[str, Any] | None = None,
    data: Text = None,
    judge: Text = None,
    accuracy: Accuracy = "balanced",
    memory: int | str | None = None,
    cache: str | None = None,
    allow_departure: bool = False,
    length: int = 512,
    samples: int = 16,
    verify: bool = True,
    resume: bool = False,
    force: bool = False,
    progress: bool | None = None,
) -> Deployment:
    """Quantize the checkpoint of a language model, write it for a runtime, and verify it in that runtime.

    Weights are read block by block, so memory contains one block, and activations up to `memory`. Every argument is
    checked before any work starts. The score is perplexity; lower is better.

    Args:
        source: Folder as transformers writes it: config.json, safetensors files, tokenizer files.
        output: Folder to write, or a file with the format's suffix, such as "model.gguf".
        target: A target for language models, such as "gguf" or "ort-genai"; `scalepoint targets` lists the names.
        config: Data types and granularity, globally and per layer. The target's defaults if None.
        data: Calibration text: a text file, a .jsonl file with a field "text", a folder of such files, or sequences
            of tokens. Not needed with accuracy="fast".
        judge: Other text, on which perplexity is measured. Default: the sequences of `data` that follow the first
            `samples`.
        accuracy: "fast" rounds without data. "balanced" also chooses codes and scales in closed form. "best" adds
            gradient steps.
        memory: Memory for activations between blocks, in bytes or as text such as "2GB"; the rest is stored on disk.
        cache: Data type of the KV cache: "int8", "int4" or "fp8", if the runtime supports it. Float if None.
        allow_departure: Return a file that the runtime cannot run or that does not match the simulation, instead of
            raising. Also allows a runtime that is not installed.
        length: Tokens per sequence.
        samples: Number of sequences for calibration; at most 16 more are used for perplexity.
        verify: Run the file in its runtime.
        resume: Continue an interrupted run; finished blocks are reused.
        force: Write into an output that is not empty. Files that scalepoint did not write are kept.
        progress: Show progress on stderr; None shows it on a terminal only.

    Returns:
        The deployment: the quantized model, the path of the file or folder, the report, and the perplexity of the
        file and of the float model.

    Raises:
        UsageError: An argument is wrong, or the output is not empty.
        StoreError: The checkpoint cannot be read, or the output cannot be written.
        VerificationError: The runtime is not installed, cannot run the file, or computes other values than the
            simulation, and `allow_departure` is False. The file is written anyway.

    Example:
        done = scalepoint.deploy_checkpoint("Qwen3-0.6B", "out", target="gguf", data="wiki.txt")
        print(done)
    """
    job = prepare_checkpoint_job(
        source, output, target=target, config=config, texts={"calibration data": data, "text to judge by": judge},
        accuracy=accuracy, memory=memory, cache=cache, allow_departure=allow_departure, length=length, samples=samples,
        resume=resume, force=force,
    )  # fmt: skip
    _check_same_checkpoint(job)
    check_config(job.source)
    if verify and not (data is None and judge is None):  # without text nothing is verified
        check = partial(check_runtime_installed, job.target, allow_departure=allow_departure)
        distributed.run_on_main("looking for the runtime", check)
    calibration, tokens = read_text(job, data, judge)
    timings: dict[str, float] = {}
    with job.workspace.open(), _explain_errors(job):
        with timed_phase(timings, "capturing", show=progress):
            model, weights = build_quantized_graph(job, calibration)
        with timed_phase(timings, "tuning", is_phase=False):
            tune_report, tuned = tune_blocks(job, model, weights, calibration, resume, progress)
        evaluation: Evaluation | None = None
        if tokens:
            with timed_phase(timings, "scoring", is_phase=False):
                memory_limit = job.tuning.memory
                evaluation = score_checkpoint(model, weights, tuned, tokens, memory=memory_limit, progress=progress)

        def write_and_verify() -> Report:
            codes = TunedCodes(model, weights, tuned)
            with timed_phase(timings, "writing", show=progress):
                write_checkpoint(job, model, codes, tuned)
            result = describe_checkpoint(job, evaluation)
            score = None if evaluation is None else evaluation.score
            if verify and evaluation is not None:
                with timed_phase(timings, f"running it in {job.target.runtime}", show=progress):
                    result, score = verify_checkpoint(job, tokens, evaluation, result)
            report = build_checkpoint_report(job, model, codes, tune_report, score, result, timings)
            job.workspace.write_report(report)
            return report

        report = distributed.run_on_main("writing and verifying", write_and_verify, Report)
    deployment = _deployment(job, model, report, tune_report)
    return deployment if allow_departure else deployment.checked()


def _deployment(job: CheckpointJob, model: fx.GraphModule, report: Report, tuned: TuneReport) -> Deployment:
    return Deployment(
        model=model,
        path=job.path,
        float_path=job.source.folder,
        coverage=coverage(model),
        verification=None,
        report=report,
        tuned=tuned,
    )


@contextmanager
def _explain_errors(job: CheckpointJob) -> Iterator[None]:
    """Convert errors of a full disk, missing files or too little memory to a StoreError with a hint; only on rank 0."""
    if not distributed.is_main():
        yield
        return
    try:
        yield
    except BaseException as error:
        hint = (
            "; finished blocks are kept: continue with resume=True (--resume)"
            if job.workspace.can_resume_after(error)
            else ""
        )
        failure = f"{job.workspace.output} could not be written"
        if _is_out_of_memory(error):
            advice = f"memory={job.tuning.memory // 2_000_000}MB, fewer samples= or a shorter length= need less"
            raise StoreError(f"{failure}: memory ran out; {advice}{hint}") from error
        if isinstance(error, OSError | SafetensorError):
            # The stored codes need at most as much space as the weights of the checkpoint.
            space = f". {describe_needed_space(job.workspace.work, job.source.size)}" if is_disk_full(error) else ""
            raise StoreError(f"{failure}: {error}{space}{hint}") from error
        if isinstance(error, StoreError) and is_disk_full(error):
            raise StoreError(f"{error.args[0]}{hint}") from error
        raise


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, the system or torch could not allocate memory."""
    if isinstance(error, RuntimeError | OSError | SafetensorError):
        return "allocate memory" in str(error)
    return isinstance(error, MemoryError)


def _check_same_checkpoint(job: CheckpointJob) -> None:
    """Raise RankError if ranks read different checkpoints: their statistics are summed."""
    shapes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in job.source.tensors.items()}
    fingerprint = hashlib.sha256(json.dumps([dict(job.source.config), shapes], sort_keys=True).encode()).hexdigest()
    distributed.check_equal("checkpoint", fingerprint, f"{job.source.folder} must be the same folder on every rank")
