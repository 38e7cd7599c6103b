"""Switch parts of a decoder off and see what its influence profile makes of it, beside the theory's prediction.

    python -m experiments.ablate --rope=off --residual=0.5
    python -m experiments.ablate --rope=on,off --residual=off,0.5,on --causal=on,off --seeds=4
    python -m experiments.ablate --model=gpt2 --layers=2,6,12 --length=512 --probes=16

Every switch, and layers, width and length, takes a comma list, which makes an axis of the grid. Networks are at birth.
"""

import dataclasses
import itertools

import numpy as np
from absl import flags

import lim
from experiments import cli
from lim import plot, profile
from lim.influence import default_chunk
from lim.theory import kernel, paper

SIZES = ("layers", "width", "length")


def define_flags():
    cli.define("model", cli.model, "small", f"one of {', '.join(lim.config.PRESETS)}, or a folder with a config.json")
    cli.define_switches()
    cli.define_axis("layers", cli.integer(1), "number of blocks")
    cli.define_axis("width", cli.integer(1), "width of the stream; heads and MLP keep their proportions")
    cli.define_axis("length", cli.integer(2), "number of tokens; default 256")
    cli.define("seeds", cli.integer(1), 4, "how many seeds: each draws weights and tokens anew")
    cli.define_measurement()
    flags.DEFINE_enum("rows", None, [*cli.SWITCHES, *SIZES], "the axis along the rows of the figure")
    flags.DEFINE_enum("cols", None, [*cli.SWITCHES, *SIZES], "the axis along its columns")
    flags.adopt_module_key_flags(cli)


@dataclasses.dataclass
class Cell:
    """One cell of the grid and, once it has run, its results."""

    labels: dict  # axis → the value as written
    config: lim.Config
    length: int
    switches: lim.Switches
    profiles_SL: np.ndarray | None = None
    stderr_SL: np.ndarray | None = None
    theory: kernel.KernelTheory | None = None
    no_theory: str | None = None
    paper_L: np.ndarray | None = None


def grid(args) -> list[Cell]:
    """Every cell, checked against its model before anything runs.

    Raises:
      ValueError: names the flag, its value and what is allowed.
    """
    axes = {name: getattr(args, name) for name in (*SIZES, *cli.SWITCHES) if getattr(args, name) is not None}
    cells = []
    for combination in itertools.product(*axes.values()):
        chosen = {name: item.value for name, item in zip(axes, combination)}
        labels = {name: item.text for name, item in zip(axes, combination)}
        length = chosen.pop("length", 256)
        sizes = {name: chosen.pop(name) for name in ("layers", "width") if name in chosen}
        config = cli.read_config(args.model).replace(**sizes)
        if length > config.max_length:  # at birth a table of positions may be drawn at any length
            config = config.replace(max_length=length)
        switches = lim.Switches(**chosen)
        switches.check(config)
        if not args.source < config.layers:
            raise ValueError(f"source={args.source}: allowed are 0 to {config.layers - 1}")
        cli.probes_for(config, args)
        cells.append(Cell(labels, config, length, switches))
    return cells


def measure(cells, args):
    """Fills in the cells: every seed of a shape shares its weights and one compilation over all its cells."""
    with cli.progress(total=len(cells) * args.seeds, unit="profile") as bar:
        for (config, length), group in itertools.groupby(cells, key=lambda cell: (cell.config, cell.length)):
            group = list(group)
            profiles, errors = ([[] for _ in group] for _ in range(2))
            for seed in range(args.seed, args.seed + args.seeds):
                decoder = lim.Decoder.at_birth(config, seed)
                tokens_L = lim.random_tokens(config.vocab, length, seed)
                for i, cell in enumerate(group):
                    measured = lim.influence(decoder, tokens_L, cell.switches, output=args.output, source=args.source,
                                             probes=cli.probes_for(config, args), seed=seed)  # fmt: skip
                    profiles[i].append(measured.influence_L)
                    errors[i].append(measured.stderr_L)
                    bar.update()
            for cell, profiles_SL, stderr_SL in zip(group, profiles, errors):
                cell.profiles_SL, cell.stderr_SL = np.array(profiles_SL), np.array(stderr_SL)


def predict(cells, args):
    """Fills in what the theory says of each cell; where it has nothing to say, why."""
    for cell in cli.progress(cells, unit="prediction"):
        where = dict(source=args.source, read=-1)
        cell.paper_L = paper.predict(cell.config, cell.length, cell.switches, **where)
        try:
            cell.theory = kernel.predict(cell.config, cell.length, cell.switches, output=args.output, **where)
        except ValueError as error:
            cell.no_theory = str(error)


def standard_error(cell):
    """Standard error of the root mean square over seeds, [L]: the seeds' scatter, or the probes' where there is one seed."""
    if len(cell.profiles_SL) > 1:
        return profile.jackknife(lambda p: p, cell.profiles_SL)[1]
    return cell.stderr_SL[0]


def predictions(cell, args):
    """(name, profile, whether it is in absolute units) of each prediction of a cell."""
    if cell.theory is not None:
        yield "kernel theory", cell.theory.finite_width_L, True
        yield "kernel theory, scale fitted", cell.theory.finite_width_L, False
    yield "paper, a implied", cell.paper_L, False
    yield *fitted(cell, args), False


