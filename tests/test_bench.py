"""The scripts of bench/, which give the numbers of the documentation."""

import subprocess
from pathlib import Path

from tests.warm import warm

BENCH = Path(__file__).parent.parent / "bench"
IMPORT_ALL = """
import sys
from importlib import import_module
from pathlib import Path

bench = Path(sys.argv[1])
sys.path[:0] = [str(bench), str(bench.parent / "demo")]
for path in sorted(bench.rglob("*.py")):
    import_module(".".join(path.relative_to(bench).with_suffix("").parts).removesuffix(".__init__"))
"""


def test_every_script_finds_what_it_imports() -> None:
    command = [*warm(), "-c", IMPORT_ALL, str(BENCH)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
