"""Build the model of a checkpoint without its weights: transformers' modules with paged parameters.

    config.json -> modules of the installed transformers -> parameters, mapped to the names of the checkpoint

Only code of the installed transformers runs, never code of the folder. Buffers that the modules compute (rotary
frequencies) have their values. Every parameter must be in the checkpoint with the same shape.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.checkpoints.experts import split_experts
from scalepoint.checkpoints.paged_tensors import PagedTensors, release_freed_memory
from scalepoint.checkpoints.source import CONFIG, TIE_KEY, Source
from scalepoint.checkpoints.stored_names import map_stored_names
from scalepoint.compat.transformers import parameters_without_memory
from scalepoint.errors import CaptureError, ScalepointError, StoreError, UsageError, install_hint
from scalepoint.graph.torch_export import export_logs_silenced
from scalepoint.numerics import dtype_name

EXPERT = re.compile(r"\.experts\.\d+\.")
MAX_ELEMENTS_AT_ONCE = 1 << 24  # values that are checked at a time
COUNT_KEY = re.compile(r"^(n|num)_.*(layer|block|expert)s?$")


@dataclass
class CheckpointWeights:
    """Loads and drops the values of a model's paged parameters.

    Attributes:
        source: The checkpoint.
        pages: The memory of the parameters.
        names: The name in the checkpoint of each parameter, by its address.
    """

    source: Source
    pages: PagedTensors = field(default_factory=PagedTensors)
    names: dict[int, str] = field(default_factory=dict)
    _loaded: dict[int, Tensor] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint."""
        return self.source.fingerprint

    def load(self, tensors: Iterable[Tensor]) -> None:
        """Read the values of those parameters that are not loaded yet."""
        for tensor in tensors:
            address = tensor.data_ptr()
            if address in self.names and address not in self._loaded:
                self.pages.fill(tensor, self.source.tensor(self.names[address]))
                self._loaded[address] = tensor

    def check_finite(self) -> None:
        """Read every weight once, one tensor at a time; raise StoreError if one contains NaN or infinity."""
        for name in self.names.values():
            value = self.source.tensor(name).flatten()
            parts = torch.split(value, MAX_ELEMENTS_AT_ONCE)
            invalid = sum(int((~part.isfinite()).sum()) for part in parts)
            if invalid:
                raise StoreError(
                    f"{self.source.tensors[name].shard.name}: {name} contains NaN or infinity in {invalid} of "
                    f"{value.numel()} values: the checkpoint is damaged, or overflowed when it was saved. Download or "
                    "save it again"
                )

    def drop(self) -> None:
        """Release the memory of all loaded parameters."""
        for tensor in self._loaded.values():
            self.pages.drop(tensor)
        self._loaded.clear()
        release_freed_memory()

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a parameter in the checkpoint."""
        return self.names[tensor.data_ptr()]


def build_skeleton(source: Source) -> tuple[nn.Module, CheckpointWeights]:
    """Build the model in eval mode with paged parameters, which read as zero until they are loaded.

    Args:
        source: The checkpoint.

    Returns:
        The model, and the object that loads and drops its weights.

    Raises:
        StoreError: The checkpoint lacks a parameter or has it with another shape or dtype.
        CaptureError: transformers cannot build a model from config.json.
    """
    with export_logs_silenced():  # packages that transformers imports print messages
        model = _build_modules(source)
        weights, names = CheckpointWeights(source), map_stored_names(model, source)
    paged: dict[int, nn.Parameter] = {}  # by the id of the original: tied parameters stay tied
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            name = f"{path}.{leaf}" if path else leaf
            if id(parameter) not in paged:
                tensor = weights.pages.make(parameter.shape)
                weights.names[tensor.data_ptr()] = _check_parameter(source, names, name, tuple(parameter.shape))
                paged[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[leaf] = paged[id(parameter)]
    _load_buffers(model, source, names)
    return model.eval(), weights


def find_head(model: nn.Module) -> str | None:
    """Return the path of the layer that computes the logits, or None."""
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    head = get_output_embeddings() if callable(get_output_embeddings) else None
    return next((name for name, module in model.named_modules() if module is head), None)


def _check_parameter(source: Source, names: Mapping[str, str], name: str, shape: tuple[int, ...]) -> str:
    """Return the name of a parameter in the checkpoint, after checking dtype and shape."""
    stored_name = names.get(name, name)
    stored = source.tensors.get(stored_name)
    if stored is None and EXPERT.search(name) and not any(EXPERT.search(tensor) for tensor in source.tensors):
        raise CaptureError(
            f"{source.folder}: the experts of {source.model_type!r} are stored in one tensor for each layer: "
            "scalepoint reads experts that are stored one by one (as in Mixtral, Qwen-MoE and OLMoE)"
        )
    if stored is None:
        raise StoreError(
            f"{source.folder} has no {name}, which a {source.model_type!r} model of its config.json needs "
            f"(the checkpoint has {len(source.tensors)} tensors, such as {next(iter(source.tensors), 'none')})"
        )
    if not stored.dtype.is_floating_point:
        raise StoreError(
            f"{stored.shard.name}: {name} is stored as {dtype_name(stored.dtype)}, but weights must be floats: save "
            "the checkpoint again as float32, float16 or bfloat16"
        )
    if stored.shape != shape:
        raise StoreError(
            f"{stored.shard.name}: {name} has shape {list(stored.shape)}, but config.json needs {list(shape)}"
        )
    return stored_name


def _load_buffers(model: nn.Module, source: Source, names: Mapping[str, str]) -> None:
    """Read the buffers that the checkpoint has. They are small, so they stay in memory."""
    for name, buffer in model.named_buffers():
        stored = names.get(name)
        if stored is not None and source.tensors[stored].shape == tuple(buffer.shape):
            buffer.copy_(source.tensor(stored))


def check_counts(source: Source) -> None:
    """Raise StoreError if config.json asks for more layers or experts than the checkpoint can have weights for.

    transformers would build all of them, which takes forever for a hostile config.
    """
    sizes = [size for stored in source.tensors.values() for size in stored.shape]
    max_experts = max([len(source.tensors), *sizes])
    for key, value in _iterate_integers(source.config):
        if COUNT_KEY.search(key) and value > (len(source.tensors) if "layer" in key else max_experts):
            raise StoreError(
                f"{source.folder / CONFIG}: {key} is {value}, but the checkpoint has only {len(source.tensors)} tensors"
            )


def _iterate_integers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield key and value of every integer in a config and in the nested configs of its parts."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _iterate_integers(value)
        elif isinstance(value, int):
            yield key, value


def check_config(source: Source) -> None:
    """Raise CaptureError if transformers cannot read config.json."""
    with _translated_errors(source):
        _load_config(source)


def _build_modules(source: Source) -> nn.Module:
    check_counts(source)
    with _translated_errors(source):
        config = _load_config(source)
        config.use_cache = False
        with parameters_without_memory():
            model: nn.Module = _import_transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            split_experts(model)
    model.tie_weights()  # type: ignore[operator]
    return model


def _load_config(source: Source) -> Any:
    transformers = _import_transformers()
    if "auto_map" in source.config and source.model_type not in transformers.CONFIG_MAPPING:
        raise CaptureError(
            f"{source.folder}: config.json needs code from the folder (auto_map of {source.model_type!r}): scalepoint "
            "never runs such code"
        )
    # Source.open sets tie_word_embeddings to False if the file has a head of its own, whatever config.json says.
    overrides = {TIE_KEY: False} if source.config.get(TIE_KEY) is False else {}
    return transformers.AutoConfig.from_pretrained(
        source.folder, local_files_only=True, trust_remote_code=False, **overrides
    )


@contextmanager
def _translated_errors(source: Source) -> Iterator[None]:
    """Turn errors of transformers about a config into CaptureError."""
    try:
        yield
    except (ScalepointError, MemoryError):
        raise
    except Exception as error:  # the validators of transformers raise exceptions of many types
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CaptureError(
            f"{source.folder}: transformers {_import_transformers().__version__} cannot make a language model of its "
            f"config.json (model_type {source.model_type!r}): {reason}"
        ) from error


def _import_transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415  # an extra
    except ImportError:
        raise UsageError(f"language models need transformers: {install_hint('transformers')}") from None
    return transformers
