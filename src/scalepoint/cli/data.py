"""Loads calibration data by name.

    a .npz, .npy or .safetensors file      the samples of each input along the first axis
    a folder of .npz or .npy files         one batch per file
    a folder of images                     cropped to a square and normalized
    package.module:function                an iterable of batches, or a function that returns one

The result can be iterated several times. No file is unpickled.
"""

# ruff: noqa: PLC0415  # numpy, torch and pillow are imported when data is read
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from scalepoint.cli.load_objects import PICKLE_SUFFIXES, ObjectLoader, check_name, load_object, user_code
from scalepoint.cli.output import say
from scalepoint.errors import DocumentError, ScalepointError, UsageError
from scalepoint.support.untrusted import check_file

FILE_SUFFIXES = (".npz", ".npy", ".safetensors")
ARRAY_SUFFIXES = (".npz", ".npy")  # of the files in a folder, one for each batch
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
MAX_DATA_BYTES = 2**34  # of a .npz file after decompression
PREPROCESSING_EXAMPLE = "--size 224 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225"
DATA_KINDS = (
    "a .npz, .npy or .safetensors file, a folder of .npz or .npy files or of images, or package.module:function"
)


@dataclass(frozen=True)
class DataOptions:
    """How files and images become batches. Images need size (pixels), mean and std (of values in 0..1)."""

    batch_size: int = 8
    max_batches: int | None = None
    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    loader: ObjectLoader = field(default_factory=ObjectLoader)


class Batches:
    """Iterable of batches that starts again at each iteration and stops after `limit` batches."""

    def __init__(self, name: str, start: Callable[[], Iterable[Any]], limit: int | None) -> None:
        self.name = name
        self._start = start
        self._limit = limit

    def __iter__(self) -> Iterator[Any]:
        with user_code(f"data {self.name!r}"):
            source = iter(self._start())
        for _ in islice(count(), self._limit):
            with user_code(f"data {self.name!r}"):
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield batch

    def first(self) -> Any:
        """Return the first batch."""
        for batch in islice(self, 1):
            return batch
        raise UsageError(f"data {self.name!r} is empty: at least one batch is needed")


def check_data(text: str, options: DataOptions) -> None:
    """Refuse a name that cannot be data, before anything slow happens."""
    path = options.loader.resolve(text)
    suffix = path.suffix.lower()
    if suffix in PICKLE_SUFFIXES and ":" not in text:
        raise UsageError(
            f"data {text!r}: a {suffix} file can run code when it is loaded, so it is never opened: use {DATA_KINDS}"
        )
    if path.is_dir():
        if not _has_arrays(path):
            _require_preprocessing(text, options)
    elif path.exists():
        if suffix not in FILE_SUFFIXES:
            kind = suffix or "a file without a suffix"
            raise UsageError(f"data {text!r}: {kind} cannot be used as data: use {DATA_KINDS}")
    elif suffix in FILE_SUFFIXES:
        raise UsageError(f"data {text!r}: there is no such file in {Path.cwd()}")
    elif ":" not in text:
        raise UsageError(f"data {text!r}: there is no such file or folder in {Path.cwd()}: use {DATA_KINDS}")
    else:
        check_name(text, "data", options.loader)


def load_data(text: str, options: DataOptions) -> Batches:
    """Load the data that `text` names."""
    check_data(text, options)
    path = options.loader.resolve(text)
    if path.is_dir():
        return _array_batches(path, options) if _has_arrays(path) else _image_batches(path, options)
    if path.suffix.lower() in FILE_SUFFIXES:
        arrays = _read_safetensors(path) if path.suffix.lower() == ".safetensors" else _read_npz(path)
        return Batches(text, lambda: _slice_batches(arrays, options.batch_size), options.max_batches)
    source = load_object(text, "data", options.loader)
    if not callable(source) and not isinstance(source, Iterable):
        raise UsageError(
            f"data {text!r} must be an iterable of batches or a function that returns one, got a "
            f"{type(source).__name__}"
        )
    return Batches(text, source if callable(source) else lambda: source, options.max_batches)


def _has_arrays(folder: Path) -> bool:
    return any(path.suffix.lower() in ARRAY_SUFFIXES for path in folder.iterdir())


