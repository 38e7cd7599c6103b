"""The labelled dataset of a grid on disk: an xarray.Dataset in a zarr (v3) store that any process writes, cell by cell.

A cell, one point of every axis and one seed, is one chunk of each array, and its status is written last: it is there
whole or not at all, without a lock, whatever was killed when. A path is a folder or any URL that fsspec knows.
"""

import contextlib
import datetime
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import psutil

if TYPE_CHECKING:
    import xarray as xr

# xarray and zarr, half of lim's import time, are imported by the functions that need them

SCHEMA = 1  # goes up when an older lim would misread what a newer one writes
NAME = "grid.zarr"  # of the store in a folder of results
TRAINING = "training.zarr"  # of a training's, see `lim.watch`
LEASE = 3600.0  # seconds after which a mark from another machine is taken for a dead worker's


def open(path: str | os.PathLike) -> "xr.Dataset":
    """The dataset of a grid, read lazily; it may be read while workers still write it. (Or of a training: see `lim.watch`.)

    Dimensions are the grid's axes as they were written (`ds.sel(rope="off", layers=6)`), `seed` and `position`. What the
    words of a switch mean stands beside it as a number, as in `ds.residual_value`.

      influence, stderr     [axes, seed, position]; NaN beyond a shorter text, and where a cell is not done.
      metrics               [axes, seed, metric]: the summary numbers of `lim.summarize`, and seconds.
      theory, operator      [axes, position]: kernel theory with its finite-width bias, in absolute units; the paper's
                            averaging operator, of sum 1. There once the configuration's first seed is.
      theory_metrics        [axes, theory_metric]: bias, cv and logit_variance of `lim.theory.kernel`.
      theory_error          [axes]: why there is no kernel theory, or empty.
      status, error, worker [axes, seed]: pending, running, done or failed; why it failed; who took it and when.

    Args:
      path: the folder of results, the store itself, or a URL of either (gs://bucket/run).

    Raises:
      ValueError: there is no store, it is damaged, or a newer lim wrote it.

    Example:
      >>> from lim import sweep
      >>> grid = sweep.Grid(lim.Config.preset("small"), {"residual": {"on": 1.0, "0.5": 0.5}}, seeds=(0, 1), length=16)
      >>> store = grid.store("runs/grid")  # sweep.run(grid, store) would fill it
      >>> ds = lim.open("runs/grid")
      >>> ds.influence.dims, ds.influence.shape
      (('residual', 'seed', 'position'), (2, 2, 16))
      >>> ds.status.sel(residual="0.5").values.tolist()
      ['pending', 'pending']
    """
    import xarray as xr

    path = _located(path)
    with readable(path):
        _read_attributes(path)
        ds = xr.open_zarr(path, consolidated=False, chunks=None)
        texts = {name: ds[name].values.astype(object) for name in ds.coords if ds[name].dtype.kind not in "if"}
        return ds.set_coords([name for name in ds if name.endswith("_value")]).assign_coords(texts)


