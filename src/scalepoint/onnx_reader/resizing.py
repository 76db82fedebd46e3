"""Resize, Upsample, GridSample and AffineGrid."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalepoint.onnx_reader.operators import Node, operator, require
from scalepoint.onnx_reader.values import Value, as_list, check_size

# Position in the input of an output position: (position, scale, input size, output size) -> position
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
_TORCH_MODES = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}


def _requested(
    node: Node, x: Tensor, scales: Value | None, sizes: Value | None
) -> tuple[list[int], list[Any], list[Any]]:
    """Return the axes, their scales and their new sizes; one of the two lists has None."""
    axes = [axis % x.ndim for axis in node.get("axes", range(x.ndim))]
    if sizes is not None and (new_sizes := as_list(sizes, "sizes")):
        return axes, [None] * len(axes), _keep_ratio(node, x, axes, new_sizes)
    factors = node.get("scales") if scales is None else as_list(scales, "scales")
    require(bool(factors), "a Resize without scales and sizes")
    return axes, list(factors), [None] * len(axes)


def _keep_ratio(node: Node, x: Tensor, axes: Sequence[int], sizes: Sequence[Any]) -> list[Any]:
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return list(sizes)
    ratios = [size / x.shape[axis] for size, axis in zip(sizes, axes, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(ratio * x.shape[axis] + 0.5) for axis in axes]


@operator("Upsample", known_inputs=(1,))
def upsample(node: Node, x: Tensor, scales: Value | None = None) -> Tensor:
    return _resize(node, x, scales, None, "asymmetric", "floor")


@operator("Resize", known_inputs=(1, 2, 3))
def resize(node: Node, x: Tensor, *rest: Value | None) -> Tensor:
    if node.opset < 11:
        return _resize(node, x, rest[0], None, "asymmetric", "floor")
    _, scales, sizes = (*rest, None, None, None)[:3]
    coordinates = node.get("coordinate_transformation_mode", "half_pixel")
    return _resize(node, x, scales, sizes, coordinates, node.get("nearest_mode", "round_prefer_floor"))


def _resize(
    node: Node, x: Tensor, scales: Value | None, sizes: Value | None, coordinates: str, rounding: str
) -> Tensor:
    axes, factors, new_sizes = _requested(node, x, scales, sizes)
    changes = {
        a: (f, s) for a, f, s in zip(axes, factors, new_sizes, strict=True) if f != 1 or (f is None and s != x.shape[a])
    }
    mode = node.get("mode", "nearest")
    require(coordinates in _COORDINATES, f"a Resize with {coordinates}")
    if coordinates == "align_corners":  # ONNX Runtime and the standard's reference differ for other scales
        is_whole = all(f is None or float(f * x.shape[a]).is_integer() for a, (f, _) in changes.items())
        require(is_whole, "a Resize with align_corners to a size that is not whole")
    is_plain = not node.get("exclude_outside", 0) and not node.get("antialias", 0) and set(changes) <= {2, 3, 4}
    if not changes:
        return x
    if is_plain and 3 <= x.ndim <= 5:
        result = _interpolate(node, x, changes, mode, coordinates, rounding)
        if result is not None:
            return result
    for axis, (factor, size) in changes.items():
        x = _resize_axis(node, x, axis, factor, size, mode, coordinates, rounding)
    return x


def _interpolate(
    node: Node, x: Tensor, changes: dict[int, tuple[Any, Any]], mode: str, coordinates: str, rounding: str
) -> Tensor | None:
    """Resize all spatial axes with torch's interpolate where it computes the same; else return None."""
    spatial = range(2, x.ndim)
    factors: list[Any] = [changes[axis][0] if axis in changes else 1.0 for axis in spatial]
    has_factors = all(factor is not None for factor in factors)
    if has_factors:
        size = (
            None
            if any(isinstance(x.shape[axis], torch.SymInt) for axis in spatial)
            else [math.floor(x.shape[axis] * factor) for axis, factor in zip(spatial, factors, strict=True)]
        )
    else:
        size = [changes[axis][1] if axis in changes else x.shape[axis] for axis in spatial]
    are_whole = has_factors and all(float(factor).is_integer() for factor in factors)
    if size is not None:
        check_size([*x.shape[:2], *size])
    where: dict[str, Any] = {"size": size} if size is not None else {"scale_factor": [float(f) for f in factors]}
    if mode == "nearest":
        is_same = (coordinates == "asymmetric" and rounding == "floor") or (
            are_whole
            and (
                coordinates in ("half_pixel", "pytorch_half_pixel")
                or (rounding == "round_prefer_floor" and max(factors) <= 2)
            )
        )
        if size is not None and not are_whole and not _divides(size, x.shape[2:]):
            is_same = False  # torch rounds positions in another way
        return F.interpolate(x, mode="nearest", **where) if is_same else None
    torch_mode = _TORCH_MODES[mode][x.ndim - 3]
    is_even = are_whole or (not has_factors)
    if not torch_mode or (mode == "cubic" and node.get("cubic_coeff_a", -0.75) != -0.75):
        return None
    if coordinates == "align_corners" and size is not None and all(s != 1 for s in size):
        return F.interpolate(x, mode=torch_mode, align_corners=True, **where)
    if (
        coordinates in ("half_pixel", "pytorch_half_pixel")
        and is_even
        and not (coordinates != "half_pixel" and size and 1 in size)
    ):
        return F.interpolate(x, mode=torch_mode, align_corners=False, **where)
    return None


