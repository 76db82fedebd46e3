"""The first layer whose codes are others in the runtime than in the simulation, and the known cause."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from scalepoint.formats.onnx.channels_first import to_model_layout
from scalepoint.support.cpu import instruction_set
from scalepoint.verification.agreement import Agreement, worst_sqnr
from scalepoint.verification.result import Departure

MIN_EQUAL_SHARE = 0.9
MAX_FAR_SHARE, FAR_CODES = 0.02, 2  # the share of codes that may be more than so many steps away
CLEARLY_BETTER_DB = 6.0
SATURATION_CAUSE = (
    "u8 x s8 products saturate: this CPU adds them in pairs of 16 bits",
    "Deploy with cpu='avx2' (--cpu avx2: the pair-safe scale)",
)


def find_departure(
    codes: Mapping[str, list[Tensor]],
    quantizers: Mapping[str, str],
    found: Mapping[str, np.ndarray],
    on: Sequence[Agreement],
    off: Sequence[Agreement],
    drawn: Sequence[str] = (),
) -> Departure | None:
    """The first stub whose codes differ in more than a tenth of the values, and by more than two steps in many;
    `drawn` names what draws random numbers in the model."""
    for name, values in codes.items():
        for value, array in match_calls(name, values, quantizers, found):
            apart = np.abs(array.astype(np.int32) - value)
            equal = float((apart == 0).mean()) if apart.size else 1.0
            if equal < MIN_EQUAL_SHARE and float((apart > FAR_CODES).mean()) > MAX_FAR_SHARE:
                return Departure(
                    name, equal, int(apart.max()), *(_random_cause(drawn) if drawn else _find_cause(on, off))
                )
    return None


def match_calls(
    name: str, values: Sequence[Tensor], quantizers: Mapping[str, str], found: Mapping[str, np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The calls of a stub with their tensors in the file, in order, by shape.

    Where the exporter folded a padding away, the file quantizes before it and the simulation after it too: the
    simulation has a call more, or one of another shape, which has no counterpart.
    """
    calls = [value.cpu().numpy() for value in values]
    pairs = []
    for place in range(len(calls)):
        tensor = quantizers.get(f"{name}/QuantizeLinear" + (f"_{place}" if place else ""))
        array = None if tensor is None else found.get(tensor)
        if tensor is None or array is None:
            continue
        seen = [to_model_layout(tensor, array, call.ndim) for call in calls]
        index = next((at for at, call in enumerate(calls) if call.shape == seen[at].shape), None)
        if index is not None:
            pairs.append((calls[index], seen[index]))
            del calls[: index + 1]
    return pairs


def _random_cause(drawn: Sequence[str]) -> tuple[str, str]:
    return (
        f"the model draws random numbers ({', '.join(drawn)}), and the runtime draws others",
        "Give them to the model as an input, or leave them out in eval",
    )


def _find_cause(on: Sequence[Agreement], off: Sequence[Agreement]) -> tuple[str, str]:
    is_better = worst_sqnr(off) > worst_sqnr(on) + CLEARLY_BETTER_DB
    if is_better and instruction_set() == "avx2":
        return SATURATION_CAUSE
    if is_better:
        return "an optimisation of the runtime changes the result", "report it with the file"
    return "rounding differences that grow from layer to layer", "none needed if accuracy holds"


def predict_saturation(origin: Mapping[str, str], path: Path, has_quantizers: bool) -> str:
    """What will go wrong on this CPU, by what the file was made for; weights alone never saturate."""
    if origin.get("cpu") == "vnni" and instruction_set() != "vnni" and has_quantizers:
        return (
            f"{path.name} was made for a CPU with VNNI, this one has none: {SATURATION_CAUSE[0]}. {SATURATION_CAUSE[1]}"
        )
    return ""
