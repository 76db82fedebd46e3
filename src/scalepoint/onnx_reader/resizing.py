"""Resize, Upsample and GridSample."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scalepoint.onnx_reader.operators import Node, operator, require
from scalepoint.onnx_reader.values import Value, as_list, check_size

# Where an output position lies in the input: (output position, scale, input size, output size) -> input position
_COORDINATES: dict[str, Callable[[Tensor, float, int, int], Tensor]] = {
    "asymmetric": lambda p, scale, size, new: p / scale,
    "half_pixel": lambda p, scale, size, new: (p + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda p, scale, size, new: (p + 0.5) / scale - 0.5 if new > 1 else torch.zeros_like(p),
    "align_corners": lambda p, scale, size, new: p * (size - 1) / (new - 1) if new > 1 else torch.zeros_like(p),
    "half_pixel_symmetric": lambda p, scale, size, new: (p + 0.5) / scale - 0.5 + size / 2 * (1 - new / (scale * size)),
}
_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round_prefer_floor": lambda p: torch.ceil(p - 0.5),
    "round_prefer_ceil": lambda p: torch.floor(p + 0.5),
}
# torch's names of the modes for 1, 2 and 3 spatial axes; "" if there is none
_TORCH_MODES = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}


class AxisChange(NamedTuple):
    """How a Resize changes one axis: by a scale or to a size. The other one is None."""

    scale: Any
    size: Any


def _list_changes(node: Node, x: Tensor, scales: Value | None, sizes: Value | None) -> dict[int, AxisChange]:
    """Return the change of each axis that does not stay as it is."""
    axes = [axis % x.ndim for axis in node.get("axes", range(x.ndim))]
    if sizes is not None and (new_sizes := as_list(sizes, "sizes")):
        new_sizes = _keep_aspect_ratio(node, x, axes, new_sizes)
        pairs = zip(axes, new_sizes, strict=True)
        return {axis: AxisChange(None, size) for axis, size in pairs if size != x.shape[axis]}
    factors = node.get("scales") if scales is None else as_list(scales, "scales")
    require(bool(factors), "a Resize without scales and sizes")
    return {axis: AxisChange(scale, None) for axis, scale in zip(axes, factors, strict=True) if scale != 1}


def _keep_aspect_ratio(node: Node, x: Tensor, axes: Sequence[int], sizes: Sequence[Any]) -> list[Any]:
    """Return the sizes; with keep_aspect_ratio_policy all axes have the same scale."""
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return list(sizes)
    ratios = [size / x.shape[axis] for size, axis in zip(sizes, axes, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(ratio * x.shape[axis] + 0.5) for axis in axes]


@operator("Upsample", known_inputs=(1,))
def upsample(node: Node, x: Tensor, scales: Value | None = None) -> Tensor:
    return _resize(node, x, scales, sizes=None, coordinates="asymmetric", rounding="floor")


@operator("Resize", known_inputs=(1, 2, 3))
def resize(node: Node, x: Tensor, *rest: Value | None) -> Tensor:
    if node.opset < 11:
        return _resize(node, x, scales=rest[0], sizes=None, coordinates="asymmetric", rounding="floor")
    _, scales, sizes = (*rest, None, None, None)[:3]
    coordinates = node.get("coordinate_transformation_mode", "half_pixel")
    return _resize(node, x, scales, sizes, coordinates, node.get("nearest_mode", "round_prefer_floor"))


def _resize(
    node: Node, x: Tensor, scales: Value | None, sizes: Value | None, coordinates: str, rounding: str
) -> Tensor:
    """Resize with torch's interpolate if it computes the same, else axis by axis with the formula of ONNX."""
    changes = _list_changes(node, x, scales, sizes)
    mode = node.get("mode", "nearest")
    require(coordinates in _COORDINATES, f"a Resize with {coordinates}")
    if coordinates == "align_corners":  # for other scales ONNX Runtime differs from ONNX's reference implementation
        is_whole = all(
            change.scale is None or float(change.scale * x.shape[axis]).is_integer() for axis, change in changes.items()
        )
        require(is_whole, "a Resize with align_corners to a size that is not whole")
    if not changes:
        return x
    has_special_weights = node.get("exclude_outside", 0) or node.get("antialias", 0)
    if not has_special_weights and set(changes) <= {2, 3, 4} and 3 <= x.ndim <= 5:
        result = _interpolate(node, x, changes, mode, coordinates, rounding)
        if result is not None:
            return result
    for axis, change in changes.items():
        x = _resize_axis(node, x, axis, change, mode, coordinates, rounding)
    return x