@contextlib.contextmanager
def readable(path):
    """Whatever JSON, zarr and xarray raise over a damaged store becomes a ValueError that names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # zarr's, of what it does not know: the refusal says it
            yield
    except OSError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ValueError) and reason.startswith(os.path.dirname(path) or path):  # names it already
            raise
        raise ValueError(f"{path}: cannot be read, it is damaged: {reason[:200] or type(error).__name__}") from None


class Store:
    """A grid's dataset for those who write it."""

    def __init__(self, path: str | os.PathLike, *, axes: Mapping[str, list | tuple[Sequence, Sequence]], seeds: Sequence[int],
                 length: int, metrics: Sequence[str], theory_metrics: Sequence[str], grid: dict, attributes: dict):  # fmt: skip
        """Opens the store of this grid, and makes it where there is none or only part of one.

        Several processes may do so at once, since all of them write the same bytes.

        Args:
          path: the folder that holds the store or will, or a URL.
          axes: name → values of each dimension but the seed, text or integers; or (texts, numbers) where a text has a
            number behind it, which is kept as NAME_value.
          seeds: integers.
          length: the longest text.
          metrics, theory_metrics: names of the packed numbers of a cell and of a configuration.
          grid: what decides the numbers, as JSON: a store that holds another is refused.
          attributes: what else a reader should know, as JSON: flags, versions, device.

        Raises:
          ValueError: a store is there, but of another grid (the message shows the difference), by a newer lim, or damaged.
        """
        self.path = _inside(path)
        with readable(self.path):
            self._open(axes, seeds, length, metrics, theory_metrics, grid, attributes)

    def _open(self, axes, seeds, length, metrics, theory_metrics, grid, attributes):
        import zarr

        grid = json.loads(json.dumps(grid))
        try:
            zarr.create_group(self.path, attributes=dict(schema=SCHEMA, grid=grid, **attributes))
        except zarr.errors.ContainsGroupError:
            pass
        self.attributes = check_same(self.path, grid)
        group = zarr.open_group(self.path, mode="r+", use_consolidated=False)
        self._arrays: dict[str, Any] = {}

        def coordinate(name, values, dim=None):
            text = any(isinstance(value, str) for value in values)
            values = np.array(values, object if text else None)  # numpy's own text would drop a NUL at its end
            self._make(group, name, str if text else values.dtype, "" if text else 0, [(dim or name, len(values))], len(values))
            self._arrays.pop(name)[:] = values

        for name, values in axes.items():
            texts, numbers = values if isinstance(values, tuple) else (values, None)
            coordinate(name, texts)
            if numbers is not None:
                coordinate(f"{name}_value", np.asarray(numbers, np.float64), name)
        for name, values in dict(seed=seeds, position=range(length), metric=metrics, theory_metric=theory_metrics).items():
            coordinate(name, list(values))
        places = [(name, len(values[0] if isinstance(values, tuple) else values)) for name, values in axes.items()]
        position, seed = ("position", length), ("seed", len(seeds))
        for name in ("theory", "operator"):
            self._make(group, name, "f8", math.nan, [*places, position], length)
        self._make(group, "theory_metrics", "f8", math.nan, [*places, ("theory_metric", len(theory_metrics))], len(theory_metrics))
        self._make(group, "theory_error", str, "", places)
        for name in ("influence", "stderr"):
            self._make(group, name, "f8", math.nan, [*places, seed, position], length)
        self._make(group, "metrics", "f8", math.nan, [*places, seed, ("metric", len(metrics))], len(metrics))
        for name, fill in (("error", ""), ("worker", ""), ("status", "pending")):
            self._make(group, name, str, fill, [*places, seed])

    def _make(self, group, name, dtype, fill, dims, inner=None):
        """One array, unless it is there: a chunk holds one cell, `inner` entries of the last dimension."""
        import zarr

        shape = [size for _, size in dims]
        chunks = [1] * len(shape) if inner is None else [1] * (len(shape) - 1) + [inner]
        try:
            group.create_array(name, shape=shape, chunks=chunks, dtype=dtype, fill_value=fill, compressors=None,
                               dimension_names=[dim for dim, _ in dims])  # fmt: skip
        except zarr.errors.ContainsArrayError:
            pass
        self._arrays[name] = group[name]
        if self._arrays[name].chunks != tuple(chunks):
            raise ValueError(f"{self.path}: is a compact copy, which only reads; go on with the store that it was made from")

    def status(self) -> np.ndarray:
        """The status of every cell, [axes, seed].

        Raises:
          ValueError: the store is damaged.
        """
        with readable(self.path):
            return np.asarray(self._arrays["status"][...], object)

    def claim(self, cells: Iterable[tuple], retry_failed: bool = False, alone: bool = False) -> list[tuple]:
        """Marks cells as running, and returns those that are this process's now.

        Left out are those that another worker has done or has in hand: a running mark counts while its process lives, or
        for an hour where that cannot be seen from here; it does not where nobody else may run these cells (`alone`). Two
        workers that claim at the same instant may both get a cell; both then write the same numbers.
        """
        status, worker, mine = self._arrays["status"], self._arrays["worker"], []
        for cell in cells:
            now = str(status[cell])
            left_behind = now == "running" and (alone or not _alive(str(worker[cell])))
            if now == "pending" or left_behind or (now == "failed" and retry_failed):
                worker[cell] = _mark()
                status[cell] = "running"
                mine.append(cell)
        return mine

    def release(self, cells: Iterable[tuple]) -> None:
        """Cells in hand are pending again, unless another worker has done them meanwhile.

        This needs no room on the disk, since what is pending is not stored.
        """
        for cell in cells:
            if str(self._arrays["status"][cell]) == "running":
                self._arrays["status"][cell] = "pending"

    def write(self, cell: tuple, status: str, *, error: str = "", **values: Any) -> None:
        """A cell's values, by variable, and then its status.

        Args:
          cell: index along each axis and the seed.
          status: done or failed; what another worker has done meanwhile stays done.
          error: why it failed.
          values: by variable; profiles may be shorter than the store's. Variables without a seed belong to the configuration.
        """
        if status == "failed" and str(self._arrays["status"][cell]) == "done":
            return
        for name, value in dict(values, error=error).items():
            array = self._arrays[name]
            place = cell if "seed" in (array.metadata.dimension_names or ()) else cell[:-1]
            if array.ndim > len(place):
                value = np.pad(np.asarray(value, np.float64), (0, array.shape[-1] - len(value)), constant_values=math.nan)
            array[place] = value
        self._arrays["status"][cell] = status


