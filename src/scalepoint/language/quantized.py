"""What tuning left in its folder, as the quantized weights of a checkpoint: read a layer at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, fx

from scalepoint.checkpoints import Packed
from scalepoint.checkpoints.packed import outer_of
from scalepoint.checkpoints.skeleton import Weights
from scalepoint.numerics import E4M3
from scalepoint.quantize.stubs import QuantStub
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.spec import QuantizationSpec
from scalepoint.support.untrusted import open_tensors
from scalepoint.tuning.checkpoint import Checkpoint


@dataclass(frozen=True)
class _Place:
    """Where the codes of one weight are."""

    file: Path
    place: str  # of the layer in the model
    layer: QuantizedWeighted
    stub: tuple[str, QuantStub] | None  # on its input


class Codes(Mapping[str, Packed]):
    """By the names of the checkpoint; whatever is asked for is read then."""

    def __init__(self, model: fx.GraphModule, weights: Weights, kept: Checkpoint) -> None:
        files = {place: file for file, places in kept.places().items() for place in places}
        stubs = _stubs(model)
        self._places: dict[str, _Place] = {}
        for place, module in model.named_modules():
            if isinstance(module, QuantizedWeighted) and place in files:
                name = weights.name_of(module.weight)
                self._places[name] = _Place(files[place], place, module, stubs.get(place))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def specs(self) -> Iterator[tuple[QuantizationSpec, int]]:
        """The spec of every weight and its columns; no codes are read."""
        for place in self._places.values():
            yield place.layer.weight_quant.spec, int(place.layer.canonical(place.layer.weight).shape[1])

    def __getitem__(self, name: str) -> Packed:
        found = self._places[name]
        spec = found.layer.weight_quant.spec
        with open_tensors(found.file) as file:

            def stored(key: str) -> Tensor:
                return file.get_tensor(f"{found.place}|weight_quant.{key}").clone()  # type: ignore[no-any-return]

            codes, scale, zero = stored("chosen"), stored("scale"), stored("zero_point")
            least = stored("minval") if spec.qformulation == "minval" else None
        rows = len(codes)
        if least is not None:
            return Packed(codes, _by_row(scale, rows), spec, minval=_by_row(least, rows))
        scale, zero = _by_row(scale, rows), _by_row(zero, rows)
        is_plain = found.layer.weight_quant.quantizer.grid.format.is_float or not bool(zero.any())
        activation, activation_scale = None, None
        if found.stub is not None:
            activation, activation_scale = found.stub[1].spec, self._static(found)
        outer = outer_of(scale) if spec.scale_dtype == E4M3 else None
        return Packed(codes, scale, spec, None if is_plain else zero, activation, activation_scale, outer)

    def _static(self, found: _Place) -> Tensor | None:
        """The scale of its input that does not change from run to run: its own, or that of all blocks."""
        if found.stub is None:
            return None
        place, stub = found.stub
        key = "calculator.tensor_scale" if stub.calculator.always_called else "scale"
        with open_tensors(found.file) as file:
            names = [name for name in file.keys() if name.startswith(f"{place}|") and name.endswith(key)]  # noqa: SIM118
            return file.get_tensor(names[0]).clone() if names else None


def _by_row(value: Tensor, rows: int) -> Tensor:
    """As (out, blocks)."""
    return value.reshape(-1, 1).expand(rows, 1).clone() if value.ndim < 2 else value.reshape(rows, -1)


def _stubs(model: fx.GraphModule) -> dict[str, tuple[str, QuantStub]]:
    """Layer -> the quantizer on its input, by place."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, tuple[str, QuantStub]] = {}
    for node in model.graph.nodes:
        if node.op != "call_module" or not node.all_input_nodes:
            continue
        before = node.all_input_nodes[0]
        stub = model.get_submodule(str(before.target)) if before.op == "call_module" else None
        if isinstance(stub, QuantStub):
            for part in getattr(model.get_submodule(str(node.target)), "parts", {}).values():
                if isinstance(part, QuantizedWeighted):
                    found[names[id(part)]] = (str(before.target), stub)
    return found
