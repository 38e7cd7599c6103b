"""A grid of networks at birth → cells → batches that share one compilation → the store, over local devices and processes.

A cell is one point of every axis and one seed. Its numbers do not depend on which cells ran beside it, nor on the number
of devices or processes; cells that share their shapes share one compilation.

Axes: B cell of a batch, L position.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lim import profile, tokens
from lim.config import Config
from lim.influence import LARGE, OUTPUTS, available_memory, default_chunk, entries, finish, squared_influence
from lim.model import birth_params, graphdef, random_key
from lim.store import Store
from lim.switches import Switches
from lim.theory import kernel, paper

SWITCHES = tuple(field.name for field in dataclasses.fields(Switches))
AXES = ("model", "tokens", "layers", "width", "length", *SWITCHES)
METRICS = (*(field.name for field in dataclasses.fields(profile.Summary) if field.type in (int, float)
             and field.name != "length" and not field.name.endswith("_se")), "seconds")  # fmt: skip
THEORY_METRICS = ("bias", "cv", "logit_variance")
NOT_HEARD = "influence is zero everywhere: below float32's reach"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One point of every axis but the seed: `place` in the grid, `labels` axis → text, and what they mean."""

    place: tuple
    labels: dict
    config: Config
    length: int
    switches: Switches
    tokens_WL: np.ndarray | None
    probes: int | None


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every combination of the axes' values, once per seed.

    Attributes:
      config: the network, where `model` is no axis.
      axes: name → {text: value} in the order of the dimensions; the names are `AXES`. A model's value is its Config, that
        of tokens an array of ids (see `window`) or None for random ones, anew for each seed.
      seeds: each draws weights, probes and random tokens.
      length: of the text, where it is no axis.
      output, source: as in `lim.influence`.
      probes: as in `lim.influence`, or "auto": exact up to 256 entries, 16 probes beyond.

    Raises:
      ValueError: names the axis, its value and what is allowed.
    """

    config: Config
    axes: dict
    seeds: tuple
    length: int = 256
    output: str = "hidden"
    source: int = 0
    probes: int | Literal["auto"] | None = "auto"

    def __post_init__(self):
        if unknown := self.axes.keys() - set(AXES):
            raise ValueError(f"axis {', '.join(sorted(unknown))}: allowed are {', '.join(AXES)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds}: must be at least one, none of them twice")
        for seed in self.seeds:
            random_key(seed)
        if self.output not in OUTPUTS or self.output == "loss":
            raise ValueError(f"output={self.output!r}: allowed are {', '.join(o for o in OUTPUTS if o != 'loss')}")
        for name in self.axes.keys() & set(SWITCHES):
            if any(np.ndim(value) for value in self.axes[name].values()):
                raise ValueError(f"axis {name}: must hold one number per value, not one per layer")
        self.configurations  # noqa: B018 (refuses what does not fit)

    @functools.cached_property
    def configurations(self) -> list[Configuration]:
        """Every combination of the axes' values, the last axis fastest."""
        made = []
        for place in itertools.product(*(range(len(values)) for values in self.axes.values())):
            labels = {name: list(values)[i] for i, (name, values) in zip(place, self.axes.items())}
            made.append(self._configuration(place, labels))
        return made

    def _configuration(self, place, labels):
        chosen = {name: self.axes[name][text] for name, text in labels.items()}
        config, ids, length = chosen.pop("model", self.config), chosen.pop("tokens", None), chosen.pop("length", self.length)
        config = config.replace(**{name: chosen.pop(name) for name in ("layers", "width") if name in chosen})
        if length > config.max_length:  # at birth a table of positions may be drawn at any length
            config = config.replace(max_length=length)
        if not 0 <= self.source < config.layers:
            raise ValueError(f"source={self.source}: allowed are 0 to {config.layers - 1}")
        switches = Switches(**chosen)
        switches.check(config)
        if isinstance(ids, np.ndarray):
            if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
                raise ValueError(f"tokens={labels['tokens']}: must hold integers of at least 0")
            if ids.max() >= config.vocab:
                raise ValueError(f"tokens={labels['tokens']}: holds the id {ids.max()}, this model ends at {config.vocab - 1}")
            ids = np.stack([window(ids, length, seed) for seed in self.seeds])
        return Configuration(place, labels, config, length, switches, ids, self._probes(config))

    def _probes(self, config):
        rows = entries(config, self.output)
        if self.probes == "auto":
            return None if rows <= 256 else 16
        if self.probes is None or rows == 1:
            return None
        if isinstance(self.probes, bool) or not isinstance(self.probes, (int, np.integer)) or not 2 <= self.probes <= rows:
            raise ValueError(f"probes={self.probes!r}: allowed are 2 to {rows}, the entries of {self.output}")
        return self.probes

    @property
    def shape(self) -> tuple:
        """Values per axis, and seeds."""
        return (*map(len, self.axes.values()), len(self.seeds))

    def spec(self) -> dict:
        """All that decides the numbers, as JSON; `from_spec` makes the grid again, without the text's ids."""
        plain: dict[str, Callable] = {"model": dataclasses.asdict, "tokens": lambda ids: None if ids is None else hashlib.sha256(ids.tobytes()).hexdigest()}
        axes = {name: {text: plain.get(name, lambda v: v)(value) for text, value in values.items()}
                for name, values in self.axes.items()}  # fmt: skip
        text = any(ids is not None for ids in self.axes.get("tokens", {}).values())
        which = dict(windows="by seed") if text else {}  # older stores of text read others, and must not go on with these
        return dict(model=dataclasses.asdict(self.config), axes=axes, seeds=list(self.seeds), length=self.length,
                    output=self.output, source=self.source, probes=self.probes) | which  # fmt: skip

    @classmethod
    def from_spec(cls, spec: dict) -> "Grid":
        """A grid as a store remembers it: for drawing, since it has forgotten the text."""
        axes = {name: dict(values) for name, values in spec["axes"].items()}
        axes |= {name: {text: read(value) for text, value in axes[name].items()}
                 for name, read in (("model", lambda c: Config(**c)), ("tokens", lambda digest: None)) if name in axes}  # fmt: skip
        rest = {name: spec[name] for name in ("length", "output", "source", "probes")}
        return cls(Config(**spec["model"]), axes, tuple(spec["seeds"]), **rest)

    def store(self, path: str | os.PathLike, **attributes: Any) -> Store:
        """This grid's store at a path, made where there is none; `attributes` are kept in a new one.

        Raises:
          ValueError: as `lim.store.Store`.
        """
        axes = {name: (list(values), list(values.values())) if name in SWITCHES else list(map(int, values))
                if name in ("layers", "width", "length") else list(values) for name, values in self.axes.items()}  # fmt: skip
        return Store(path, axes=axes, seeds=self.seeds, length=max(c.length for c in self.configurations), metrics=METRICS,
                     theory_metrics=THEORY_METRICS, grid=self.spec(), attributes=attributes)  # fmt: skip


