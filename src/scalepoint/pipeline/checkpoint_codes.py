"""Connects tuning with the file formats of checkpoints.

TunedCodes               the codes and scales that tuning stored, by the tensor names of the checkpoint
find_unstorable_layers   layers whose weights the format stores only as floats
find_rounding            how scales and minima are rounded to values that the format can store
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, fx

from scalepoint.checkpoints import QuantizedWeight
from scalepoint.checkpoints.quantized import outer_scale
from scalepoint.checkpoints.skeleton import CheckpointWeights
from scalepoint.formats.checkpoint import RoundScales, RoundScalesAndMinima
from scalepoint.numerics import E4M3, QParams
from scalepoint.patterns import Fused
from scalepoint.pipeline.checkpoint_job import CheckpointJob
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import QuantizationSpec
from scalepoint.support.untrusted import open_tensors
from scalepoint.transformation import TransformationResult
from scalepoint.tuning.checkpoint import Checkpoint


@dataclass(frozen=True)
class _StoredLayer:
    """The file that contains the codes of one weight, and the layer that they belong to."""

    file: Path
    module_path: str
    layer: QuantizedLayer
    input_stub: tuple[str, QuantStub] | None  # module path and quantizer of the layer's input


class TunedCodes(Mapping[str, QuantizedWeight]):
    """Quantized weights by the tensor names of the checkpoint. A weight is read from its file on access."""

    def __init__(self, model: fx.GraphModule, weights: CheckpointWeights, tuned: Checkpoint) -> None:
        files = {path: file for file, module_paths in tuned.modules_by_file().items() for path in module_paths}
        stubs = _input_stubs(model)
        self._layers: dict[str, _StoredLayer] = {}
        for path, module in model.named_modules():
            if isinstance(module, QuantizedLayer) and path in files:
                name = weights.name_of(module.weight)
                self._layers[name] = _StoredLayer(files[path], path, module, stubs.get(path))

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def specs(self) -> Iterator[tuple[QuantizationSpec, int]]:
        """Yield the spec and the number of columns of every weight. No codes are read."""
        for stored in self._layers.values():
            yield stored.layer.weight_quant.spec, int(stored.layer.to_output_first(stored.layer.weight).shape[1])

    def __getitem__(self, name: str) -> QuantizedWeight:
        stored = self._layers[name]
        spec = stored.layer.weight_quant.spec
        with open_tensors(stored.file) as file:

            def read(key: str) -> Tensor:
                return file.get_tensor(f"{stored.module_path}|weight_quant.{key}").clone()  # type: ignore[no-any-return]

            codes, scale, zero_point = read("chosen"), read("scale"), read("zero_point")
            minval = read("minval") if spec.qformulation == "minval" else None
        rows = len(codes)
        if minval is not None:
            return QuantizedWeight(codes, _by_row(scale, rows), spec, minval=_by_row(minval, rows))
        scale, zero_point = _by_row(scale, rows), _by_row(zero_point, rows)
        is_float = stored.layer.weight_quant.quantizer.grid.format.is_float
        return QuantizedWeight(
            codes,
            scale,
            spec,
            zero_point=zero_point if not is_float and bool(zero_point.any()) else None,
            activation=None if stored.input_stub is None else stored.input_stub[1].spec,
            activation_scale=_static_input_scale(stored),
            outer_scale=outer_scale(scale) if spec.scale_dtype == E4M3 else None,
        )


def _static_input_scale(stored: _StoredLayer) -> Tensor | None:
    """Return the calibrated scale of the layer's input, or the scale shared by its blocks; None if it has none."""
    if stored.input_stub is None:
        return None
    path, stub = stored.input_stub
    # A dynamic quantizer has no stored scale; NVFP4 stores the one that all its blocks share.
    key = "calculator.tensor_scale" if stub.calculator.always_called else "scale"
    with open_tensors(stored.file) as file:
        names = [name for name in file.keys() if name.startswith(f"{path}|") and name.endswith(key)]  # noqa: SIM118
        return file.get_tensor(names[0]).clone() if names else None


