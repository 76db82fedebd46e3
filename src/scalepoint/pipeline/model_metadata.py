"""Reads labels and preprocessing from a model of timm or transformers; the file stores them as metadata."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from scalepoint.formats import check_metadata
from scalepoint.support.jsonable import to_jsonable

PREPROCESSING_KEYS = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # keys of timm's pretrained_cfg
MAX_LABEL_CHARACTERS = 500_000  # longer labels would be most of a small file


def collect_metadata(own_metadata: Mapping[str, Any], user_metadata: Any) -> dict[str, Any]:
    """Return the metadata of a model, updated by the user's metadata.

    Raises:
        UsageError: The user's metadata is not a mapping, or has a key or value that a file cannot store.
    """
    if user_metadata is None:
        user_metadata = {}
    metadata = {**own_metadata, **user_metadata} if isinstance(user_metadata, Mapping) else user_metadata
    check_metadata(metadata)
    return dict(to_jsonable(metadata))


def read_library_metadata(model: nn.Module) -> dict[str, Any]:
    """Return `labels` (transformers and timm) and `preprocessing` (timm); {} for other models."""
    metadata = {"labels": _read_labels(model), "preprocessing": _read_preprocessing(model)}
    return {key: value for key, value in metadata.items() if value}


def _read_labels(model: nn.Module) -> list[str]:
    """Return one label per class, in the order of the classes; [] if they are not known."""
    names: list[Any] = []
    by_index = getattr(getattr(model, "config", None), "id2label", None)  # of transformers
    if isinstance(by_index, Mapping):
        if set(by_index) == set(range(len(by_index))):
            names = [by_index[index] for index in range(len(by_index))]
    else:
        timm_names = _pretrained_config(model).get("label_names")
        count = getattr(model, "num_classes", None)
        if isinstance(timm_names, list | tuple) and count in (None, len(timm_names)):
            names = list(timm_names)
    labels = [str(name).encode("utf-8", "replace").decode() for name in names]  # without unpaired surrogates
    are_placeholders = labels == [f"LABEL_{index}" for index in range(len(labels))]  # the default of transformers
    return [] if are_placeholders or sum(map(len, labels)) > MAX_LABEL_CHARACTERS else labels


def _read_preprocessing(model: nn.Module) -> dict[str, Any]:
    config = _pretrained_config(model)
    size = config.get("input_size")
    if not isinstance(size, list | tuple) or len(size) != 3 or "mean" not in config:
        return {}
    height, width = size[1:]
    values = {key: config[key] for key in PREPROCESSING_KEYS if config.get(key) is not None}
    return {"size": width if height == width else [height, width], **values}


def _pretrained_config(model: nn.Module) -> Mapping[str, Any]:
    config = getattr(model, "pretrained_cfg", None)
    return config if isinstance(config, Mapping) else {}
