"""Builds the graphs that formats export from a quantized model. The model itself does not change.

    build_stored_graph   integer codes as weights, biases as the target needs them, Q/DQ pairs as quantizers
    build_float_graph    the model without quantizers, for the float file

Both copy the model and replace its layers and quantizers by modules of the format (ModuleFactories).
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
    stored = _copy_for_export(model, changes_scales=rounds_scales)
    if rounds_scales:
        _round_scales(stored, float_dtype)
    _replace_layers(stored, factories.weight, factories.float_layer)
    _prepare_nodes(stored)
    factors = scale_before_quantizing(stored)  # of quantizers of attention queries
    for name, module in list(stored.named_modules()):
        if isinstance(module, QuantStub) and module.enabled and not module.quantizer.is_disabled():
            stored.set_submodule(name, factories.stub(module, factors.get(name, 1.0)))
    stored.recompile()
    return convert_to_float32(stored) if needs_float32(model) else stored


def build_float_graph(model: fx.GraphModule, factories: ModuleFactories) -> fx.GraphModule:
    """Return a copy of the model without quantizers."""
    float_model = _copy_for_export(model)
    _replace_layers(float_model, factories.float_layer, factories.float_layer)
    _prepare_nodes(float_model)
    for node in list(float_model.graph.nodes):
        if node.op == "call_module" and isinstance(float_model.get_submodule(str(node.target)), QuantStub):
            _bypass(node)
    float_model.recompile()
    return convert_to_float32(float_model) if needs_float32(model) else float_model


def _bypass(node: fx.Node) -> None:
    """Remove a node; its readers read its first argument instead."""
    source: Any = node.args[0]
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


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
) -> None:
    """Replace the layers of a copied model in place."""
    replacements: dict[QuantizedLayer, nn.Module] = {}  # a layer that several groups share gets one
    with torch.no_grad():
        for fused in [module for module in model.modules() if isinstance(module, Fused)]:
            for role, layer in fused.parts.items():
                if not isinstance(layer, QuantizedLayer):
                    continue
                if layer not in replacements:
                    factory = float_layer if layer.weight_quant.quantizer.is_disabled() else quantized_layer
                    replacements[layer] = factory(layer).eval()
                    fused.add_module(f"stored_{role}", replacements[layer])
                fused.parts[role] = replacements[layer]


def _prepare_nodes(model: fx.GraphModule) -> None:
    """Prepare the graph of a copied model for torch.export, in place. The caller recompiles."""
    copy_after_masked_attention(model)
    for node in list(model.graph.nodes):
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, ChannelFactors) and bool((module.weight == 1).all()):
            _bypass(node)
        else:  # torch.export names its nodes after nn_module_stack
            path = get_layer_name(node) if node.op != "call_module" else str(node.target)
            node.meta["nn_module_stack"] = {path: (path, nn.Module)} if node.op.startswith("call") else {}


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
    stubs = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantStub)]
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLayer)]
    if not stubs and not layers:
        if is_float_for_speed(model):
            return
        raise ExportError("this model has no quantizers: export a model that insert_qdq returned")
    # Quantizers of activations come first: a model that was not calibrated has no frozen weights either.
    problems = [(name, problem) for name, module in (*stubs, *layers) if (problem := _find_problem(module))]
    if problems:
        name, problem = problems[0]
        raise ExportError(f"{name} {problem} ({len(problems)} such modules)")


def _find_problem(module: nn.Module) -> str:
    """Return why a quantizer or quantized layer cannot be exported; "" if it can."""
    if isinstance(module, QuantStub) and not module.skip_reason:
        if not module.has_observed:
            return "was never calibrated: calibrate(model, data) first"
        if not module.enabled:
            return "is disabled: enable_fake_quant(model) first"
    if isinstance(module, QuantizedLayer):
        if not module.weight_quant.enabled:
            return "has a weight that is not fake-quantized: enable_fake_quant(model) first"
        if not module.weight_quant.frozen:
            return "has a weight scale that is not frozen: freeze(model) first, or calibrate(..., freeze_weights=True)"
    return ""
