"""Switch parts of a decoder off and see what its influence profile makes of it, beside the theory's prediction.

    python -m experiments.ablate --rope=off --residual=0.5
    python -m experiments.ablate --rope=on,off --residual=off,0.5,on --causal=on,off --seeds=4 --rows=causal --cols=residual
    python -m experiments.ablate --model=gpt2 --layers=2,6,12 --length=512 --probes=16 --out=gs://bucket/depth --shard=3/8
    python -m experiments.ablate --plot-only=runs/ablate/rope=off_residual=0.5

Every switch, and model, tokens, layers, width and length, takes a comma list, which makes an axis of the grid. Networks
are at birth. Results go to --out, by default runs/ablate/FLAGS: grid.zarr (every cell, for lim.open), summary.csv, and
figures. A run that was stopped in whatever way goes on when the same line is given again. Exit status: 0, 2 for a bad
value, 3 when cells failed, 1 when results cannot be written, 130 when interrupted.
"""

import csv
import dataclasses
import sys

import numpy as np
from absl import flags

import lim
from experiments import cli
from lim import profile, store, sweep, tokens
from lim.influence import default_chunk, entries
from lim.theory import paper

SIZES = ("layers", "width", "length")
GRID = ("model", "tokens", *SIZES, *cli.SWITCHES)  # axes, in the order of the tables
DECIDE = (*GRID, "seeds", "output", "source", "probes", "exact", "seed")  # what the numbers depend on
MOST_PANELS = 60


def define_flags():
    cli.define_axis("model", cli.model, f"any of {', '.join(lim.config.PRESETS)}, or folders with a config.json; default small")
    cli.define_axis("tokens", text, "random (drawn anew for each seed; the default), or UTF-8 text files, read as bytes")
    cli.define_switches()
    cli.define_axis("layers", cli.integer(1), "number of blocks")
    cli.define_axis("width", cli.integer(1), "width of the stream; heads and MLP keep their proportions")
    cli.define_axis("length", cli.integer(2), "number of tokens; default 256")
    cli.define("seeds", cli.integer(1), 4, "how many seeds: each draws weights and random tokens anew")
    cli.define_measurement()
    cli.define_workers()
    flags.DEFINE_string("plot_only", None, "only draw, from the store in this folder or below this URL")
    flags.DEFINE_enum("rows", None, GRID, "the axis along the rows of the figure")
    flags.DEFINE_enum("cols", None, GRID, "the axis along its columns")
    flags.adopt_module_key_flags(cli)


def text(name):
    """Reader of an item of --tokens: what the file holds, or None for random."""
    return None if name == "random" else tokens.read_text(name)


def read_grid(args) -> sweep.Grid:
    """The grid that the flags ask for.

    Raises:
      ValueError: names the flag, its value and what is allowed.
    """
    axes = {name: {item.text: item.value for item in args[name].value} for name in GRID if args[name].value is not None}
    if "model" in axes:
        axes["model"] = {name: cli.read_config(name) for name in axes["model"]}
    if "tokens" in axes:
        axes["tokens"] = {name: words and tokens.encode(words, None, 256) for name, words in axes["tokens"].items()}
    if args.exact and args.probes is not None:
        raise ValueError("--exact, --probes: give one of them")
    cli.check_seeds(args.seed, args.seeds, "seeds")
    probes = None if args.exact else args.probes or (16 if args.exact is False else "auto")
    return sweep.Grid(lim.Config.preset("small"), axes, tuple(range(args.seed, args.seed + args.seeds)), output=args.output,
                      source=args.source, probes=probes)  # fmt: skip


@dataclasses.dataclass
class Cell:
    """One configuration of the grid and its results over the seeds that are done."""

    labels: dict  # axis → the value as written
    config: lim.Config
    switches: lim.Switches
    source: int
    profiles_SL: np.ndarray
    stderr_SL: np.ndarray
    theory_L: np.ndarray | None
    bias: float
    cv: float
    no_theory: str
    paper_L: np.ndarray


