"""SmoothQuant (Xiao et al. 2023): moves outlier channels from activations, which have one scale, into weights.

    s_j = max|x_j|^alpha / max|W_j|^(1 - alpha)

Weight and bias of a norm are divided by s, and the columns of the linear layers that read it are multiplied by s. The
products are the same, so the float output is unchanged.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from scalepoint.errors import ConfigError, NonFiniteError, NotObservedError, did_you_mean
from scalepoint.graph import Operation, Reference
from scalepoint.graph.nodes import get_fake_tensor, get_kind
from scalepoint.graph.operations import get_tensors
from scalepoint.quantize.config import SmoothQuantConfig
from scalepoint.quantize.feeding import NAN_HINT
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import Consumers, join_consumer_names, to_consumer_list
from scalepoint.quantize.sites import QuantizationSite

MIN_MAGNITUDE = 1e-5  # of a channel, before powers and quotients are taken
NORM_KINDS = ("layer_norm", "rms_norm")
MULTIPLIES_BY_NUMBER = "its norm multiplies by a number: there is no weight to change"


class SmoothQuantObserver(nn.Module):
    """Observes the output of a norm, then moves scale differences of its channels into the linears that read it.

    `layer_norm` and `downstream_linears` are the modules of the model; the observer only refers to them.
    """

    def __init__(
        self,
        consumers: Consumers,
        layer_norm: nn.Module,
        enabled: bool = False,
        config: SmoothQuantConfig | None = None,
        downstream_linears: Sequence[nn.Module] = (),
        activation_max: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.consumers = to_consumer_list(consumers)
        self.enabled = enabled
        self.config = config or SmoothQuantConfig(enabled=enabled)
        self.module_refs: dict[str, Any] = {"norm": layer_norm, "linears": list(downstream_linears)}
        self.activation_max = activation_max
        self.mean_square: Tensor | None = None
        self.count = 0
        self.alpha: float | None = None
        self.name = ""
        self.on_nan = "error"
        self._handle: RemovableHandle | None = None

    @property
    def layer_norm(self) -> nn.Module:
        norm: nn.Module = self.module_refs["norm"]
        return norm

    @property
    def downstream_linears(self) -> list[nn.Module]:
        linears: list[nn.Module] = self.module_refs["linears"]
        return linears

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Start observing the norm, if called without arguments. With a hook: the method of nn.Module."""
        if args or kwargs:
            return super().register_forward_hook(*args, **kwargs)
        self._handle = self.layer_norm.register_forward_hook(self._observe_output)
        return self._handle

    def remove_hook(self) -> None:
        """Stop observing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def reset(self) -> None:
        """Discard everything that was observed."""
        self.activation_max, self.mean_square, self.count = None, None, 0

    def _observe_output(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.observe(output)

    @torch.no_grad()
    def observe(self, output: Tensor) -> None:
        """Update the largest magnitude and the mean square of each channel."""
        rows = output.detach().to(torch.float32).reshape(-1, output.shape[-1])
        if not rows.numel() or not self._is_finite(rows):
            return
        largest, square = rows.abs().amax(0), rows.square().mean(0)
        if self.activation_max is not None:
            largest = torch.maximum(self.activation_max, largest)
        self.activation_max = largest
        if self.mean_square is None:
            self.mean_square, self.count = square, 1
        else:
            self.count += 1
            self.mean_square += (square - self.mean_square) / self.count

    def _is_finite(self, rows: Tensor) -> bool:
        if bool(torch.isfinite(rows).all()):
            return True
        if self.on_nan == "skip":
            return False
        raise NonFiniteError(f"the output of {self.name or 'a norm'} contains NaN or infinity. {NAN_HINT}")

    @torch.no_grad()
    def compute_smooth_scales(self) -> Tensor | None:
        """Smooth, and discard what was observed: the output of the norm is different from now on.

        Returns:
            The scales s, or None if no linear reads the norm.

        Raises:
            NotObservedError: Nothing was observed since the last call. It is a RuntimeError.
        """
        if not self.downstream_linears:
            return None
        if self.activation_max is None:
            raise NotObservedError(
                f"{self.name or 'a SmoothQuantObserver'} (read by {join_consumer_names(self.consumers)}) has observed "
                "nothing: register_forward_hook(), then run data through the model"
            )
        weights = [get_linear_weight(linear) for linear in self.downstream_linears]
        weight_max = torch.stack([weight.abs().amax(0).to(torch.float32) for weight in weights]).amax(0)
        self.alpha = self._choose_alpha(weights)
        s = compute_channel_scales(self.activation_max.to(weight_max.device), weight_max, self.alpha)
        divide_norm_output(self.layer_norm, s)
        for weight in weights:
            weight.mul_(s.to(weight.dtype))
        self.reset()
        return s

    def _choose_alpha(self, weights: Sequence[Tensor]) -> float:
        layer_alphas = (alpha for glob, alpha in self.config.layers.items() if fnmatchcase(self.name, glob))
        alpha = next(layer_alphas, self.config.alpha)
        if alpha != "search":
            return alpha
        activation_max = self.activation_max
        assert activation_max is not None  # noqa: S101  # checked by the caller
        # An activation_max that was passed to the constructor comes without mean squares: then assume max = 3 sigma.
        mean_square = self.mean_square if self.mean_square is not None else activation_max.square() / 9
        stacked = torch.cat([weight.to(torch.float32) for weight in weights])
        return min(
            self.config.alphas,
            key=lambda candidate: estimate_error(stacked, activation_max, mean_square, candidate),
        )

    def extra_repr(self) -> str:
        alpha = self.config.alpha if self.alpha is None else self.alpha
        return f"{self.name}, enabled={self.enabled}, alpha={alpha}, {len(self.downstream_linears)} linears"


def compute_channel_scales(activation_max: Tensor, weight_max: Tensor, alpha: float) -> Tensor:
    """Compute s from the largest magnitudes of each channel."""
    numerator = activation_max.clamp(min=MIN_MAGNITUDE) ** alpha
    s: Tensor = numerator / weight_max.clamp(min=MIN_MAGNITUDE) ** (1 - alpha)
    return s


def estimate_error(weight: Tensor, activation_max: Tensor, mean_square: Tensor, alpha: float) -> float:
    """Estimate the squared error of the outputs with 8-bit weights and activations, after smoothing with alpha.

    It is the sum of the rounding errors of x and W:
    E|W (x' - x)|^2 = step_x^2 / 12 * |W|^2, and E|(W' - W) x|^2 = sum over channels of E x_j^2 * |W'_j - W_j|^2.
    """
    s = compute_channel_scales(activation_max, weight.abs().amax(0), alpha)
    smoothed = weight * s
    step_x = (activation_max / s).amax() / 127.5
    step_w = smoothed.abs().amax(1, keepdim=True).clamp(min=MIN_MAGNITUDE) / 127.5
    error_from_x = step_x.square() / 12 * smoothed.square().sum()
    weight_error = ((smoothed / step_w).round() * step_w - smoothed).square().sum(0)
    error_from_w = (weight_error * mean_square / s.square()).sum()
    return float(error_from_x + error_from_w)


def get_linear_weight(linear: nn.Module) -> Tensor:
    """Return the weight as (out, in), which is a view if it is stored as (in, out)."""
    operation: Any = linear.operation if isinstance(linear, QuantizedLayer) else linear
    weight: Tensor = operation.weight.data
    if isinstance(operation, Operation) and operation.has_transposed_weight:
        return weight.transpose(0, 1)
    return weight


def find_norm_tensors(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of a layer norm or RMS norm; None for a missing one."""
    tensors: dict[str, Tensor | None]
    if isinstance(norm, Operation):
        tensors = {name: reference.value for name, reference in norm.references().items()}
        if norm.kind == "mul":  # the last part of a norm of separate operations: its weight is the only parameter
            tensors = {"weight": next(iter(tensors.values()), None)}
    else:
        tensors = {name: getattr(norm, name, None) for name in ("weight", "bias")}
    weight, bias = tensors.get("weight"), tensors.get("bias")
    return None if weight is None else weight.data, None if bias is None else bias.data


