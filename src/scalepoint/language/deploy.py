"""deploy_checkpoint: a language model's folder in, what its runtime reads out; never more than a block in memory.

headers of the shards -> module tree over hollow weights -> graph -> quantizers, as for any model
walk: load a block -> observe, tune -> keep its codes in a folder -> drop it        (killed: goes on here)
score: both streams once more on other text -> write the format from the codes -> run it in its runtime

Several ranks share the sequences, in the walk and in the score; each has the block that is walked. The first alone
keeps codes, writes, and runs the file, and tells the others.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.checkpoints import QuantizedCheckpoint
from scalepoint.checkpoints.skeleton import Weights, check_config, head_of, skeleton
from scalepoint.errors import CalibrationError, NonFiniteError, StoreError, UsageError
from scalepoint.language.cache import check_cached, check_placed, groups_of, stored_cache
from scalepoint.language.proof import Proof, prove
from scalepoint.language.quantized import Codes
from scalepoint.language.reporting import report_of, write_report
from scalepoint.language.settings import REPORTS, STAGED, TUNING, Asked, asked, has_blocks, with_head
from scalepoint.language.storage import as_stored, not_held
from scalepoint.language.streams import Scored, scored
from scalepoint.language.text import Text, sequences
from scalepoint.options import Accuracy
from scalepoint.pipeline.job import check_runtime_installed
from scalepoint.pipeline.result import Deployment
from scalepoint.quantize import QuantConfig, coverage, insert_qdq
from scalepoint.quantize.stubs import Quantizing
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.report import Report
from scalepoint.support.files import LOCK, is_full, locked, remove, room_needed, sweep, sweep_temporary
from scalepoint.support.output_folder import LIST, WrittenFiles, move_into
from scalepoint.support.progress import timed
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target
from scalepoint.transformation import transform
from scalepoint.tuning import TuneReport, tune
from scalepoint.tuning.checkpoint import Checkpoint

JUDGED = 16  # sequences that are scored, at most


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
    """Quantize the checkpoint in the folder `source` for a runtime of language models, and prove it there.

    `data` calibrates (a text file, a .jsonl, a folder of such, or sequences of tokens), `judge` is other text that
    perplexity is measured on: without it, what comes after the calibration text in `data`. Of each, sequences of
    `length` tokens are taken: `samples` calibrate, and at most 16 are judged. Blocks come and go: memory
    holds one, and activations up to `memory`. `cache` keeps keys and values of earlier tokens in few bits ("int8",
    "int4", "fp8"), where the runtime does. resume=True goes on where a run of the same was killed. force=True writes
    into an `output` that contains something, and leaves files of others. The score is perplexity, lower is better. A
    runtime that cannot run the file, or departs from the simulation, is a VerificationError unless
    allow_departure=True; the file is kept. A runtime that is not installed is the same error, before any work.
    """
    texts = {"calibration data": data, "text to judge by": judge}
    job = asked(source, output, target, config, accuracy, memory, cache, texts, may_exist=force, resume=resume)
    _check_same(job)
    timings: dict[str, float] = {}
    check_config(job.source)
    calibration, judging = _texts(job, data, judge, length, samples)
    if verify and judging:
        check = partial(check_runtime_installed, job.target, allow_departure=allow_departure)
        distributed.run_on_main("looking for the runtime", check)
    with _working(job):
        with timed(timings, "capturing", show=progress):
            model, weights = quantized_skeleton(job, calibration)
        with timed(timings, "tuning", is_phase=False):
            tuned, kept = _tuned(job, model, weights, calibration, resume, progress)
        scores: Scored | None = None
        if judging:
            with timed(timings, "scoring", is_phase=False):
                scores = scored(model, weights, kept, judging, memory=job.tuning.memory, progress=progress)

        def written() -> Report:
            codes = Codes(model, weights, kept)
            with timed(timings, "writing", show=progress):
                job.path.parent.mkdir(parents=True, exist_ok=True)
                cached = stored_cache(model, kept, groups_of(job.source)) if cache else None
                _write(job, QuantizedCheckpoint(job.source, codes, cache=cached))
            proof: Proof | None = None
            if verify and scores is not None:
                with timed(timings, f"running it in {job.target.runtime}", show=progress):
                    proof = prove(job, judging, scores)
            report = report_of(job, model, codes, tuned, scores, proof, timings)
            write_report(report, job)
            _remove_work(job)
            return report

        report = distributed.run_on_main("writing and verifying", written, Report)
    return _deployment(job, model, report, tuned, is_checked=not allow_departure)


def _deployment(
    job: Asked, model: fx.GraphModule, report: Report, tuned: TuneReport, *, is_checked: bool
) -> Deployment:
    score = next(iter(report.accuracy), None)
    before, after = (None, None) if score is None else (score.float_value, score.final)
    done = Deployment(model, job.path, job.source.folder, coverage(model), None, report, before, after, (), tuned)
    return done.checked() if is_checked else done


def _write(job: Asked, checkpoint: QuantizedCheckpoint) -> None:
    """Let the format write a folder in the folder of the run, and move its files to the output when all are whole."""
    if job.format.suffix:
        job.format.write(checkpoint, job.path)
        WrittenFiles(job.path.parent).add([job.path])
        return
    staged = job.work / STAGED
    remove(staged)
    job.format.write(checkpoint, staged)
    move_into(staged, job.path)


def _remove_work(job: Asked) -> None:
    """Delete the files that a killed run resumes from. Files of others stay."""
    for name in (STAGED, TUNING, LOCK):
        with suppress(OSError):
            remove(job.work / name)
    with suppress(OSError):
        job.work.rmdir()


@contextmanager
def _working(job: Asked) -> Iterator[None]:
    """Lock and clean the work folder, on rank 0. An error leaves finished blocks to resume from, and nothing else."""
    if not distributed.is_main():
        yield
        return
    was_there = job.output.exists()
    with locked(job.work):
        sweep(job.work)
        sweep_temporary()
        if job.report_folder.is_dir():
            sweep(job.report_folder, (LIST, *REPORTS, job.path.name))
        try:
            yield
        except BaseException as error:
            # the same weights and data would give NaN again: there is nothing to go on from
            is_kept = has_blocks(job.work) and not isinstance(error, NonFiniteError)
            if not is_kept:
                _remove_work(job)
            if job.path.parent == job.output and not was_there:
                with suppress(OSError):
                    job.output.rmdir()  # where it is empty
            way_out = "; finished blocks are kept, resume=True (--resume) goes on from them" if is_kept else ""
            if _is_out_of_memory(error):
                less = f"memory={job.tuning.memory // 2_000_000}MB, fewer samples= or a shorter length= need less"
                raise StoreError(f"{job.output} could not be made: memory ran out; {less}{way_out}") from error
            if isinstance(error, OSError | SafetensorError):
                raise StoreError(f"{job.output} could not be made: {error}{_room(job, error)}{way_out}") from error
            if isinstance(error, StoreError) and is_full(error):
                raise StoreError(f"{error.args[0]}{way_out}") from error
            raise


def _room(job: Asked, error: BaseException) -> str:
    """What a full disk lacks: the weights that are chosen are at most as large as those of the checkpoint."""
    return f". {room_needed(job.work, job.source.size)}" if is_full(error) else ""


def _is_out_of_memory(error: BaseException) -> bool:
    """As Python, the system and torch say it."""
    is_told = isinstance(error, RuntimeError | OSError | SafetensorError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_told


def _check_same(job: Asked) -> None:
    """Refuse ranks with different checkpoints: sums over ranks would mix different models."""
    about = {name: [str(each.dtype), *each.shape] for name, each in job.source.tensors.items()}
    fingerprint = hashlib.sha256(json.dumps([dict(job.source.config), about], sort_keys=True).encode()).hexdigest()
    distributed.check_equal("checkpoint", fingerprint, f"{job.source.folder} must be the same folder on every rank")


def quantized_skeleton(job: Asked, tokens: list[Tensor]) -> tuple[fx.GraphModule, Weights]:
    """The graph of the model with its quantizers on, its weights hollow."""
    tree, weights = skeleton(job.source)
    distributed.run_on_main("checking the weights", weights.check_finite)
    example = tokens[0][:1] if tokens else torch.zeros(1, 16, dtype=torch.int64)
    plan = transform(tree, (), target=job.target, kwargs={"input_ids": example}, copy=False)
    if job.cache:
        check_cached(plan.model, job.source, job.target.caches[job.cache])
    left = not_held(job, plan, weights)
    config = with_head(job.config, head_of(tree), job.target, left)
    model = insert_qdq(plan.model, plan.matches, config, target=job.target, copy=False).eval()
    if job.cache:
        check_placed(model, job.target.caches[job.cache])
    for module in model.modules():
        if isinstance(module, Quantizing):
            module.enabled = True
        if isinstance(module, QuantizedWeighted):
            module.weight_quant.as_stored = as_stored(job, module, weights)
    return model, weights


def _texts(job: Asked, data: Text, judge: Text, length: int, samples: int) -> tuple[list[Tensor], list[Tensor]]:
    if length < 2 or samples < 1:
        raise UsageError(
            f"length={length}, samples={samples}: sequences have at least 2 tokens, and there is at least one"
        )
    if data is None and not job.tuning.steps and not job.cache:
        first: list[Tensor] = []
        return first, [] if judge is None else sequences(judge, job.source, length=length, count=JUDGED, what="text")
    if judge is not None:
        first = sequences(data, job.source, length=length, count=samples, what="calibration data")
        return first, sequences(judge, job.source, length=length, count=JUDGED, what="text to judge by")
    found = sequences(data, job.source, length=length, count=samples + JUDGED, what="calibration data")
    if len(found) < 2:
        raise CalibrationError(
            f"the calibration data is one sequence of {found[0].shape[1]} tokens, and perplexity is measured on other "
            "ones than those that calibrate: give more data, a shorter length=, or other text as judge="
        )
    cut = min(samples, len(found) // 2)
    return found[:cut], found[cut : cut + JUDGED]


def _tuned(
    job: Asked, model: fx.GraphModule, weights: Weights, data: list[Tensor], resume: bool, progress: bool | None
) -> tuple[TuneReport, Checkpoint]:
    report = tune(
        model,
        [(each,) for each in data],
        job.tuning,
        folder=job.work / TUNING,
        resume=resume,
        progress=progress,
        lender=weights,
    )
    return report, Checkpoint.reopened(job.work / TUNING)
