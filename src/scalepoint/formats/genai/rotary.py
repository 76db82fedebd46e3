"""Rotary positions as tables: cosines and sines of every position, which GroupQueryAttention reads.

    angle(p, i) = p f_i,   f_i = base^(-2i / d)   and, with a long context, f_i scaled

The scalings are those whose frequencies do not depend on the length of the text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import TargetError

FULL_ATTENTION_ONLY = (
    "gemma3_text",
    "olmo3",
)  # layers with a window keep their angles, where a config has one scaling for all
KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rotary:
    """What the angles are made of."""

    base: float
    size: int  # channels of a head that are turned, the first ones
    kind: str = "default"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the config: factor and the like

    @property
    def longest(self) -> int | None:
        """Positions up to which the table is right; None: all."""
        return int(self.settings["original_max_position_embeddings"]) if self.kind == "longrope" else None

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (positions, size / 2)."""
        frequencies, factor = self._scaled(1.0 / self._powers())
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        return angles.cos() * factor, angles.sin() * factor

    def _powers(self) -> Tensor:
        return torch.as_tensor(self.base ** (torch.arange(0, self.size, 2, dtype=torch.float32) / self.size))

    def _scaled(self, frequencies: Tensor) -> tuple[Tensor, float]:
        """Frequencies, and what cosines and sines are multiplied with."""
        if self.kind == "linear":
            return frequencies / float(self.settings["factor"]), 1.0
        if self.kind == "llama3":
            return self._llama3(frequencies), 1.0
        if self.kind == "yarn":
            return self._yarn(frequencies)
        if self.kind == "longrope":
            return self._longrope()
        return frequencies, 1.0

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Short waves stay, long ones are stretched, those between are mixed."""
        factor, length = float(self.settings["factor"]), float(self.settings["original_max_position_embeddings"])
        low, high = float(self.settings["low_freq_factor"]), float(self.settings["high_freq_factor"])
        waves = 2 * math.pi / frequencies
        mix = (length / waves - low) / (high - low)
        mixed = (1 - mix) * frequencies / factor + mix * frequencies
        stretched = torch.where(waves > length / low, frequencies / factor, frequencies)
        return torch.where((waves <= length / low) & (waves >= length / high), mixed, stretched)

    def _yarn(self, frequencies: Tensor) -> tuple[Tensor, float]:
        factor, length = float(self.settings["factor"]), float(self.settings["original_max_position_embeddings"])

        def place(turns: float) -> float:
            return (self.size * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(self.base))

        low, high = (
            place(float(self.settings.get("beta_fast") or 32)),
            place(float(self.settings.get("beta_slow") or 1)),
        )
        if self.settings.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        ramp = (torch.arange(self.size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
        kept = 1 - ramp.clamp(0, 1)
        given = self.settings.get("attention_factor")
        stretch = float(given) if given else 0.1 * math.log(factor) + 1.0
        return frequencies / factor * (1 - kept) + frequencies * kept, stretch

    def _longrope(self) -> tuple[Tensor, float]:
        """The factors of short texts: right up to the context of training."""
        length = float(self.settings["original_max_position_embeddings"])
        factors = torch.tensor(self.settings["short_factor"], dtype=torch.float32)
        grown = float(self.settings.get("factor") or self.settings["max_position_embeddings"] / length)
        given = self.settings.get("attention_factor")
        factor = float(given) if given else 1.0 if grown <= 1 else math.sqrt(1 + math.log(grown) / math.log(length))
        return 1.0 / (factors * self._powers()), factor


def describe_rotary(config: Mapping[str, Any], head: int, layers: str = "", base: float | None = None) -> Rotary:
    """From a config of any version of transformers; `layers` names a kind of layer that may have angles of its own."""
    found = config.get("rope_parameters") or {}
    found = found.get(layers, found) if layers else found
    is_plain = layers == "sliding_attention" and config.get("model_type") in FULL_ATTENTION_ONLY
    about = {**((not is_plain and config.get("rope_scaling")) or {}), **found}
    kind = about.get("rope_type") or about.get("type") or "default"
    if kind not in KINDS:
        raise TargetError(
            f"ort-genai writes rotary positions of the kinds {', '.join(KINDS)}, not {kind!r} (rope_parameters of "
            "config.json): set it to 'default' for texts as long as those of the training"
        )
    about.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
    original = about.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    about["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    share = next((part for part in _partial_factors(config, about) if part is not None), 1.0)
    theta = base or about.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10_000.0
    return Rotary(float(theta), int(head * float(share)), kind, about)


def _partial_factors(config: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Any]:
    """How much of a head is turned, by the names that there are for it."""
    return [settings.get("partial_rotary_factor"), config.get("partial_rotary_factor"), config.get("rotary_pct")]
