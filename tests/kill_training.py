"""Kills a training with SIGKILL at random moments and resumes it, until it is done; then holds it against one left in peace.

    python tests/kill_training.py --kills=20

Run by anyone from anywhere; `tests/test_experiments.py` runs a shorter form. It says what it saw, and ends with an
AssertionError if a loss, a measured number or a weight differs by a bit, or a checkpoint cannot be read.
"""

import argparse
import json
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


def start(scratch, name, steps):
    """A process that trains into scratch/name."""
    words = f"--layers=2 --width=32 --length=32 --batch=4 --windows=3 --measurements=5 --probes=4 --steps={steps} --save_every={max(steps // 20, 1)}"
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_COMPILATION_CACHE_DIR=str(scratch / "cache"),
               JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")  # fmt: skip
    return subprocess.Popen([sys.executable, "-m", "experiments.train", *words.split(), f"--out={scratch / name}"], env=env, cwd=scratch,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip


def losses(folder):
    """Step → loss, of the whole lines of a log; a step that stands twice must be the same."""
    seen = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True):
        if line.endswith("\n") and "loss" in (entry := json.loads(line)):
            assert seen.setdefault(entry["step"], entry) == entry, entry
    return seen


def last_step(folder):
    """The last step in a log that may not be there yet, or end in half a line."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return -1
    return max((json.loads(line)["step"] for line in lines[:-1]), default=-1)


def main(kills, steps=200, seed=0, scratch=None):
    """Raises AssertionError if a promise is broken; returns what was seen."""
    sys.path.insert(0, str(ROOT))
    import jax

    import lim
    from lim import train
    from lim.model import params_of

    rng, scratch, began = random.Random(seed), pathlib.Path(scratch or tempfile.mkdtemp(prefix="kill_training.")), time.monotonic()
    peace = start(scratch, "peace", steps)
    assert peace.wait() == 0, peace.stderr.read()
    print(f"{steps} steps in peace: {time.monotonic() - began:.1f} s", flush=True)
    folder, killed, lost = scratch / "killed", 0, 0
    while True:
        process = start(scratch, "killed", steps)
        if killed < kills:
            aim = steps * (killed + rng.random()) / kills  # spread over the whole training; and a moment more
            while process.poll() is None and last_step(folder) < aim:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            killed += 1
            reached = last_step(folder)
        err = process.stderr.read()
        code = process.wait()
        assert code in (0, -signal.SIGKILL), err
        if code == 0:
            break
        kept = train.Checkpoints(folder).steps() if (folder / train.CHECKPOINTS).exists() else []
        lost += reached - max(kept, default=0)
    assert losses(folder) == losses(scratch / "peace"), "losses differ"
    assert sorted(losses(folder)) == list(range(1, steps + 1))
    one, other = (lim.open(scratch / name).load() for name in ("peace", "killed"))
    for name in one.variables:
        assert one[name].equals(other[name]), f"{name} differs"
    one, other = (jax.tree.leaves(params_of(train.trained(scratch / name))) for name in ("peace", "killed"))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)), "weights differ"
    return (f"{killed} kills of a training of {steps} steps; losses, measurements and weights equal to the bit to the uninterrupted run's; "
            f"{lost} steps done again; {time.monotonic() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    print(main(**vars(parser.parse_args())))
