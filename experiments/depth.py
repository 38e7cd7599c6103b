"""How deep the valley is against how deep the network is: factorial, exponential or a power, by how the skip is weighed.

    python -m experiments.depth
    python -m experiments.depth --layers=2,4,8,16,32 --alpha=0.1 --length=256 --seeds=8

Three networks at birth: without residual, with convex mixing (1-α)·x + α·f(x), and the standard block. For each the
influence of the middle over the mean influence, measured and from the kernel theory (depth.png), and the strength of each
attention layer that the theory implies (strengths.png): about 1/l for the standard block, constant under α.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import lim
from experiments import cli
from lim import ladder, plot, profile
from lim.theory import kernel

DEPTHS = "2,4,8,16,32,64,96"


def define_flags():
    cli.define_axis("layers", cli.integer(1), f"numbers of blocks; default {DEPTHS}")
    cli.define("alpha", lambda text: cli.read_switch("alpha", text), 0.25, "the convex mixing's strength")
    cli.define("width", cli.integer(64), 64, "width of the stream, a multiple of 64")
    cli.define("length", cli.integer(10), 128, "number of tokens")
    cli.define("seeds", cli.integer(2), 6, "how many seeds")
    flags.DEFINE_string("out", None, "folder for figures and results.json; default runs/depth/FLAGS")
    flags.adopt_module_key_flags(cli)


def networks(alpha):
    """The three laws, by name."""
    return {
        "no residual: factorial": lim.Switches(residual=0.0),
        f"α = {alpha:g}: exponential": lim.Switches(alpha=alpha),
        "standard block: about a power": lim.Switches(residual=1.0),
    }


def middle_over_mean(profile_L):
    """Influence of the middle over the mean influence: the continuum density in the middle, at finite length."""
    return profile.middle(profile_L) / np.mean(profile_L)


def predict(laws, configs, length):
    """Kernel theory and strengths by law and depth, before anything is measured, so that a refusal costs nothing."""
    places = [(name, depth) for name in laws for depth in configs]
    with cli.refusing():
        return {(name, depth): (kernel.predict(configs[depth], length, laws[name]), kernel.effective_strengths(configs[depth], length, laws[name]))
                for name, depth in cli.progress(places, desc="kernel theory", unit="network")}  # fmt: skip


def main(args):
    jax.config.update("jax_enable_x64", True)  # without residual the middle falls below what float32 holds
    with cli.refusing():
        folder = cli.output_folder(args.out)
        depths = [item.value for item in args.layers or cli.Items(cli.integer(1)).parse(DEPTHS)]
        configs = {depth: ladder.shape(args.width, depth, args.length) for depth in depths}
        lim.check_compiler(args.length * args.width, args.width)
        provenance = cli.provenance() | dict(dtype="float64")
    laws = networks(args.alpha)
    theory = predict(laws, configs, args.length)
    series, rows = {}, []
    with cli.progress(total=len(laws) * len(depths) * args.seeds, unit="profile") as bar:
        for name, switches in laws.items():
            points = []
            for depth, config in configs.items():
                profiles = []
                for seed in range(args.seeds):
                    decoder = lim.Decoder.at_birth(config, seed, dtype=jnp.float64)
                    tokens_L = lim.random_tokens(config.vocab, args.length, seed)
                    profiles.append(lim.influence(decoder, tokens_L, switches).influence_L)
                    bar.update()
                value, error = profile.jackknife(middle_over_mean, profiles)
                predicted, strengths_N = theory[name, depth]
                points.append((value, error, middle_over_mean(predicted.influence_L)))
                rows.append([name, depth, cli.number(value, error), f"{points[-1][-1]:.4g}", f"{strengths_N.sum():.3f}"])
            series[name] = tuple(np.array(column) for column in zip(*points))
    print("\nInfluence of the middle over the mean influence (± standard error over seeds), and the expected number of hops")
    print(cli.table(["network", "layers", "measured", "kernel theory", "hops"], rows))

    deepest = configs[max(depths)]
    strengths = {name: (None, None, theory[name, deepest.layers][1]) for name in laws}
    cli.write_json(folder / "results.json", dict(provenance=provenance, flags=cli.flag_values(args), layers=depths,
                                                 series=series, strengths=strengths))  # fmt: skip
    plot.save(plot.convergence_figure(depths, series, xlabel="layers H", ylabel="influence of the middle / mean influence",
                                      yscale="log", caption=cli.command()), folder / "depth.png")  # fmt: skip
    ticks = [2**k for k in range(int(np.log2(deepest.layers)) + 1)]
    plot.save(plot.convergence_figure(np.arange(1, deepest.layers + 1), strengths, ticks=ticks, xlabel="layer l", yscale="log",
                                      ylabel="strength $a_l$ of its attention", caption=cli.command()), folder / "strengths.png")  # fmt: skip
    print(f"\nwrote {folder / 'depth.png'}, {folder / 'strengths.png'} and {folder / 'results.json'}")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
