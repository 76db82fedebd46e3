"""The form that is exported: quantized weights as their codes, biases as the target stores them, quantizers as Q/DQ."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from scalepoint.errors import ExportError
from scalepoint.formats.attention import copy_after_masked_attention, scale_before_quantizing
from scalepoint.formats.float32 import convert_to_float32, needs_float32
from scalepoint.graph.captured_module import code_generation_paused
from scalepoint.graph.kinds import MODULE_KINDS
from scalepoint.numerics import QParams
from scalepoint.patterns import Fused
from scalepoint.patterns.language import place_of
from scalepoint.quantize.outliers import Factors
from scalepoint.quantize.stubs import Quantizing, QuantStub, held_as
from scalepoint.quantize.weighted import QuantizedWeighted


@dataclass(frozen=True)
class ModuleFactories:
    """What a file format makes of a quantized layer, of a stub (with the factor of attention.py that goes into its
    scale), and of a layer in float."""

    weight: Callable[[QuantizedWeighted], nn.Module]
    stub: Callable[[QuantStub, float], nn.Module]
    float_layer: Callable[[QuantizedWeighted], nn.Module]


def build_stored_graph(
    model: fx.GraphModule, factories: ModuleFactories, float_dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """A copy whose weights are codes, for scales that are stored in `float_dtype`."""
    check_is_calibrated(model)
    is_rounded = float_dtype != torch.float32
    copied = _copy_for_export(model, has_own_scales=is_rounded)
    if is_rounded:
        _round_scales(copied, float_dtype)
    stored = _remove_unit_factors(_replace_layers(copied, factories.weight, factories.float_layer))
    factors = scale_before_quantizing(stored)
    for name, module in list(stored.named_modules()):
        if isinstance(module, QuantStub) and module.enabled and not module.quantizer.is_disabled():
            parent, _, leaf = name.rpartition(".")
            setattr(stored.get_submodule(parent), leaf, factories.stub(module, factors.get(name, 1.0)))
    stored.recompile()
    return convert_to_float32(stored) if needs_float32(model) else stored


def build_float_graph(model: fx.GraphModule, factories: ModuleFactories) -> fx.GraphModule:
    """A copy without quantizers."""
    float_model = _remove_unit_factors(
        _replace_layers(_copy_for_export(model), factories.float_layer, factories.float_layer)
    )
    for node in list(float_model.graph.nodes):
        if node.op == "call_module" and isinstance(float_model.get_submodule(str(node.target)), QuantStub):
            node.replace_all_uses_with(node.args[0])
            float_model.graph.erase_node(node)
    float_model.recompile()
    return convert_to_float32(float_model) if needs_float32(model) else float_model


def _remove_unit_factors(model: fx.GraphModule) -> fx.GraphModule:
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


def _replace_layers(
    model: fx.GraphModule,
    quantized_layer: Callable[[QuantizedWeighted], nn.Module],
    float_layer: Callable[[QuantizedWeighted], nn.Module],
) -> fx.GraphModule:
    replacements: dict[int, nn.Module] = {}
    with torch.no_grad():
        for fused in model.modules():
            if not isinstance(fused, Fused):
                continue
            for role, part in fused.parts.items():
                if isinstance(part, QuantizedWeighted):
                    if id(part) not in replacements:
                        is_disabled = part.weight_quant.quantizer.is_disabled()
                        replacements[id(part)] = (float_layer if is_disabled else quantized_layer)(part).eval()
                        fused.add_module(f"stored_{role}", replacements[id(part)])
                    fused.parts[role] = replacements[id(part)]
    copy_after_masked_attention(model)
    for node in model.graph.nodes:  # torch.export names what it records after this
        path = place_of(node) if node.op != "call_module" else str(node.target)
        node.meta["nn_module_stack"] = {path: (path, nn.Module)} if node.op.startswith("call") else {}
    return model


def _copy_for_export(model: fx.GraphModule, has_own_scales: bool = False) -> fx.GraphModule:
    """A copy on the CPU in eval mode; what is there already and is only read is shared."""
    is_on_device = any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers()))
    shared = [] if is_on_device or needs_float32(model) else _list_shareable(model, has_own_scales)
    shared += model.meta.values()  # what is known of the model
    try:
        with code_generation_paused():  # the forms change the graph
            copied: fx.GraphModule = copy.deepcopy(model, {id(value): value for value in shared})
    except RuntimeError as error:
        if "data pointer" not in str(error):
            raise
        raise ExportError(
            "the graph holds a constant without values, which the model's forward made while it was captured: leave "
            "the submodule that makes it, leave=[...]"
        ) from error
    if any(module.training for module in copied.modules()):
        copied.eval()
    return copied.cpu() if is_on_device else copied


def _list_shareable(model: fx.GraphModule, has_own_scales: bool) -> list[Any]:
    """Parameters; of a model in eval mode also buffers, the quantizers that stored forms take the place of, and plain
    layers of torch, which nobody changes."""
    shareable: list[Any] = list(model.parameters())
    if has_own_scales or any(module.training for module in model.modules()):
        return shareable
    shareable += model.buffers()
    for module in model.modules():
        if isinstance(module, QuantStub | QuantizedWeighted):
            holds_stub = any(isinstance(part, QuantStub) for part in module.modules() if part is not module)
            shareable += [] if holds_stub else [module]
        elif type(module) in MODULE_KINDS and not module._modules:
            shareable.append(module)
    return shareable


def check_is_calibrated(model: fx.GraphModule) -> None:
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
