"""Whether memory grows with the number of cells of a grid, or with the number of updates of a training.

    python tests/memory_over_time.py
    python tests/memory_over_time.py --cells=200 --steps=500 --figure=memory.png

Runs experiments.ablate and experiments.train on a tiny network, each in a process of its own, and notes every second how much of
it is resident and how far it is. Writes the samples as JSON, draws them, and prints the growth by a thousand cells or updates
once the first fifth is over: a straight line through the means of ten stretches, since neighbouring samples are not independent.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import matplotlib
import numpy as np
import psutil
import scipy
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lim import plot  # noqa: E402

WARM_UP, STRETCHES = 0.2, 10
MIB = 2**20


def cells_done(folder):
    """Each cell's profile is a file of its own."""
    return sum(name != "zarr.json" for _, _, names in os.walk(folder / "grid.zarr" / "influence") for name in names)


def updates_done(folder):
    log = folder / "metrics.jsonl"
    return log.read_text(encoding="utf-8").count('"loss"') if log.exists() else 0


def sampled(name, flags, done, total):
    """Runs a command to its end; what was resident each second while it worked, up to its last cell or update."""
    seconds, count, resident = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = pathlib.Path(scratch) / "out", pathlib.Path(scratch) / "log"
        with log.open("w") as said:
            command = [sys.executable, "-m", f"experiments.{name}", *flags, f"--out={folder}"]
            process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
            watched, began = psutil.Process(process.pid), time.monotonic()
            while process.poll() is None:
                now = done(folder)
                if now < total:
                    seconds.append(time.monotonic() - began)
                    count.append(now)
                    resident.append(watched.memory_info().rss / MIB)
                time.sleep(1)
        if process.returncode or done(folder) < total:
            sys.exit(f"experiments.{name} ended at {done(folder)} of {total}:\n{log.read_text()[-2000:]}")
    return dict(command=" ".join(command[1:-1]), seconds=seconds, count=count, resident_mib=resident)


def growth(run):
    """Resident MiB by a thousand cells or updates after the warm-up, and its standard error."""
    count, resident = np.array(run["count"]), np.array(run["resident_mib"])
    warm = count >= WARM_UP * count.max()
    mean = lambda values: [stretch.mean() for stretch in np.array_split(values[warm], STRETCHES)]  # noqa: E731
    line = scipy.stats.linregress(np.array(mean(count)) / 1000, mean(resident))
    return line.slope, line.stderr


def draw(runs):
    """Resident memory against cells and against updates."""
    with matplotlib.rc_context(plot.STYLE):
        figure = Figure(figsize=(6.5, 2.4), layout="constrained")
        for ax, (unit, run) in zip(figure.subplots(1, len(runs)), runs.items()):
            ax.axvspan(0, WARM_UP * max(run["count"]), color="#eeeeee", lw=0)
            ax.plot(run["count"], run["resident_mib"], ".", color=plot.MEASURED, ms=3)
            ax.set(xlabel=unit, ylabel="resident memory, MiB", xlim=(0, None), ylim=(0, None))
            slope, error = growth(run)
            ax.set_title(f"{slope:+.2f} ± {error:.2f} MiB per 1,000 {unit}\n(after the shaded warm-up)", fontsize=8)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=2000, help="of the grid, a multiple of 10; default: %(default)s")
    parser.add_argument("--steps", type=int, default=5000, help="updates; default: %(default)s")
    parser.add_argument("--samples", default="runs/memory.json", help="where the samples go; default: %(default)s")
    parser.add_argument("--figure", default="docs/memory.png", help="default: %(default)s")
    args = parser.parse_args()
    if args.cells % 10 or args.cells < 100 or args.steps < 100:
        parser.error(f"--cells={args.cells}, --steps={args.steps}: at least 100, cells a multiple of 10")

    grid = ["--layers=1", "--width=16", "--length=16", "--residual=0.1,0.3,0.5,0.7,0.9", "--rope=on,off", f"--seeds={args.cells // 10}"]
    training = ["--layers=1", "--width=16", "--length=32", "--batch=2", f"--steps={args.steps}", "--windows=4", "--measurements=20",
                "--probes=2", f"--save_every={args.steps // 50}"]  # fmt: skip
    runs = dict(cells=sampled("ablate", grid, cells_done, args.cells), updates=sampled("train", training, updates_done, args.steps))
    pathlib.Path(args.samples).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(args.samples).write_text(json.dumps(runs), encoding="utf-8")
    for unit, run in runs.items():
        slope, error = growth(run)
        print(f"{run['command']}: {len(run['count'])} samples in {run['seconds'][-1]:.0f} s, at most {max(run['resident_mib']):.0f} MiB, "
              f"{slope:+.2f} ± {error:.2f} MiB per 1,000 {unit}")  # fmt: skip
    plot.save(draw(runs), args.figure)


if __name__ == "__main__":
    main()