def read_cells(ds, grid) -> list[Cell]:
    """Every configuration of a dataset of which a seed is done.

    Raises:
      ValueError: numbers of one that is done are not there.
    """
    names = ("influence", "stderr", "theory", "theory_metrics", "theory_error", "operator", "status")
    values, cells = {name: ds[name].values for name in names}, []
    for c in grid.configurations:
        done = values["status"][c.place] == "done"
        if done.any() and values["status"][(*c.place, 0)] in ("done", "failed"):  # its first seed brings the predictions
            own = {name: values[name][c.place][..., : c.length] for name in ("theory", "operator")}
            error = str(values["theory_error"][c.place])
            needed = [values[name][c.place][done, : c.length] for name in ("influence", "stderr")] + [own["operator"]] + [own["theory"]] * (not error)
            if not all(np.all(np.isfinite(numbers)) for numbers in needed):
                raise ValueError(f"numbers of {c.labels} are not there, though it is done")
            cells.append(Cell(c.labels, c.config, c.switches, grid.source, values["influence"][c.place][done, : c.length],
                              values["stderr"][c.place][done, : c.length], None if error else own["theory"],
                              *values["theory_metrics"][c.place][:2], error, own["operator"]))  # fmt: skip
    return cells


def standard_errors(cells):
    """(error of each cell's root mean square over seeds [L], what it is for the legend).

    It is the seeds' scatter, nan where there is one seed. Where no cell has more, it is the probes', nan if every direction was pulled
    back: an exact number of one seed says nothing of another seed's.
    """
    if all(len(cell.profiles_SL) == 1 for cell in cells):
        return [np.where(cell.stderr_SL[0] > 0, cell.stderr_SL[0], np.nan) for cell in cells], "standard error of the probes"
    return [profile.jackknife(lambda p: p, cell.profiles_SL)[1] for cell in cells], "standard error"


def predictions(cell):
    """(name, function from a root mean square [L] to its prediction [L], whether that is in absolute units) of each prediction."""
    if cell.theory_L is not None:
        yield "kernel theory", lambda rms_L: cell.theory_L, True
        yield "kernel theory, scale fitted", lambda rms_L: cell.theory_L, False
    yield "paper, a implied", lambda rms_L: cell.paper_L, False
    yield fitted(cell)[0], lambda rms_L: fit(cell, rms_L)[1], False


def fitted(cell):
    """The paper's operator at its best constant strength: its name, and the profile in the measured one's units."""
    strength, fitted_L = fit(cell, profile.rms(cell.profiles_SL))
    return f"paper, a fitted: {strength:.3f}", fitted_L


def fit(cell, rms_L):
    return paper.fit(rms_L, cell.config, cell.switches, source=cell.source)


def report(cells):
    """The two tables: what was measured, and how far each prediction is from it."""
    axes = list(cells[0].labels) or ["model"]
    label = lambda cell: list(cell.labels.values()) or ["as published"]  # noqa: E731
    measured, predicted = [], []
    for cell in cells:
        s = profile.summarize_seeds(cell.profiles_SL)
        shape = "delta only" if s.delta else s.shape
        measured.append([*label(cell), len(cell.profiles_SL), shape, cli.number(s.primacy, s.primacy_se), cli.number(s.recency, s.recency_se),
                         cli.number(s.anchor, s.anchor_se), f"{s.valley + 1}", cli.number(s.middle_over_valley),
                         cli.number(s.last)])  # fmt: skip
        for name, predict, units in predictions(cell):  # what is fitted is fitted again without each seed
            value, error = profile.jackknife(lambda p: profile.compare(p, predict(p)), cell.profiles_SL)
            names = ("spearman", *(f"{'' if units else 'shape_'}log_{which}" for which in ("median", "max")))
            predicted.append([*label(cell), name, *(cli.number(value[key], error[key]) for key in names)])
    print("\nMeasured: the last output's Jacobian, root mean square over seeds (± standard error over seeds)")
    print(cli.table([*axes, "seeds", "shape", "first/middle", "last/middle", "last/next", "lowest at", "middle/lowest", "last"], measured))
    print("\nDistance of the predictions: rank correlation, and median and largest |ln measured/predicted| over positions\n"
          "(kernel theory: in absolute units, finite-width bias included, nothing fitted; the paper's operator has no units: scale fitted)")  # fmt: skip
    print(cli.table([*axes, "prediction", "Spearman", "median", "max"], predicted))
    wide = [cell for cell in cells if cell.theory_L is not None and max(abs(cell.bias), cell.cv) > 0.3]
    if wide:
        bias, cv = max((cell.bias for cell in wide), key=abs), max(cell.cv for cell in wide)
        print(f"finite width: bias {bias:.2g} and scatter {cv:.2g} to first order are not small here{_rows(wide, cells)}; "
              "read the row with its scale fitted")  # fmt: skip
    for reason in sorted({cell.no_theory for cell in cells} - {""}):
        print(f"no kernel theory: {reason}")