def _interpolate(
    node: Node, x: Tensor, changes: Mapping[int, AxisChange], mode: str, coordinates: str, rounding: str
) -> Tensor | None:
    """Resize all spatial axes with torch's interpolate if it computes the same, else return None."""
    spatial_axes = range(2, x.ndim)
    scales = [changes[axis].scale if axis in changes else 1.0 for axis in spatial_axes]
    has_scales = all(scale is not None for scale in scales)
    has_free_axis = any(isinstance(x.shape[axis], torch.SymInt) for axis in spatial_axes)
    sizes: list[Any] | None
    if not has_scales:
        sizes = [changes[axis].size if axis in changes else x.shape[axis] for axis in spatial_axes]
    elif has_free_axis:
        sizes = None  # torch computes them from the scales
    else:
        sizes = [math.floor(x.shape[axis] * scale) for axis, scale in zip(spatial_axes, scales, strict=True)]
    target: dict[str, Any]
    if sizes is None:
        target = {"scale_factor": [float(scale) for scale in scales]}
    else:
        check_size([*x.shape[:2], *sizes])
        target = {"size": sizes}
    has_whole_scales = has_scales and all(float(scale).is_integer() for scale in scales)
    is_half_pixel = coordinates in ("half_pixel", "pytorch_half_pixel")
    if mode == "nearest":
        if sizes is not None and not has_whole_scales and not _are_multiples(sizes, x.shape[2:]):
            return None  # torch rounds positions differently
        is_torch_rounding = coordinates == "asymmetric" and rounding == "floor"
        # With these settings the nearest input of output p is floor(p / scale), as in torch.
        has_same_nearest = has_whole_scales and (
            (is_half_pixel and rounding.startswith("round_")) or (rounding == "round_prefer_floor" and max(scales) <= 2)
        )
        if not is_torch_rounding and not has_same_nearest:
            return None
        return F.interpolate(x, mode="nearest", **target)
    torch_mode = _TORCH_MODES[mode][x.ndim - 3]
    if not torch_mode or (mode == "cubic" and node.get("cubic_coeff_a", -0.75) != -0.75):
        return None
    if coordinates == "align_corners" and sizes is not None and all(size != 1 for size in sizes):
        return F.interpolate(x, mode=torch_mode, align_corners=True, **target)
    # pytorch_half_pixel differs from torch where an axis gets the size 1.
    is_torch_half_pixel = is_half_pixel and not (coordinates == "pytorch_half_pixel" and sizes and 1 in sizes)
    if is_torch_half_pixel and (has_whole_scales or not has_scales):
        return F.interpolate(x, mode=torch_mode, align_corners=False, **target)
    return None


def _are_multiples(sizes: Sequence[Any], old_sizes: Sequence[Any]) -> bool:
    return all(
        isinstance(new, int) and isinstance(old, int) and new % old == 0
        for new, old in zip(sizes, old_sizes, strict=True)
    )


def _resize_axis(
    node: Node, x: Tensor, axis: int, change: AxisChange, mode: str, coordinates: str, rounding: str
) -> Tensor:
    """Resize one axis with the formula of ONNX: a weighted sum of input values for each output position."""
    old = x.shape[axis]
    new = math.floor(old * change.scale) if change.size is None else change.size
    require(isinstance(old, int) and isinstance(new, int), f"{mode} Resize with {coordinates} of a free axis")
    require(new > 0 and old > 0, "a Resize to or from no values")
    check_size([*x.shape[:axis], new, *x.shape[axis + 1 :]])
    scale = new / old if change.scale is None else change.scale
    positions = _COORDINATES[coordinates](torch.arange(new, dtype=torch.float64), scale, old, new)
    if mode == "nearest":
        return x.index_select(axis, _ROUNDINGS[rounding](positions).clamp(0, old - 1).long())
    sources, weights = _sources_and_weights(node, positions, mode, scale)
    if node.get("exclude_outside", 0):
        weights = torch.where((sources >= 0) & (sources < old), weights, 0.0)
    weights = weights / weights.sum(0)
    values = [x.index_select(axis, source.clamp(0, old - 1).long()) for source in sources]
    weight_shape = [1] * x.ndim
    weight_shape[axis] = new
    total = sum(value * weight.reshape(weight_shape).to(x.dtype) for value, weight in zip(values, weights, strict=True))
    return torch.as_tensor(total).to(x.dtype)


def _sources_and_weights(node: Node, positions: Tensor, mode: str, scale: float) -> tuple[Tensor, Tensor]:
    """Return the input positions that each output position reads, and their weights: both (reads, output positions)."""
    shrink = min(scale, 1.0) if node.get("antialias", 0) else 1.0  # antialias widens the filter when x gets smaller
    radius = math.ceil((1 if mode == "linear" else 2) / shrink)
    offsets = torch.arange(1 - radius, radius + 1, dtype=torch.float64).unsqueeze(1)
    sources = torch.floor(positions).unsqueeze(0) + offsets
    distance = (sources - positions).abs() * shrink
    if mode == "linear":
        return sources, (1 - distance).clamp(min=0)
    a = node.get("cubic_coeff_a", -0.75)
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
    return sources, torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))


@operator("GridSample")
def grid_sample(node: Node, x: Tensor, grid: Tensor) -> Tensor:
    onnx_mode = node.get("mode", "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(onnx_mode, onnx_mode)
    padding, corners = node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0))
    return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners)
