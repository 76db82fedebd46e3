"""What scalepoint raises. Every error is a ScalepointError and the builtin a caller would expect:

    ScalepointError
    ├── SpecError (ValueError)                  SP-A001  a spec, granularity or option that makes no sense
    │   ├── BlockSizeMismatchError              SP-A002  blocks do not divide the tensor
    │   └── UnknownKeyError                     SP-A003  a registry has no such key or class
    ├── TensorError (ValueError)                SP-A004  a tensor that cannot be quantized: type, layout, device
    ├── NonFiniteError (ValueError)             SP-A005  NaN or infinity where a range is observed
    ├── NotObservedError (RuntimeError)         SP-A006  parameters asked for before anything was observed
    ├── FrozenError (RuntimeError)              SP-A007  a change that is only possible before the first use
    ├── UsageError (RuntimeError)               SP-A008  a call that makes no sense on this object
    ├── CaptureError (ValueError)               SP-G001  a model that cannot become a graph
    ├── PatternError (ValueError)               SP-G003  a pattern or a plan that makes no sense
    ├── GraphError (RuntimeError)               SP-G002  a graph that is not sound: our fault, please report it
    ├── ConfigError (ValueError)                SP-Q001  a quantization config that makes no sense for this model
    ├── TargetError (ValueError)                SP-Q002  something that the target cannot run
    ├── CoverageError (ValueError)              SP-Q003  strict=True, and an operation stays float unasked
    ├── CalibrationError (RuntimeError)         SP-Q004  calibration that saw no data, or not all of the model
    ├── ExportError (RuntimeError)              SP-E001  a model that cannot be written for its target
    ├── VerificationError (RuntimeError)        SP-V001  a file that the runtime does not run as it should
    ├── DocumentError (ValueError)              SP-C001  a YAML or JSON text that cannot be read safely
    ├── StoreError (ValueError)                 SP-C002  a saved model that is damaged, or of another model
    └── RankError (RuntimeError)                SP-R001  a process of a distributed job that ended, or does other things

What works, but not as one may think, is a ScalepointWarning (UserWarning).
Fields of specs and configs are checked by pydantic; its ValidationError is the cause of the SpecError or ConfigError.
A message says what was given, what is allowed, where, and the way out.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr


class ScalepointError(Exception):
    """The root: `except ScalepointError` catches everything that is the caller's to mend."""

    code = "SP-0000"

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.code}]"


class SpecError(ScalepointError, ValueError):
    code = "SP-A001"


class BlockSizeMismatchError(SpecError):
    """A block size does not divide the axis it applies to."""

    code = "SP-A002"


class UnknownKeyError(SpecError):
    code = "SP-A003"


class TensorError(ScalepointError, ValueError):
    code = "SP-A004"


class NonFiniteError(ScalepointError, ValueError):
    code = "SP-A005"


class NotObservedError(ScalepointError, RuntimeError):
    code = "SP-A006"


class FrozenError(ScalepointError, RuntimeError):
    code = "SP-A007"


class UsageError(ScalepointError, RuntimeError):
    code = "SP-A008"


class CaptureError(ScalepointError, ValueError):
    code = "SP-G001"


class PatternError(ScalepointError, ValueError):
    code = "SP-G003"


class GraphError(ScalepointError, RuntimeError):
    code = "SP-G002"


class ConfigError(ScalepointError, ValueError):
    code = "SP-Q001"


class TargetError(ScalepointError, ValueError):
    code = "SP-Q002"


class CoverageError(ScalepointError, ValueError):
    code = "SP-Q003"


class CalibrationError(ScalepointError, RuntimeError):
    code = "SP-Q004"


class ExportError(ScalepointError, RuntimeError):
    code = "SP-E001"


class VerificationError(ScalepointError, RuntimeError):
    code = "SP-V001"


class DocumentError(ScalepointError, ValueError):
    code = "SP-C001"


class StoreError(ScalepointError, ValueError):
    code = "SP-C002"


class RankError(ScalepointError, RuntimeError):
    code = "SP-R001"


class BatchNote(str):
    """A note on an exception that your data or your model raised: which batch it was, and how it looked."""

    __slots__ = ()


class ScalepointWarning(UserWarning):
    """A result that is right but narrower than one may think."""


def short_repr(value: object) -> str:
    """What was given, short enough for a message whatever it is."""
    return _SHORT.repr(value)


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def install_hint(extra: str) -> str:
    """The command that brings an optional part. Quoted: the brackets mean something else to zsh."""
    return f"pip install 'scalepoint[{extra}]'"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The hint that ends a message about an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    begun = [name for name in names if len(given) > 2 and name.startswith(given)]  # onnx: onnxruntime
    folded = {name.casefold(): name for name in reversed(names)}
    alike = [folded[each] for each in get_close_matches(given.casefold(), folded, n=1, cutoff=0.6)]  # OpenVINO
    close = get_close_matches(given, names, n=1, cutoff=0.6) or alike or begun
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}"
