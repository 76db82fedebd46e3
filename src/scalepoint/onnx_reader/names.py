"""Names of layers and weights: valid in Python, and those of the original model if the file contains them.

/layer1/layer1.0/conv1/Conv with the weight layer1.0.conv1.weight  ->  layer1.0.conv1
/layer1/layer1.0/Add                                               ->  layer1.0.Add
"""

import ast
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword

from torch import Tensor, nn

from scalepoint.compat.torch_names import get_reserved_names

_MAX_LENGTH = 120
_MAX_SCOPES = 10_000
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
_WEIGHT_SUFFIXES = (".weight", ".weight_v", ".kernel", ".gamma", ".bias")


def identifier(text: str, default: str = "value") -> str:
    """Turn a text into a Python identifier; `default` if it has no letters or digits."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")[:_MAX_LENGTH] or default
    name = f"_{name}" if name[0].isdigit() else name
    return f"{name}_" if iskeyword(name) else name


def path_of_node(name: str) -> list[str]:
    """Split the name of a node into the path of its module: "/layer1/layer1.0/conv1/Conv" -> layer1, 0, conv1, Conv.

    torch.onnx repeats the name of a Sequential before the index of its child, as "layer1.0" after "layer1".
    """
    parts: list[str] = []
    for part in filter(None, name.strip("/").split("/")):
        *parents, leaf = part.split(".")
        is_repeated = bool(parents) and parts[-len(parents) :] == parents
        parts += [leaf] if is_repeated else [*parents, leaf]
    return [to_path_part(part) for part in parts if part] or ["node"]


def module_path_of(metadata: Mapping[str, str]) -> str:
    """Return the module path that torch.onnx.export (dynamo) notes for a node, as in ["", "fc", "fc.0", "linear_1"]."""
    text = metadata.get(_SCOPES_KEY, "")
    if len(text) > _MAX_SCOPES:
        return ""
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    has_path = isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str)
    return scopes[-2] if has_path else ""


def to_path_part(text: str) -> str:
    """Return a valid name for one part of a module's path; the index of a Sequential's child is one."""
    return text if text.isdigit() else identifier(text, "node")


class NameTable:
    """Gives children, parameters and buffers of one module names that are not in use."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.reserved = frozenset(dir(nn.Module())) | frozenset(vars(root)) | get_reserved_names()

    def add_child(self, child: nn.Module, node_name: str, weight_names: Sequence[str]) -> str:
        """Add a child, and return its path.

        The path is that of the layer in the original model if the name of the node or of a weight contains it, else
        the name of the node.
        """
        parts = path_of_node(node_name)
        ends_with_operator = re.fullmatch(r"[A-Z][A-Za-z]*(_\d+)?", parts[-1]) is not None
        if len(parts) > 1 and has_parameters(child) and ends_with_operator:
            parts = parts[:-1]  # /encoder/fc/MatMul is the layer encoder.fc
        else:
            parts = next(filter(None, map(_path_of_weight, weight_names)), parts)
        *parents, leaf = parts
        module, path = self.root, []
        for part in parents:
            path.append(self._container_name(module, part))
            module = module.get_submodule(path[-1])
        leaf = self._unused(module, leaf)
        module.add_module(leaf, child)
        return ".".join([*path, leaf])

    def add_tensor(self, tensor: Tensor, name: str, *, is_weight: bool) -> str:
        """Register a tensor with the root and return its name. A float weight becomes a parameter, others a buffer."""
        key = self._unused(self.root, identifier(name.replace("::", "_")))
        if is_weight and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            self.root.register_parameter(key, nn.Parameter(tensor.contiguous()))
        else:
            self.root.register_buffer(key, tensor.contiguous())
        return key

    def _container_name(self, module: nn.Module, name: str) -> str:
        """Return the name of a child that only contains other modules; add one if there is none."""
        name = f"{name}_" if name in self.reserved else name
        while name in module._modules and type(module._modules[name]) is not nn.Module:
            name = f"{name}_"  # the name of a layer
        if name not in module._modules:
            module.add_module(name, nn.Module())
        return name

    def _unused(self, module: nn.Module, name: str) -> str:
        """Return this name, with a number if the module has a child, parameter or buffer of this name."""
        name = f"{name}_" if name in self.reserved else name
        candidate, number = name, 1
        while candidate in module._modules or candidate in module._parameters or candidate in module._buffers:
            candidate, number = f"{name}_{number}", number + 1
        return candidate


def _path_of_weight(name: str) -> list[str]:
    """Return the path of the layer if the name is like that of a weight in a PyTorch model: a.b.weight -> a, b."""
    layer = next((name.removesuffix(suffix) for suffix in _WEIGHT_SUFFIXES if name.endswith(suffix)), "")
    parts = layer.split(".")
    return [to_path_part(part) for part in parts] if layer and all(map(_is_word, parts)) else []


def _is_word(part: str) -> bool:
    return re.fullmatch(r"\w+", part, flags=re.ASCII) is not None


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