def _rows(some, cells):
    """Says which rows are meant, where not all are."""
    return "" if len(some) == len(cells) else f" (in {len(some)} of {len(cells)} rows, at most)"


def main(args):
    if args.plot_only is not None:
        with cli.refusing():
            ds, folder = opened(args)
        show(ds, args, folder)
        return
    with cli.refusing():
        shard = cli.workers(args)
        grid = read_grid(args)
        check_axes(grid, args)
        words = cli.given(args, DECIDE)
        folder = cli.output_folder(args.out or f"runs/ablate/{cli.slug(words)}", urls=True)
        if not args.resume:
            lim.store.remove(folder)
        try:
            kept = grid.store(folder, flags=cli.flag_values(args), provenance=cli.provenance())
        except ValueError as error:
            more = " (docs/reading-the-store.md puts stores of different seeds together)" if ": seeds is" in str(error) else ""
            raise ValueError(f"--out={error}. Choose another{more}, or --noresume to replace what is there") from None
        check_compiler(grid)
    for c in grid.configurations:
        if c.tokens_WL is not None and len({window.tobytes() for window in c.tokens_WL}) < len(grid.seeds):
            print(f"note: {c.labels['tokens']} has fewer windows of {c.length} tokens than there are seeds: some read the same, and the "
                  "errors over seeds know less of how texts scatter", file=sys.stderr)  # fmt: skip
            break
    if "provenance" in kept.attributes and kept.attributes["provenance"]["versions"] != cli.provenance()["versions"]:
        print("note: this store was begun with other versions: " + str(kept.attributes["provenance"]["versions"]), file=sys.stderr)
    measure(grid, kept, shard, args)
    status = kept.status()
    done, failed = np.sum(status == "done"), np.sum(status == "failed")
    if done + failed < status.size:
        marks = lim.open(kept.path).worker.values[status == "running"]
        print(f"{done} of {status.size} cells are done, {len(marks)} in the hands of {', '.join(sorted(set(marks))) or 'nobody'}. "
              f"The last worker draws; the same line goes on. To draw before: python -m experiments.ablate --plot-only={folder}")  # fmt: skip
    else:
        try:
            failed = show(read(kept.path), args, folder)
        except OSError as error:
            stopped(kept, f"{folder} cannot be written: {error.strerror or error}", 1)
    if failed:
        sys.exit(3)


def check_compiler(grid):
    """`lim.check_compiler` at each width of the grid, at its most rows."""
    rows: dict[int, int] = {}
    for c in grid.configurations:
        chunk = default_chunk(c.config, c.length, c.probes or entries(c.config, grid.output))
        rows[c.config.width] = max(rows.get(c.config.width, 0), c.length * chunk)
    for width in rows:
        lim.check_compiler(rows[width], width)


def measure(grid, store, shard, args):
    """Runs what the store lacks, with a bar; says how to go on where that ends early."""
    which = dict(shard=shard, retry_failed=args.retry_failed)
    shapes = sweep.todo(grid, store, **which)
    lacking, there = sum(map(len, shapes)), np.sum((status := store.status()) == "done")
    if lacking or there:
        print(f"{there} of {status.size} cells are there, {lacking} to do here; compiles for {len(shapes)} shape(s) first", file=sys.stderr)
    try:
        with cli.interruptible(), cli.progress(total=lacking, unit="cell") as bar:
            for _ in sweep.run(grid, store, batch=args.batch, **which):
                bar.update()
    except KeyboardInterrupt:
        stopped(store, "interrupted", 130)
    except OSError as error:
        stopped(store, f"{store.path} cannot be written: {error.strerror or error}", 1)


def stopped(store, why, code):
    """Ends an unfinished run: one line, an exit status."""
    status = store.status()
    print(f"{cli.command_name()}: {why}; {np.sum(status == 'done')} of {status.size} cells are done and kept, the same line goes on",
          file=sys.stderr)  # fmt: skip
    sys.exit(code)