def _array_batches(folder: Path, options: DataOptions) -> Batches:
    """Read each .npz or .npy file of a folder as one batch."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in ARRAY_SUFFIXES)

    def start() -> Iterator[Any]:
        for path in paths:
            arrays = _read_npz(path)
            sample_count = len(next(iter(arrays.values())))  # the same for all arrays: see _check_samples
            yield from _slice_batches(arrays, sample_count)

    return Batches(str(folder), start, options.max_batches)


def _read_npz(path: Path) -> dict[str, Any]:
    """Read the arrays of a .npz file by name, or the array of a .npy file as arr_0."""
    import numpy as np
    import torch

    _check_file(path)
    try:
        if path.suffix.lower() == ".npy":
            return _check_samples(path, {"arr_0": torch.from_numpy(np.load(path, allow_pickle=False))})
        with zipfile.ZipFile(path) as file:
            size = sum(entry.file_size for entry in file.infolist())
        if size > MAX_DATA_BYTES:
            raise UsageError(f"{path}: {size} bytes once unpacked, at most {MAX_DATA_BYTES} can be read")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _check_samples(path, {name: torch.from_numpy(array) for name, array in arrays.items()})
    except ScalepointError:
        raise
    except Exception as error:  # a damaged archive raises many types
        raise UsageError(f"{path} is not a {path.suffix} file of plain arrays: {error}") from error


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_file(path)
    try:
        return _check_samples(path, load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{path} is not a safetensors file: {error}") from error


def _check_file(path: Path) -> None:
    try:
        check_file(path)
    except (OSError, DocumentError) as error:
        raise UsageError(
            error.args[0] if isinstance(error, DocumentError) else f"{path} cannot be read: {error}"
        ) from error


def _check_samples(path: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Check that all arrays have the same number of samples along the first axis. Convert float64 to float32."""
    import torch

    lengths = {name: len(tensor) if tensor.ndim else 0 for name, tensor in tensors.items()}
    if not lengths or 0 in lengths.values() or len(set(lengths.values())) > 1:
        arrays = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()) or "no arrays"
        raise UsageError(
            f"{path}: each array must have the samples of one input along its first axis, and all arrays the same "
            f"number of samples, got {arrays}"
        )
    doubles = [name for name, tensor in tensors.items() if tensor.dtype == torch.float64]
    if doubles:
        say(f"note: {path}: float64 is read as float32 ({', '.join(doubles)})")
    return {name: tensor.float() if name in doubles else tensor for name, tensor in tensors.items()}


def _slice_batches(arrays: Mapping[str, Any], size: int) -> Iterator[Any]:
    """Yield batches: a tensor for one array, a tuple for arrays arr_0, arr_1, ..., else a dict by name.

    np.savez gives the names arr_0, arr_1, ... to positional arrays.
    """
    names = list(arrays)
    if all(map(_is_numbered, names)):  # arr_2 comes before arr_10
        names.sort(key=lambda name: (len(name), name))
    for start in range(0, len(arrays[names[0]]), size):
        parts = {name: arrays[name][start : start + size] for name in names}
        if len(names) == 1:
            yield parts[names[0]]
        else:
            yield tuple(parts.values()) if all(map(_is_numbered, names)) else parts


def _is_numbered(name: str) -> bool:
    return name.startswith("arr_") and name[4:].isdecimal()


def _require_preprocessing(text: str, options: DataOptions) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """Return size, mean and std of images. They depend on the model: all three are required."""
    if options.size is None or options.mean is None or options.std is None:
        raise UsageError(
            f"data {text!r} is a folder of images: pass the preprocessing of the model, such as {PREPROCESSING_EXAMPLE}"
        )
    mean, std = options.mean, options.std
    if len(mean) != len(std) or len(mean) not in (1, 3) or not all(value > 0 for value in std):
        raise UsageError(
            f"--mean and --std must have 3 numbers each (colour) or 1 (grey), and --std must be above 0, as in "
            f"{PREPROCESSING_EXAMPLE}"
        )
    return options.size, mean, std


def _image_batches(folder: Path, options: DataOptions) -> Batches:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UsageError("images need the package pillow: pip install pillow") from error
    size, mean, std = _require_preprocessing(str(folder), options)
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not paths:
        raise UsageError(f"data '{folder}': no images ({', '.join(IMAGE_SUFFIXES)}) in this folder")
    groups = [paths[start : start + options.batch_size] for start in range(0, len(paths), options.batch_size)]

    def start() -> Iterator[Any]:
        import torch

        for group in groups:
            yield torch.stack([_read_image(path, size, mean, std) for path in group])

    return Batches(str(folder), start, options.max_batches)


def _read_image(path: Path, size: int, mean: Sequence[float], std: Sequence[float]) -> Any:
    """Return (pixel / 255 - mean) / std of the central square, channels first."""
    import numpy as np
    import torch
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("RGB" if len(mean) == 3 else "L")
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
    except (OSError, ValueError, SyntaxError, ZeroDivisionError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} cannot be read as an image: {error}") from error
    pixels = np.asarray(image, dtype=np.float32).reshape(size, size, len(mean)) / 255
    values = (pixels - np.asarray(mean, dtype=np.float32)) / np.asarray(std, dtype=np.float32)
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))