def window(ids: np.ndarray, length: int, seed: int) -> np.ndarray:
    """The window [length] of a text that a seed reads, whatever other seeds there are.

    A text has as many windows as fit without overlap, evenly spaced. Seeds 0, 1, 2, … take them in bit-reversed order (of
    eight: 0, 4, 2, 6, 1, 5, 3, 7), so that the first few are spread over the text; then they begin again.

    Raises:
      ValueError: as `tokens.windows`.
    """
    count = max(len(ids) // length, 1)
    bits = (count - 1).bit_length()
    order = [n for i in range(2**bits) if (n := int(f"{i:0{bits}b}"[::-1], 2)) < count]
    start = order[seed % count] * (len(ids) - length) // max(count - 1, 1)
    return tokens.windows(ids[start : start + length], length)[0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A cell that has run: index along each axis and the seed; done or failed, and why."""

    cell: tuple
    status: str
    error: str = ""


def todo(grid: Grid, store: Store, *, shard: tuple[int, int] = (0, 1), retry_failed: bool = False) -> list[dict[tuple, tuple[Configuration, int]]]:
    """The cells that the store lacks: for each shape cell → (configuration, index of its seed), a seed at a time.

    Args:
      grid, store: `grid.store(path)` makes the latter.
      shard: (i, n) takes the i-th of n equal parts of each shape's cells.
      retry_failed: failed cells are lacking, too.

    Raises:
      ValueError: there is no such part.
    """
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard}: must be (i, n) with i from 0 to n - 1")
    status, shapes = store.status(), []
    wanted = {"pending", "running", "failed"} if retry_failed else {"pending", "running"}
    for _, group in itertools.groupby(sorted(grid.configurations, key=_shape), key=_shape):
        configurations = list(group)
        cells = [((*c.place, s), (c, s)) for s in range(len(grid.seeds)) for c in configurations]
        shapes.append({cell: what for cell, what in cells[shard[0] :: shard[1]] if status[cell] in wanted})
    return [cells for cells in shapes if cells]


def run(grid: Grid, store: Store, *, shard: tuple[int, int] = (0, 1), batch: int | None = None, retry_failed: bool = False) -> Iterator[Outcome]:
    """Runs what the store lacks; yields an `Outcome` for each cell once it is stored.

    Cells of the same shapes run in batches of one size, so that each shape is compiled once. When it is left early (an
    error, Ctrl-C, a closed generator), the batch in flight is dropped and its cells are pending again.

    Args:
      grid, store, shard, retry_failed: as in `todo`.
      batch: cells in a batch, over all local devices; by default as many as take a second or so, within memory.

    Raises:
      ValueError: there is no such part, or the batch is empty.
      OSError: the store cannot be written; what is done stays done.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch}: must be at least 1")
    for cells in todo(grid, store, shard=shard, retry_failed=retry_failed):
        left = list(cells)
        runner = _Runner(grid, cells[left[0]][0], len(left), batch)
        while left:
            now, left = left[: runner.size], left[runner.size :]
            # a part of several is this worker's alone, so a mark in it is of its own earlier life
            yield from _batch(grid, store, runner, cells, store.claim(now, retry_failed, alone=shard[1] > 1))


def _batch(grid, store, runner, cells, claimed):
    """Runs and stores one batch."""
    left = list(claimed)
    try:
        began = time.monotonic()
        results = runner([cells[cell] for cell in claimed]) if claimed else []
        seconds = (time.monotonic() - began - runner.compiling) / max(len(claimed), 1)
        for cell, result in zip(claimed, results):
            outcome, values = _verdict(cell, result, seconds)
            if cell[-1] == 0:
                values |= predict(grid, cells[cell][0])
            store.write(cell, outcome.status, error=outcome.error, **values)
            left.remove(cell)
            yield outcome
    except BaseException:
        with contextlib.suppress(OSError):  # the marks of a dead worker are taken over
            store.release(left)
        raise


def _shape(configuration):
    """What a compilation is for, in an order: small networks first."""
    c = configuration.config
    return c.layers, c.width, configuration.length, repr(c), configuration.probes or 0


def _verdict(cell, result, seconds):
    if isinstance(result, str):
        return Outcome(cell, "failed", result), {}
    if why := fault(result.influence_L):
        return Outcome(cell, "failed", why), {}
    summary = profile.summarize(result.influence_L)
    metrics = [getattr(summary, name, seconds) for name in METRICS]
    return Outcome(cell, "done"), dict(influence=result.influence_L, stderr=result.stderr_L, metrics=metrics)


def fault(influence_L: np.ndarray) -> str:
    """Why a measured profile cannot be used, or nothing."""
    if bad := np.sum(~np.isfinite(influence_L)):
        return f"influence is not finite at {bad} of {len(influence_L)} positions"
    return "" if np.any(influence_L) else NOT_HEARD


def predict(grid: Grid, configuration: Configuration) -> dict:
    """What theory says of a configuration, as variables of the store.

    Where the kernel theory's matrices would not fit into memory it is not begun, and `theory_error` says so.
    """
    c = configuration
    where: dict[str, Any] = dict(source=grid.source, read=-1)
    values = dict(operator=paper.predict(c.config, c.length, c.switches, **where))
    needed, free = 8 * c.length**2 * (c.config.layers + 16), psutil.virtual_memory().available
    if needed > free:
        return values | dict(theory_error=f"length={c.length}: the kernel theory needs about {needed / 1e9:.2g} GB of memory, {free / 1e9:.2g} GB are free")
    try:
        # seeds that read different tokens have different profiles, whose squares are averaged; None: all of them distinct
        texts_WL = [None] if c.tokens_WL is None else c.tokens_WL
        if c.tokens_WL is None and c.length > c.config.vocab:
            texts_WL = [tokens.random_tokens(c.config.vocab, c.length, seed) for seed in grid.seeds]
        each = [kernel.predict(c.config, c.length, c.switches, output=grid.output, tokens=ids, **where) for ids in texts_WL]
        metrics = np.mean([[getattr(t, name) for name in THEORY_METRICS] for t in each], axis=0)
        return values | dict(theory=profile.rms([t.finite_width_L for t in each]), theory_metrics=metrics)
    except ValueError as error:
        return values | dict(theory_error=str(error))
    except MemoryError:
        return values | dict(theory_error=f"length={c.length}: the kernel theory ran out of memory")


class _Runner:
    """The compiled measurement of one shape, for batches of at most `size` cells over the local devices."""

    def __init__(self, grid, configuration, cells, batch):
        config, length, probes = configuration.config, configuration.length, configuration.probes
        devices = jax.local_devices()
        rows = entries(config, grid.output)
        chunk = default_chunk(config, length, probes or rows)
        side, per_device = _batching(config, length, probes or rows, chunk)
        batch = len(devices) * per_device if batch is None else batch
        self.size = min(batch, cells)
        self.compiling = 0.0  # seconds of the last call
        self._grid, self._sharding = grid, NamedSharding(Mesh(np.array(devices), ("cell",)), PartitionSpec("cell"))
        self._static = dict(config=config, output=grid.output, source=grid.source, rows=rows, probes=probes, chunk=chunk)
        self._side, self._per_device = side, side * math.ceil(self.size / len(devices) / side)
        self._compiled = None

    def __call__(self, cells) -> list:
        """An `Influence` for each (configuration, index of the seed), or the text of the error that it raised."""
        self.compiling = 0.0
        try:
            return self._measure(cells)
        except Exception as error:  # whatever a compiler or a device raises
            if self.size > 1:  # from now on one cell at a time: it may be memory, or one cell's own fault
                self.size, self._side, self._per_device, self._compiled = 1, 1, 1, None
                return [result for cell in cells for result in self([cell])]
            return [f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"]

    def _measure(self, cells):
        rows, probes, chunk = (self._static[name] for name in ("rows", "probes", "chunk"))
        results: list[Any] = [None] * len(cells)
        left = list(range(len(cells)))
        for unit in (LARGE, 1.0):  # as `influence`: what overflows when enlarged is pulled back as it is
            moments = self._moments([cells[i] for i in left], unit)
            for i, *(scale_L, mean_L, m2_L) in zip(list(left), *moments):
                if unit == 1.0 or np.all(np.isfinite([scale_L, mean_L, m2_L])):
                    results[i] = finish(scale_L / unit, mean_L, m2_L, rows, probes or rows, chunk)
                    left.remove(i)
            if not left:
                return results

    def _moments(self, cells, unit):
        """The running moments of each cell, [B, L] each. Device d gets every cell whose number is d modulo the devices."""
        devices = self._sharding.num_devices
        number_B = np.arange(self._per_device) * devices + np.arange(devices)[:, None]
        count = (number_B < len(cells)).sum(1, dtype=np.int32)
        slots = np.minimum(number_B.ravel(), len(cells) - 1)  # what is beyond is there for the shape, and is not run
        batch = jax.device_put((count, *(jax.tree.map(lambda v: v[slots], self._inputs(cells, unit)))), self._sharding)
        if self._compiled is None:
            began = time.monotonic()
            with jax.default_matmul_precision("highest"):
                lowered = _moments.lower(*batch, mesh=self._sharding.mesh, side=self._side, **self._static)
            self._compiled = lowered.compile()
            self.compiling = time.monotonic() - began
        place = np.argsort(number_B.ravel())[: len(cells)]
        return [np.asarray(moment_BL, np.float64)[place] for moment_BL in self._compiled(*batch)]

    def _inputs(self, cells, unit):
        seeds = [self._grid.seeds[s] for _, s in cells]
        keys_B = np.stack([jax.random.key_data(random_key(seed)) for seed in seeds])
        tokens_BL = np.stack([tokens.random_tokens(c.config.vocab, c.length, seed) if c.tokens_WL is None else c.tokens_WL[s]
                              for (c, s), seed in zip(cells, seeds)])  # fmt: skip
        switches_B = jax.tree.map(lambda *values: np.array(values, np.float32), *(c.switches for c, _ in cells))
        return keys_B, tokens_BL, switches_B, np.full(len(cells), unit, np.float32)


@functools.partial(jax.jit, static_argnames=("mesh", "side", "config", "output", "source", "rows", "probes", "chunk"))
def _moments(count, keys_B, tokens_BL, switches_B, unit_B, *, mesh, side, config, **measurement):
    """`squared_influence` of the first `count` cells of each device, which goes through its own, `side` of them side by side.

    The number of rounds is traced, so that the compiled body is the same for every size of a batch, down to the bit.
    """

    def one(cell):
        key, tokens_L, switches, unit = cell
        key = jax.random.wrap_key_data(key)
        return squared_influence(graphdef(config), birth_params(config, key), switches, tokens_L, tokens_L.shape[0] - 1, 0, key,
                                 unit, **measurement)  # fmt: skip

    def all_of_a_device(count, cells):
        def round_(i, moments):
            at = i * side
            now = jax.vmap(one)(jax.tree.map(lambda v: jax.lax.dynamic_slice_in_dim(v, at, side), cells)) if side > 1 else \
                jax.tree.map(lambda v: v[None], one(jax.tree.map(lambda v: v[at], cells)))  # fmt: skip
            return jax.tree.map(lambda all_B, v: jax.lax.dynamic_update_slice_in_dim(all_B, v, at, 0), moments, now)

        empty = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), jax.eval_shape(jax.vmap(one), cells))
        return jax.lax.fori_loop(0, (count[0] + side - 1) // side, round_, empty)

    spec = PartitionSpec("cell")
    over_devices = jax.shard_map(all_of_a_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return over_devices(count, (keys_B, tokens_BL, switches_B, unit_B))


def _batching(config, length, cotangents, chunk) -> tuple[int, int]:
    """Cells side by side on a device, and cells per device in a batch.

    A CPU fills its cores with one cell, so batches are loops there; an accelerator takes as many as make 2^15 rows. A batch
    is as long as about a second's work, at most 16 such loops: what a kill costs.
    """
    per_layer = config.width * (2 * config.heads * config.head_dim + 2 * config.kv_heads * config.head_dim + 3 * config.inner)
    weights = config.layers * per_layer
    work = 4 * weights * length * cotangents  # floating-point operations of all pullbacks
    cpu = jax.default_backend() == "cpu"
    room = 4 * (weights + config.vocab * config.width + 16 * chunk * length * (config.width + config.inner))
    side = 1 if cpu else max(1, min(2**15 // (chunk * length), int(0.3 * available_memory()) // room))
    loops = int((2e10 if cpu else 1e13) / (work * side))
    return side, side * min(max(loops, 1), 16)
