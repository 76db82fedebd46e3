"""Builds the graphs that are exported.

build_stored_graph   weights are integer codes, biases are stored as the target needs them, quantizers are Q/DQ pairs
build_float_graph    the model without quantizers, for the float file

A format provides the modules of the stored graph (ModuleFactories).
"""

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
from scalepoint.patterns.language import get_layer_name
from scalepoint.quantize.outlier_scaling import ChannelFactors
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub, round_to_dtype
from scalepoint.quantize.record import is_float_for_speed


@dataclass(frozen=True)
class ModuleFactories:
    """Functions of a file format that build the modules of the stored graph.

    `weight` builds a quantized layer. `stub` builds a quantizer of activations; its second argument is a factor for the
    scale (see attention.py). `float_layer` builds a layer in float.
    """

    weight: Callable[[QuantizedLayer], nn.Module]
    stub: Callable[[QuantStub, float], nn.Module]
    float_layer: Callable[[QuantizedLayer], nn.Module]


def build_stored_graph(
    model: fx.GraphModule, factories: ModuleFactories, float_dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """Return a copy of the model with stored codes. Scales are rounded to `float_dtype` first."""
    check_is_calibrated(model)
    rounds_scales = float_dtype != torch.float32
    model_copy = _copy_for_export(model, changes_scales=rounds_scales)
    if rounds_scales:
        _round_scales(model_copy, float_dtype)
    stored = _remove_unit_factors(_replace_layers(model_copy, factories.weight, factories.float_layer))
    factors = scale_before_quantizing(stored)  # quantizers of attention queries; the scale of all others stays
    for name, module in list(stored.named_modules()):
        if isinstance(module, QuantStub) and module.enabled and not module.quantizer.is_disabled():
            parent, _, leaf = name.rpartition(".")
            setattr(stored.get_submodule(parent), leaf, factories.stub(module, factors.get(name, 1.0)))
    stored.recompile()
    return convert_to_float32(stored) if needs_float32(model) else stored


def build_float_graph(model: fx.GraphModule, factories: ModuleFactories) -> fx.GraphModule:
    """Return a copy of the model without quantizers."""
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
    """Remove channel factors that are all 1 from the graph. The caller recompiles."""
    for node in list(model.graph.nodes):
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, ChannelFactors) and bool((module.weight == 1).all()):
            node.replace_all_uses_with(node.args[0])
            model.graph.erase_node(node)
    return model


def _round_scales(model: fx.GraphModule, dtype: torch.dtype) -> None:
    """Round scales and minima to `dtype` before codes are computed with them. No scale becomes zero."""
    for module in model.modules():
        if isinstance(module, QuantizerBase) and module.spec.scale_dtype is None:
            minval = None if module.minval is None else module.minval.to(dtype).to(torch.float32)
            # None: the zero point stays.
            module.set_parameters(QParams(round_to_dtype(module.scale, dtype), zero_point=None, minval=minval))


def _replace_layers(
    model: fx.GraphModule,
    quantized_layer: Callable[[QuantizedLayer], nn.Module],
    float_layer: Callable[[QuantizedLayer], nn.Module],
) -> fx.GraphModule:
    """Replace the layers of a copied model in place. A layer that several groups share gets one replacement."""
    replacements: dict[int, nn.Module] = {}
    with torch.no_grad():
        for fused in model.modules():
            if not isinstance(fused, Fused):
                continue
            for role, part in fused.parts.items():
                if isinstance(part, QuantizedLayer):
                    if id(part) not in replacements:
                        is_disabled = part.weight_quant.quantizer.is_disabled()
                        replacements[id(part)] = (float_layer if is_disabled else quantized_layer)(part).eval()
                        fused.add_module(f"stored_{role}", replacements[id(part)])
                    fused.parts[role] = replacements[id(part)]
    copy_after_masked_attention(model)
    for node in model.graph.nodes:  # torch.export names its nodes after nn_module_stack
        path = get_layer_name(node) if node.op != "call_module" else str(node.target)
        node.meta["nn_module_stack"] = {path: (path, nn.Module)} if node.op.startswith("call") else {}
    return model


def _copy_for_export(model: fx.GraphModule, changes_scales: bool = False) -> fx.GraphModule:
    """Return a copy on the CPU in eval mode, which shares what the export only reads with the model."""
    is_on_device = any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers()))
    shared = [] if is_on_device or needs_float32(model) else _list_shareable(model, changes_scales)
    shared += model.meta.values()
    try:
        with code_generation_paused():  # the graph is changed before it runs
            model_copy: fx.GraphModule = copy.deepcopy(model, {id(value): value for value in shared})
    except RuntimeError as error:
        # torch 2.13: "Cannot access data pointer of Tensor that doesn't have storage", from a fake tensor in the graph.
        if "data pointer" not in str(error):
            raise
        raise ExportError(
            "the graph contains a constant without values, which the model's forward created during the capture: leave "
            "the submodule that creates it as it is, with leave=[...]"
        ) from error
    if any(module.training for module in model_copy.modules()):
        model_copy.eval()
    return model_copy.cpu() if is_on_device else model_copy


def _list_shareable(model: fx.GraphModule, changes_scales: bool) -> list[Any]:
    """List objects that a copy can share with the model.

    These are its parameters; in eval mode also buffers, quantizers that stored modules replace, and plain torch layers.
    """
    shareable: list[Any] = list(model.parameters())
    if changes_scales or any(module.training for module in model.modules()):
        return shareable
    shareable += model.buffers()
    for module in model.modules():
        if isinstance(module, QuantStub | QuantizedLayer):
            contains_stub = any(isinstance(part, QuantStub) for part in module.modules() if part is not module)
            shareable += [] if contains_stub else [module]
        elif type(module) in MODULE_KINDS and not module._modules:
            shareable.append(module)
    return shareable


def check_is_calibrated(model: fx.GraphModule) -> None:
    """Raise ExportError unless all quantizers are calibrated, enabled and frozen; the file would be partly float."""
    stubs = {name: module for name, module in model.named_modules() if isinstance(module, QuantStub)}
    weights = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    if not stubs and not weights:
        if is_float_for_speed(model):
            return
        raise ExportError("this model has no quantizers: export a model that insert_qdq returned")
    problems = [
        (name, "was never calibrated: calibrate(model, data) first")
        for name, stub in stubs.items()
        if not stub.has_observed and not stub.skip_reason
    ]
    problems += [
        (name, "is disabled: enable_fake_quant(model) first")
        for name, stub in stubs.items()
        if stub.has_observed and not stub.enabled and not stub.skip_reason
    ]
    problems += [
        (name, "has a weight that is not fake-quantized: enable_fake_quant(model) first")
        for name, weighted in weights.items()
        if not weighted.weight_quant.enabled
    ]
    problems += [
        (name, "has a weight scale that is not frozen: freeze(model) first, or calibrate(..., freeze_weights=True)")
        for name, weighted in weights.items()
        if weighted.weight_quant.enabled and not weighted.weight_quant.frozen
    ]
    if problems:
        name, reason = problems[0]
        raise ExportError(f"{name} {reason} ({len(problems)} such modules)")
