"""What a model of a known library says of its labels and of how its pictures are made: kept in the file."""

from collections.abc import Mapping
from typing import Any

from torch import nn

PICTURES = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # of timm
LONGEST = 500_000  # characters of all labels: more would be most of a file


def known_of(model: nn.Module) -> dict[str, Any]:
    """`labels` of transformers and timm, `preprocessing` of timm; nothing of other models."""
    found = {"labels": _labels(model), "preprocessing": _preprocessing(model)}
    return {key: value for key, value in found.items() if value}


def _labels(model: nn.Module) -> list[str]:
    """By the number of the class, where there is one for each."""
    named = getattr(getattr(model, "config", None), "id2label", None)
    if isinstance(named, Mapping):
        own = [named[index] for index in range(len(named))] if set(named) == set(range(len(named))) else []
    else:
        found, count = _pretrained(model).get("label_names"), getattr(model, "num_classes", None)
        own = list(found) if isinstance(found, list | tuple) and count in (None, len(found)) else []
    labels = [str(each).encode("utf-8", "replace").decode() for each in own]
    is_unnamed = labels == [f"LABEL_{index}" for index in range(len(labels))]
    return [] if is_unnamed or sum(map(len, labels)) > LONGEST else labels


def _preprocessing(model: nn.Module) -> dict[str, Any]:
    known = _pretrained(model)
    size = known.get("input_size")
    if not isinstance(size, list | tuple) or len(size) != 3 or "mean" not in known:
        return {}
    height, width = size[1:]
    pictures = {key: known[key] for key in PICTURES if known.get(key) is not None}
    return {"size": width if height == width else [height, width], **pictures}


def _pretrained(model: nn.Module) -> Mapping[str, Any]:
    found = getattr(model, "pretrained_cfg", None)
    return found if isinstance(found, Mapping) else {}