def opened(args):
    """The dataset that --plot_only means, complete or not, and the folder to draw into."""
    if also := cli.given(args, DECIDE):
        raise ValueError(f"--plot_only={args.plot_only}: draws what the store holds; leave out --{', --'.join(also)}")
    with store.readable(args.plot_only):
        ds = read(args.plot_only if args.plot_only.endswith(".zarr") else f"{args.plot_only.rstrip('/')}/{store.NAME}")
        grid = sweep.Grid.from_spec(ds.attrs["grid"])
        read_cells(ds, grid)
    check_axes(grid, args)
    return ds, cli.output_folder(args.out or args.plot_only, urls=True)


def read(path):
    """The dataset of a store; cells that an older version kept though nothing was heard are failed."""
    ds = lim.open(path).load()
    unheard = ((ds.influence == 0).any("position") & ~(ds.influence > 0).any("position") & (ds.status == "done")).values
    for name, text in dict(status="failed", error=sweep.NOT_HEARD).items():
        ds[name] = ds[name].dims, np.where(unheard, text, ds[name].values.astype(object))
    return ds


def check_axes(grid, args):
    """Refuses --rows and --cols that the grid does not have."""
    for name in ("rows", "cols"):
        if (axis := getattr(args, name)) is not None and axis not in grid.axes:
            raise ValueError(f"--{name}={axis}: is not an axis of this grid: {', '.join(grid.axes) or 'it has none'}")
    if args.rows is not None and args.rows == args.cols:
        raise ValueError(f"--rows={args.rows}, --cols={args.cols}: must be two axes")


def show(ds, args, folder):
    """Tables, summary.csv and figures of a dataset; the list of cells that failed, whose number it returns."""
    from lim import plot

    grid = sweep.Grid.from_spec(ds.attrs["grid"])
    cells = read_cells(ds, grid)
    written = []
    if cells:
        report(cells)
        cli.put(folder, "summary.csv", lambda path: write_csv(cells, path))
        written.append("summary.csv")
        for name, figure in figures(cells, args):
            cli.put(folder, name, lambda path: plot.save(figure, path))
            written.append(name)
    if left := int(np.isin(ds.status.values, ("pending", "running")).sum()):
        print(f"{left} of {ds.status.size} cells are not done yet")
    failed = np.argwhere(ds.status.values == "failed")
    for *place, seed in failed:
        labels = [f"{axis}={list(values)[i]}" for i, (axis, values) in zip(place, grid.axes.items())]
        print(f"failed: {' '.join([*labels, f'seed={grid.seeds[seed]}'])}: {ds.error.values[(*place, seed)]}", file=sys.stderr)
    if len(failed):
        print(f"{len(failed)} of {ds.status.size} cells failed; --retry-failed runs them again", file=sys.stderr)
    print(f"\nwrote {', '.join([*written, lim.store.NAME])} in {folder}")
    return len(failed)


def write_csv(cells, path):
    """One line per configuration: summary over seeds with standard errors, and how far the predictions are."""
    lines = []
    for cell in cells:
        line = cell.labels | dict(seeds=len(cell.profiles_SL)) | dataclasses.asdict(profile.summarize_seeds(cell.profiles_SL))
        names = ("ratio", "spearman", "log_median", "log_max")
        theory = dict.fromkeys(names) if cell.theory_L is None else profile.compare(profile.rms(cell.profiles_SL), cell.theory_L)
        line |= {f"theory_{name}": theory[name] for name in names}
        strength, fitted_L = fit(cell, profile.rms(cell.profiles_SL))
        for kind, operator_L in dict(implied=cell.paper_L, fitted=fitted_L).items():
            distance = profile.compare(profile.rms(cell.profiles_SL), operator_L)
            line |= {f"paper_{kind}_{name}": distance[f"shape_{name}"] for name in ("log_median", "log_max")}
        lines.append(line | dict(paper_fitted_a=strength))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def figures(cells, args):
    """(file, figure): the profiles, one large or all as small multiples; then along one axis, or over two."""
    several = [axis for axis in cells[0].labels if len({cell.labels[axis] for cell in cells}) > 1]
    if len(cells) <= MOST_PANELS:
        yield "influence.png", profiles_figure(cells, args)
    else:
        print(f"\n{len(cells)} configurations: too many for small multiples of each (at most {MOST_PANELS})")
    chosen = [axis for axis in (args.rows, args.cols) if axis] or several
    if len(chosen) == 1:
        yield "bundle.png", bundle(cells, *chosen)
    elif len(chosen) == 2:
        yield "valley.png", valley_map(cells, *chosen)


