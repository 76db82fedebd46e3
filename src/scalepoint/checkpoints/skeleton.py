"""The model of a checkpoint without its weights: transformers' own module tree over hollow parameters.

    config.json -> module tree (only code of the installed transformers) -> parameters by the names of the checkpoint

What the tree computes by itself (rotary frequencies) is there; every parameter must be in the checkpoint, in its shape.
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
from scalepoint.compat.transformers import parameters_without_memory
from scalepoint.errors import CaptureError, ScalepointError, StoreError, UsageError, install_hint
from scalepoint.graph.torch_export import export_logs_silenced
from scalepoint.numerics import dtype_name

EXPERT = re.compile(r"\.experts\.\d+\.")
MAX_ELEMENTS_AT_ONCE = 1 << 24  # values that are looked at at a time
COUNT_KEY = re.compile(r"^(n|num)_.*(layer|block|expert)s?$")
STACKED_PARTS = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}  # of a stack


@dataclass
class CheckpointWeights:
    """The parameters of a model and where they come from; here while they are asked for."""

    source: Source
    hollows: PagedTensors = field(default_factory=PagedTensors)
    names: dict[int, str] = field(default_factory=dict)  # address -> name in the checkpoint
    _here: dict[int, Tensor] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        return self.source.mark

    def load(self, tensors: Iterable[Tensor]) -> None:
        """Read what is not here yet."""
        for tensor in tensors:
            place = tensor.data_ptr()
            if place in self.names and place not in self._here:
                self.hollows.fill(tensor, self.source.tensor(self.names[place]))
                self._here[place] = tensor

    def check_finite(self) -> None:
        """Read every weight once, a tensor at a time; StoreError names one that holds NaN or infinity."""
        for name in self.names.values():
            value = self.source.tensor(name).flatten()
            starts = range(0, value.numel(), MAX_ELEMENTS_AT_ONCE)
            bad = sum([int((~value[start : start + MAX_ELEMENTS_AT_ONCE].isfinite()).sum()) for start in starts])
            if bad:
                raise StoreError(
                    f"{self.source.tensors[name].shard.name}: {name} holds NaN or infinity in {bad} of {value.numel()} "
                    "values: the checkpoint is damaged, or overflowed when it was saved. Fetch or save it again"
                )

    def drop(self) -> None:
        """Give the memory of all back."""
        for tensor in self._here.values():
            self.hollows.drop(tensor)
        self._here.clear()
        release_freed_memory()

    def name_of(self, tensor: Tensor) -> str:
        """Its name in the checkpoint."""
        return self.names[tensor.data_ptr()]


def build_skeleton(source: Source) -> tuple[nn.Module, CheckpointWeights]:
    """The model in eval mode, its weights hollow; an error names what the checkpoint lacks."""
    with export_logs_silenced():  # what transformers imports talks of itself
        model = _build_modules(source)
        weights, names = CheckpointWeights(source), _map_stored_names(model, source)
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, own in list(module._parameters.items()):
            if own is None:
                continue
            name = f"{path}.{leaf}" if path else leaf
            if id(own) not in made:
                tensor = weights.hollows.make(own.shape)
                weights.names[tensor.data_ptr()] = _check_parameter(source, names, name, tuple(own.shape))
                made[id(own)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[leaf] = made[id(own)]
    _load_buffers(model, source, names)
    return model.eval(), weights


def find_head(model: nn.Module) -> str | None:
    """The name of the layer that gives the logits."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return next((name for name, module in model.named_modules() if module is head), None)


def _map_stored_names(model: nn.Module, source: Source) -> dict[str, str]:
    """Name in the model -> name in the checkpoint: transformers has renamed some things over the years."""
    found = {name: name for name in source.tensors}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
        from transformers.core_model_loading import WeightRenaming, rename_source_key  # noqa: PLC0415
    except ImportError:
        return found
    all_of_them = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    changes = [each for each in all_of_them if isinstance(each, WeightRenaming)]
    parts = {
        own: part
        for each in all_of_them
        for end, wanted in STACKED_PARTS.items()
        if any(str(target).endswith(end) for target in each.target_patterns)
        for own, part in zip(map(_last_name, each.source_patterns), wanted, strict=False)
    }
    known, prefix = model.state_dict(), str(getattr(model, "base_model_prefix", ""))
    renamed = {rename_source_key(name, changes, [], prefix, known)[0]: name for name in source.tensors}
    return {_expert_name(own, parts): name for own, name in renamed.items()} | {
        name: name for name in found if name in known
    }


