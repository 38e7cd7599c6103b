"""Draws the figures of docs/theory.md again:  python docs/figures.py [FOLDER]  (by default the folder of this script)."""

import dataclasses
import pathlib
import sys

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from scipy.special import expit

import lim
from lim import ladder, plot
from lim.theory import cesaro, density, kernel

BLUE, ORANGE, GREEN, PURPLE = plot.MEASURED, *plot.PREDICTED[:3]


def averaging(length=64):
    """A row of M^H beside its continuum density, for four numbers of layers."""
    fig, (ax,) = panels(1, height=2.6)
    x_L = plot.positions(length)
    x = expit(np.linspace(-6.5, 6.5, 400))
    for layers, color in zip((1, 2, 4, 8), (BLUE, ORANGE, GREEN, PURPLE)):
        ax.plot(x, np.exp(density.log_density(-np.log(x), 1.0, layers=layers)), color=color, lw=1.3, label=f"H = {layers}")
        ax.plot(x_L, length * cesaro.profile(length, 1.0, layers=layers), "o", ms=2.8, color=color)
    over_positions(ax, length, ylabel="weight of a position, times L")
    ax.set_ylim(1e-7, 1e3)
    ax.legend(loc="lower left")
    fig.suptitle(f"Averaging H times: the last row of $M^H$ at L = {length} (points), and $(\\ln 1/x)^{{H-1}}/(H-1)!$ (lines)", fontsize=8.5)
    return fig


def hops(layers=24, length=512):
    """The number of hops for three laws of the strengths, and the profiles that they make."""
    fig, (left, right) = panels(2, height=2.6)
    laws = {"a = 1, no skip": 1.0, "a = ½ in every layer": 0.5, "a = 1/l in layer l": 1 / np.arange(1, layers + 1)}
    for (label, strengths), color, dash in zip(laws.items(), (BLUE, ORANGE, GREEN), ("-", *plot.DASHES)):
        law = np.exp(density.log_hops(strengths, layers=layers))
        left.plot(np.flatnonzero(law > 1e-12), law[law > 1e-12], "o-", ms=3, lw=0.9, color=color, label=label)
        right.plot(plot.positions(length), cesaro.profile(length, strengths, layers=layers), color=color, ls=dash, lw=1.3, label=label)
    left.set(xlabel=f"hops in {layers} layers", ylabel="probability", ylim=(0, 1.05))
    over_positions(right, length, ylabel="weight of a position")
    right.set_ylim(1e-13, 3)
    right.get_legend().remove()
    left.legend(loc="upper center", bbox_to_anchor=(0.55, 1.0))
    return fig


def norms(seeds=8, length=48, width=64, layers=6):
    """Networks that are nothing but averaging: with identity values a row of the operator, with random values not."""
    fig, axes = panels(2, height=2.6)
    identity, random = ladder.rungs(width, layers, length)[:2]
    config = identity.config
    random = dataclasses.replace(random, config=config)
    gain = config.width * config.init_std**2 * config.heads * config.head_dim * config.residual_std**2
    coherent_L = np.sqrt(width) * cesaro.operator_row(length, 1.0, np.sqrt(gain), layers=layers)
    moment_L = np.sqrt(width * cesaro.second_moment_profile(length, 1.0, 1.0, gain, layers=layers))
    measured_L, error_L = lim.jackknife(lambda profile_L: profile_L, [random.measure(length, seed) for seed in range(seeds)])
    x_L = plot.positions(length)
    for ax, rung in zip(axes, (identity, random)):
        ax.set_title("values pass unchanged" if rung is identity else f"random values, {seeds} seeds", fontsize=8)
    axes[0].plot(x_L, identity.measure(length, 0), "o", ms=3, color=BLUE, label="measured")
    axes[0].plot(x_L, identity.predict(length)[0], color=ORANGE, lw=1.2, label="row of the operator")
    axes[1].errorbar(x_L, measured_L, error_L, fmt="o", ms=3, lw=0.8, color=BLUE, label="measured, ± 1 standard error")
    axes[1].plot(x_L, coherent_L, color=ORANGE, lw=1.2, ls=plot.DASHES[0], label="row of the operator")
    axes[1].plot(x_L, moment_L, color=GREEN, lw=1.2, label="root of the sum of squares")
    for ax in axes:
        over_positions(ax, length, ylabel=plot.INFLUENCE if ax is axes[0] else "")
    return fig


def widths(seeds=8, length=48, layers=4, widths=(64, 256), probes=64):
    """Seeds around the kernel theory, at two widths."""
    fig, axes = panels(len(widths), height=2.4)
    x_L = plot.positions(length)
    for ax, width in zip(axes, widths):
        config = ladder.shape(width, layers, length)
        theory = kernel.predict(config, length)
        ratio_SL = np.array([lim.influence(lim.Decoder.at_birth(config, seed), lim.random_tokens(length, length, seed), probes=probes, seed=seed).influence_L
                             for seed in range(seeds)]) / theory.influence_L  # fmt: skip
        for n, ratio_L in enumerate(ratio_SL):
            ax.plot(x_L, ratio_L, color=BLUE, lw=0.6, alpha=0.5, label=None if n else f"one of {seeds} seeds")
        ax.plot(x_L, lim.rms(ratio_SL), color=BLUE, lw=1.8, label="their root mean square")
        level = np.sqrt(1 + theory.bias)
        ax.axhspan(level * (1 - theory.cv / 2), level * (1 + theory.cv / 2), color=ORANGE, alpha=0.2, lw=0, label="theory of one seed's scatter")
        ax.axhline(1, color=ORANGE, lw=1.2, ls=plot.DASHES[0], label="kernel theory")
        over_positions(ax, length, ylabel="measured / kernel theory" if ax is axes[0] else "", yscale="linear")
        ax.set(ylim=(0.3, 2.8), title=f"width {width}")
        ax.title.set_fontsize(8)
        if ax is not axes[0]:
            ax.get_legend().remove()
    return fig


def panels(count, height):
    """A figure of panels side by side."""
    fig = Figure(figsize=(6.8, height), layout="constrained")
    return fig, fig.subplots(1, count, squeeze=False)[0]


def over_positions(ax, length, ylabel, yscale="log"):
    """The logit axis of all of lim's figures."""
    edge = 1.08 * np.log(2 * length)
    ax.set_xscale("logit")
    x, labels = plot.position_ticks(length, em=2 * edge * 9 / 72 / (3 if ax.get_subplotspec().get_gridspec().ncols > 1 else 6))
    ax.set_xticks(x, labels)
    ax.set_xticks([], minor=True)
    ax.set(xlim=expit([-edge, edge]), yscale=yscale, ylabel=ylabel, xlabel=f"token, of L = {length}")
    ax.legend()


def main(folder):
    """Writes every figure as theory-NAME.png."""
    with matplotlib.rc_context(plot.STYLE):
        for draw in (averaging, hops, norms, widths):
            plot.save(draw(), pathlib.Path(folder) / f"theory-{draw.__name__}.png")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
