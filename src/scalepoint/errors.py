"""The exceptions of scalepoint. Each one is a ScalepointError and also the builtin exception that fits:

    ScalepointError
    ├── SpecError (ValueError)                  SP-A001  a spec, granularity or option is invalid
    │   ├── BlockSizeMismatchError              SP-A002  the block size does not divide the axis
    │   └── UnknownKeyError                     SP-A003  no class is registered under this key
    ├── TensorError (ValueError)                SP-A004  the type, layout or device of a tensor is not supported
    ├── NonFiniteError (ValueError)             SP-A005  NaN or infinity where a finite number is needed
    ├── NotObservedError (RuntimeError)         SP-A006  parameters are needed before data was observed
    ├── FrozenError (RuntimeError)              SP-A007  a change that is possible only before the first use
    ├── UsageError (RuntimeError)               SP-A008  an argument is wrong, or a call is not possible now
    ├── CaptureError (ValueError)               SP-G001  the model cannot be captured as a graph
    ├── PatternError (ValueError)               SP-G003  a pattern or a transformation plan is invalid
    ├── OnnxReadError (ValueError)              SP-G004  an ONNX file contains something that cannot be read
    ├── GraphError (RuntimeError)               SP-G002  the graph is inconsistent: a bug, please report it
    ├── ConfigError (ValueError)                SP-Q001  the quantization config is invalid or does not fit the model
    ├── TargetError (ValueError)                SP-Q002  the target does not support what the config or model needs
    ├── CoverageError (ValueError)              SP-Q003  strict=True, and an operation stays float unrequested
    ├── CalibrationError (RuntimeError)         SP-Q004  calibration data is empty or does not reach the whole model
    ├── ExportError (RuntimeError)              SP-E001  the model cannot be written in the target's format
    ├── VerificationError (RuntimeError)        SP-V001  the runtime is missing, fails, or computes other values
    ├── DocumentError (ValueError)              SP-C001  a YAML or JSON text cannot be read safely
    ├── StoreError (ValueError)                 SP-C002  a file is damaged, of another model, or not writable
    └── RankError (RuntimeError)                SP-R001  a process of a distributed job exited or went another way

A ScalepointWarning (UserWarning) reports a result that is correct but more limited than expected.
pydantic checks the fields of specs and configs; its ValidationError is the cause of the SpecError or ConfigError.
A message has the form `<what is wrong>: <what to do>`.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr
from typing import Any


class ScalepointError(Exception):
    """Base class of all scalepoint errors."""

    code = "SP-0000"

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.code}]"


class SpecError(ScalepointError, ValueError):
    """A spec, granularity or option is invalid."""

    code = "SP-A001"


class BlockSizeMismatchError(SpecError):
    """A block size does not divide the axis it applies to."""

    code = "SP-A002"


class UnknownKeyError(SpecError):
    """No class is registered under this key."""

    code = "SP-A003"


class TensorError(ScalepointError, ValueError):
    """The type, layout or device of a tensor is not supported."""

    code = "SP-A004"


class NonFiniteError(ScalepointError, ValueError):
    """NaN or infinity where a finite number is needed."""

    code = "SP-A005"


class NotObservedError(ScalepointError, RuntimeError):
    """Parameters are needed before data was observed."""

    code = "SP-A006"


class FrozenError(ScalepointError, RuntimeError):
    """A change that is possible only before the first use."""

    code = "SP-A007"


class UsageError(ScalepointError, RuntimeError):
    """An argument is wrong, or a call is not possible now."""

    code = "SP-A008"


class CaptureError(ScalepointError, ValueError):
    """The model cannot be captured as a graph."""

    code = "SP-G001"


class PatternError(ScalepointError, ValueError):
    """A pattern or a transformation plan is invalid."""

    code = "SP-G003"


class OnnxReadError(ScalepointError, ValueError):
    """An ONNX file contains something that cannot be read."""

    code = "SP-G004"


class GraphError(ScalepointError, RuntimeError):
    """The graph is inconsistent: a bug, please report it."""

    code = "SP-G002"


class ConfigError(ScalepointError, ValueError):
    """The quantization config is invalid or does not fit the model."""

    code = "SP-Q001"


class TargetError(ScalepointError, ValueError):
    """The target does not support what the config or model needs."""

    code = "SP-Q002"


class CoverageError(ScalepointError, ValueError):
    """An operation stays float although the config did not ask for that, with strict=True."""

    code = "SP-Q003"


class CalibrationError(ScalepointError, RuntimeError):
    """Calibration data is empty or does not reach the whole model."""

    code = "SP-Q004"


class ExportError(ScalepointError, RuntimeError):
    """The model cannot be written in the target's format."""

    code = "SP-E001"


class VerificationError(ScalepointError, RuntimeError):
    """The runtime is missing, fails, or computes other values."""

    code = "SP-V001"
    deployment: Any = None  # the Deployment whose file failed; None if deploy wrote no file


class DocumentError(ScalepointError, ValueError):
    """A YAML or JSON text cannot be read safely."""

    code = "SP-C001"


class StoreError(ScalepointError, ValueError):
    """A file is damaged, of another model, or not writable."""

    code = "SP-C002"


class RankError(ScalepointError, RuntimeError):
    """A process of a distributed job exited or went another way."""

    code = "SP-R001"


class BatchNote(str):
    """A note added to an exception of the user's data or model: number and shapes of the batch."""

    __slots__ = ()


class ScalepointWarning(UserWarning):
    """A correct result that is more limited than expected."""


def short_repr(value: object) -> str:
    """Return the repr of any value, shortened for a message."""
    return _SHORT.repr(value)


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def install_hint(extra: str) -> str:
    """Return the pip command that installs an extra. It is quoted because zsh expands brackets."""
    return f"pip install 'scalepoint[{extra}]'"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known name, then all of them."""
    names = sorted(known)
    by_lower_case = {candidate.casefold(): candidate for candidate in reversed(names)}  # "openvino" for "OpenVINO"
    similar = get_close_matches(name, names, n=1, cutoff=0.6)
    if not similar:
        lower_case_matches = get_close_matches(name.casefold(), by_lower_case, n=1, cutoff=0.6)
        similar = [by_lower_case[match] for match in lower_case_matches]
    if not similar and len(name) > 2:  # "onnx": "onnxruntime"
        similar = [candidate for candidate in names if candidate.startswith(name)]
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    return f"{hint}Known: {', '.join(names)}"
