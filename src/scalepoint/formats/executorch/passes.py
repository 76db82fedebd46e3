"""Skips the passes of XNNPACK that have nothing to change in a graph.

ExecuTorch runs 17 passes over every delegate, and nearly each one traces the whole graph again, which takes almost half
of the time of an export. Most of them change only certain operations. Without such an operation the result is the
same graph, and the program has the same bytes.

`XNNPACKPassManager` is private to ExecuTorch: with a version that is not in TESTED, or without that name, all passes
run. A pass that is not in CHANGES always runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import fx

TESTED_VERSIONS = ("1.5.",)  # versions of ExecuTorch, by how they begin
MAX_CONCAT_INPUTS = 5  # inputs; DecomposeConcatenate splits longer ones


def _contains(*words: str) -> Callable[[fx.Node], bool]:
    return lambda node: any(word in _operation_name(node) for word in words)


def _operation_name(node: fx.Node) -> str:
    """aten.cat.default; the text of the operation itself has its arguments too."""
    return str(getattr(node.target, "__name__", node.target))


def _is_long_concat(node: fx.Node) -> bool:
    joined: Any = node.args[0]
    return _operation_name(node) == "aten.cat.default" and len(joined) > MAX_CONCAT_INPUTS


def _is_conv1d(node: fx.Node) -> bool:
    return _operation_name(node) == "aten.convolution.default" and node.all_input_nodes[1].meta["val"].ndim == 3


def _is_constant(node: fx.Node) -> bool:
    return all(source.op == "get_attr" for source in node.all_input_nodes)


def _has_custom_meta(node: fx.Node) -> bool:
    return any("custom" in source.meta for source in node.all_input_nodes)


CHANGES_BY_PASS: dict[str, Callable[[fx.Node], bool]] = {
    "XNNPACKRemoveCloneOpsTransform": _contains("clone"),
    "DimOrderOpsRevertPass": _contains("dim_order"),
    "ConvertToUpsampleBilinear2d": _contains("index", "upsample"),
    "ConvertToLinearPass": _contains("mm.", "linear"),
    "PropagateCustomMetaPass": _has_custom_meta,
    "ConvertToSDPAPass": _contains("softmax"),
    "ConstPropPass": _is_constant,
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
    """XNNPACK's lowering inside this block runs only the passes that can change the graph."""
    from executorch.backends.xnnpack import xnnpack_preprocess  # noqa: PLC0415

    whole: Any = getattr(xnnpack_preprocess, "XNNPACKPassManager", None)
    if whole is None or not _is_tested():
        yield
        return

    class NeededPasses(whole):  # type: ignore[misc]
        def transform(self) -> Any:
            """One pass at a time: what a pass writes may be what a later one changes."""
            for each in self.passes:
                if _can_change(each.__name__, self.exported_program.graph):
                    self._exported_program = whole(self.exported_program, passes=[each]).transform()
            return self.exported_program

    xnnpack_preprocess.XNNPACKPassManager = NeededPasses
    try:
        yield
    finally:
        xnnpack_preprocess.XNNPACKPassManager = whole


def _is_tested() -> bool:
    try:
        return version("executorch").startswith(TESTED_VERSIONS)
    except PackageNotFoundError:  # built from source, without metadata
        return False


def _can_change(name: str, graph: fx.Graph) -> bool:
    if name not in CHANGES_BY_PASS:
        return True
    return any(CHANGES_BY_PASS[name](node) for node in graph.nodes if node.op == "call_function")