def multiplies_by_number(norm: Any) -> bool:
    """Whether a norm of separate operations ends in a product with a number, so that it can have no weight."""
    return isinstance(norm, Operation) and norm.kind == "mul" and find_norm_tensors(norm)[0] is None


def ensure_norm_tensors(norm: Any, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a norm. A norm without weight gets one, with the dtype and device of `like`."""
    weight, bias = find_norm_tensors(norm)
    if weight is None and isinstance(norm, Operation):
        new_weight = nn.Parameter(like.new_ones(norm.arguments["normalized_shape"]))
        norm.register_parameter("own_weight", new_weight)
        norm.arguments["weight"] = Reference(norm, "own_weight")
        weight = new_weight.data
    elif weight is None:
        norm.weight = nn.Parameter(like.new_ones(norm.normalized_shape))
        norm.elementwise_affine = True
        weight = norm.weight.data
    return weight, bias


def divide_norm_output(norm: nn.Module, s: Tensor) -> None:
    """Divide the output of a norm by s, channel by channel."""
    for tensor in ensure_norm_tensors(norm, s):
        if tensor is not None:
            tensor.div_(s.to(tensor.dtype))


def insert_smoothing_observers(
    model: fx.GraphModule, sites: Sequence[QuantizationSite], config: SmoothQuantConfig
) -> dict[str, str]:
    """Add an observer for each norm that only linear layers read.

    Returns:
        The names of the other norms, with the reason why they cannot be smoothed.
    """
    sites_by_node = {site.node: site for site in sites}
    shared = find_shared_parameters(sites)
    refusals: dict[str, str] = {}
    count = 0
    for site in sites:
        norm = _get_norm_part(site)
        if norm is None:
            continue
        readers, refusal = _find_linear_readers(site, sites_by_node, shared)
        if multiplies_by_number(norm):
            refusal = MULTIPLIES_BY_NUMBER
        if refusal:
            refusals[site.name] = refusal
            continue
        linears = [_get_linear(reader) for reader in readers]
        observer = SmoothQuantObserver([reader.name for reader in readers], norm, True, config, linears)
        observer.name = site.name
        model.add_submodule(f"smooth_quant_{count}", observer)
        count += 1
    _check_layer_globs(config, [*refusals, *(observer.name for observer in find_smoothing_observers(model))])
    return refusals


def find_smoothing_observers(model: nn.Module) -> list[SmoothQuantObserver]:
    return [module for module in model.modules() if isinstance(module, SmoothQuantObserver)]


def _get_linear(site: QuantizationSite) -> nn.Module:
    assert site.part is not None  # noqa: S101  # it is a linear
    return site.part


def _get_norm_part(site: QuantizationSite) -> nn.Module | None:
    """Return the module whose output is scaled: the norm, or the last multiplication of a norm of single operations."""
    if site.kind in NORM_KINDS:
        return next(iter(site.fused.parts.values()))
    if site.match.pattern.name == "RMSNormSpelledOutPattern":
        return list(site.fused.parts.values())[-1]
    return None


def _find_linear_readers(
    site: QuantizationSite, sites_by_node: dict[fx.Node, QuantizationSite], shared: set[int]
) -> tuple[list[QuantizationSite], str]:
    """Return the linear layers that read a norm, or the reason why it cannot be smoothed."""
    readers = []
    for user in _find_users(site.node):
        reader = sites_by_node.get(user)
        if reader is None or reader.kind != "linear" or reader.role is None or _find_input(reader) is not site.node:
            return [], f"also read by {user.target}, which cannot be scaled"
        if has_computed_weight(_get_linear(reader)):
            return [], f"the weight of {reader.name} is computed and cannot be scaled"
        if get_linear_weight(_get_linear(reader)).data_ptr() in shared:
            return [], f"the weight of {reader.name} is used by another layer too"
        readers.append(reader)
    norm = _get_norm_part(site)
    if norm is not None and shared & {id(norm), *_get_addresses(norm)}:
        return [], "the norm is used more than once"
    return (readers, "") if readers else ([], "no linear reads it")


def _find_users(node: fx.Node) -> Iterable[fx.Node]:
    """Yield the readers of a tensor, behind operations that keep its last axis."""
    for user in node.users:
        if _keeps_channels(user):
            yield from _find_users(user)
        else:
            yield user


def _find_input(site: QuantizationSite) -> Any:
    """Return the input of a group, before operations that keep the last axis."""
    source = site.node.args[0]
    while isinstance(source, fx.Node) and _keeps_channels(source):
        source = source.args[0]
    return source


def _keeps_channels(node: fx.Node) -> bool:
    """Return whether an operation keeps values and the last axis: a stub, a dropout, a move of other axes.

    Attention with batch_first moves axes this way.
    """
    kind = get_kind(node)
    if kind in ("quant", "dropout", "contiguous", "clone"):
        return True
    if kind not in ("transpose", "permute", "reshape", "unsqueeze") or not isinstance(node.args[0], fx.Node):
        return False
    before, after = get_fake_tensor(node.args[0]), get_fake_tensor(node)
    if before is None or after is None:
        return False
    if not isinstance(after.shape[-1], int) or after.shape[-1] != before.shape[-1]:
        return False
    axes = [int(axis) % before.ndim for argument in node.args[1:] for axis in _to_ints(argument)]
    last_axis = before.ndim - 1
    if kind == "transpose":
        return last_axis not in axes
    return kind != "permute" or axes[-1] == last_axis


def _to_ints(argument: Any) -> list[int]:
    return [argument] if isinstance(argument, int) else [value for value in argument if isinstance(value, int)]


def find_shared_parameters(sites: Sequence[QuantizationSite]) -> set[int]:
    """Return weights (by address) and norms (by id) that more than one group uses, such as a tied embedding."""
    read_before: set[int] = set()
    shared: set[int] = set()
    for site in sites:
        norm = _get_norm_part(site)
        keys = {address for part in site.fused.parts.values() for address in _get_addresses(part)}
        if norm is not None:
            keys.add(id(norm))
        shared |= keys & read_before
        read_before |= keys
    return shared


def _get_addresses(part: nn.Module) -> set[int]:
    """Return the memory addresses of the weights of a part."""
    part = part.operation if isinstance(part, QuantizedLayer) else part
    return {tensor.data_ptr() for tensor in get_tensors(part)}


def has_computed_weight(part: nn.Module) -> bool:
    """Return whether the weight is computed from other tensors, so that it cannot be written."""
    part = part.operation if isinstance(part, QuantizedLayer) else part
    return isinstance(part, Operation) and part.is_computed


def _check_layer_globs(config: SmoothQuantConfig, names: Sequence[str]) -> None:
    for glob in config.layers:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ConfigError(
                f"smooth_quant.layers: {glob!r} matches no norm of this model: {did_you_mean(glob, names)}"
            )
