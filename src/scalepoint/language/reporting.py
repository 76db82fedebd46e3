"""The report of a language model's deployment."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from torch import fx

from scalepoint.deployment.reporting import environment, tuned
from scalepoint.errors import ScalepointError
from scalepoint.language.proof import Proof
from scalepoint.language.quantized import Codes, bits_per_weight
from scalepoint.language.settings import Asked
from scalepoint.language.streams import Scored
from scalepoint.language.text import tokenizer_of
from scalepoint.quantize import coverage
from scalepoint.report import Language, Metric, Report, write
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
        tuning=tuned(found),
        language=_language(job, codes, scores, proof),
    )


def _language(job: Asked, codes: Codes, scores: Scored | None, proof: Proof | None) -> Language:
    shown = proof or Proof(job.target.runtime or "", "")
    prompt, written, float_written = _texts(job, shown)
    return Language(
        bits=bits_per_weight(codes, _float_weights(job, codes)),
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


def _float_weights(job: Asked, codes: Codes) -> int:
    """Parameters that stay float."""
    sizes = {name: each.nbytes // each.dtype.itemsize for name, each in job.source.tensors.items()}
    return sum(size for name, size in sizes.items() if name not in codes)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.rglob("*"))


def write_report(report: Report, job: Asked) -> None:
    """Beside the file, or in the folder."""
    write(report, job.path if job.path.is_dir() else job.path.parent)