def _by_row(value: Tensor, rows: int) -> Tensor:
    """Reshape parameters to (rows, blocks)."""
    return value.reshape(-1, 1).expand(rows, 1).clone() if value.ndim < 2 else value.reshape(rows, -1)


def _input_stubs(model: fx.GraphModule) -> dict[str, tuple[str, QuantStub]]:
    """Return path and quantizer of the input of each layer, by the path of the layer."""
    paths = {id(module): path for path, module in model.named_modules()}
    stubs: dict[str, tuple[str, QuantStub]] = {}
    for node in model.graph.nodes:
        if node.op != "call_module" or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        stub = model.get_submodule(str(source.target)) if source.op == "call_module" else None
        if isinstance(stub, QuantStub):
            for part in getattr(model.get_submodule(str(node.target)), "parts", {}).values():
                if isinstance(part, QuantizedLayer):
                    stubs[paths[id(part)]] = (str(source.target), stub)
    return stubs


def find_unstorable_layers(job: CheckpointJob, plan: TransformationResult, weights: CheckpointWeights) -> list[str]:
    """Return the names of layers whose weights the format stores only as floats, such as routers of experts."""
    names = []
    for match in plan.matches:
        fused = plan.model.get_submodule(match.fused) if match.apply and match.fused else None
        weight = fused.weight if isinstance(fused, Fused) else None
        name = None if weight is None else weights.names.get(weight.data_ptr())
        if name is not None and not job.format.can_quantize(job.source, name):
            names.append(match.name)
    return names


def find_rounding(
    job: CheckpointJob, layer: QuantizedLayer, weights: CheckpointWeights
) -> Callable[[QParams], QParams] | None:
    """Return the function that rounds a layer's scales to values of the format; None if it stores every float32."""
    quantizer = layer.weight_quant
    if quantizer.quantizer.grid.format.is_float:  # the spec declares the dtype of these scales
        return _round_to_two_levels if quantizer.spec.scale_dtype == E4M3 else None
    columns = layer.to_output_first(layer.weight).shape[1]
    dtype = job.format.scale_dtype or job.source.tensors[weights.name_of(layer.weight)].dtype
    if quantizer.spec.qformulation == "minval" and job.format.round_scales_and_minima is not None:
        return partial(_round_scales_and_minima, job.format.round_scales_and_minima, quantizer.spec, columns)
    if job.format.round_scales is not None:
        return partial(_round_scales, job.format.round_scales, quantizer.spec, columns, dtype)
    return None if dtype == torch.float32 else partial(_round_to_dtype, dtype)


def _round_to_two_levels(qparams: QParams) -> QParams:
    """Round block scales to float8_e4m3fn times a power of two.

    Loaders divide by the reciprocal of the outer scale; the reciprocal of a power of two is exact.
    """
    outer = outer_scale(qparams.scale)
    inner = (qparams.scale / outer).clamp(min=torch.finfo(E4M3).smallest_normal / 8).to(E4M3)
    return qparams._replace(scale=inner.to(torch.float32) * outer)


def _round_to_dtype(dtype: torch.dtype, qparams: QParams) -> QParams:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    return qparams._replace(scale=qparams.scale.clamp(smallest, info.max).to(dtype).to(torch.float32))


def _round_scales_and_minima(
    round_values: RoundScalesAndMinima, spec: QuantizationSpec, columns: int, qparams: QParams
) -> QParams:
    """Round scales and minima of blocks, or of rows, to the format's values."""
    scale, minval = qparams.scale, qparams.minval
    if minval is None:
        return qparams
    rows = scale.shape[0] if scale.ndim else 1
    new_scale, new_minval = round_values(spec, columns, scale.reshape(rows, -1), minval.reshape(rows, -1))
    return qparams._replace(scale=new_scale.reshape(scale.shape), minval=new_minval.reshape(minval.shape))


def _round_scales(
    round_values: RoundScales, spec: QuantizationSpec, columns: int, dtype: torch.dtype, qparams: QParams
) -> QParams:
    """Round block scales to the format's values, and scales per row or per tensor to `dtype`."""
    if qparams.scale.ndim != 2:
        return _round_to_dtype(dtype, qparams)
    return qparams._replace(scale=round_values(spec, columns, qparams.scale))
