"""Compute rotary position embeddings as the tables of cosines and sines that GroupQueryAttention reads.

    angle(position, i) = position f_i,   f_i = base^(-2i / channels), scaled for models with a long context

Supported are the scalings of transformers whose frequencies do not depend on the length of the text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import TargetError

# Models whose rope_scaling applies only to blocks with full attention, not to those with a window
FULL_ATTENTION_ONLY = ("gemma3_text", "olmo3")
KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rotary:
    """The angles of a rotary position embedding."""

    base: float
    channels: int  # of a head that are rotated, the first ones
    kind: str = "default"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # rope_parameters of the config

    @property
    def max_positions(self) -> int | None:
        """The number of positions for which the tables are correct; None: any."""
        return int(self.settings["original_max_position_embeddings"]) if self.kind == "longrope" else None

    def build_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each of shape (positions, channels / 2)."""
        frequencies, factor = self._scale_frequencies(1.0 / self._inverse_frequencies())
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        return angles.cos() * factor, angles.sin() * factor

    def _inverse_frequencies(self) -> Tensor:
        """Return base^(2i / channels)."""
        return torch.as_tensor(self.base ** (torch.arange(0, self.channels, 2, dtype=torch.float32) / self.channels))

    def _scale_frequencies(self, frequencies: Tensor) -> tuple[Tensor, float]:
        """Return the scaled frequencies, and the factor of cosines and sines."""
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
        """Keep short wavelengths, stretch long ones, and interpolate in between."""
        factor, length = float(self.settings["factor"]), float(self.settings["original_max_position_embeddings"])
        low, high = float(self.settings["low_freq_factor"]), float(self.settings["high_freq_factor"])
        wavelengths = 2 * math.pi / frequencies
        mix = (length / wavelengths - low) / (high - low)
        mixed = (1 - mix) * frequencies / factor + mix * frequencies
        stretched = torch.where(wavelengths > length / low, frequencies / factor, frequencies)
        return torch.where((wavelengths <= length / low) & (wavelengths >= length / high), mixed, stretched)

    def _yarn(self, frequencies: Tensor) -> tuple[Tensor, float]:
        """Keep frequencies with many rotations per context, stretch those with few, and interpolate in between."""
        factor, length = float(self.settings["factor"]), float(self.settings["original_max_position_embeddings"])

        def find_channel(rotations: float) -> float:
            """Return the index of the frequency that rotates so often within the original context."""
            return (self.channels * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(self.base))

        low = find_channel(float(self.settings.get("beta_fast") or 32))
        high = find_channel(float(self.settings.get("beta_slow") or 1))
        if self.settings.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.channels - 1)
        ramp = (torch.arange(self.channels // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
        unscaled_share = 1 - ramp.clamp(0, 1)
        attention_factor = self.settings.get("attention_factor")
        attention_factor = float(attention_factor) if attention_factor else 0.1 * math.log(factor) + 1.0
        return frequencies / factor * (1 - unscaled_share) + frequencies * unscaled_share, attention_factor

    def _longrope(self) -> tuple[Tensor, float]:
        """Use the factors for short texts, which are correct up to the context length of training."""
        length = float(self.settings["original_max_position_embeddings"])
        factors = torch.tensor(self.settings["short_factor"], dtype=torch.float32)
        growth = float(self.settings.get("factor") or self.settings["max_position_embeddings"] / length)
        attention_factor = self.settings.get("attention_factor")
        if attention_factor:
            attention_factor = float(attention_factor)
        elif growth <= 1:
            attention_factor = 1.0
        else:
            attention_factor = math.sqrt(1 + math.log(growth) / math.log(length))
        return 1.0 / (factors * self._inverse_frequencies()), attention_factor


def describe_rotary(
    config: Mapping[str, Any], head_size: int, layer_type: str = "", base: float | None = None
) -> Rotary:
    """Read the rotary settings of a config.json that any version of transformers has written.

    Args:
        config: The content of config.json.
        head_size: Channels of a head.
        layer_type: "sliding_attention" or "full_attention", which may have different angles; "": one kind of layer.
        base: The base of the frequencies; None: that of the config.
    """
    parameters = config.get("rope_parameters") or {}
    if layer_type:
        parameters = parameters.get(layer_type, parameters)
    settings = dict(parameters)
    if layer_type != "sliding_attention" or config.get("model_type") not in FULL_ATTENTION_ONLY:
        settings = {**(config.get("rope_scaling") or {}), **settings}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in KINDS:
        raise TargetError(
            f"ort-genai supports rotary positions of the kinds {', '.join(KINDS)}, not {kind!r} (rope_parameters of "
            "config.json): set it to 'default' if texts are not longer than in training"
        )
    settings.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
    original = settings.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    settings["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    theta = base or settings.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10_000.0
    return Rotary(float(theta), int(head_size * _rotated_share(config, settings)), kind, settings)


def _rotated_share(config: Mapping[str, Any], settings: Mapping[str, Any]) -> float:
    """Return the share of a head's channels that is rotated; configs have several names for it."""
    shares = (settings.get("partial_rotary_factor"), config.get("partial_rotary_factor"), config.get("rotary_pct"))
    return next((float(share) for share in shares if share is not None), 1.0)
