"""Skips the passes of XNNPACK that have nothing to change in a graph.

ExecuTorch 1.5 runs 17 passes over every delegate, and nearly each one traces the whole graph again, which takes almost
half of the time of an export. Most of them change only certain operations. Without such an operation the result is the
same graph, and the program has the same bytes.

`XNNPACKPassManager` is private to ExecuTorch: with a version that is not in TESTED_VERSIONS, or without that name, all
passes run. A pass that is not in CHANGES_BY_PASS always runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import fx

from scalepoint.compat import attribute_replaced, patches_enabled

TESTED_VERSIONS = ("1.5.",)  # versions of ExecuTorch, by their first numbers
MAX_CONCAT_INPUTS = 5  # DecomposeConcatenate splits concatenations of more tensors


def _contains(*words: str) -> Callable[[fx.Node], bool]:
    return lambda node: any(word in _operation_name(node) for word in words)


def _operation_name(node: fx.Node) -> str:
    """Return a name like aten.cat.default. str() of an operation of the edge dialect also contains its arguments."""
    return str(getattr(node.target, "__name__", node.target))


def _is_long_concat(node: fx.Node) -> bool:
    tensors: Any = node.args[0]
    return _operation_name(node) == "aten.cat.default" and len(tensors) > MAX_CONCAT_INPUTS


def _is_conv1d(node: fx.Node) -> bool:
    return _operation_name(node) == "aten.convolution.default" and node.all_input_nodes[1].meta["val"].ndim == 3


def _has_constant_inputs(node: fx.Node) -> bool:
    return all(source.op == "get_attr" for source in node.all_input_nodes)


def _has_custom_meta(node: fx.Node) -> bool:
    return any("custom" in source.meta for source in node.all_input_nodes)


# name of a pass -> whether a node is one that the pass changes
CHANGES_BY_PASS: dict[str, Callable[[fx.Node], bool]] = {
    "XNNPACKRemoveCloneOpsTransform": _contains("clone"),
    "DimOrderOpsRevertPass": _contains("dim_order"),
    "ConvertToUpsampleBilinear2d": _contains("index", "upsample"),
    "ConvertToLinearPass": _contains("mm.", "linear"),
    "PropagateCustomMetaPass": _has_custom_meta,
    "ConvertToSDPAPass": _contains("softmax"),
    "ConstPropPass": _has_constant_inputs,
    "FuseBatchNormPass": _contains("batch_norm"),
    "DecomposeBatchNorm": _contains("batch_norm"),
    "FuseActivationPass": _contains("relu", "hardtanh"),
    "DecomposeConcatenate": _is_long_concat,
    "RemoveGetItemPass": _contains("max_pool2d_with_indices", "aten.max.dim"),
    "InsertPadQDQPass": _contains("constant_pad_nd"),
    "Conv1dUnsqueezePass": _is_conv1d,
    "PReLUReshapePass": _contains("prelu"),
    "RemoveRedundantCopyPass": _contains("_to_copy"),
}


@contextmanager
def without_idle_passes() -> Iterator[None]:
    """Inside this context, XNNPACK's lowering runs only the passes that can change the graph."""
    from executorch.backends.xnnpack import xnnpack_preprocess  # noqa: PLC0415  # an extra

    all_passes: Any = getattr(xnnpack_preprocess, "XNNPACKPassManager", None)
    if all_passes is None or not _is_tested() or not patches_enabled():
        yield
        return

    class NeededPasses(all_passes):  # type: ignore[misc]
        def transform(self) -> Any:
            """Run one pass at a time: the nodes that a pass adds may be those that a later pass changes."""
            for single_pass in self.passes:
                if _can_change(single_pass.__name__, self.exported_program.graph):
                    self._exported_program = all_passes(self.exported_program, passes=[single_pass]).transform()
            return self.exported_program

    with attribute_replaced(xnnpack_preprocess, "XNNPACKPassManager", NeededPasses):
        yield


def _is_tested() -> bool:
    try:
        return version("executorch").startswith(TESTED_VERSIONS)
    except PackageNotFoundError:  # built from source, without metadata
        return False


def _can_change(pass_name: str, graph: fx.Graph) -> bool:
    if pass_name not in CHANGES_BY_PASS:
        return True
    is_changed = CHANGES_BY_PASS[pass_name]
    return any(is_changed(node) for node in graph.nodes if node.op == "call_function")
