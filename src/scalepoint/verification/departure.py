"""Finds the first layer whose codes in the runtime differ from the simulation, and names a known cause.

codes of a stub in the simulation  <-- compare -->  output of its QuantizeLinear in the file
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from scalepoint.formats.onnx.channels_first import to_model_layout
from scalepoint.support.cpu import instruction_set
from scalepoint.verification.agreement import Agreement, worst_sqnr
from scalepoint.verification.result import Departure

# A stub departs if too few codes are equal and too many are far. In a whole network rounding differences add up, so the
# bounds are wider than in layers.py, which compares each layer with the simulation's inputs.
MIN_EQUAL_SHARE = 0.9
FAR_CODES = 2  # a larger difference counts as far
MAX_FAR_SHARE = 0.02  # share of codes that may be far
CLEARLY_BETTER_DB = 6.0  # without the runtime's optimisations: then they are the cause
PRODUCT_STEPS = 127  # of the largest product of a layer
MAX_PRODUCT_STEPS = 1e9  # also for differences that are not finite
SATURATION_CAUSE = (
    "u8 x s8 products saturate: this CPU adds pairs of them in 16 bits",
    "Deploy with cpu='avx2' (--cpu avx2), which uses the pair-safe scale",
)


def find_departure(
    codes: Mapping[str, list[Tensor]],
    quantizers: Mapping[str, str],
    outputs: Mapping[str, np.ndarray],
    optimized: Sequence[Agreement],
    unoptimized: Sequence[Agreement],
    random_nodes: Sequence[str] = (),
) -> Departure | None:
    """Find the first stub whose codes differ: over 10 % are not equal, and over 2 % differ by more than two steps.

    Args:
        codes: Codes of the simulation by stub, one tensor per call.
        quantizers: Names of the tensors with the codes in the file, by quantizer.
        outputs: Tensors of the file by name.
        optimized: Agreement of the outputs with the runtime's optimisations on.
        unoptimized: The same with the optimisations off.
        random_nodes: Operations of the model that draw random numbers.
    """
    for name, calls in codes.items():
        for expected, actual in match_calls(name, calls, quantizers, outputs):
            difference = np.abs(actual.astype(np.int32) - expected)
            equal = float((difference == 0).mean()) if difference.size else 1.0
            if equal < MIN_EQUAL_SHARE and float((difference > FAR_CODES).mean()) > MAX_FAR_SHARE:
                cause = _random_cause(random_nodes) if random_nodes else _find_cause(optimized, unoptimized)
                return Departure(name, equal, int(difference.max()), *cause)
    return None


def find_product_departure(
    products: Mapping[str, tuple[np.ndarray, np.ndarray]],
    optimized: Sequence[Agreement],
    unoptimized: Sequence[Agreement],
    random_nodes: Sequence[str] = (),
) -> Departure | None:
    """Find the first layer whose product differs, by the rule of `find_departure`.

    A step is 1/127 of the layer's largest product, as if it were stored in 8 bits.

    Args:
        products: The product of the simulation and that of the runtime, by layer.
        optimized: Agreement of the outputs with the runtime's optimisations on.
        unoptimized: The same with the optimisations off.
        random_nodes: Operations of the model that draw random numbers.
    """
    for name, (expected, actual) in products.items():
        step = float(np.abs(expected).max(initial=np.finfo(np.float32).tiny)) / PRODUCT_STEPS
        difference = np.abs(actual.astype(np.float64) - expected) / step
        difference = np.where(np.isfinite(difference), difference, MAX_PRODUCT_STEPS).clip(max=MAX_PRODUCT_STEPS)
        equal = float((difference <= 0.5).mean()) if difference.size else 1.0
        if equal < MIN_EQUAL_SHARE and float((difference > FAR_CODES).mean()) > MAX_FAR_SHARE:
            cause = _random_cause(random_nodes) if random_nodes else _find_cause(optimized, unoptimized)
            return Departure(name, equal, round(float(difference.max())), *cause)
    return None


def match_calls(
    name: str, codes: Sequence[Tensor], quantizers: Mapping[str, str], outputs: Mapping[str, np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pair the calls of a stub with their tensors in the file, in order, by shape.

    If the exporter folds a padding into a convolution, the file quantizes only before the padding. The simulation
    also quantizes after it. That call, or a call of another shape, has no counterpart in the file.
    """
    remaining = [value.cpu().numpy() for value in codes]
    pairs = []
    for index in range(len(codes)):  # the exporter writes NAME/QuantizeLinear, NAME/QuantizeLinear_1, ...
        tensor = quantizers.get(f"{name}/QuantizeLinear" + (f"_{index}" if index else ""))
        array = None if tensor is None else outputs.get(tensor)
        if tensor is None or array is None:
            continue
        for position, call in enumerate(remaining):
            in_layout = to_model_layout(tensor, array, call.ndim)
            if call.shape == in_layout.shape:
                pairs.append((call, in_layout))
                remaining = remaining[position + 1 :]
                break
    return pairs


def _random_cause(random_nodes: Sequence[str]) -> tuple[str, str]:
    return (
        f"the model draws random numbers ({', '.join(random_nodes)}), and the runtime draws different ones",
        "Pass the random numbers to the model as an input, or do not draw them in eval mode",
    )


def _find_cause(optimized: Sequence[Agreement], unoptimized: Sequence[Agreement]) -> tuple[str, str]:
    """Return the probable cause and what to do about it."""
    is_optimization = worst_sqnr(unoptimized) > worst_sqnr(optimized) + CLEARLY_BETTER_DB
    if is_optimization and instruction_set() == "avx2":
        return SATURATION_CAUSE
    if is_optimization:
        return "an optimisation of the runtime changes the result", "Report it to the runtime, with the file"
    return "rounding differences that grow from layer to layer", "Nothing, if the accuracy of the file is good enough"


def predict_saturation(origin: Mapping[str, str], path: Path, has_quantizers: bool) -> str:
    """Return a warning if the file was made for VNNI or ARM and this is an x86 CPU without VNNI; "" otherwise.

    A file without activation quantizers (weight-only) does not saturate: its products are float.
    """
    made_for = {"vnni": "a CPU with VNNI", "arm": "an ARM CPU"}.get(origin.get("cpu", ""))
    if made_for is not None and instruction_set() == "avx2" and has_quantizers:
        cause, advice = SATURATION_CAUSE
        return f"{path.name} was made for {made_for}, but this CPU has no VNNI: {cause}. {advice}"
    return ""