def compact(path: str | os.PathLike, target: str | os.PathLike) -> None:
    """Copies a store in which nothing is left to do into few large files, for archives and fast reading.

    Args:
      path: as `open` takes it.
      target: a folder or URL, for `open` to read; a store there is replaced.

    Raises:
      ValueError: the target is the store itself.
    """
    if _inside(target) == _located(path):
        raise ValueError(f"target={target}: is the store itself; give another folder")
    ds = open(path).load()
    for variable in ds.variables.values():
        variable.encoding.clear()
    ds.to_zarr(_inside(target), mode="w", consolidated=False, zarr_format=3)


def remove(path: str | os.PathLike) -> None:
    """Removes the store in a folder or below a URL, if there is one."""
    files, place = fsspec.url_to_fs(_inside(path))
    if files.exists(place):
        files.rm(place, recursive=True)


def _plain(path) -> str:
    # zarr takes file:// for a name, and ~ too
    return os.path.expanduser(os.fspath(path).removeprefix("file://").rstrip("/"))


def _inside(folder) -> str:
    return _plain(folder) + "/" + NAME


def _located(path) -> str:
    """The store that a path means: itself, or the one in it."""
    path = _plain(path)
    if path.endswith(".zarr"):
        return path
    files, training = fsspec.url_to_fs(f"{path}/{TRAINING}")
    return f"{path}/{TRAINING}" if files.exists(training) else _inside(path)


def _read_attributes(path) -> dict[str, Any]:
    import zarr

    attributes: dict[str, Any]
    try:
        attributes = dict(zarr.open_group(path, mode="r", use_consolidated=False).attrs)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path}: is not there, or holds no grid of lim's") from None
    if "schema" not in attributes:
        raise ValueError(f"{path}: holds no grid of lim's")
    if attributes["schema"] > SCHEMA:
        raise ValueError(f"{path}: was written by a newer lim (schema {attributes['schema']}; this one reads up to {SCHEMA})")
    return attributes


def check_same(path: str, grid: dict) -> dict:
    """The attributes of the store at a path, which must hold this grid (or training).

    Raises:
      ValueError: it holds another (the message shows the difference), it is damaged, or a newer lim wrote it.
    """
    with readable(path):
        attributes = _read_attributes(path)
        differences = list(_differences(attributes["grid"], grid))
        differences += _reordered(attributes["grid"].get("axes", {}), grid.get("axes", {}))
    if differences:
        kind = "training" if path.endswith(TRAINING) else "grid"
        raise ValueError(f"{os.path.dirname(path)}: holds another {kind}: {'; '.join(differences)}")
    return attributes


def _differences(there, here, prefix=""):
    """One phrase per entry in which two nested dicts differ."""
    for key in dict.fromkeys([*there, *here]):
        old, new = there.get(key), here.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict) and (prefix == "" and key == "axes" or old.keys() == new.keys()):
            yield from _differences(old, new, f"{prefix}{key}." if key != "axes" else "")
        else:
            yield f"{prefix}{key} is {_shown(old)} there, {_shown(new)} here"


def _reordered(there, here):
    """One phrase per axis with the same values in another order, in which places mean other cells."""
    if there == here and list(there) != list(here):
        yield f"the order of the axes is {_shown(list(there))} there, {_shown(list(here))} here"
    for name in there:
        if there[name] == here.get(name) and list(there[name]) != list(here[name]):
            yield f"the order of {name} is {_shown(list(there[name]))} there, {_shown(list(here[name]))} here"


def _shown(value):
    if value is None:
        return "not given"
    return ",".join(map(str, value)) if isinstance(value, (dict, list)) else str(value)


def _mark():
    """Who takes a cell, and when: HOST/PID TIME."""
    return f"{socket.gethostname()}/{os.getpid()} {datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')}"


def _alive(mark):
    """Whether the worker that left a mark may still be at it."""
    try:
        who, when = mark.split()
        host, pid = who.rsplit("/", 1)
        when = datetime.datetime.fromisoformat(when).timestamp()
        if host != socket.gethostname():
            return time.time() - when < LEASE
        process = psutil.Process(int(pid))
        # A process born after the mark has inherited the number, and this one has nothing in hand when it claims.
        return int(pid) != os.getpid() and process.create_time() < when + 1 and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, psutil.Error):
        return False