def _divides(sizes: Sequence[Any], old_sizes: Sequence[Any]) -> bool:
    return all(
        isinstance(new, int) and isinstance(old, int) and new % old == 0
        for new, old in zip(sizes, old_sizes, strict=True)
    )


def _resize_axis(
    node: Node, x: Tensor, axis: int, factor: Any, size: Any, mode: str, coordinates: str, rounding: str
) -> Tensor:
    """Resize one axis by the definition: positions, weights, gather."""
    old = x.shape[axis]
    new = math.floor(old * factor) if size is None else size
    require(isinstance(old, int) and isinstance(new, int), f"{mode} Resize with {coordinates} of a free axis")
    require(new > 0 and old > 0, "a Resize to or from no values")
    check_size([*x.shape[:axis], new, *x.shape[axis + 1 :]])
    scale = new / old if factor is None else factor
    positions = _COORDINATES[coordinates](torch.arange(new, dtype=torch.float64), scale, old, new)
    if mode == "nearest":
        return x.index_select(axis, _ROUNDINGS[rounding](positions).clamp(0, old - 1).long())
    taps, weights = _taps(node, positions, mode, scale)
    if node.get("exclude_outside", 0):
        weights = torch.where((taps >= 0) & (taps < old), weights, 0.0)
    weights = weights / weights.sum(0)
    rows = [x.index_select(axis, tap.clamp(0, old - 1).long()) for tap in taps]
    view = [1] * x.ndim
    view[axis] = new
    total = sum(row * weight.reshape(view).to(x.dtype) for row, weight in zip(rows, weights, strict=True))
    return torch.as_tensor(total).to(x.dtype)


def _taps(node: Node, positions: Tensor, mode: str, scale: float) -> tuple[Tensor, Tensor]:
    """Return the input positions that each output reads, and their weights; both (taps, outputs)."""
    shrink = min(scale, 1.0) if node.get("antialias", 0) else 1.0
    reach = math.ceil((1 if mode == "linear" else 2) / shrink)
    offsets = torch.arange(1 - reach, reach + 1, dtype=torch.float64).unsqueeze(1)
    taps = torch.floor(positions).unsqueeze(0) + offsets
    distance = (taps - positions).abs() * shrink
    if mode == "linear":
        return taps, (1 - distance).clamp(min=0)
    a = node.get("cubic_coeff_a", -0.75)
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
    return taps, torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))


@operator("GridSample")
def grid_sample(node: Node, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(node.get("mode", "linear"), node.get("mode", "linear"))
    padding, corners = node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0))
    return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners)


@operator("AffineGrid", known_inputs=(1,))
def affine_grid(node: Node, theta: Tensor, size: Value) -> Tensor:
    return F.affine_grid(theta, as_list(size, "size"), align_corners=bool(node.get("align_corners", 0)))
