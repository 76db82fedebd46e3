"""Starts real groups of ranks for tests: each rank is a process, connected by gloo.

    results = run_group("tests.ranks.jobs:calibrating", 2, tmp_path)      what the job returned on each rank, as JSON

A job is a function of a folder. A killed rank has no result, and a negative exit code.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.warm import warm

ROOT = Path(__file__).parents[2]


def start_group(job: str, size: int, folder: Path, store: str = "file", **env: str) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of a group."""
    init = f"file://{folder}/store" if store == "file" else f"tcp://127.0.0.1:{free_port()}"
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
    processes = []
    for rank in range(size):
        command = [*warm(), "-m", "tests.ranks.group", job, str(rank), str(size), init, str(folder)]
        with (folder / f"output-{rank}").open("w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    return processes


def run_group(job: str, size: int, folder: Path, store: str = "file", **env: str) -> list[Any]:
    """Return the results of all ranks. The test fails with the output of a rank that did not return."""
    ranks = start_group(job, size, folder, store, **env)
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()  # a rank may wait for one that failed
    for index, code in enumerate(codes):
        assert code == 0, f"rank {index} ended with {code}: {(folder / f'output-{index}').read_text()[-3000:]}"
    return [result_of(folder, index) for index in range(size)]


def result_of(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"result-{rank}.json").read_text())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(job: str, rank: str, size: str, init: str, folder: str) -> None:
    from scalepoint.support.cpu import cap_instruction_set

    cap_instruction_set()
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=init, rank=int(rank), world_size=int(size))
    module, _, name = job.partition(":")
    result = getattr(importlib.import_module(module), name)(Path(folder))
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