def _last_name(pattern: str) -> str:
    """What an expert's layer is called: the w1 of .experts.*.w1.weight."""
    return pattern.removesuffix(".weight").rpartition(".")[2]


def _expert_name(name: str, parts: Mapping[str, str]) -> str:
    """The name of an expert's layer here, whatever the checkpoint calls it."""
    before, _, last = name.removesuffix(".weight").rpartition(".")
    return f"{before}.{parts[last]}.weight" if ".experts." in name and last in parts else name


def _check_parameter(source: Source, names: Mapping[str, str], name: str, shape: tuple[int, ...]) -> str:
    """The name of a parameter in the checkpoint, which has it in this shape."""
    stored = source.tensors.get(names.get(name, name))
    if stored is None and EXPERT.search(name) and not any(EXPERT.search(each) for each in source.tensors):
        raise CaptureError(
            f"{source.folder}: the experts of {source.model_type!r} are stored in one tensor for each layer, and "
            "scalepoint reads experts that are stored one by one (as in Mixtral, Qwen-MoE and OLMoE)"
        )
    if stored is None:
        raise StoreError(
            f"{source.folder} has no {name}, which a {source.model_type!r} model of its config.json needs "
            f"({len(source.tensors)} tensors there, such as {next(iter(source.tensors), 'none')})"
        )
    if not stored.dtype.is_floating_point:
        raise StoreError(
            f"{stored.shard.name}: {name} is stored as {dtype_name(stored.dtype)}, and the weights of a model are "
            "floats: save the checkpoint again as float32, float16 or bfloat16"
        )
    if stored.shape != shape:
        raise StoreError(
            f"{stored.shard.name}: {name} has shape {list(stored.shape)}, by config.json it is {list(shape)}"
        )
    return names.get(name, name)


def _load_buffers(model: nn.Module, source: Source, names: Mapping[str, str]) -> None:
    """State that is no parameter is small: it is read now."""
    for name, buffer in model.named_buffers():
        stored = names.get(name)
        if stored is not None and source.tensors[stored].shape == tuple(buffer.shape):
            buffer.copy_(source.tensor(stored))


def check_counts(source: Source) -> None:
    """Refuse more layers or experts than the checkpoint has weights for: transformers would build them one by one."""
    sizes = [size for stored in source.tensors.values() for size in stored.shape]
    most = max([len(source.tensors), *sizes])
    for key, value in _iterate_integers(source.config):
        if COUNT_KEY.search(key) and value > (len(source.tensors) if "layer" in key else most):
            raise StoreError(
                f"{source.folder / CONFIG}: {key} is {value}, and the checkpoint has {len(source.tensors)} tensors"
            )


def _iterate_integers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All whole numbers of a config by their keys; parts of a model have configs of their own."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _iterate_integers(value)
        elif isinstance(value, int):
            yield key, value


def check_config(source: Source) -> None:
    """CaptureError where transformers makes no model of its config.json."""
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
            f"{source.folder}: config.json asks for code of its own ({source.model_type!r}), which is never run here"
        )
    untied = {TIE_KEY: False} if source.config.get(TIE_KEY) is False else {}  # by the file, whatever config.json says
    return transformers.AutoConfig.from_pretrained(
        source.folder, local_files_only=True, trust_remote_code=False, **untied
    )


@contextmanager
def _translated_errors(source: Source) -> Iterator[None]:
    """What transformers has against a config, in our words."""
    try:
        yield
    except (ScalepointError, MemoryError):
        raise
    except Exception as error:  # its validators raise many things
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise CaptureError(
            f"{source.folder}: transformers {_import_transformers().__version__} makes no language model of its "
            f"config.json (model_type {source.model_type!r}): {said}"
        ) from error


def _import_transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415  # an extra
    except ImportError:
        raise UsageError(f"language models need transformers: {install_hint('transformers')}") from None
    return transformers
