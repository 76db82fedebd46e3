"""Formats numbers and names for terminals, HTML pages and errors."""

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_LENGTH = 96  # characters of a shortened name


def render_as_text(renderable: "RenderableType") -> str:
    """Render a rich object as text."""
    from rich.console import Console  # noqa: PLC0415  # slow to import

    console = Console(width=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def escape_unprintable(text: object) -> str:
    """Escape characters that control a terminal or change the direction of text, for texts from untrusted files.

    Escapes control characters, lone surrogates and invisible marks. Newlines and tabs stay.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1] for character in text
    )


def to_one_line(text: object) -> str:
    """Escape a text and its newlines, for a name or a cell of a table."""
    return escape_unprintable(text).replace("\n", "\\n").replace("\t", "\\t")


def shorten(text: str, longest: int = MAX_LENGTH) -> str:
    """Return one line. The middle of a long name is left out, because both ends of a module path are informative."""
    if len(text) > longest * 8:  # look at both ends only: the text may be megabytes long
        text = text[: longest * 4] + text[-longest * 4 :]
    text = to_one_line(text)
    if len(text) <= longest:
        return text
    end = longest // 2
    return f"{text[: longest - end - 3]}...{text[-end:]}"


def format_count(value: int | None) -> str:
    """Format a number as 1.5M; "?" for None."""
    if value is None:
        return "?"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return str(value)


def format_value(value: float | None) -> str:
    """Format a metric with four digits, without an exponent if possible."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 1e5 else f"{value:.4g}"


def format_change(value: float) -> str:
    """Format a difference of metrics, with its sign."""
    return f"{'+' if value >= 0 else ''}{format_value(value)}"


def format_size(value: float) -> str:
    """Format a number of bytes."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:.2f} {unit}"
    return f"{value:.0f} B"


def format_time(seconds: float) -> str:
    """Format a time as us, ms, s or min."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.{2 if seconds < 0.1 else 0}f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def format_two_times(first: float, second: float) -> tuple[str, str]:
    """Format two times with enough digits to tell which is shorter, at most three more than `format_time`."""
    texts = format_time(first), format_time(second)
    for digits in range(1, 4):
        if texts[0] != texts[1] or first == second:
            break
        factor, unit = (1e6, "us") if max(first, second) < 1e-3 else (1e3, "ms")
        texts = f"{first * factor:.{digits}f} {unit}", f"{second * factor:.{digits}f} {unit}"
    return texts


def format_share(value: float | None) -> str:
    """Format a share as percent. A share below 1 is never shown as 100%."""
    if value is None:
        return ""
    if 0 < value < 1e-4:
        return "<0.01%"
    digits = 2 if value < 0.01 else 1
    text = f"{value:.{digits}%}"
    return "99.9%" if text == "100.0%" and value < 1 else text.replace("100.0%", "100%").replace("0.00%", "0%")


GOOD_DB, FAIR_DB, POOR_DB = 35, 25, 15  # lowest levels that are called very good, good and fair
SCALE = f"{GOOD_DB} dB and more is very good, {FAIR_DB} good, {POOR_DB} fair, less is poor"


def describe_quality(sqnr: float | None) -> str:
    """Return a word for a signal-to-noise ratio in dB; "" for no error."""
    if sqnr is None or sqnr == math.inf:
        return ""
    if math.isnan(sqnr):
        return "broken"
    for level, word in ((GOOD_DB, "very good"), (FAIR_DB, "good"), (POOR_DB, "fair")):
        if sqnr >= level:
            return word
    return "poor"


def is_poor(sqnr: float) -> bool:
    """Return whether a signal-to-noise ratio in dB is less than fair, or NaN: outputs with NaN are broken."""
    return not sqnr >= POOR_DB  # `sqnr < POOR_DB` is false for NaN


def format_error_share(sqnr: float) -> str:
    """Format a signal-to-noise ratio in dB as error divided by signal (root mean squares): 28.9 dB is 3.6%."""
    return format_share(10 ** (-sqnr / 20))


def format_decibels(value: float | None) -> str:
    """Format a signal-to-noise ratio in dB."""
    if value is None:
        return ""
    if math.isinf(value) and value > 0:
        return "exact"
    return "not a number" if math.isnan(value) else f"{value:.1f}"


def format_noise_level(error: float) -> str:
    """Format noise power divided by signal power as a signal-to-noise ratio in dB."""
    if error <= 0:
        return "exact"
    return f"{-10 * math.log10(error):.1f}" if math.isfinite(error) else "broken"


def format_ratio(value: float) -> str:
    """Format a ratio as 3.94x, rounded down, so that a ratio below 1 is never shown as 1."""
    if not math.isfinite(value * 100):
        return "not a number" if math.isnan(value) else f"{value:.3g}x"
    return f"{math.floor(value * 100 + 1e-9) / 100:.2f}x"


def describe_size_change(before: float, after: float) -> tuple[str, str]:
    """Return the ratio of two sizes and a word for it: ("3.94x", "smaller") or ("1.16x", "larger")."""
    if not before or not after:
        return ("empty", "")
    return (format_ratio(before / after), "smaller") if before >= after else (format_ratio(after / before), "larger")


RUNTIME_NAMES = {
    "coreai": "Core AI",
    "coreml": "Core ML",
    "executorch": "ExecuTorch",
    "litert": "LiteRT",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}


def describe_runtime(name: str) -> str:
    """Return the name of a runtime as its project writes it."""
    return RUNTIME_NAMES.get(name) or shorten(name)


def describe_precision(precision: str) -> str:
    """Return a precision in words: "w int8 per_channel, x uint8" -> "int8 weights per channel, uint8 activations"."""
    parts = []
    for part in precision.split(", "):
        role, _, spec = part.partition(" ")
        noun = {"w": "weights", "x": "activations"}.get(role)
        dtype, _, granularity = spec.partition(" ")
        if noun is None:
            parts.append(part)
        elif "/" in spec:
            parts.append(f"{spec} {noun}")
        else:
            parts.append(f"{dtype} {noun} {granularity}".rstrip())
    return re.sub(r"\bper_(\w+)", r"per \1", ", ".join(parts))


def format_plural(number: int, word: str) -> str:
    """Return "1 layer" or "2 layers"."""
    suffix = "es" if word.endswith(("ch", "x")) else "s"
    return f"{number} {word}{'' if number == 1 else suffix}"
