"""Everything that depends on private parts of other libraries: patches, and the private names that scalepoint reads.

A patch replaces a private part of a library, because the public way is slow or does not work. Each patch has a public
fallback that writes the same file. Set the environment variable `SCALEPOINT_NO_PATCHES=1` to use the fallbacks, for
example to find out whether a patch causes a problem with a new version of a library.

`torch_names` is not a patch: it collects the classes and functions of torch that have no public name.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NO_PATCHES_VARIABLE = "SCALEPOINT_NO_PATCHES"


@dataclass(frozen=True)
class Patch:
    """One patch: the library it depends on, and what happens without it.

    Attributes:
        module: The module of `scalepoint.compat` that contains the patch.
        package: The package whose private names it uses.
        tested_versions: The versions that the patch was tested with, by their first numbers.
        reason: Why the patch exists.
        fallback: What runs instead with SCALEPOINT_NO_PATCHES=1.
    """

    module: str
    package: str
    tested_versions: tuple[str, ...]
    reason: str
    fallback: str


PATCHES = (
    Patch(
        "fast_export",
        "torch",
        ("2.13.", "2.15."),
        "torch.export traces a captured graph again to write a file, which takes most of the time of an export",
        "torch.export.export and ExportedProgram.run_decompositions",
    ),
    Patch(
        "recurrent_shapes",
        "torch",
        ("2.13.", "2.15."),
        "torch unrolls a recurrent layer to find its output shape, which fixes the sequence length",
        "the sequence length of the example is fixed in graphs with recurrent layers",
    ),
    Patch(
        "torch_onnx",
        "torch",
        ("2.13.", "2.15."),
        "torch.onnx.export rebuilds its operator tables in every call and runs the program once more",
        "torch.onnx.export",
    ),
    Patch(
        "onnx_rewriter",
        "onnxscript",
        ("0.7.",),
        "onnxscript tries every rewrite rule on every node and infers the shapes of repeated blocks again",
        "onnxscript.optimizer.optimize",
    ),
    Patch(
        "executorch",
        "executorch",
        ("1.5.",),
        "XNNPACK's lowering runs 17 passes for each delegate, most of which change nothing, and decomposes twice",
        "all passes, and ExecuTorch's own partitioner",
    ),
    Patch(
        "transformers",
        "torch",
        ("2.13.", "2.15."),
        "transformers allocates all weights of a model, which are read block by block later",
        "the weights are allocated while the module tree is built",
    ),
    Patch(
        "autocast",
        "torch",
        ("2.13.", "2.15."),
        "torch.autocast in a forward would put casts into the captured graph",
        "a torch function mode that turns autocast off before each operation",
    ),
    Patch(
        "transformer_masks",
        "torch",
        ("2.13.", "2.15."),
        "nn.TransformerEncoder and nn.TransformerDecoder read the values of a mask, which a trace does not have",
        "forward hooks on these modules pass is_causal=False",
    ),
    Patch(
        "outside_tracing",
        "torch",
        ("2.13.", "2.15."),
        "weights of a plain torch.onnx.export must be computed while the exporter traces, without being recorded",
        "the computation runs in another thread: tracers record only their own thread",
    ),
    Patch(
        "onnx_log",
        "torch",
        ("2.13.",),
        "the TorchScript exporter prints the graph of a failed export to stdout",
        "the graph is printed",
    ),
    Patch(
        "dynamo",
        "torch",
        ("2.13.", "2.15."),
        "torch.compiler.assume_constant_result imports torch._dynamo, which takes as long as importing torch",
        "torch.compiler.assume_constant_result",
    ),
)


def patches_enabled() -> bool:
    """Whether patches are used: yes, unless the environment variable SCALEPOINT_NO_PATCHES is set to 1."""
    return os.environ.get(NO_PATCHES_VARIABLE, "0") in ("", "0")


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside this context, an attribute of a module or a class has another value."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def only_in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `replacement` in the current thread and `original` in the user's other threads."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    return call
