"""Count the code that one deploy runs: the functions of scalepoint that it calls, their lines and files.

A reader who wants to know what happens has that much to read.

    python bench/happy_path.py [--source OTHER/src]        the same for another checkout
"""

import argparse
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import ast, collections, pathlib, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
import scalepoint
root = pathlib.Path(scalepoint.__file__).parent
called = set()

def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(str(root)):
        called.add(frame.f_code)

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
data = [torch.randn(2, 3, 12, 12) for _ in range(2)]
with tempfile.TemporaryDirectory() as folder:
    sys.setprofile(profile)
    scalepoint.deploy(net, data[0], data, target="onnxruntime", output=folder, evaluate=lambda run: 1.0, progress=False)
    sys.setprofile(None)

sizes = {}
for code in called:
    if code.co_name.startswith("<") or not code.co_filename.endswith(".py"):
        continue
    sizes.setdefault(code.co_filename, set()).add(code.co_firstlineno)
layers = collections.Counter(); lines = collections.Counter(); files = collections.Counter()
for path, starts in sizes.items():
    layer = pathlib.Path(path).relative_to(root).parts[0].removesuffix(".py")
    tree = ast.parse(pathlib.Path(path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first in starts or node.lineno in starts:
                layers[layer] += 1
                lines[layer] += node.end_lineno - first + 1
    files[layer] += 1
for layer in sorted(layers, key=lambda each: -lines[each]):
    print(f"{layer:16} {files[layer]:6} {layers[layer]:10} {lines[layer]:6}")
print(f"{'all':16} {sum(files.values()):6} {sum(layers.values()):10} {sum(lines.values()):6}")
print(f"modules of scalepoint that were loaded: {sum(name.startswith('scalepoint') for name in sys.modules)}")
packages = {name.split(".")[2] for name in sys.modules if name.startswith("scalepoint.formats.")}
formats = packages & {path.name for path in (root / "formats").iterdir() if path.is_dir()}
print(f"packages of file formats that were loaded: {', '.join(sorted(formats))}")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    source = parser.parse_args().source.resolve()
    print(f"{'layer':16} {'files':>6} {'functions':>10} {'lines':>6}", flush=True)
    environment = {"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
