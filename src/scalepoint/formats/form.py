"""The form that is exported: quantized weights as their codes, biases as the target stores them, quantizers as Q/DQ."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from scalepoint.errors import ExportError
from scalepoint.formats.attention import lay_out, scale_before_quantizing
from scalepoint.formats.single import needs_single, use_single
from scalepoint.graph.captured_module import code_generation_paused
from scalepoint.graph.kinds import MODULE_KINDS
from scalepoint.numerics import QParams
from scalepoint.patterns import Fused
from scalepoint.patterns.language import place_of
from scalepoint.quantize.outliers import Factors
from scalepoint.quantize.stubs import Quantizing, QuantStub, held_as
from scalepoint.quantize.weighted import QuantizedWeighted


@dataclass(frozen=True)
class Parts:
    """What a file format makes of a quantized layer, of a stub (with the factor of attention.py that goes into its
    scale), and of a layer in float."""

    weight: Callable[[QuantizedWeighted], nn.Module]
    stub: Callable[[QuantStub, float], nn.Module]
    plain: Callable[[QuantizedWeighted], nn.Module]


def stored_form(model: fx.GraphModule, parts: Parts, float_dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """A copy whose weights are codes, for scales that are stored in `float_dtype`."""
    check_ready(model)
    is_rounded = float_dtype != torch.float32
    twin = _twin(model, has_own_scales=is_rounded)
    if is_rounded:
        _round_scales(twin, float_dtype)
    stored = _without_idle_factors(_replaced(twin, parts.weight, parts.plain))
    factors = scale_before_quantizing(stored)
    for name, module in list(stored.named_modules()):
        if isinstance(module, QuantStub) and module.enabled and not module.quantizer.is_disabled():
            parent, _, leaf = name.rpartition(".")
            setattr(stored.get_submodule(parent), leaf, parts.stub(module, factors.get(name, 1.0)))
    stored.recompile()
    return use_single(stored) if needs_single(model) else stored


def float_form(model: fx.GraphModule, parts: Parts) -> fx.GraphModule:
    """A copy without quantizers."""
    plain = _without_idle_factors(_replaced(_twin(model), parts.plain, parts.plain))
    for node in list(plain.graph.nodes):
        if node.op == "call_module" and isinstance(plain.get_submodule(str(node.target)), QuantStub):
            node.replace_all_uses_with(node.args[0])
            plain.graph.erase_node(node)
    plain.recompile()
    return use_single(plain) if needs_single(model) else plain


def _without_idle_factors(model: fx.GraphModule) -> fx.GraphModule:
    """Factors that calibration left at one are no operation. The graph alone, not its code."""
    for node in list(model.graph.nodes):
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Factors) and bool((module.weight == 1).all()):
            node.replace_all_uses_with(node.args[0])
            model.graph.erase_node(node)
    return model


def _round_scales(model: fx.GraphModule, dtype: torch.dtype) -> None:
    """To what the file can hold, before codes are made with them; never to zero."""
    for module in model.modules():
        if isinstance(module, Quantizing) and module.spec.scale_dtype is None:
            least = None if module.minval is None else module.minval.to(dtype).to(torch.float32)
            module.take(QParams(held_as(module.scale, dtype), None, least))


def _replaced(
    twin: fx.GraphModule,
    kind: Callable[[QuantizedWeighted], nn.Module],
    plain: Callable[[QuantizedWeighted], nn.Module],
) -> fx.GraphModule:
    made: dict[int, nn.Module] = {}
    with torch.no_grad():
        for fused in twin.modules():
            if not isinstance(fused, Fused):
                continue
            for role, part in fused.parts.items():
                if isinstance(part, QuantizedWeighted):
                    if id(part) not in made:
                        gave_up = part.weight_quant.quantizer.is_disabled()
                        made[id(part)] = (plain if gave_up else kind)(part).eval()
                        fused.add_module(f"stored_{role}", made[id(part)])
                    fused.parts[role] = made[id(part)]
    lay_out(twin)
    for node in twin.graph.nodes:  # torch.export names what it records after this
        path = place_of(node) if node.op != "call_module" else str(node.target)
        node.meta["nn_module_stack"] = {path: (path, nn.Module)} if node.op.startswith("call") else {}
    return twin


def _twin(model: fx.GraphModule, has_own_scales: bool = False) -> fx.GraphModule:
    """A copy on the CPU in eval mode; what is there already and is only read is shared."""
    is_elsewhere = any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers()))
    shared = [] if is_elsewhere or needs_single(model) else _shared(model, has_own_scales)
    shared += model.meta.values()  # what is known of the model
    try:
        with code_generation_paused():  # the forms change the graph
            twin: fx.GraphModule = copy.deepcopy(model, {id(each): each for each in shared})
    except RuntimeError as error:
        if "data pointer" not in str(error):
            raise
        raise ExportError(
            "the graph holds a constant without values, which the model's forward made while it was captured: leave "
            "the submodule that makes it, leave=[...]"
        ) from error
    if any(module.training for module in twin.modules()):
        twin.eval()
    return twin.cpu() if is_elsewhere else twin


def _shared(model: fx.GraphModule, has_own_scales: bool) -> list[Any]:
    """Parameters; of a model in eval mode also buffers, the quantizers that stored forms take the place of, and plain
    layers of torch, which nobody changes."""
    found: list[Any] = list(model.parameters())
    if has_own_scales or any(module.training for module in model.modules()):
        return found
    found += model.buffers()
    for module in model.modules():
        if isinstance(module, QuantStub | QuantizedWeighted):
            holds_stub = any(isinstance(each, QuantStub) for each in module.modules() if each is not module)
            found += [] if holds_stub else [module]
        elif type(module) in MODULE_KINDS and not module._modules:
            found.append(module)
    return found


def check_ready(model: fx.GraphModule) -> None:
    """Never a float model in disguise: everything calibrated, switched on and frozen."""
    stubs = {name: module for name, module in model.named_modules() if isinstance(module, QuantStub)}
    weights = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeighted)}
    if not stubs and not weights:
        raise ExportError("this model has no quantizers: export what insert_qdq made")
    faults = [
        (name, "was never calibrated: calibrate(model, data) first")
        for name, stub in stubs.items()
        if not stub.has_observed and not stub.skipped_because
    ]
    faults += [
        (name, "is switched off: enable_fake_quant(model) first")
        for name, stub in stubs.items()
        if stub.has_observed and not stub.enabled and not stub.skipped_because
    ]
    faults += [
        (name, "has a weight that is not fake-quantized: enable_fake_quant(model) first")
        for name, weighted in weights.items()
        if not weighted.weight_quant.enabled
    ]
    faults += [
        (name, "has a live weight scale: freeze(model) first, or calibrate(..., freeze_weights=True)")
        for name, weighted in weights.items()
        if weighted.weight_quant.enabled and not weighted.weight_quant.frozen
    ]
    if faults:
        name, why = faults[0]
        raise ExportError(f"{name} {why} ({len(faults)} like it)")
