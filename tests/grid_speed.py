"""What a grid costs: a shared compilation against one a cell, and the store at ten thousand cells.

    python tests/grid_speed.py            # 240 cells of 2 shapes, shared; a few of them with a compilation each
    python tests/grid_speed.py --alone=240
    python tests/grid_speed.py --store=10000

Each prints what it measured, a line a number.
"""

import argparse
import logging
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import numpy as np  # noqa: E402

import lim  # noqa: E402
from lim import sweep  # noqa: E402


def grid():
    """2 RoPE × 2 mask × 5 residual × 2 depths × 6 seeds."""
    axes = {"layers": {"1": 1, "2": 2}, "rope": {"on": 1.0, "off": 0.0}, "causal": {"on": 1.0, "off": 0.0},
            "residual": {str(r): r for r in (1.0, 0.75, 0.5, 0.25, 0.0)}}  # fmt: skip
    return sweep.Grid(lim.Config.preset("small").replace(layers=1, width=32), axes, tuple(range(6)), length=16)


def compilations(lines):
    return sum("Finished XLA compilation of jit(_moments)" in line for line in lines)


def shared_against_alone(alone):
    """Cells a second with shared compilations, and with the compiled code thrown away before each cell."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("jax")
    logger.handlers, logger.propagate = [handler], False
    with jax.log_compiles(), tempfile.TemporaryDirectory() as scratch:
        into, began = grid().store(f"{scratch}/shared"), time.monotonic()
        cpu, count = time.process_time(), len(list(sweep.run(grid(), into)))
        wall, cpu = time.monotonic() - began, time.process_time() - cpu
        print(f"shared: {count} cells, {compilations(lines)} compilations, {wall:.1f} s ({cpu:.1f} of CPU): {count / wall:.2f} cells/s")
        lines.clear()
        picked = random.Random(0).sample(list(np.ndindex(grid().shape)), alone)
        into, began, cpu_alone = grid().store(f"{scratch}/alone"), time.monotonic(), time.process_time()
        for *place, seed in picked:
            jax.clear_caches()
            one = {name: dict([list(values.items())[i]]) for (name, values), i in zip(grid().axes.items(), place)}
            single = sweep.Grid(grid().config, one, (seed,), length=16)
            runner = sweep._Runner(single, single.configurations[0], 1, 1)
            (result,) = runner([(single.configurations[0], 0)])
            values = dict(influence=result.influence_L, stderr=result.stderr_L)
            into.write((*place, seed), "done", **values)
        wall_alone, cpu_alone = time.monotonic() - began, time.process_time() - cpu_alone
        print(f"alone: {alone} cells, {compilations(lines)} compilations, {wall_alone:.1f} s ({cpu_alone:.1f} of CPU): {alone / wall_alone:.3f} cells/s")
        print(f"ratio: {count / wall / (alone / wall_alone):.1f} in wall time, {count / cpu / (alone / cpu_alone):.1f} in CPU time")
        both = [lim.open(f"{scratch}/{name}").load().influence.values for name in ("shared", "alone")]
        off = max(np.max(np.abs(both[1][cell] / both[0][cell] - 1)) for cell in picked)
        print(f"largest relative difference of the cells that both ran: {off:.1e}")


def store(cells):
    """Seconds and bytes a cell, of 16 positions, through the claims and writes of a run; and reading."""
    big = sweep.Grid(lim.Config.preset("small").replace(layers=1, width=32), {"residual": {str(i): i / 100 for i in range(100)}},
                     tuple(range(cells // 100)), length=16)  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        into, rng = big.store(scratch), np.random.default_rng(0)
        values = dict(influence=rng.random(16), stderr=rng.random(16), metrics=rng.random(len(sweep.METRICS)))
        began, cpu = time.monotonic(), time.process_time()
        for cell in np.ndindex(big.shape):
            into.claim([cell])
            into.write(cell, "done", **values)
        wall, cpu = time.monotonic() - began, time.process_time() - cpu
        files = [path.stat() for path in pathlib.Path(scratch).rglob("*") if path.is_file()]
        print(f"{cells} cells: {1e3 * wall / cells:.2f} ms a cell ({1e3 * cpu / cells:.2f} of CPU), {sum(f.st_size for f in files) / cells:.0f} bytes "
              f"a cell ({512 * sum(f.st_blocks for f in files) / cells:.0f} on disk), {len(files) / cells:.1f} files a cell")  # fmt: skip
        for what, read in dict(open=lambda: lim.open(scratch), status=into.status, everything=lambda: lim.open(scratch).load(),
                               compact=lambda: lim.store.compact(scratch, f"{scratch}/compact"),
                               compacted=lambda: lim.open(f"{scratch}/compact").load()).items():  # fmt: skip
            began = time.monotonic()
            read()
            print(f"{what}: {time.monotonic() - began:.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", type=int, default=12, help="cells to compile one by one")
    parser.add_argument("--store", type=int, default=0, help="only write this many cells to a store")
    args = parser.parse_args()
    store(args.store) if args.store else shared_against_alone(args.alone)
