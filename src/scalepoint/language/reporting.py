"""The report of a language model's deployment."""

from collections.abc import Mapping
from datetime import UTC, datetime

from torch import fx

from scalepoint.deployment.reporting import environment
from scalepoint.files import replace_text
from scalepoint.language.proof import Proof
from scalepoint.language.quantized import Codes, bits_per_weight
from scalepoint.language.settings import Asked
from scalepoint.language.streams import Scored
from scalepoint.quantize import coverage
from scalepoint.report import Metric, Report, to_html
from scalepoint.tuning import TuneReport


def report_of(
    job: Asked,
    model: fx.GraphModule,
    codes: Codes,
    tuned: TuneReport,
    scores: Scored | None,
    proof: Proof | None,
    timings: Mapping[str, float],
) -> Report:
    """All that was found, as plain data."""
    metrics: tuple[Metric, ...] = ()
    if scores is not None:
        in_runtime = None if proof is None else proof.perplexity
        metrics = (Metric("perplexity", scores.float_perplexity, scores.perplexity, in_runtime),)
    return Report(
        title=str(job.source.config.get("_name_or_path") or job.source.folder.resolve().name),
        target=job.target.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coverage=coverage(model),
        environment=environment(job.target),
        config=job.config.to_dict(),
        accuracy=metrics,
        timings=dict(timings),
    )


def write_report(report: Report, job: Asked) -> None:
    """Beside the file, or in the folder."""
    folder = job.path if not job.format.suffix else job.path.parent
    replace_text(folder / "report.json", report.to_json())
    replace_text(folder / "report.html", to_html(report))


def float_weights(job: Asked, codes: Codes) -> int:
    """Parameters that stay float."""
    sizes = {name: each.nbytes // each.dtype.itemsize for name, each in job.source.tensors.items()}
    return sum(size for name, size in sizes.items() if name not in codes)


def bits(job: Asked, codes: Codes) -> float:
    return bits_per_weight(codes, float_weights(job, codes))
