"""Sparsity: which part of a weight is zero, asked for beside its quantization.

"2:4"                          two of every four weights along the input channels stay
0.5                            half of the weights go, the smallest
{"share": 0.5, "block": 4}     the same for blocks of four neighbouring output channels
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, StrictInt, WithJsonSchema, model_validator
from torch import Tensor

from scalepoint.errors import SpecError, did_you_mean, short_repr
from scalepoint.numerics.sparsity import mask_by_share, mask_n_of_m
from scalepoint.support.validation_errors import CheckedModel

_RATIO = re.compile(r"(\d+):(\d+)")


class Sparsity(CheckedModel):
    """Which weights are pruned: `share` of all, `block` output channels together; or all but `keep` of every `of`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    error_class = SpecError

    share: float | None = None
    block: Annotated[StrictInt, Field(gt=0)] = 1
    keep: StrictInt | None = None
    of: StrictInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                raise SpecError(f"Sparsity has no field {name!r}: {did_you_mean(str(name), cls.model_fields)}")
        return data

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if (self.share is None) == (self.keep is None) or (self.keep is None) != (self.of is None):
            raise SpecError(f"sparsity is a share, or keep and of: not {self!r}")
        if self.share is not None and not 0 <= self.share < 1:
            raise SpecError(f"sparsity: a share of {self.share:g} goes; from 0 to less than 1 can")
        if self.keep is not None and self.of is not None and not 0 < self.keep < self.of:
            raise SpecError(f"sparsity: {self.keep} of {self.of} stay; give fewer than all, and one at least")
        if self.keep is not None and self.block != 1:
            raise SpecError("sparsity: blocks of channels go with a share, not with keep and of")
        return self

    @classmethod
    def build(cls, value: Any) -> Any:
        """From itself, a share, "n:m" or a mapping of the fields."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(share=float(value))
        if isinstance(value, str) and (found := _RATIO.fullmatch(value)):
            return cls(keep=int(found[1]), of=int(found[2]))
        if isinstance(value, dict):
            return cls(**value)
        raise SpecError(f"sparsity is a share such as 0.5, or '2:4', not {short_repr(value)}")

    def __str__(self) -> str:
        if self.keep is not None:
            return f"{self.keep}:{self.of}"
        return f"{self.share:.0%} zero" + (f" in blocks of {self.block}" if self.block > 1 else "")

    def why_unfit(self, shape: Sequence[int], *, is_transposed: bool = False) -> str:
        """Why a weight (out, in, ..) cannot be pruned so; "" if it can."""
        if self.of is not None and is_transposed:
            return f"not pruned to {self}: its input channels are not where kernels look for pairs"
        if self.of is not None and shape[1] % self.of:
            return f"not pruned to {self}: groups of {self.of} do not divide its {shape[1]} input channels"
        if shape[0] % self.block:
            return f"not pruned: blocks of {self.block} do not divide its {shape[0]} output channels"
        return ""

    def mask(self, weight: Tensor, progress: float = 1.0) -> Tensor:
        """Which weights stay; `progress` from 0 to 1 is how far pruning has come in a training."""
        if self.share is not None:
            return mask_by_share(weight, self.share * progress, self.block)
        assert self.keep is not None  # noqa: S101  # asked when it was made
        assert self.of is not None  # noqa: S101
        return mask_n_of_m(weight, self.of - round((self.of - self.keep) * progress), self.of)


SparsityField = Annotated[
    Sparsity | None,
    BeforeValidator(Sparsity.build),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "object"}, {"type": "null"}]}),
]
