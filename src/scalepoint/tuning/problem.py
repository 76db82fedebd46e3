"""A layer as the steps of the solver see it, and a solution: codes and scales.

Weights, targets and codes have the shape (groups, outputs, n), with n the inputs of one output; a column is one of the
n inputs. `GroupedLayer` translates between a layer of the model and this shape. A step of the solver gets a problem and
a solution, and returns a solution with another target, other codes or other scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scalepoint import distributed
from scalepoint.tuning.code_grids import CodeGrid
from scalepoint.tuning.moments import ErrorAroundWeight, Moments, float32_hessian, split_outputs

Ridge = float | str  # a share of the mean diagonal, or "auto": chosen on held-out rows
MAX_SAMPLED_OUTPUTS = 128  # outputs on which steps compare settings


@dataclass(frozen=True)
class Solution:
    """Codes and scales of a layer, and the target weight that they approximate.

    Attributes:
        target: The weight to approximate, (groups, outputs, n).
        codes: Codes minus their zero point, (groups, outputs, n), in float32, which represents all of them exactly.
        scale: (groups, outputs, blocks).
        tables: Tables of a palette, if they are not those of the problem. Codes are then entries of the tables.
    """

    target: Tensor
    codes: Tensor
    scale: Tensor
    tables: Tensor | None = None

    @property
    def scale_per_code(self) -> Tensor:
        return expand_scale(self.scale, self.codes.shape[-1])

    @property
    def values(self) -> Tensor:
        return self.codes * self.scale_per_code

    def select_outputs(self, outputs: slice) -> "Solution":
        return Solution(self.target[:, outputs], self.codes[:, outputs], self.scale[:, outputs])


@dataclass(frozen=True)
class LayerProblem:
    """One layer as the steps of the solver see it.

    Outputs do not depend on each other, so ranks may share the outputs of a layer. A step that decides something for
    all outputs must compare sums that went through `sum_over_ranks`, or ranks would decide differently.

    Attributes:
        name: Name of the layer.
        weight: The float weight, (groups, outputs, n).
        grid: The values that codes may have.
        fit: Moments of the fitted rows.
        holdout: Moments of the rows on which solutions are compared; `fit` itself if there are too few rows to split.
        can_change_scales: Whether every output has its own scales, and these may change.
        has_intercept: Whether a shift of the bias will correct a mismatch of the means.
        ridge: Regularization of the target.
        notes: Texts and numbers of the steps for the report, by name.
        is_part: Whether other ranks solve the other outputs.
    """

    name: str
    weight: Tensor
    grid: CodeGrid
    fit: Moments
    holdout: Moments
    can_change_scales: bool
    has_intercept: bool
    ridge: Ridge = "auto"
    notes: dict[str, Any] = field(default_factory=dict)
    is_part: bool = False
    _errors: dict[int, ErrorAroundWeight] = field(default_factory=dict)  # by id of the moments

    def select_outputs(self, outputs: slice) -> "LayerProblem":
        """Return the problem of this rank, if other ranks solve the other outputs."""
        fit = self.fit.select_outputs(outputs)
        return replace(
            self,
            weight=self.weight[:, outputs],
            grid=self.grid.select_outputs(outputs),
            fit=fit,
            holdout=fit if self.holdout is self.fit else self.holdout.select_outputs(outputs),
            is_part=True,
            _errors={},
        )

    def sum_over_ranks(self, *sums: float) -> list[float]:
        """Add up sums over outputs, including the outputs of other ranks."""
        if not self.is_part:
            return list(sums)
        parts = distributed.gather_values(f"solving {self.name}", sums)
        return [sum(values) for values in zip(*parts, strict=True)]

    def error_around_weight(self, moments: Moments) -> ErrorAroundWeight:
        """Return the errors of values near the float weight, prepared once per moments."""
        if id(moments) not in self._errors:
            self._errors[id(moments)] = ErrorAroundWeight(moments, self.weight)
        return self._errors[id(moments)]

    def nearest_codes(self, target: Tensor, scale: Tensor, tables: Tensor | None = None) -> Tensor:
        grid = self.get_grid(tables)
        return grid.nearest_codes(target / expand_scale(scale, target.shape[-1])).to(torch.float32)

    def get_grid(self, tables: Tensor | None) -> CodeGrid:
        """Return the grid, with the tables of a solution."""
        return self.grid if tables is None else self.grid.with_tables(tables)

    def error(self, solution: Solution, moments: Moments | None = None, outputs: slice = slice(None)) -> float:
        """Return the squared error of the outputs over the variance of their targets.

        Args:
            solution: The codes and scales.
            moments: The rows to measure on; the held-out rows if None.
            outputs: Measure only these outputs.
        """
        moments = self.holdout if moments is None else moments
        squared_error = 0.0
        # Part by part, because the values of all outputs in float64 would take much memory.
        for part in split_outputs(outputs, self.weight.shape[1]):
            values = solution.select_outputs(part).values
            mismatch = moments.select_outputs(part).mean_mismatch(values)
            if self.has_intercept:  # the bias will be fitted on the fitted rows, not on those measured here
                mismatch = mismatch - self.fit.select_outputs(part).mean_mismatch(values)
            squared_error += float((self.error_around_weight(moments).error(values, part) + mismatch.square()).sum())
        variance = float(moments.target_variance[:, outputs].sum())
        squared_error, variance = self.sum_over_ranks(squared_error, variance)
        return squared_error / variance if variance > 0 else 0.0

    @property
    def sampled_outputs(self) -> slice:
        """Evenly spaced outputs on which to compare settings, because all outputs would take long."""
        return slice(None, None, max(1, -(-self.weight.shape[1] // MAX_SAMPLED_OUTPUTS)))

    def damped_hessian(self, min_share: float = 0.01) -> Tensor:
        """Return H with a raised diagonal, in float32.

        The damping grows with unknowns per row: with few rows, rounding fits noise too. With it H is so far from
        singular that float32 is enough.
        """
        return with_ridge(float32_hessian(self.fit), min_share + self.fit.size / max(self.fit.count, 1))


def with_ridge(hessian: Tensor, share: float) -> Tensor:
    """Return a copy of H with a share of its mean diagonal added to the diagonal."""
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    damped = hessian.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(share * mean[:, None])
    return damped


def expand_scale(scale: Tensor, size: int) -> Tensor:
    """Repeat one value per block to one value per element."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(size // scale.shape[-1], -1)


def format_notes(notes: Mapping[str, Any]) -> str:
    texts = (f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in notes.items())
    return ", ".join(texts)
