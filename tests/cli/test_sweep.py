"""sweep on the command line: a grid in a config, a folder a run, and what is wrong with it."""

import json

from scalepoint.cli.exit_codes import Code

GRID = """
model: nets:net
data: nets:same
target: reference
grid:
  quantization: [{}, {overrides: [{name: head, weight: float, activation: float}]}]
"""


def test_a_sweep_makes_a_folder_a_run_and_goes_on(call, here) -> None:
    (here / "sweep.yaml").write_text(GRID)
    code, out, err = call("sweep", "-c", "sweep.yaml", "-o", "all", "--json", "-q")
    assert code == 0, err
    found = json.loads(out)
    assert [row["name"] for row in found["rows"]] == ["config1", "config2"]
    assert (here / "all" / "sweep.html").is_file()
    code, _, err = call("deploy", "-c", "all/config2/config.yaml", "--dry-run")
    assert code == 0, err
    code, _, err = call("sweep", "-c", "sweep.yaml", "-o", "all")
    assert (code, "--resume" in err) == (Code.USAGE, True)
    code, out, _ = call("sweep", "-c", "sweep.yaml", "-o", "all", "--resume")
    assert (code, "config1" in out) == (0, True)
