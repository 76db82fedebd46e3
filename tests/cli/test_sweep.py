"""The command sweep: a grid in a config, and a folder for each run."""

import json

from scalepoint.cli.exit_codes import Code

GRID = """
model: nets:net
data: nets:fixed_batches
target: reference
grid:
  quantization: [{}, {overrides: [{name: head, weight: float, activation: float}]}]
"""


def test_a_sweep_writes_a_folder_per_run_and_can_be_resumed(call, here) -> None:
    (here / "sweep.yaml").write_text(GRID)
    code, out, err = call("sweep", "-c", "sweep.yaml", "-o", "all", "--json", "-q")
    assert code == 0, err
    result = json.loads(out)
    assert [row["name"] for row in result["rows"]] == ["config1", "config2"]
    assert (here / "all" / "sweep.html").is_file()
    code, _, err = call("deploy", "-c", "all/config2/config.yaml", "--dry-run")
    assert code == 0, err
    code, _, err = call("sweep", "-c", "sweep.yaml", "-o", "all")
    assert (code, "--resume" in err) == (Code.USAGE, True)
    code, out, _ = call("sweep", "-c", "sweep.yaml", "-o", "all", "--resume")
    assert (code, "config1" in out) == (0, True)


def test_options_of_all_runs_are_checked_before_the_model_is_loaded(call, here) -> None:
    (here / "sweep.yaml").write_text("model: nets:none\ndata: nets:fixed_batches\ngrid: {max_drop: [1]}\n")
    code, _, err = call("sweep", "-c", "sweep.yaml", "-o", "all")
    assert (code, "--evaluate" in err) == (Code.USAGE, True)
