"""Climb from the averaging operator to the real network, one part at a time, each rung against its prediction.

    python -m experiments.ladder
    python -m experiments.ladder --width=256 --layers=12 --length=256 --seeds=64
    python -m experiments.ladder --widths=64,128,256,512,1024

Writes ladder.png (all rungs side by side) and, with --widths, widths.png: how the disagreement falls as width grows, and
the finite-width bias that the theory predicts.
"""

import dataclasses

import numpy as np
from absl import flags

import lim
from experiments import cli
from lim import ladder, plot, profile


def define_flags():
    cli.define("width", cli.integer(64), 128, "width of the stream, a multiple of 64")
    cli.define("layers", cli.integer(1), 6, "number of blocks")
    cli.define("length", cli.integer(3), 64, "number of tokens")
    cli.define("seeds", cli.integer(2), 32, "how many seeds")
    cli.define("probes", cli.integer(2), None, "random directions per seed; default every direction up to width 256, else 16")
    cli.define_axis("widths", cli.integer(64), "climb at each of these widths, too, for the figure of the disagreement against width")
    flags.DEFINE_string("out", None, "folder for figures and results.json; default runs/ladder/FLAGS")
    flags.adopt_module_key_flags(cli)


@dataclasses.dataclass
class Climb:
    """One rung, predicted and measured."""

    rung: ladder.Rung
    predicted_L: np.ndarray
    cv: float
    profiles_SL: np.ndarray

    def level(self):
        """Mean over positions of ln(measured/predicted), and its standard error over seeds."""
        return profile.jackknife(lambda p: float(np.mean(np.log(p / self.predicted_L))), self.profiles_SL)

    def log_distance(self):
        """Median and largest |ln measured/predicted| over positions, and their standard errors."""
        return profile.jackknife(lambda p: dict(zip(("median", "max"), profile.log_distance(p, self.predicted_L))), self.profiles_SL)

    def measured_cv(self):
        """Scatter of ‖J‖² from seed to seed, over its mean; averaged over positions."""
        square_SL = self.profiles_SL**2
        return float(np.mean(square_SL.std(0, ddof=1) / square_SL.mean(0)))


def climb(rungs, length, seeds, probes):
    """Every rung, measured; a rung with identity values needs two seeds only, since it does not scatter."""
    climbs = []
    for rung in rungs:
        width = rung.config.width
        per_seed = probes if probes is not None else None if width <= 256 else 16
        count = 2 if rung.identity else seeds
        profiles = [rung.measure(length, seed, per_seed)
                    for seed in cli.progress(range(count), desc=f"width {width}: {rung.name}", unit="seed")]  # fmt: skip
        climbs.append(Climb(rung, *rung.predict(length), np.array(profiles)))
    return climbs


def report(climbs):
    rows = []
    for i, each in enumerate(climbs, 7 - len(climbs)):  # a climb may begin above the first rung
        level, error = each.level()
        distance, distance_error = each.log_distance()
        rows.append([f"{i} {each.rung.name}", len(each.profiles_SL), cli.number(100 * level, 100 * error),
                     *(cli.number(distance[k], distance_error[k]) for k in ("median", "max")),
                     f"{each.measured_cv():.3f}", f"{each.cv:.3f}"])  # fmt: skip
    print(f"\nWidth {climbs[0].rung.config.width}, {climbs[0].rung.config.layers} layers, {climbs[0].profiles_SL.shape[1]} tokens: "
          "root mean square over seeds against the prediction, finite-width bias included, nothing fitted\n"
          "(± standard error over seeds; scatter: standard deviation of ‖J‖² over its mean)")  # fmt: skip
    print(cli.table(["rung", "seeds", "mean ln ratio, %", "median |ln|", "max |ln|", "scatter", "predicted"], rows))


def main(args):
    with cli.refusing():
        folder = cli.output_folder(args.out)
        rungs = ladder.rungs(args.width, args.layers, args.length)
        by_width = {item.value: ladder.rungs(item.value, args.layers, args.length) for item in args.widths or ()}
        smallest = min([args.width, *by_width])
        if args.probes is not None and args.probes > smallest:
            raise ValueError(f"--probes={args.probes}: allowed are 2 to {smallest}, the smallest width")
        for width in sorted({args.width, *by_width}):
            lim.check_compiler(args.length * 64, width)
        provenance = cli.provenance()
    climbs = climb(rungs, args.length, args.seeds, args.probes)
    report(climbs)
    cells = [plot.Cell(f"{i} {c.rung.name}", profile.rms(c.profiles_SL), profile.jackknife(lambda p: p, c.profiles_SL)[1], c.predicted_L)
             for i, c in enumerate(climbs, 1)]  # fmt: skip
    plot.save(plot.grid_figure(cells, caption=cli.command(), share_y=False), folder / "ladder.png")
    written = [folder / "ladder.png"]
    series = {}
    for width, rungs in by_width.items():
        # the first rung has no width; the last is the network itself
        series[width] = climb(rungs[1:], args.length, args.seeds, args.probes)
        report(series[width])
    if series:
        plot.save(width_figure(series, cli.command()), folder / "widths.png")
        written.append(folder / "widths.png")
    content = dict(provenance=provenance, flags=cli.flag_values(args), rungs=climbs, widths=series)
    cli.write_json(folder / "results.json", content)
    print(f"\nwrote {', '.join(map(str, [*written, folder / 'results.json']))}")


def width_figure(series, caption):
    """Mean square over the theory of infinite width, rung by rung, against width: points; the predicted 1/D bias: lines."""
    widths = sorted(series)
    lines = {}
    for i, lowest in enumerate(series[widths[0]]):
        points, errors, predicted = [], [], []
        for width in widths:
            each = series[width][i]
            infinite = lim.theory.kernel.predict(each.rung.config, each.profiles_SL.shape[1], each.rung.switches)
            level, error = each.level()  # against the prediction with its bias, which is one factor for all positions
            points.append(np.exp(2 * level) * (1 + infinite.bias))
            errors.append(2 * error * points[-1])
            predicted.append(1 + infinite.bias)
        lines[lowest.rung.name] = (np.array(points), np.array(errors), np.array(predicted))
    return plot.convergence_figure(widths, lines, xlabel="width D", ylabel="⟨‖J‖²⟩ / theory of infinite width", caption=caption)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
