"""Sparsity: which part of a weight becomes zero, in addition to its quantization.

"2:4"                          keep two of every four weights along the input channels
0.5                            remove half of the weights, the smallest
{"share": 0.5, "block": 4}     the same in blocks of four neighbouring output channels
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
    """Which weights are pruned.

    Attributes:
        share: Share of all weights that becomes zero.
        block: With `share`, number of neighbouring output channels that are pruned together.
        keep: Number of weights that are kept of every `of` along the input channels.
        of: See `keep`.
    """

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
            raise SpecError(f"sparsity must have either share, or keep and of: got {self!r}")
        if self.share is not None and not 0 <= self.share < 1:
            raise SpecError(f"sparsity: share must be at least 0 and less than 1, got {self.share:g}")
        if self.keep is not None and self.of is not None and not 0 < self.keep < self.of:
            raise SpecError(f"sparsity: keep must be from 1 to less than {self.of}, got {self.keep}")
        if self.keep is not None and self.block != 1:
            raise SpecError("sparsity: block= can only be used with share=, not with keep= and of=")
        return self

    @classmethod
    def build(cls, value: Any) -> Any:
        """Convert a share, "n:m" or a mapping of the fields."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(share=float(value))
        if isinstance(value, str) and (ratio := _RATIO.fullmatch(value)):
            return cls(keep=int(ratio[1]), of=int(ratio[2]))
        if isinstance(value, dict):
            return cls(**value)
        raise SpecError(f"sparsity must be a share such as 0.5, or '2:4', got {short_repr(value)}")

    def __str__(self) -> str:
        if self.keep is not None:
            return f"{self.keep}:{self.of}"
        return f"{self.share:.0%} zero" + (f" in blocks of {self.block}" if self.block > 1 else "")

    @property
    def kept_share(self) -> float:
        """Share of the weights that are kept."""
        if self.share is not None:
            return 1 - self.share
        assert self.keep is not None  # noqa: S101  # checked in _check_fields
        assert self.of is not None  # noqa: S101
        return self.keep / self.of

    def reason_unsupported(self, shape: Sequence[int], *, is_transposed: bool = False) -> str:
        """Return why a weight (out, in, ...) cannot be pruned like this; "" if it can."""
        if self.of is not None and is_transposed:
            return f"not pruned to {self}: its input channels are not on the axis where kernels expect the groups"
        if self.of is not None and shape[1] % self.of:
            return f"not pruned to {self}: groups of {self.of} do not divide its {shape[1]} input channels"
        if shape[0] % self.block:
            return f"not pruned: blocks of {self.block} do not divide its {shape[0]} output channels"
        return ""

    def mask(self, weight: Tensor, progress: float = 1.0) -> Tensor:
        """Return the mask of weights that are kept.

        Args:
            weight: The weight, shape (out, in, ...).
            progress: How much of the pruning is done, from 0 to 1, for a training that prunes gradually.
        """
        if self.share is not None:
            return mask_by_share(weight, self.share * progress, self.block)
        assert self.keep is not None  # noqa: S101  # checked in _check_fields
        assert self.of is not None  # noqa: S101
        return mask_n_of_m(weight, self.of - round((self.of - self.keep) * progress), self.of)


SparsityField = Annotated[
    Sparsity | None,
    BeforeValidator(Sparsity.build),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "object"}, {"type": "null"}]}),
]
