# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Read a grid
#
# A small grid, two weights of the skip by two masks and four seeds, is measured into a temporary folder. Then it is opened as
# anyone's grid is, a result of `python -m experiments.ablate` say.

# %%
import tempfile

import numpy as np

import lim
from lim import plot, sweep

folder = tempfile.mkdtemp()
config = lim.Config.preset("small").replace(layers=3, width=32)
axes = {"causal": {"on": 1.0, "off": 0.0}, "residual": {"on": 1.0, "0.5": 0.5}}
grid = sweep.Grid(config, axes, seeds=(0, 1, 2, 3), length=48)
for outcome in sweep.run(grid, grid.store(folder)):
    print(outcome.cell, outcome.status)

# %% [markdown]
# An `xarray.Dataset`: the axes as they were written, `seed`, `position`. Influence has every seed, predictions have one profile for
# each configuration.

# %%
ds = lim.open(folder).load()
print(dict(ds.influence.sizes), dict(ds.theory.sizes))
print(ds.status.to_series().value_counts().to_string())

# %% [markdown]
# Statistics of the root mean square over seeds, with jackknife errors.

# %%
for causal in ds.causal.values:
    for residual in ds.residual.values:
        cell = ds.sel(causal=causal, residual=residual)
        value, error = lim.jackknife(lim.profile.ratios, cell.influence.values)
        print(f"causal {causal}, residual {residual}: last/middle {value['recency']:.2f} ± {error['recency']:.2f}")

# %% [markdown]
# Both weights of the skip were given the same seeds, so their difference is paired: what a seed does to both drops out.

# %%
recency = np.log(ds.metrics.sel(metric="recency"))
change = recency.sel(residual="0.5") - recency.sel(residual="on")
print("ln last/middle, change:", change.mean("seed").round(2).to_series().to_dict())
print("standard error:", (change.std("seed", ddof=1) / np.sqrt(change.sizes["seed"])).round(2).to_series().to_dict())

# %% [markdown]
# A panel for each cell, the kernel theory dashed.

# %%
cells = []
for causal in ds.causal.values:
    for residual in ds.residual.values:
        cell = ds.sel(causal=causal, residual=residual)
        value_L, error_L = lim.jackknife(lambda profile_L: profile_L, cell.influence.values)
        cells.append(plot.Cell("", value_L, error_L, cell.theory.values, {"causal": causal, "residual": residual}))
plot.save(plot.grid_figure(cells, rows="causal", cols="residual"), "read_a_grid.png")
