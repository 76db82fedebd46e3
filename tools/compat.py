"""Run the fast tests with other versions of torch and Python, each in an environment of its own.

    python tools/compat.py                          every row of VERSIONS, and the table in docs/reference/versions.md
    python tools/compat.py --torch 2.15.0           one version of torch with this Python; exit code 1 if a test fails
    python tools/compat.py --torch 2.15.0 tests/graph tests/spec    only these tests

An environment has scalepoint, the newest versions of its other dependencies that pip chooses, and what the tests need.
Where pip has no CPU build of torch it installs the CUDA build and its packages: 4 GB for each version.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".compat"
RESULTS = ROOT / "docs" / "reference" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"
VERSIONS = (("3.11", "2.13.0"), ("3.11", "2.15.0"), ("3.12", "2.15.0"), ("3.13", "2.15.0"), ("3.14", "2.15.0"))
# Without executorch and coremltools, which ask for one version of torch. Their tests are skipped.
TEST_PACKAGES = (
    "ai-edge-litert", "compressed-tensors", "expecttest", "gguf", "h5py", "hypothesis", "openvino", "pillow", "pytest",
    "pytest-xdist", "sybil", "transformers",
)  # fmt: skip
SHOWN_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "transformers", "numpy")
SHOWN_COLUMNS = (
    "python", "torch", "onnxruntime", "transformers", "tests", "passed", "failed", "skipped", "minutes",
)  # fmt: skip
# Not run: torchvision and timm in .architectures belong to the pinned torch, and docs and tools do not depend on torch.
IGNORED = (
    "tests/test_architectures.py",
    "tests/docs",
    "tests/tools",
    "tests/test_bench.py",
    "tests/test_distribution.py",
)
BEGIN, END = "<!-- begin versions -->", "<!-- end versions -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="one version instead of all")
    parser.add_argument("--python", help="the interpreter, such as python3.12; default: this one")
    parser.add_argument("--index-url", help="where torch is installed from")
    parser.add_argument("--environment", help="an existing environment instead of a new one")
    parser.add_argument(
        "--results", nargs="+", type=Path, help="JUnit files of a run in parts, instead of running tests"
    )
    parser.add_argument("tests", nargs="*", help="files and folders of tests; default: all fast tests")
    options = parser.parse_args()
    if options.results:
        row = describe_environment(Path(options.environment) / "bin" / "python")
        add_rows([row | {"torch": row["torch"].partition("+")[0]} | read_results(options.results, options.tests)])
        return 0
    if options.torch:
        python = options.python or sys.executable
        row = run_version(python, options.torch, options.index_url, options.tests, options.environment)
        add_rows([row])
        return 1 if row["failed"] else 0
    rows = []
    for version, torch in VERSIONS:
        python = shutil.which(f"python{version}")
        if python is None or not runs(python):
            rows.append({"python": version, "torch": torch, "tests": "not run: no interpreter here", "failed": 0})
        else:
            rows.append(run_version(python, torch, options.index_url, options.tests, None))
    add_rows(rows)
    return 1 if any(row["failed"] for row in rows) else 0


def runs(python: str) -> bool:
    return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0


def run_version(python: str, torch: str, index_url: str | None, tests: Sequence[str], environment: str | None) -> dict:
    """Install one version, run the tests, and return the row of the table."""
    folder = Path(environment) if environment else FOLDER / f"{Path(python).name}-torch{torch}"
    executable = folder / "bin" / "python"
    if not environment:
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(executable), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"torch=={torch}", *(["--index-url", index_url] if index_url else [])], check=True)
        subprocess.run([*install, f"torch=={torch}", "-e", str(ROOT), *TEST_PACKAGES], check=True)
    log = folder / "tests.xml"
    log.unlink(missing_ok=True)
    ignored = [f"--ignore={path}" for path in IGNORED]
    command = [str(executable), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={log}", *ignored]
    done = subprocess.run([*command, *(tests or ["tests"])], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-8000:], flush=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with code {done.returncode}: {done.stderr[-2000:]}")
    return {"torch": torch, **describe_environment(executable), **read_results([log], tests)}


def read_results(logs: Sequence[Path], tests: Sequence[str]) -> dict:
    """Count the tests of JUnit files. If a test is in several files, the last one counts."""
    roots = [ElementTree.parse(log).getroot() for log in logs]  # noqa: S314  # written by pytest
    cases = {f"{case.get('classname')}::{case.get('name')}": case for root in roots for case in root.iter("testcase")}
    outcomes = {name: {child.tag for child in case} for name, case in cases.items()}
    failures = sorted(name for name, tags in outcomes.items() if tags & {"failure", "error"})
    skipped = sum("skipped" in tags for tags in outcomes.values())
    seconds = sum(float(suite.get("time", 0)) for root in roots for suite in root.iter("testsuite"))
    return {
        "tests": " ".join(tests) or "all fast tests",
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
        "minutes": round(seconds / 60, 1),
    }


def describe_environment(executable: Path) -> dict:
    program = (
        "import json, platform\nfrom importlib.metadata import version\n"
        f"print(json.dumps({{'python': platform.python_version(), **{{n: version(n) for n in {SHOWN_PACKAGES}}}}}))"
    )
    return json.loads(
        subprocess.run([str(executable), "-c", program], capture_output=True, text=True, check=True).stdout
    )


def add_rows(rows: Sequence[dict]) -> None:
    """Replace the rows of the same versions in the results, and write the table again."""
    old = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    key = lambda row: (".".join(row["python"].split(".")[:2]), row["torch"].partition("+")[0], row["tests"])  # noqa: E731
    merged = {key(row): row for row in (*old, *rows)}
    table = [merged[name] for name in sorted(merged)]
    RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{format_table(table)}{END}{after}")


def format_table(rows: Sequence[dict]) -> str:
    lines = [
        "| Python | torch | onnxruntime | transformers | tests | passed | failed | skipped | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = (row.get(name, "") for name in SHOWN_COLUMNS)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