def fitted(cell, args):
    """The paper's operator at its best constant strength: its name, and the profile in the measured one's units."""
    causal = 1.0 if cell.switches.causal is None else cell.switches.causal
    strength, fitted_L = paper.fit(profile.rms(cell.profiles_SL), cell.config.layers - args.source, causal=causal)
    return f"paper, a fitted: {strength:.3f}", fitted_L


def report(cells, args):
    """The two tables: what was measured, and how far each prediction is from it."""
    axes = list(cells[0].labels) or ["model"]
    label = lambda cell: list(cell.labels.values()) or ["as published"]  # noqa: E731
    measured, predicted = [], []
    for cell in cells:
        s = profile.summarize_seeds(cell.profiles_SL)
        shape = "delta only" if s.delta else s.shape
        measured.append([*label(cell), shape, cli.number(s.primacy, s.primacy_se), cli.number(s.recency, s.recency_se),
                         cli.number(s.anchor, s.anchor_se), f"{s.valley + 1}", cli.number(s.middle_over_valley),
                         cli.number(s.last)])  # fmt: skip
        for name, prediction_L, units in predictions(cell, args):
            value, error = profile.jackknife(lambda p: profile.compare(p, prediction_L), cell.profiles_SL)
            names = ("spearman", *(f"{'' if units else 'shape_'}log_{which}" for which in ("median", "max")))
            predicted.append([*label(cell), name, *(cli.number(value[key], error[key]) for key in names)])
    print("\nMeasured: the last output's Jacobian, root mean square over seeds (± standard error over seeds)")
    print(cli.table([*axes, "shape", "first/middle", "last/middle", "last/next", "lowest at", "middle/lowest", "last"], measured))
    print("\nDistance of the predictions: rank correlation, and median and largest |ln measured/predicted| over positions\n"
          "(kernel theory: in absolute units, finite-width bias included, nothing fitted; the paper's operator has no units: scale fitted)")  # fmt: skip
    print(cli.table([*axes, "prediction", "Spearman", "median", "max"], predicted))
    for reason in sorted({cell.no_theory for cell in cells} - {None}):
        print(f"no kernel theory: {reason}")


def main(args):
    with cli.refusing():
        cells = grid(args)
        folder = cli.output_folder(args.out)
        for name in ("rows", "cols"):
            if (axis := getattr(args, name)) is not None and axis not in cells[0].labels:
                raise ValueError(f"--{name}={axis}: is not an axis of this grid: {', '.join(cells[0].labels) or 'it has none'}")
        rows = max(cell.length * default_chunk(cell.config, cell.length, cell.config.width) for cell in cells)
        lim.check_compiler(rows, cells[0].config.width)
        provenance = cli.provenance()  # before the work, so that nothing can fail after it
    measure(cells, args)
    predict(cells, args)
    report(cells, args)
    cli.write_json(folder / "results.json", dict(provenance=provenance, **results(cells, args)))
    draw(cells, args, folder / "influence.png")
    print(f"\nwrote {folder / 'influence.png'} and {folder / 'results.json'}")


def draw(cells, args, path):
    """The figure: one cell large, several as small multiples."""
    caption = cli.command()
    if len(cells) == 1:
        (cell,) = cells
        measured_L = profile.rms(cell.profiles_SL)
        name, fitted_L = fitted(cell, args)
        curves = {name: fitted_L}
        if cell.theory is not None:
            curves = {"kernel theory (band: one seed's scatter)": (cell.theory.finite_width_L, cell.theory.cv / 2)} | curves
        title = ", ".join(f"{axis} {text}" for axis, text in cell.labels.items()) or "as published"
        figure = plot.influence_figure(measured_L, stderr_L=standard_error(cell), curves=curves, title=title,
                                       summary=profile.summarize_seeds(cell.profiles_SL), caption=caption)  # fmt: skip
    else:
        panels = []
        for cell in cells:
            measured_L = profile.rms(cell.profiles_SL)
            predicted_L = cell.paper_L * measured_L.mean() / cell.paper_L.mean() if cell.theory is None else cell.theory.finite_width_L
            text = ", ".join(f"{axis} {text}" for axis, text in cell.labels.items())
            panels.append(plot.Cell(text, measured_L, standard_error(cell), predicted_L, cell.labels, profile.summarize_seeds(cell.profiles_SL)))
        panels, rows, cols = arranged(panels, args.rows, args.cols)
        figure = plot.grid_figure(panels, rows=rows, cols=cols, caption=caption)
    plot.save(figure, path)


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


def results(cells, args):
    """The flags and every cell, as results.json holds them."""
    return dict(
        flags=cli.flag_values(args),
        cells=[
            dict(labels=cell.labels, config=cell.config, length=cell.length,
                 switches={k: v for k, v in dataclasses.asdict(cell.switches).items() if v is not None},
                 influence=cell.profiles_SL, stderr=cell.stderr_SL, summary=profile.summarize_seeds(cell.profiles_SL),
                 theory=cell.theory, no_theory=cell.no_theory, paper=cell.paper_L)
            for cell in cells
        ],
    )  # fmt: skip


if __name__ == "__main__":
    define_flags()
    cli.run(main)
