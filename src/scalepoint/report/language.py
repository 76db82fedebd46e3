"""What became of a language model: plain data of the report, and its lines in the terminal."""

from dataclasses import dataclass

from scalepoint.errors import VerificationError
from scalepoint.support.formatting import change_of_size, decibel, one_line, short, size_of

FAILED, DEPARTS = "failed", "departs"  # of Language.status; the others are "", "ok", "unavailable"


@dataclass(frozen=True)
class Language:
    """One deployed language model; None is what was not measured."""

    bits: float  # a weight on average, scales and what stays float counted
    size: int  # bytes of what was written
    float_size: int  # bytes of the checkpoint
    tokens: int = 0  # that perplexity was measured on
    logits_db: float | None = None  # of the simulation against the float model
    runtime: str = ""
    status: str = ""  # how the run in the runtime ended; "": it was not asked
    message: str = ""
    agreement_db: float | None = None  # of the runtime's logits against the simulation's
    prefill: float | None = None  # tokens a second
    decode: float | None = None
    prompt: str = ""
    written: str = ""  # how it goes on from the prompt
    float_written: str = ""  # how the float model does
    float_dtype: str = ""  # of most of the checkpoint, which sizes are compared with
    float_prefill: float | None = None  # tokens a second of the checkpoint itself
    float_decode: float | None = None
    float_runtime: str = ""  # where those were measured

    @property
    def smaller(self) -> float:
        return self.float_size / max(self.size, 1)

    def check(self, path: str) -> None:
        """Raise VerificationError if the runtime failed on the file or computed something else."""
        if self.status == FAILED:
            raise VerificationError(self.message)  # it names the file and the runtime
        if self.status == DEPARTS:
            raise VerificationError(
                f"{path} in {self.runtime}: {self.status}: {self.message}; allow_departure=True accepts it"
            )


def verdict(found: Language) -> str:
    """One sentence."""
    if not found.status and not found.tokens:
        return "Not run in a runtime, and nothing was measured: that needs text to judge by (judge=, --judge)."
    if not found.status:
        return f"Not run in a runtime.{' All numbers are of the simulation.' if found.logits_db is not None else ''}"
    if found.status != "ok":
        return f"Not verified: {found.runtime}: {found.status}. {one_line(found.message)}".strip()
    text = "" if found.agreement_db is None else decibel(found.agreement_db)
    agreement = {"": "", "exact": " and gives the simulation's logits exactly"}.get(
        text, f", its logits {text} dB from the simulation's"
    )
    return f"Verified: {found.runtime} runs it{agreement}."


def sizes(found: Language) -> str:
    """Before and after; a factor says little unless the type of the checkpoint is named."""
    times, word = change_of_size(found.float_size, found.size)
    checkpoint = f"the {found.float_dtype} checkpoint" if found.float_dtype else "the checkpoint"
    return f"{size_of(found.float_size)} -> {size_of(found.size)}, {times} {word} than {checkpoint}"


def float_speed(found: Language) -> str:
    """The float model's speed next to ours, where it was measured."""
    if found.float_prefill is None or found.float_decode is None:
        return ""
    return f"; the float model {found.float_prefill:.0f} and {found.float_decode:.0f}, in {found.float_runtime}"


def lines(found: Language) -> list[str]:
    """One thing each."""
    said = [f"size: {sizes(found)}, {found.bits:.2f} bits a weight"]
    if found.logits_db is not None:
        said.append(f"logits: {decibel(found.logits_db)} dB from the float model's, {found.tokens} tokens judged")
    if found.prefill is not None and found.decode is not None:
        own = f"{found.prefill:.0f} tokens a second read, {found.decode:.0f} written, in {found.runtime}"
        said.append(f"speed: {own}{float_speed(found)}")
    if found.written:
        said.append(f"it goes on: {short(found.prompt, 60)} ... {short(found.written, 100)}")
    return said
