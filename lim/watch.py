"""What is measured along a training, at logarithmically spaced steps, in one labelled store that may be read meanwhile.

A step is written whole and marked last, so a killed training resumes without a gap or a half-written step.

Axes: M measured step, W held-out window, T = L + 1 tokens of a window, L position, N layer.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr
import zarr
from flax import nnx
from numpy.typing import ArrayLike

from lim import profile, rollout, store, train
from lim.influence import influence
from lim.model import Decoder
from lim.switches import Switches
from lim.tokens import Packed


def log_spaced(steps: int, count: int) -> list[int]:
    """At most `count` numbers of updates, 0 and `steps` among them, the rest evenly spaced in the logarithm between 1 and `steps`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise ValueError(f"measurements={count!r}: must be an integer of at least 2")
    return sorted({0, *(round(steps ** (i / (count - 2))) for i in range(count - 1))}) if count > 2 else [0, steps]


def boundary_windows(packed: Packed, length: int, count: int) -> np.ndarray:
    """Windows of a packed text, int32 [count, length + 1], evenly chosen among those in which a document begins.

    Only beginnings with a tenth of the window on either side count. Where fewer than `count` such windows exist, all are taken
    and others fill up.

    Raises:
      ValueError: the text has fewer than `count` windows that do not overlap.
    """
    starts = np.arange(0, len(packed.ids) - length, length)
    if len(starts) < count:
        raise ValueError(f"windows={count}: the held-out text of {len(packed.ids)} tokens has only {len(starts)} of length {length}")
    margin = length // 10
    inside = np.array([np.any((packed.starts > s + margin) & (packed.starts < s + length - margin)) for s in starts])
    order = np.concatenate([np.flatnonzero(inside)[_even(inside.sum(), count)], np.flatnonzero(~inside)[_even((~inside).sum(), count)]])
    chosen = np.sort(order[:count])
    return packed.ids[starts[chosen][:, None] + np.arange(length + 1)]


def _even(available, count):
    """Up to `count` evenly spaced indices below `available`."""
    return np.unique(np.linspace(0, available - 1, min(available, count)).round().astype(int)) if available else np.zeros(0, int)


class Watch:
    """The store of one training's measurements, for whoever trains; `lim.open(folder)` reads it.

    Its variables: influence and stderr [step, window, position]; loss (held-out, nats), gradient (root mean square over
    windows of ‖∂ loss / ∂ x_j‖) and rollout [step, position]; first_token [step, layer], attention mass on the first token in
    the second half of the text; tokens and boundary (whether a separator stands there) [window, position]; done [step].
    """

    def __init__(self, folder: str | os.PathLike, *, steps: Iterable[int], windows_WT: ArrayLike, separator: int, layers: int,
                 spec: dict, attributes: dict):  # fmt: skip
        """Opens the store of this training in a folder, or makes it.

        Args:
          steps: the numbers of updates at which something will be measured.
          windows_WT: held-out windows, [W, L + 1].
          separator: the id that stands before a document.
          layers: number of blocks.
          spec: what decides the numbers, as JSON: a store that holds another is refused.
          attributes: what else a reader should know, as JSON.

        Raises:
          ValueError: a store is there, but of another training.
        """
        self.steps, self.windows_WT = list(steps), np.asarray(windows_WT, np.int32)
        path, spec = os.path.join(os.fspath(folder), store.TRAINING), json.loads(json.dumps(spec))
        windows, length = len(self.windows_WT), self.windows_WT.shape[1] - 1
        if not os.path.exists(os.path.join(path, "done")):  # the array that is made last
            sizes = dict(step=len(self.steps), window=windows, position=length, layer=layers)
            dims = dict(influence=("step", "window", "position"), stderr=("step", "window", "position"), loss=("step", "position"),
                        gradient=("step", "position"), rollout=("step", "position"), first_token=("step", "layer"))  # fmt: skip
            ds = xr.Dataset({name: (axes, np.full([sizes[axis] for axis in axes], np.nan)) for name, axes in dims.items()},
                            coords=dict(step=self.steps, window=range(windows), position=range(length), layer=range(1, layers + 1)))  # fmt: skip
            ds["tokens"] = ("window", "position"), self.windows_WT[:, :-1]
            ds["boundary"] = ("window", "position"), self.windows_WT[:, :-1] == separator
            ds["done"] = "step", np.zeros(len(self.steps), np.int8)
            ds.attrs = dict(schema=store.SCHEMA, grid=spec, **attributes)
            chunks = {name: dict(chunks=[1, *(sizes[axis] for axis in axes[1:])]) for name, axes in dims.items()}
            ds.to_zarr(path, mode="w", consolidated=False, zarr_format=3, encoding=chunks | dict(done=dict(chunks=[1])))
        with store.readable(path):
            store.check_same(path, spec)
            self._group: Any = zarr.open_group(path, mode="r+", use_consolidated=False)
            self._group["done"]

    def done(self, step: int) -> bool:
        """Whether this step is measured already, or is none to measure."""
        return step not in self.steps or bool(self._group["done"][self.steps.index(step)])

    def measure(self, step: int, decoder: Decoder, switches: Switches = Switches(), *, probes: int | None = None) -> np.ndarray:
        """Measures a network and stores what it finds; returns the influence, [W, L].

        Args:
          step: one of `steps`.
          decoder: the network after so many updates.
          switches: those it is trained under.
          probes: as in `lim.influence`.
        """
        inputs_WL = self.windows_WT[:, :-1]
        measured = [influence(decoder, tokens_L, switches, probes=probes) for tokens_L in inputs_WL]
        rolled = [rollout.measure(decoder, tokens_L, switches) for tokens_L in inputs_WL]
        structure, state = nnx.split(decoder)
        gradient_WL = train.embedding_gradients(structure, nnx.as_pure(state), switches.check(decoder.config), self.windows_WT)
        influence_WL = np.stack([m.influence_L for m in measured])
        values = dict(
            influence=influence_WL, stderr=np.stack([m.stderr_L for m in measured]),
            loss=train.losses(decoder, self.windows_WT, switches).mean(0), gradient=profile.rms(np.asarray(gradient_WL, np.float64)),
            rollout=np.mean([r.rollout_L for r in rolled], axis=0), first_token=np.mean([r.first_token_N for r in rolled], axis=0),
        )  # fmt: skip
        at = self.steps.index(step)
        for name, value in values.items():
            self._group[name][at] = value
        self._group["done"][at] = 1
        return influence_WL
