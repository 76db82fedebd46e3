"""What a model of a known library says of its labels and of how its pictures are made: kept in the file."""

from collections.abc import Mapping
from typing import Any

from torch import nn

PICTURES = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # of timm


def known_of(model: nn.Module) -> dict[str, Any]:
    """`labels` of transformers and timm, `preprocessing` of timm; nothing of other models."""
    found = {"labels": _labels(model), "preprocessing": _preprocessing(model)}
    return {key: value for key, value in found.items() if value}


def _labels(model: nn.Module) -> list[str]:
    named = getattr(getattr(model, "config", None), "id2label", None)
    if isinstance(named, Mapping) and all(isinstance(each, int) for each in named):
        labels = [str(named[index]) for index in sorted(named)]
        return [] if labels == [f"LABEL_{index}" for index in range(len(labels))] else labels  # what nobody has named
    own = _pretrained(model).get("label_names")
    return list(map(str, own)) if isinstance(own, list | tuple) else []


def _preprocessing(model: nn.Module) -> dict[str, Any]:
    known = _pretrained(model)
    size = known.get("input_size")
    if not isinstance(size, list | tuple) or "mean" not in known:
        return {}
    return {"size": size[-1], **{key: known[key] for key in PICTURES if known.get(key) is not None}}


def _pretrained(model: nn.Module) -> Mapping[str, Any]:
    found = getattr(model, "pretrained_cfg", None)
    return found if isinstance(found, Mapping) else {}
