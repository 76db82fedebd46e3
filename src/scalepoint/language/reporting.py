"""The report of a language model's deployment."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from torch import fx

from scalepoint.checkpoints import Source
from scalepoint.errors import ScalepointError
from scalepoint.language.proof import FLOAT_RUNTIME, Proof
from scalepoint.language.quantized import Codes
from scalepoint.language.settings import REPORTS, Asked
from scalepoint.language.streams import Scored
from scalepoint.language.text import tokenizer_of
from scalepoint.numerics import dtype_name
from scalepoint.pipeline.build_report import environment, tuned_layers
from scalepoint.quantize import coverage
from scalepoint.report import Language, Metric, Report, write
from scalepoint.support.formatting import plural
from scalepoint.support.output_folder import WrittenFiles
from scalepoint.tuning import TuneReport


def report_of(
    job: Asked,
    model: fx.GraphModule,
    codes: Codes,
    found: TuneReport,
    scores: Scored | None,
    proof: Proof | None,
    timings: Mapping[str, float],
) -> Report:
    """All that was found, as plain data."""
    metrics: tuple[Metric, ...] = ()
    if scores is not None:
        in_runtime = None if proof is None else proof.perplexity
        values = (scores.float_perplexity, scores.perplexity, in_runtime)
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
        tuning=tuned_layers(found),
        warnings=_wider(job, codes),
        language=_language(job, codes, scores, proof),
    )


def _language(job: Asked, codes: Codes, scores: Scored | None, proof: Proof | None) -> Language:
    shown = proof or Proof(job.target.runtime or "", "")
    prompt, written, float_written = _texts(job, shown)
    return Language(
        bits=_bits(job),
        size=_size(job.path),
        float_size=job.source.size,
        tokens=0 if scores is None else scores.tokens,
        logits_db=None if scores is None else scores.sqnr_db,
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


def _texts(job: Asked, proof: Proof) -> tuple[str, str, str]:
    """Tokens in words; as numbers where there is no tokenizer."""
    sides = (proof.prompt, proof.tokens, proof.float_tokens)
    if not proof.prompt:
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


def _bits(job: Asked) -> float:
    """Bits per weight of what was written: the bytes of all its tensors over the weights of the checkpoint.

    Scales, zero points, float tensors and what a format stores twice count.
    """
    stored = [each for each in job.source.tensors.values() if each.dtype.is_floating_point]
    weights = sum(each.nbytes // each.dtype.itemsize for each in stored)
    count = _size if job.format.tensor_bytes is None else job.format.tensor_bytes
    return 8 * count(job.path) / max(weights, 1)


def _wider(job: Asked, codes: Codes) -> tuple[str, ...]:
    """A warning for every kind of layer whose codes take more bits in the file than their type has."""
    found = Counter(
        (dtype_name(spec.dtype), why) for spec, columns in codes.specs() if (why := job.format.wider(spec, columns))
    )
    return tuple(
        f"{dtype} codes of {plural(count, 'layer')} are stored as {why}" for (dtype, why), count in found.items()
    )


def _size(path: Path) -> int:
    """Bytes of what was written: a folder may contain files of others."""
    return path.stat().st_size if path.is_file() else sum(each.size for each in WrittenFiles(path).records.values())


def write_report(report: Report, job: Asked) -> None:
    """Next to the file, or in the folder."""
    write(report, job.report_folder)
    WrittenFiles(job.report_folder).add(job.report_folder / name for name in REPORTS)
