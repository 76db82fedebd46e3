"""Count the code that one deploy runs: the functions of scalepoint that it calls, their lines and files.

This is the amount of code that somebody must read to follow one deploy. Code lines are lines without docstrings,
comments and blanks. Measured placements of earlier runs are not used.

    python bench/happy_path.py [--source OTHER/src]        the same for another checkout
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import ast, collections, pathlib, sys, tempfile, tokenize, warnings
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

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

def find_code_lines(path, tree):
    numbers = set()
    with tokenize.open(path) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type not in LAYOUT:
                numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            numbers.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return numbers

sizes = {}
for code in called:
    if code.co_name.startswith("<") or not code.co_filename.endswith(".py"):
        continue
    sizes.setdefault(code.co_filename, set()).add(code.co_firstlineno)
layers = collections.Counter(); lines = collections.Counter(); files = collections.Counter()
code_lines = collections.Counter()
for path, starts in sizes.items():
    layer = pathlib.Path(path).relative_to(root).parts[0].removesuffix(".py")
    tree = ast.parse(pathlib.Path(path).read_text())
    numbers = find_code_lines(path, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first in starts or node.lineno in starts:
                layers[layer] += 1
                lines[layer] += node.end_lineno - first + 1
                code_lines[layer] += len(numbers.intersection(range(first, node.end_lineno + 1)))
    files[layer] += 1
for layer in sorted(layers, key=lambda each: -lines[each]):
    print(f"{layer:16} {files[layer]:6} {layers[layer]:10} {lines[layer]:6} {code_lines[layer]:10}")
totals = [sum(counts.values()) for counts in (files, layers, lines, code_lines)]
print("{:16} {:6} {:10} {:6} {:10}".format("all", *totals))
print(f"modules of scalepoint that were loaded: {sum(name.startswith('scalepoint') for name in sys.modules)}")
packages = {name.split(".")[2] for name in sys.modules if name.startswith("scalepoint.formats.")}
formats = packages & {path.name for path in (root / "formats").iterdir() if path.is_dir()}
print(f"packages of file formats that were loaded: {', '.join(sorted(formats))}")
paths = sorted(root.rglob("*.py"))
all_lines = sum(len(path.read_text().splitlines()) for path in paths)
all_code = sum(len(find_code_lines(path, ast.parse(path.read_text()))) for path in paths)
print(f"the whole package: {len(paths)} files, {all_lines} lines, {all_code} code lines")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    source = parser.parse_args().source.resolve()
    print(f"{'layer':16} {'files':>6} {'functions':>10} {'lines':>6} {'code lines':>10}", flush=True)
    environment = {"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    with tempfile.TemporaryDirectory() as cache:
        environment["SCALEPOINT_CACHE"] = cache
        return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
