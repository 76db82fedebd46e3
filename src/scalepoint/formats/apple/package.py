"""An .mlpackage read back: the operations of its program, with the values of what is constant."""

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
    """The package, imported quietly; an error says how it is installed."""
    with without_warnings():
        try:
            import coremltools as found  # noqa: PLC0415  # only files of Core ML need it
        except ImportError as error:
            raise ExportError(
                f"Core ML files are written by coremltools, which is not installed: {install_hint('coreml')}"
            ) from error
    return found


@contextmanager
def without_warnings() -> Iterator[None]:
    """It warns of every version of torch that it does not know, and of what only a Mac has."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def read_spec(path: Path) -> Any:
    """The protobuf of a package's model."""
    tools = import_coremltools()
    file = path / MODEL_FOLDER / "model.mlmodel"
    spec = tools.proto.Model_pb2.Model()
    try:
        for each in path.rglob("*"):  # coremltools opens the weights by itself
            if not each.is_dir():
                check_file(each, folder=path)
        spec.ParseFromString(read_bytes(file, LARGEST_PROTOBUF, folder=path))
    except DocumentError as error:
        raise StoreError(error.args[0]) from error
    except Exception as error:  # protobuf raises its own kinds
        raise StoreError(f"{path} is not a Core ML package, or only a part of one: {error}") from error
    if spec.WhichOneof("Type") != "mlProgram":
        raise StoreError(f"{path} is not a Core ML package with a program")
    return spec


def read_operations(path: Path) -> list[Any]:
    """The operations of its main function in order, as coremltools reads them back."""
    tools = import_coremltools()
    spec = read_spec(path)
    with without_warnings():
        from coremltools.converters.mil.frontend.milproto.load import load  # noqa: PLC0415

        try:
            program = load(spec, spec.specificationVersion, file_weights_dir=str(path / MODEL_FOLDER / "weights"))
        except Exception as error:  # a weight file that is cut off, or none
            raise StoreError(f"{path} cannot be read back by coremltools {tools.__version__}: {error}") from error
        return list(program.functions["main"].operations)