def bundle(cells, axis):
    """The profiles along one axis, the other axes at their first values."""
    from lim import plot

    first = {name: text for name, text in cells[0].labels.items() if name != axis}
    along = [cell for cell in cells if all(cell.labels[name] == text for name, text in first.items())]
    profiles = {cell.labels[axis]: (profile.rms(cell.profiles_SL), cell.theory_L) for cell in along}
    title = ", ".join(f"{name} {text}" for name, text in first.items())
    return plot.bundle_figure(profiles, axis=axis, title=title, caption=cli.command(), predicted="kernel theory")


def valley_map(cells, rows, cols):
    """Valley depth over two axes, a panel for each combination of the others."""
    from lim import plot

    names = {axis: list(dict.fromkeys(cell.labels[axis] for cell in cells)) for axis in cells[0].labels}
    others, panels = [axis for axis in names if axis not in (rows, cols) and len(names[axis]) > 1], {}
    for cell in cells:
        title = ", ".join(f"{axis} {cell.labels[axis]}" for axis in others)
        values_RC = panels.setdefault(title, np.full((len(names[rows]), len(names[cols])), np.nan))
        depth = profile.summarize_seeds(cell.profiles_SL).valley_depth
        values_RC[names[rows].index(cell.labels[rows]), names[cols].index(cell.labels[cols])] = depth
    return plot.heat_figure(panels, rows=rows, cols=cols, row_names=names[rows], col_names=names[cols],
                            label="valley depth: lower end / lowest position", caption=cli.command())  # fmt: skip


def profiles_figure(cells, args):
    """One cell large, several as small multiples."""
    from lim import plot

    caption, (errors, error) = cli.command(), standard_errors(cells)
    if len(cells) == 1:
        (cell,) = cells
        measured_L = profile.rms(cell.profiles_SL)
        name, fitted_L = fitted(cell)
        curves = {name: fitted_L}
        if cell.theory_L is not None:
            curves = {"kernel theory (band: one seed's scatter)": (cell.theory_L, cell.cv / 2)} | curves
        title = ", ".join(f"{axis} {text}" for axis, text in cell.labels.items()) or "as published"
        figure = plot.influence_figure(measured_L, stderr_L=errors[0], error=error, curves=curves, title=title,
                                       summary=profile.summarize_seeds(cell.profiles_SL), caption=caption)  # fmt: skip
    else:
        panels, varied = [], [axis for axis in cells[0].labels if len({cell.labels[axis] for cell in cells}) > 1]
        for cell, stderr_L in zip(cells, errors):
            measured_L = profile.rms(cell.profiles_SL)
            predicted_L, prediction = cell.theory_L, "kernel theory"
            if predicted_L is None:
                predicted_L, prediction = cell.paper_L * measured_L.mean() / cell.paper_L.mean(), "paper's operator, a implied (scale fitted)"
            text = ", ".join(f"{axis} {cell.labels[axis]}" for axis in varied)
            panels.append(plot.Cell(text, measured_L, stderr_L, predicted_L, cell.labels, profile.summarize_seeds(cell.profiles_SL), prediction))
        panels, rows, cols = arranged(panels, args.rows, args.cols)
        figure = plot.grid_figure(panels, rows=rows, cols=cols, error=error, caption=caption)
    return figure


def arranged(panels, rows, cols):
    """(panels, rows, cols): axes that neither direction shows join the rows, so that each cell has a panel of its own."""
    rest = [axis for axis in panels[0].coordinates
            if axis not in (rows, cols) and len({panel.coordinates[axis] for panel in panels}) > 1]  # fmt: skip
    if not (rows and cols and rest):
        return panels, rows, cols
    joined = [rows, *rest]
    name = ", ".join(joined)
    join = lambda panel: panel.coordinates | {name: ", ".join(panel.coordinates[axis] for axis in joined)}  # noqa: E731
    return [dataclasses.replace(panel, coordinates=join(panel)) for panel in panels], name, cols


if __name__ == "__main__":
    define_flags()
    cli.run(main)
