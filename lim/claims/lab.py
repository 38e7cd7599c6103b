"""Where the claims' measurements are made and kept: sizes, grids of networks at birth, and what is measured beside them.

Axes: L position, S seed.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import xarray as xr

from lim import files, ladder, profile, recall, store, sweep
from lim.claims.outside import OUTSIDE
from lim.config import Config
from lim.switches import Switches
from lim.tokens import BYTES
from lim.train import Recipe

ON_OFF = {"on": 1.0, "off": 0.0}
ON, OFF = {"on": 1.0}, {"off": 0.0}


@dataclasses.dataclass(frozen=True)
class Training:
    """Networks that are trained on packed documents, one a seed, and what is measured of them.

    Attributes:
      config, recipe: the network, for byte tokens, and how it is trained; the recipe's own seed is not used.
      length: tokens of a window.
      seeds: how many networks.
      windows: held-out windows on which each is measured.
      measurements: steps at which it is, birth and the end among them.
      probes: random directions per profile.
    """

    config: Config
    recipe: Recipe
    length: int
    seeds: int
    windows: int
    measurements: int
    probes: int


@dataclasses.dataclass(frozen=True)
class Recalls:
    """Networks that are trained to recall pairs, one per seed and intervention.

    Attributes:
      task: its seed is that of the first network, less the block's.
      config, recipe: the network and how it is trained.
      arms: interventions, plain training ("none") first.
      seeds: how many networks per arm.
      evaluations, count: evaluations along training after the one at birth, questions about each place.
    """

    task: recall.Task
    config: Config
    recipe: Recipe
    arms: tuple
    seeds: int
    evaluations: int
    count: int


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of every experiment.

    Attributes:
      name: of the scale.
      qwen2, gpt2: the two networks whose profiles are claimed, with vocabularies cut to the text, since only the tokens
        that are read matter before the head.
      length: of their text.
      swept, swept_length: the network whose depth and skip are swept, and the length of its text.
      depths, skips: the values of that sweep, each in rising order; skips hold 0 and 1.
      target, target_length: the network and the length that the claimed peak-to-valley ratio is about.
      seeds, probes: per configuration.
      extra_seeds: of what is measured outside the grids (attention mass, one-pass gradients).
      training: what is trained on text, and watched.
      recall: what is trained to recall, under interventions.
    """

    name: str
    qwen2: Config
    gpt2: Config
    length: int
    swept: Config
    swept_length: int
    depths: tuple
    skips: tuple
    target: Config
    target_length: int
    seeds: int
    probes: int
    extra_seeds: int
    training: Training
    recall: Recalls

    def spec(self) -> dict:
        """All of it as JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def small_gpt2(width: int, layers: int, length: int) -> Config:
    """A narrow GPT-2 whose width·init_std², and with it the weight of its branches, is that of GPT-2 small."""
    return Config("gpt2", layers=layers, width=width, heads=width // 32, kv_heads=width // 32, head_dim=32, inner=4 * width,
                  vocab=length, max_length=length, norm_eps=1e-5, init_std=0.02 * (768 / width) ** 0.5)  # fmt: skip


def recalls(task: recall.Task, steps: int, *, arms: tuple, seeds: int) -> Recalls:
    """Recall by `lim.recall.network`, trained as `experiments.recall` trains it."""
    recipe = Recipe(steps, batch=32, learning_rate=3e-3, weight_decay=0.01, warmup=0.1)
    return Recalls(task, recall.network(task), recipe, arms, seeds, evaluations=24, count=64)


QWEN2 = Config.preset("qwen2-0.5b")
SCALES = {
    "small": Scale(
        "small", qwen2=ladder.shape(128, 24, 128), gpt2=small_gpt2(128, 12, 128), length=128, swept=ladder.shape(64, 24, 128),
        swept_length=128, depths=(2, 4, 8, 16, 24), skips=(0.0, 0.75, 1.0), target=QWEN2, target_length=2048, seeds=8,
        probes=16, extra_seeds=8,
        training=Training(ladder.shape(64, 8, 128).replace(vocab=BYTES + 1), Recipe(400, 4), length=128, seeds=3, windows=16,
                          measurements=6, probes=16),
        recall=recalls(recall.Task(), 600, arms=("none", "weights-middle", "curriculum"), seeds=3),
    ),
    "paper": Scale(
        "paper", qwen2=QWEN2.replace(vocab=2048), gpt2=Config.preset("gpt2").replace(vocab=2048, max_length=2048), length=2048,
        swept=QWEN2.replace(vocab=512), swept_length=512, depths=(2, 6, 12, 24), skips=(0.0, 0.75, 1.0), target=QWEN2,
        target_length=2048, seeds=4, probes=4, extra_seeds=4,
        training=Training(ladder.shape(64, 24, 512).replace(vocab=BYTES + 1), Recipe(2000, 4), length=512, seeds=4, windows=16,
                          measurements=8, probes=16),
        recall=recalls(recall.Task(), 1500, arms=tuple(recall.INTERVENTIONS), seeds=5),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """One configuration over its seeds.

    Attributes:
      profiles_SL: measured influence, one row per seed.
      theory_L: kernel theory with its finite-width bias, in absolute units; None where it does not apply.
      operator_L: the paper's operator at the strength that the switches imply, of sum 1.
      config, switches, length: what was measured.
    """

    profiles_SL: np.ndarray
    theory_L: np.ndarray | None
    operator_L: np.ndarray
    config: Config
    switches: Switches
    length: int

    @property
    def rms_L(self) -> np.ndarray:
        """Root mean square over seeds."""
        return profile.rms(self.profiles_SL)


class Lab:
    """The measurements of one scale and one block of seeds, kept in a folder: what is there is not measured again."""

    def __init__(self, scale: Scale, seed: int, folder: str | os.PathLike):
        """Opens the folder.

        Args:
          scale: the sizes.
          seed: which block of seeds: block s holds seeds s·n to s·n + n - 1, so different blocks share nothing.
          folder: for the stores; made where there is none.

        Raises:
          ValueError: the folder holds another scale or seed.
        """
        self.scale, self.seed, self.folder = scale, seed, pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        spec, path = dict(scale=scale.spec(), seed=seed), self.folder / "lab.json"
        if path.exists():
            try:
                there = json.loads(path.read_bytes())
                other = f"scale {there['scale']['name']}, seed {there['seed']}"
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"{folder}: its lab.json is damaged ({type(error).__name__})") from None
            if there != spec:
                raise ValueError(f"{folder}: holds another run ({other}, or its sizes have changed since)")
        else:
            with files.whole(path) as partial:
                partial.write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
        self._read: dict[str, xr.Dataset] = {}

    def block(self, count: int) -> tuple:
        """The block's seeds where each block has `count`."""
        return tuple(range(self.seed * count, (self.seed + 1) * count))

    @property
    def seeds(self) -> tuple:
        """The block's seeds of the grids."""
        return self.block(self.scale.seeds)

    @property
    def extra_seeds(self) -> tuple:
        """The first of them, for what is measured outside the grids."""
        return self.seeds[: self.scale.extra_seeds]

    @functools.cached_property
    def grids(self) -> dict[str, sweep.Grid]:
        """Every grid by name. What is not an axis runs as published.

        depth: layers × skip × attention, softmax or exact averaging.
        mask: the Qwen2 network, mask × skip × score path.  parts: RoPE × MLPs.  gpt2: learned positions.
        bare: random values alone, no norm, MLP or softmax.  normed: with norms.  Both with the skip and without.
        """
        s = self.scale
        skips = {f"{skip:g}": skip for skip in s.skips}
        bare = dict(norm=OFF, mlp=OFF, uniform_attention=ON)
        grid = functools.partial(sweep.Grid, seeds=self.seeds, probes=s.probes)
        return {
            "depth": grid(s.swept, dict(layers={str(n): n for n in s.depths}, residual=skips, uniform_attention=ON_OFF),
                          length=s.swept_length),
            "mask": grid(s.qwen2, dict(causal=ON_OFF, residual=ON_OFF, score_path=ON_OFF), length=s.length),
            "parts": grid(s.qwen2, dict(rope=ON_OFF, mlp=ON_OFF), length=s.length),
            "gpt2": grid(s.gpt2, dict(positions=ON_OFF), length=s.length),
            "bare": grid(s.swept, dict(bare, residual=ON_OFF), length=s.swept_length),
            "normed": grid(s.swept, dict(mlp=OFF, uniform_attention=ON, residual=ON_OFF), length=s.swept_length),
        }  # fmt: skip

    def stored(self, name: str) -> store.Store:
        """The store of a grid, made where there is none."""
        return self.grids[name].store(self.folder / name)

    def lacking(self, name: str) -> int:
        """How many cells of a grid, or parts of what is measured outside the grids (`OUTSIDE`), are to do."""
        if name in OUTSIDE:
            return sum(not self._file(name, part).exists() for part in OUTSIDE[name](self))
        return sum(map(len, sweep.todo(self.grids[name], self.stored(name))))

    def measure(self, name: str) -> Iterator[str]:
        """Runs what is lacking; yields an error, mostly empty, for each cell or part that is stored."""
        if not self.lacking(name):
            return
        if name not in OUTSIDE:
            yield from (outcome.error for outcome in sweep.run(self.grids[name], self.stored(name)))
            return
        for part, make in OUTSIDE[name](self).items():
            if not (path := self._file(name, part)).exists():
                arrays = make()
                with files.whole(path) as partial:
                    np.savez(partial, **arrays)
                yield ""

    def ensemble(self, name: str, **labels: str) -> Ensemble:
        """One configuration of a grid that has been measured, by the text of each axis.

        Raises:
          ValueError: not all of its seeds are done, at least two: statistics of several configurations go seed by seed.
        """
        if name not in self._read:
            self._read[name] = store.open(self.folder / name).load()
        ds, grid = self._read[name], self.grids[name]
        full = {axis: labels.get(axis, next(iter(values))) for axis, values in grid.axes.items()}
        c = next(c for c in grid.configurations if c.labels == full)
        done_S = ds.status.values[c.place] == "done"
        if len(done_S) < 2 or not done_S.all():
            raise ValueError(f"grid {name}, {full}: {done_S.sum()} of {len(done_S)} seeds are done: "
                             f"{next(filter(None, map(str, ds.error.values[c.place])), 'the others are to come')}")  # fmt: skip
        theory_L = None if str(ds.theory_error.values[c.place]) else ds.theory.values[c.place][: c.length]
        return Ensemble(ds.influence.values[c.place][:, : c.length], theory_L, ds.operator.values[c.place][: c.length],
                        c.config, c.switches, c.length)  # fmt: skip

    def kept(self, name: str) -> dict[str, dict]:
        """What was measured outside the grids: part → arrays by name.

        Raises:
          ValueError: it has not been.
        """
        if self.lacking(name):
            raise ValueError(f"{name}: not measured yet")
        found = {}
        for part in OUTSIDE[name](self):
            with np.load(self._file(name, part), allow_pickle=False) as arrays:
                found[part] = dict(arrays)
        return found

    def _file(self, name, part):
        return self.folder / f"{name}-{part}.npz"
