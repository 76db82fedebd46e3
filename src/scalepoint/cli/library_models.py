"""Loads models of a library by name (timm:NAME, hf:FOLDER), and weights from a file.

Nothing is downloaded or unpickled, and no code of a checkpoint is run.
"""

# ruff: noqa: PLC0415  # torch and the libraries are imported when a model is
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalepoint.errors import DocumentError, UsageError, did_you_mean, install_hint
from scalepoint.support.formatting import to_one_line
from scalepoint.support.untrusted import check_file

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth")


def is_library_model(text: str | None) -> bool:
    """Whether the name is timm:NAME or hf:FOLDER."""
    library, _, name = (text or "").partition(":")
    return library in MAKERS and bool(name)


def check_library_model(text: str, root: Path) -> None:
    """Check that the library is installed and the folder is a checkpoint. The library is not loaded."""
    library, _, name = text.partition(":")
    package = "transformers" if library == "hf" else library
    if find_spec(package) is None:
        command = install_hint("transformers") if library == "hf" else f"pip install {package}"
        raise UsageError(f"model {text!r} needs {package}, which is not installed: {command}")
    if library == "hf" and not ((root / name) / "config.json").is_file():
        raise UsageError(f"model {text!r}: {root / name} is not a checkpoint of transformers: it has no config.json")


def make_library_model(text: str, root: Path, random: bool) -> tuple[Any, Any]:
    """Build the model and example inputs for it. With `random` its weights are random."""
    library, _, name = text.partition(":")
    with _offline():
        _import_package("transformers" if library == "hf" else library, text)
        return MAKERS[library](name, root, random)


def _import_package(package: str, text: str) -> None:
    """Import a library. Report a failure as a usage error: it is often an incompatible torchvision."""
    try:
        import_module(package)
    except Exception as error:
        raise UsageError(
            f"model {text!r}: {package} is installed and cannot be imported: {type(error).__name__}: "
            f"{to_one_line(error)[:300]}"
        ) from error


@contextmanager
def _offline() -> Iterator[None]:
    """Make the libraries fail instead of downloading."""
    before = {name: os.environ.get(name) for name in OFFLINE_VARIABLES}
    os.environ.update(dict.fromkeys(OFFLINE_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _make_timm(name: str, _: Path, random: bool) -> tuple[Any, Any]:
    import timm
    import torch

    if not timm.is_model(name):
        known = timm.list_models() if "." not in name else timm.list_pretrained()
        close = did_you_mean(name, known).partition("Known")[0]
        raise UsageError(f"timm has no model {name!r}: {close or 'see timm.list_models()'}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # so that random weights are the same in every run
            model = timm.create_model(name, pretrained=not random)
    except Exception as error:
        raise UsageError(
            f"timm:{name}: its weights are not in the local cache, and scalepoint does not download "
            f"({type(error).__name__}: {to_one_line(error)[:200]}): load the model with timm once, or use --random"
        ) from error
    shape = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    return model, torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def _make_hf(name: str, root: Path, random: bool) -> tuple[Any, Any]:
    import torch
    import transformers

    from scalepoint.checkpoints.source import check_files

    folder = root / name
    check_files(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model_class = getattr(transformers, (config.architectures or ["?"])[0], None)
        if model_class is None:
            raise UsageError(f"hf:{name}: this version of transformers has no class {config.architectures}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            options = {"local_files_only": True, "use_safetensors": True}
            model = model_class(config) if random else model_class.from_pretrained(folder, **options)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"hf:{name}: {type(error).__name__}: {to_one_line(error)[:300]}") from error
    if getattr(model, "main_input_name", "") == "pixel_values":
        side = getattr(config, "image_size", 224)
        return model, {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), side, side)}
    return model, {"input_ids": torch.ones(2, 8, dtype=torch.int64)}


def without_labels(model: Any, inputs: Any) -> Any:
    """Remove the labels from inputs of a transformers model.

    It takes labels to compute a loss; a deployed file does not.
    """
    if not isinstance(inputs, dict) or not type(model).__module__.startswith("transformers."):
        return inputs
    from transformers.utils.generic import find_labels

    labels = find_labels(type(model))  # type: ignore[no-untyped-call]
    return {name: value for name, value in inputs.items() if name not in labels}


MAKERS: dict[str, Callable[[str, Path, bool], tuple[Any, Any]]] = {"timm": _make_timm, "hf": _make_hf}


def check_weights(path: Path) -> None:
    """Check that the file exists and has a supported suffix."""
    if path.suffix not in WEIGHT_SUFFIXES:
        raise UsageError(f"--weights {str(path)!r}: must be a {', '.join(WEIGHT_SUFFIXES)} file")
    if not path.is_file():
        raise UsageError(f"--weights {str(path)!r}: there is no such file")


def load_weights(model: Any, path: Path) -> None:
    """Load a state_dict from safetensors or torch.save into the model. All names and shapes must match."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        check_file(path)
        state: Any = None
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251  # tensors only
    except DocumentError as error:
        raise UsageError(error.args[0]) from error
    except (SafetensorError, OSError, EOFError, RuntimeError) as error:
        raise UsageError(f"{path} cannot be read: {to_one_line(error)[:300]}") from error
    except Exception as error:  # weights_only=True raises several types for a file with other objects
        raise UsageError(
            f"{path} contains objects that are not tensors and could run code: save only the state_dict "
            f"({type(error).__name__})"
        ) from error
    state = state["state_dict"] if isinstance(state, dict) and "state_dict" in state else state
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UsageError(f"{path} contains no state_dict: it must be a mapping of names to tensors")
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise UsageError(f"{path} does not fit the model: {to_one_line(error)[:400]}") from error
    if missing or unexpected:
        raise UsageError(f"{path} does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}")
