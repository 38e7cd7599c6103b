"""Kills a grid with SIGKILL at random moments and resumes it, until it is whole; then holds it against one left in peace.

    python tests/kill_and_resume.py --kills=50

Run by anyone from anywhere; `tests/test_sweep.py` runs a shorter form. It says what it saw, and ends with status 1 if a
cell was lost, torn, different from the uninterrupted one's, or computed again after it was done.
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORKER = """
import sys
import jax
import lim
from lim import sweep
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
config = lim.Config.preset("small").replace(layers=1, width=16)
axes = {"layers": {"1": 1, "2": 2}, "rope": {"on": 1.0, "off": 0.0}, "residual": {str(r): r for r in (0.0, 0.25, 0.5, 0.75, 1.0)}}
grid = sweep.Grid(config, axes, tuple(range(int(sys.argv[4]))), length=8)
into = grid.store(sys.argv[2])
print("ready", flush=True)
for outcome in sweep.run(grid, into, batch=int(sys.argv[3])):
    print(*outcome.cell, outcome.status, flush=True)
"""


def worker(scratch, name, batch, seeds):
    """A process that runs the grid into scratch/name."""
    return subprocess.Popen([sys.executable, "-c", WORKER, str(scratch / "cache"), str(scratch / name), str(batch), str(seeds)],
                            env=dict(os.environ, PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, text=True)  # fmt: skip


def main(kills, batch=4, seeds=12, seed=0, scratch=None):
    """Raises AssertionError if a promise is broken; returns what was seen."""
    sys.path.insert(0, str(ROOT))
    import lim

    rng = random.Random(seed)
    scratch = pathlib.Path(scratch or tempfile.mkdtemp(prefix="kill_and_resume."))
    began = time.monotonic()
    assert worker(scratch, "peace", batch, seeds).communicate()[0].count("done") == 20 * seeds
    print(f"{20 * seeds} cells in peace: {time.monotonic() - began:.1f} s", flush=True)
    marks, killed, said, whole = {}, 0, [], False
    while not whole:
        process = worker(scratch, "killed", batch, seeds)
        lines = [process.stdout.readline()]
        if killed < kills:
            # how many cells it may finish, so that the kills are spread over the whole grid; and a moment more
            left = 20 * seeds - len(marks)
            for _ in range(rng.randint(0, max(1, 2 * left // (kills - killed + 1)))):
                lines.append(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            killed += 1
        rest = process.communicate()[0].splitlines(keepends=True)
        assert killed <= kills and process.returncode in (0, -signal.SIGKILL), process.returncode
        said += [line for line in [*lines, *rest] if line.endswith("done\n")]
        ds = lim.open(scratch / "killed")
        status, mark = ds.status.values, ds.worker.values
        assert set(np.unique(status)) <= {"pending", "running", "done"}, np.unique(status)
        in_hand = np.sum(status == "running")
        assert in_hand <= batch, f"{in_hand} cells in hand"
        for cell, who in marks.items():
            assert (status[cell], mark[cell]) == ("done", who), f"{cell} was done by {who}, and is {status[cell]} by {mark[cell]}"
        marks = {tuple(cell): mark[tuple(cell)] for cell in np.argwhere(status == "done")}
        whole = process.returncode == 0
    assert len(said) == len(set(said)), "a cell was reported done twice"
    peace, ds = lim.open(scratch / "peace").load(), ds.load()
    for name in ds.variables:
        if name not in ("worker", "metrics"):
            assert ds[name].equals(peace[name]), f"{name} differs from the uninterrupted run's"
    rest = [name for name in ds.metric.values if name != "seconds"]
    assert ds.metrics.sel(metric=rest).equals(peace.metrics.sel(metric=rest))
    assert (ds.status == "done").all() and np.isfinite(ds.influence).all()
    workers = len({who.split()[0] for who in mark.ravel()})
    partial = len(list((scratch / "killed").rglob("*.partial")))
    return (f"{killed} kills; {ds.status.size} cells by {workers} processes, each once, equal to the bit to the uninterrupted run's; "
            f"{partial} half-written files left behind; {time.monotonic() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=12, help="20 cells each")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    print(main(**vars(parser.parse_args())))
