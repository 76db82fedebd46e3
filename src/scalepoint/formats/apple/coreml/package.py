"""Read an .mlpackage: its specification, and the operations of its program with their constants."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalepoint.errors import DocumentError, ExportError, StoreError, install_hint
from scalepoint.support.untrusted import LARGEST_PROTOBUF, check_file, read_bytes

MODEL_FOLDER = Path("Data") / "com.apple.CoreML"


def import_coremltools() -> Any:
    """Import coremltools without its warnings; raise ExportError with an installation hint if it is missing."""
    with without_warnings():
        try:
            import coremltools  # noqa: PLC0415  # only Core ML files need it
        except ImportError as error:
            raise ExportError(
                f"Core ML files are written by coremltools, which is not installed: {install_hint('coreml')}"
            ) from error
    return coremltools


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence coremltools: it warns about untested versions of torch, and about libraries that only macOS has."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)


def read_spec(path: Path) -> Any:
    """Read the protobuf of a package's model."""
    coremltools = import_coremltools()
    model_file = path / MODEL_FOLDER / "model.mlmodel"
    spec = coremltools.proto.Model_pb2.Model()
    try:
        # All files are checked here, because coremltools later opens the weights itself.
        for file in path.rglob("*"):
            if not file.is_dir():
                check_file(file, folder=path)
        spec.ParseFromString(read_bytes(model_file, LARGEST_PROTOBUF, folder=path))
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except Exception as error:  # protobuf raises exceptions of its own
        raise StoreError(f"{path} is not a Core ML package, or the package is incomplete: {error}") from error
    if spec.WhichOneof("Type") != "mlProgram":
        raise StoreError(f"{path} is not a Core ML package with a program (mlProgram)")
    return spec


def read_operations(path: Path) -> list[Any]:
    """Return the operations of the main function in order, loaded by coremltools."""
    coremltools = import_coremltools()
    spec = read_spec(path)
    with without_warnings():
        from coremltools.converters.mil.frontend.milproto.load import load  # noqa: PLC0415

        try:
            program = load(spec, spec.specificationVersion, file_weights_dir=str(path / MODEL_FOLDER / "weights"))
        except Exception as error:  # a truncated or missing weight file
            raise StoreError(f"coremltools {coremltools.__version__} cannot read {path}: {error}") from error
        return list(program.functions["main"].operations)
