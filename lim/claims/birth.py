"""The claims about networks at birth: each a function of a lab that returns `Evidence`.

Axes: L position, S seed, N layer, K strengths.
"""

import dataclasses
import math

import numpy as np
import scipy

from lim import plot, profile
from lim.claims.evidence import (
    Evidence,
    at_best,
    holdable,
    log_ratio,
    mean_over_seeds,
    measured_or_theory,
    middle_over_mean,
    over_networks,
    over_seeds,
    shape_distance,
    share_of,
)  # fmt: skip
from lim.claims.lab import Ensemble, Lab, Scale
from lim.claims.outside import averaged_attention, identity_strengths, target_lengths
from lim.theory import cesaro, density, kernel, paper
from lim.verdict import Statistic


def deepest(scale: Scale) -> str:
    """The text of the deepest network of the depth sweep."""
    return str(scale.depths[-1])


def primacy_tail(lab: Lab) -> Evidence:
    """Claim 1. Networks without a skip, from the one that is the operator itself up to the published one, against a row of M^H."""
    depth, scale = deepest(lab.scale), lab.scale
    strengths, exact = identity_network(lab)
    rows = [cesaro.profile(scale.swept_length, strength_N) for strength_N in strengths]
    worst = max(profile.log_distance(measured_L[holdable(row_L)], row_L[holdable(row_L)])[1] for measured_L, row_L in zip(exact, rows))
    networks = {
        "random values": lab.ensemble("bare", residual="off"),
        "with norms": lab.ensemble("normed", residual="off"),
        "with MLPs": lab.ensemble("depth", layers=depth, residual="0", uniform_attention="on"),
        "as published": lab.ensemble("depth", layers=depth, residual="0", uniform_attention="off"),
    }
    row_L = networks["random values"].operator_L
    seen_L = holdable(row_L)
    statistics = {"identity": Statistic(worst, 0.0, "identity values: largest factor off the operator, depths 1 to "
                                        f"{depth}, residual or not", log=True)}  # fmt: skip
    for name, ensemble in networks.items():
        key, seen_SL = name.split()[-1], ensemble.profiles_SL[:, seen_L]
        for which, words in enumerate(("median", "largest")):
            statistics[f"{key}_{words}"] = over_seeds(
                f"{name}: {words} factor off a row of M^H, scale free",
                lambda p: profile.log_distance(p, row_L[seen_L], free_scale=True)[which], seen_SL, log=True)  # fmt: skip
    published = networks["as published"]
    statistics["primacy"] = over_seeds("as published: first/middle", log_ratio("primacy"), published.profiles_SL, log=True)
    half = slice(scale.swept_length // 4, 3 * scale.swept_length // 4)
    continuum_L = density.continuum_profile(scale.swept_length, 1.0, layers=int(depth))
    statistics["continuum"] = Statistic(profile.log_distance(row_L[half], continuum_L[half])[0], 0.0,
                                        "the density against the operator at this length, middle half: median factor off",
                                        log=True)  # fmt: skip
    drawn = {name: (e.rms_L / e.rms_L.sum(), row_L) for name, e in networks.items()}
    figure = plot.bundle_figure(drawn, axis="network", ylabel="share of influence", decades=40)
    return Evidence(statistics, ((f"Share of influence by position of networks of {depth} layers without residual: random values, "
                                  "with norms, with MLPs, with softmax, each beside the row of the averaging operator",
                                  figure),))  # fmt: skip


def identity_network(lab: Lab) -> tuple[np.ndarray, np.ndarray]:
    """(strengths [K, N], influence/√D [K, L]) of the swept network with identity values, which is the operator itself.

    A layer of strength 0 passes the stream on, so one compiled network serves every depth: strength 1 in the first H layers,
    for every H, and then constant strengths, ½ the last.
    """
    return identity_strengths(lab.scale.swept.layers), lab.kept("identity")["swept"]["profiles"]


def recency_anchor(lab: Lab) -> Evidence:
    """Claim 2. Last over next-to-last with the skip and without, and the last position's share of influence against (1-α)^H."""
    depth, scale = deepest(lab.scale), lab.scale
    with_skip, without = (lab.ensemble("depth", layers=depth, residual=skip, uniform_attention="off") for skip in ("1", "0"))
    averaging = lab.ensemble("depth", layers=depth, residual="0", uniform_attention="on")
    anchor, share = log_ratio("anchor"), lambda p: math.log(p[-1] / p.sum())
    implied = int(depth) * math.log(0.5)
    strengths, exact = identity_network(lab)
    at_half = exact[-1]
    theory_L = with_skip.theory_L
    statistics = {
        "with": over_seeds("standard block: last / next-to-last", anchor, with_skip.profiles_SL, log=True),
        "without": over_seeds("no residual: last / next-to-last", anchor, without.profiles_SL, log=True),
        "averaging": measured_or_theory("no residual, attention exactly uniform: last / next-to-last", anchor, averaging, log=True),
        "share": over_seeds("standard block: last position's share of influence", share, with_skip.profiles_SL, log=True),
        "mass": over_seeds("that share over (1-α)^H at the implied α = ½",
                           lambda p: share(p) - implied, with_skip.profiles_SL, log=True),
        "identity": Statistic(share(at_half) - implied, 0.0, "the operator's own share at α = ½ over (1-α)^H: finite length alone",
                              log=True),
    }  # fmt: skip
    if theory_L is not None:
        statistics["theory"] = over_seeds("last / next-to-last: measured over kernel theory",
                                          lambda p: anchor(p) - anchor(theory_L), with_skip.profiles_SL, log=True)  # fmt: skip
    series = {}
    for skip in scale.skips:
        across = [lab.ensemble("depth", layers=str(n), residual=f"{skip:g}", uniform_attention="off") for n in scale.depths]
        points = [profile.jackknife(lambda p: profile.ratios(p)["anchor"], e.profiles_SL) for e in across]
        predicted = [math.nan if e.theory_L is None else profile.ratios(e.theory_L)["anchor"] for e in across]
        series[f"skip × {skip:g}"] = (*map(np.array, zip(*points)), np.array(predicted))
    figure = plot.convergence_figure(scale.depths, series, xlabel="layers H", ylabel="last / next-to-last", yscale="log")
    return Evidence(statistics, (("Influence of the last position over the next-to-last against depth, one line for each weight of the "
                                  "skip, measured and predicted by the kernel theory", figure),))  # fmt: skip


def dead_zone(lab: Lab) -> Evidence:
    """Claim 3. How the middle's share of influence falls with depth: against ln (H-1)! a factorial law has slope 1."""
    scale = lab.scale
    constant = f"{next(s for s in scale.skips if 0 < s < 1 and s >= 0.75):g}"
    laws = {"no residual, uniform attention": ("0", "on"), "no residual, as published": ("0", "off"),
            f"skip × {constant}": (constant, "off"), "standard block": ("1", "off")}  # fmt: skip
    keys = ("averaging", "none", "constant", "standard")
    low, high = scale.depths[-3], scale.depths[-1]
    factorial = math.lgamma(high) - math.lgamma(low)
    statistics, series = {}, {}
    for key, (name, (skip, uniform)) in zip(keys, laws.items()):
        across = [lab.ensemble("depth", layers=str(n), residual=skip, uniform_attention=uniform) for n in scale.depths]
        points = [profile.jackknife(lambda p: math.exp(middle_over_mean(p)), e.profiles_SL) for e in across]
        predicted = [math.nan if e.theory_L is None else math.exp(middle_over_mean(e.theory_L)) for e in across]
        series[name] = (*map(np.array, zip(*points)), np.array(predicted))
        ends = across[-3], across[-1]
        statistics[key] = measured_or_theory(f"{name}: d ln(middle/mean) / d ln (H-1)!, H = {low} to {high}, sign changed",
                                             lambda a, b: (middle_over_mean(a) - middle_over_mean(b)) / factorial, *ends)  # fmt: skip
        if key == "standard":
            slope = lambda a, b: (middle_over_mean(b) - middle_over_mean(a)) / math.log(high / low)  # noqa: E731
            statistics["power"] = measured_or_theory(f"standard block: exponent of a power of H, H = {low} to {high}", slope, *ends)
            statistics["middle"] = over_seeds(f"standard block of {high} layers: middle over mean influence", middle_over_mean,
                                              across[-1].profiles_SL, log=True)  # fmt: skip
            for ratio in ("primacy", "recency"):
                end = dict(primacy="first", recency="last")[ratio]
                statistics[ratio] = over_seeds(f"standard block: {end}/middle", log_ratio(ratio), across[-1].profiles_SL, log=True)
    figure = plot.convergence_figure(scale.depths, series, xlabel="layers H", ylabel="influence of the middle / mean influence",
                                     yscale="log")  # fmt: skip
    return Evidence(statistics, (("Influence of the middle over the mean influence against depth on logarithmic axes: without residual, "
                                  "with a skip of constant weight and for the standard block", figure),))  # fmt: skip


def four_shapes(lab: Lab) -> Evidence:
    """Claim 4. Mask on and off times residual on and off: which end stands above the middle, and whether the effects interact."""
    cells = {(c, r): lab.ensemble("mask", causal=c, residual=r, score_path="on") for c in ("on", "off") for r in ("on", "off")}
    value_path = lab.ensemble("mask", causal="on", residual="off", score_path="off")
    statistics = {}
    for (causal, residual), ensemble in cells.items():
        for ratio, end in (("primacy", "first"), ("recency", "last")):
            statistics[f"{ratio}_{causal}_{residual}"] = measured_or_theory(
                f"mask {causal}, residual {residual}: {end}/middle", log_ratio(ratio), ensemble, log=True)  # fmt: skip
    statistics["recency_values"] = measured_or_theory("mask on, residual off, gradients through values alone: last/middle",
                                                      log_ratio("recency"), value_path, log=True)  # fmt: skip
    order = [cells[key] for key in (("on", "on"), ("on", "off"), ("off", "on"), ("off", "off"))]
    for ratio in ("primacy", "recency"):
        f = log_ratio(ratio)
        interact = lambda a, b, c, d: abs(f(a) - f(b) - f(c) + f(d))  # noqa: E731
        statistics[f"interaction_{ratio}"] = measured_or_theory(
            f"{ratio}: factor by which the two effects together miss their product", interact, *order, log=True)  # fmt: skip
    panels = [plot.Cell("", e.rms_L, profile.jackknife(lambda p: p, e.profiles_SL)[1], e.theory_L, dict(causal=c, residual=r),
                        profile.summarize_seeds(e.profiles_SL)) for (c, r), e in cells.items()]  # fmt: skip
    figure = plot.grid_figure(panels, rows="causal", cols="residual", share_y=False, decades=30)
    return Evidence(statistics, (("Influence by position in four panels, causal mask on and off times residual on and off, "
                                  "measured and predicted by the kernel theory", figure),))  # fmt: skip


def change(one: Ensemble, other: Ensemble) -> tuple[np.ndarray, np.ndarray]:
    """(ratio_L, stderr_L) of two root-mean-square profiles, seed by seed."""
    return profile.jackknife(lambda joined: np.divide(*np.split(joined, 2)), np.hstack([one.profiles_SL, other.profiles_SL]))


def change_of_shape(one_SL: np.ndarray, other_SL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same of the ratio over its median: where the profile as a whole grows, nothing has changed."""

    def scaled(joined):
        ratio_L = np.divide(*np.split(joined, 2))
        return ratio_L / np.median(ratio_L)

    return profile.jackknife(scaled, np.hstack([one_SL, other_SL]))


def rotary(lab: Lab) -> Evidence:
    """Claim 5. The same seeds with RoPE and without: the change of shape, against how much one seed's shape differs from another's.

    A seed's profile scatters as a whole, by tens of percent, and RoPE draws that factor anew: no matter of position, so shapes are
    compared, and the factor stands beside them with its error.
    """
    on, off = (lab.ensemble("parts", rope=rope, mlp="on") for rope in ("on", "off"))
    learned, none = (lab.ensemble("gpt2", positions=positions) for positions in ("on", "off"))
    log_SL = np.log(on.profiles_SL)
    seeds, half = len(log_SL), len(log_SL) // 2

    def scatter(log_SL):
        return float(np.median(np.std(log_SL - np.median(log_SL, axis=1, keepdims=True), axis=0, ddof=1)))

    def significant(both_SL):
        ratio_L, error_L = change_of_shape(*np.split(both_SL, 2, axis=1))
        return float(np.mean(abs(ratio_L - 1) > 2 * error_L))

    spread = scatter(log_SL)
    changes = {"RoPE on / off": change_of_shape(on.profiles_SL, off.profiles_SL),
               "learned positions on / off (GPT-2)": change_of_shape(learned.profiles_SL, none.profiles_SL)}  # fmt: skip
    drawn_anew = math.sqrt(2 / seeds) * scipy.stats.norm.ppf(0.75)
    statistics = {
        "change": over_seeds("RoPE on/off: median factor, scale free", shape_distance(), on.profiles_SL, off.profiles_SL, log=True),
        "largest": over_seeds("RoPE on/off: largest factor of a position, scale free", shape_distance(1), on.profiles_SL,
                              off.profiles_SL, log=True),
        "scale": over_seeds("RoPE on/off: the profile as a whole", lambda a, b: float(np.median(np.log(a / b))), on.profiles_SL,
                            off.profiles_SL, log=True),
        "share": over_seeds("RoPE on/off: the median change of the mean shape over the spread of one seed's shape "
                            f"({drawn_anew:.2f} if RoPE drew every network's scatter anew)",
                            lambda a, b: shape_distance()(a, b) / spread, on.profiles_SL, off.profiles_SL),
        "noise": over_seeds(f"RoPE on, {half} seeds against {half} others: median factor, scale free", shape_distance(),
                            on.profiles_SL[:half], on.profiles_SL[half : 2 * half], log=True),
        "spread": over_networks("spread of one seed's shape: median factor", scatter, log_SL, log=True),
        "significant": over_networks("share of positions changed by more than 2 standard errors "
                                     f"({2 * scipy.stats.t.sf(2, seeds - 1):.2f} by chance)", significant,
                                     np.hstack([on.profiles_SL, off.profiles_SL])),
        "learned": over_seeds("GPT-2's learned positions on/off: median factor, scale free", shape_distance(),
                              learned.profiles_SL, none.profiles_SL, log=True),
        "learned_largest": over_seeds("GPT-2's learned positions on/off: largest factor, scale free", shape_distance(1),
                                      learned.profiles_SL, none.profiles_SL, log=True),
    }  # fmt: skip
    figure = plot.change_figure(changes, ylabel="ratio of influence / its median")
    return Evidence(statistics, (("Ratio of influence with and without RoPE, and with and without GPT-2's learned positions, by position, "
                                  "over its median, with standard errors", figure),))  # fmt: skip


def mlps(lab: Lab) -> Evidence:
    """Claim 6. The shape with MLPs and without: which ends stand above the middle, which is the higher, and the order of positions."""
    cells = {mlp: lab.ensemble("parts", rope="on", mlp=mlp) for mlp in ("on", "off")}
    statistics = {f"{ratio}_{mlp}": over_seeds(f"MLPs {mlp}: {end}/middle", log_ratio(ratio), e.profiles_SL, log=True)
                  for mlp, e in cells.items() for ratio, end in (("primacy", "first"), ("recency", "last"))}  # fmt: skip
    both = [e.profiles_SL for e in cells.values()]
    tilt = lambda p: float(np.log(p[0] / p[-1]))  # noqa: E731
    for mlp, p in zip(cells, both):
        statistics[f"tilt_{mlp}"] = over_seeds(f"MLPs {mlp}: first/last", tilt, p, log=True)
    side = math.copysign(1, statistics["tilt_off"].value)
    statistics["side"] = over_seeds("the end that is higher without MLPs over the other end, with MLPs", lambda p: side * tilt(p), both[0],
                                    log=True)  # fmt: skip
    statistics["order"] = over_seeds("rank correlation of the profiles with and without MLPs (noise lowers it in a level valley)",
                                     profile.spearman, *both)  # fmt: skip
    if (on_L := cells["on"].theory_L) is None or (off_L := cells["off"].theory_L) is None:
        raise ValueError("there is no kernel theory of this network, and a rank correlation of measured ones is noise's")
    statistics["order_theory"] = Statistic(
        profile.spearman(on_L, off_L), 0.0, "rank correlation with and without MLPs in the kernel theory, which has no noise"
    )
    statistics["size"] = over_seeds("MLPs on/off: median factor, scale free", shape_distance(), *both, log=True)
    statistics["size_largest"] = over_seeds("MLPs on/off: largest factor, scale free", shape_distance(1), *both, log=True)
    figure = plot.bundle_figure({mlp: (e.rms_L, e.theory_L) for mlp, e in cells.items()}, axis="MLPs")
    return Evidence(statistics, (("Influence by position with MLPs and without, measured and predicted", figure),))


def score_path(lab: Lab) -> Evidence:
    """Claim 7. The whole gradient against the one through values alone, same weights."""
    whole, values = (lab.ensemble("mask", causal="on", residual="on", score_path=path) for path in ("on", "off"))
    pair = whole.profiles_SL, values.profiles_SL
    theory = kernel.predict(whole.config, whole.length, whole.switches)
    statistics = {
        "middle": over_seeds("influence, whole over values alone: median position", lambda a, b: float(np.median(np.log(a / b))),
                             *pair, log=True),
        "largest": over_seeds("the same, the position with the largest change", lambda a, b: float(np.abs(np.log(a / b)).max()),
                              *pair, log=True),
        "last": over_seeds("the same, the last position", lambda a, b: float(np.log(a[-1] / b[-1])), *pair, log=True),
        "logits": Statistic(theory.logit_variance, 0.0, "variance z of a softmax logit: what the share grows with, to first order"),
    }  # fmt: skip
    changes: dict[str, tuple] = {"measured": change(whole, values)}
    if whole.theory_L is not None and values.theory_L is not None:
        changes["kernel theory, first order in z"] = (whole.theory_L / values.theory_L, None)
        statistics["predicted"] = Statistic(float(np.median(np.log(changes["kernel theory, first order in z"][0]))), 0.0,
                                            "kernel theory: median position", log=True)  # fmt: skip
    figure = plot.change_figure(changes, ylabel="influence, whole / values alone")
    return Evidence(statistics, (("Influence with the whole gradient over that with gradients through values alone, by position, "
                                  "measured and predicted", figure),))  # fmt: skip


def agreement(lab: Lab) -> Evidence:
    """Claim 8. The paper's operator at the constant strength that is best for each distance (and at ½), and the kernel theory.

    The best strength is fitted to the very profile it is compared with, anew without each seed, which favours the paper.
    """
    statistics, figures = {}, []
    networks = {"qwen2": ("Qwen2", lab.ensemble("parts", rope="on", mlp="on")), "gpt2": ("GPT-2", lab.ensemble("gpt2", positions="on"))}
    for key, (name, e) in networks.items():
        theory_L, scaled = e.theory_L, lambda a, b: profile.wasserstein(a, b, scaled=True)
        unlike = at_best(lambda a, b: -profile.spearman(a, b), e.config)
        measures = {
            "spearman": ("Spearman, the paper's operator at its best α", lambda p: -unlike(p), False),
            "implied": ("Spearman, the same at α = ½", lambda p: profile.spearman(p, e.operator_L), False),
            "transport": ("Wasserstein, positions scaled to [0, 1], at its best α", at_best(scaled, e.config), False),
            "tokens": ("Wasserstein, in tokens, at its best α", at_best(profile.wasserstein, e.config), False),
            "median": ("the paper's operator: median factor off, at the scale and α that are best for it",
                       at_best(shape_distance(), e.config), True),
            "largest": ("the paper's operator: largest factor off, at the scale and α that are best for it",
                        at_best(shape_distance(1), e.config), True),
        }  # fmt: skip
        if theory_L is not None:
            measures |= {
                "kernel_spearman": ("Spearman, kernel theory", lambda p: profile.spearman(p, theory_L), False),
                "kernel_transport": ("Wasserstein, positions scaled to [0, 1], kernel theory", lambda p: scaled(p, theory_L), False),
                "kernel_median": ("kernel theory: median factor off, nothing fitted",
                                  lambda p: profile.log_distance(p, theory_L)[0], True),
                "kernel_largest": ("kernel theory: largest factor off, nothing fitted",
                                   lambda p: profile.log_distance(p, theory_L)[1], True),
            }  # fmt: skip
        for measure, (words, statistic, log) in measures.items():
            statistics[f"{measure}_{key}"] = over_seeds(f"{name}: {words}", statistic, e.profiles_SL, log=log)
        strength, row_L = paper.fit(e.rms_L, e.config)
        curves = {} if theory_L is None else {"kernel theory, nothing fitted": theory_L}
        curves |= {f"paper, α fitted: {strength:.3f}": row_L, "paper, α = ½": e.operator_L * e.rms_L.mean() / e.operator_L.mean()}
        figure = plot.influence_figure(e.rms_L, stderr_L=profile.jackknife(lambda p: p, e.profiles_SL)[1], curves=curves, title=name,
                                       summary=profile.summarize_seeds(e.profiles_SL))  # fmt: skip
        figures.append((f"Influence by position of the {name} network at birth beside the kernel theory and the paper's operator at its "
                        "best and at its implied strength", figure))  # fmt: skip
    return Evidence(statistics, tuple(figures))


def peak_to_valley(lab: Lab) -> Evidence:
    """Claim 9. Ends over middle and over the lowest position, for the claimed network and length.

    Where the network measured here is the claimed one, the number is the measured one. Elsewhere it is the kernel theory's of the
    claimed network, with the error that this theory has here: how far measurement lies from it, and how well that is known. The
    lowest position of a noisy profile follows the noise, so it is read where the theory has its own.
    """
    scale, e = lab.scale, lab.ensemble("parts", rope="on", mlp="on")
    if e.theory_L is None:
        raise ValueError("there is no kernel theory of this network")
    same = dataclasses.replace(scale.target, vocab=e.config.vocab) == e.config and scale.target_length == e.length
    lengths = target_lengths(scale)
    theories = lab.kept("target")["theory"]
    target_L = theories[str(scale.target_length)]
    lowest = int(e.theory_L.argmin())
    ratios = {
        "last": ("last/middle", log_ratio("recency")),
        "first": ("first/middle", log_ratio("primacy")),
        "lowest": ("highest/lowest", lambda p: math.log(p.max() / p[lowest])),
    }
    statistics = {}
    for key, (words, statistic) in ratios.items():
        here = over_seeds(f"{words} of the network measured here, L = {e.length}", statistic, e.profiles_SL, log=True)
        beside = over_seeds(f"{words} here: measured over kernel theory", lambda p: statistic(p) - statistic(e.theory_L), e.profiles_SL,
                            log=True)  # fmt: skip
        there = math.log(target_L.max() / target_L.min()) if key == "lowest" else statistic(target_L)
        at = f"{words} at L = {scale.target_length}"
        statistics[key] = dataclasses.replace(here, words=f"{at} (measured)") if same else dataclasses.replace(
            beside, value=there, error=math.hypot(beside.value, beside.error),
            words=f"{at} (kernel theory, its error that at L = {e.length})")  # fmt: skip
        statistics |= {f"{key}_here": here, f"{key}_theory": beside}
    where = (int(target_L.argmin()) + 0.5) / len(target_L)
    statistics["where"] = Statistic(where, 0.0, "where the lowest position is, as a fraction of the text (theory)")
    below = 0.0 if 0.25 <= where <= 0.75 else math.log(profile.middle(target_L) / target_L.min())
    statistics["below"] = Statistic(below, 0.0, "middle over a lowest position outside the central half, else 1 (theory)", log=True)
    drawn = {"last/middle": lambda p: profile.ratios(p)["recency"], "first/middle": lambda p: profile.ratios(p)["primacy"],
             "highest/lowest": lambda p: p.max() / p.min()}  # fmt: skip
    series: dict[str, tuple] = {f"{words}, kernel theory": (None, None, np.array([ratio(theories[str(n)]) for n in lengths]))
                                for words, ratio in drawn.items()}  # fmt: skip
    seen = np.array([math.exp(statistics["last_here"].value) if n == e.length else math.nan for n in lengths])
    series["last/middle, measured here"] = (seen, seen * statistics["last_here"].error, None)
    figure = plot.convergence_figure(lengths, series, xlabel="length L", ylabel="ratio of influence", yscale="log")
    return Evidence(statistics, (("Ends over middle and highest over lowest influence against the length of the text, kernel theory of "
                                  "Qwen2-0.5B, with the measured network as a point", figure),))  # fmt: skip


def sinks_at_birth(lab: Lab) -> Evidence:
    """Claim 12 at birth. Attention on the first token over what exact averaging puts there, layer by layer, and the rollout's."""
    scale, kept = lab.scale, lab.kept("attention")["qwen2"]
    averaging = averaged_attention(scale.length)
    log_SN = np.log(kept["first"] / averaging)
    top = int(log_SN.mean(0).argmax())
    rollout_SL = kept["rollout"]
    layers_sem = math.sqrt(log_SN.var(0, ddof=1).mean() / len(log_SN))
    statistics = {
        "sink": mean_over_seeds(f"attention on the first token over the average's: layer {top + 1}, the highest of {log_SN.shape[1]}",
                                log_SN[:, top], log=True),
        "equal": mean_over_seeds(f"what the highest of {log_SN.shape[1]} equal layers would show, by their scatter over seeds",
                                 log_SN.mean(1) + highest_of(log_SN.shape[1]) * layers_sem, log=True),
        "all": mean_over_seeds("the same, mean over layers", log_SN.mean(1), log=True),
        "rollout": mean_over_seeds("attention rollout: first position over the mean position", np.log(rollout_SL[:, 0] * scale.length),
                                   log=True),
    }  # fmt: skip
    ratio_SN = np.exp(log_SN)
    layers = np.arange(1, log_SN.shape[1] + 1)
    error_N = ratio_SN.std(0, ddof=1) / math.sqrt(len(ratio_SN))
    figure = plot.convergence_figure(layers, {"first token": (ratio_SN.mean(0), error_N, np.ones(len(layers)))}, xlabel="layer",
                                     ticks=[n for n in (1, 2, 4, 8, 16, 24, 32) if n <= len(layers)],
                                     ylabel="attention on the first token / exact averaging's")  # fmt: skip
    return Evidence(statistics, (("Attention mass on the first token over that of exact averaging, by layer, at birth", figure),))


def highest_of(count: int) -> float:
    """Expectation of the largest of so many standard normal numbers."""
    law = scipy.stats.norm
    return float(scipy.integrate.quad(lambda x: x * count * law.pdf(x) * law.cdf(x) ** (count - 1), -8, 8)[0])


def operator_row_criticism(lab: Lab) -> Evidence:
    """Criticism A. A row of the operator's product against the Jacobian's norm: bare random values, and the published network."""
    bare, published = lab.ensemble("bare", residual="on"), lab.ensemble("parts", rope="on", mlp="on")
    exact = identity_network(lab)[1][-1]
    if (theory_L := published.theory_L) is None:
        raise ValueError("there is no kernel theory of this network, to tell noise by")
    config, farthest = bare.config, at_best(shape_distance(1), published.config)
    gain = config.width * config.init_std**2 * config.heads * config.head_dim * config.residual_std**2
    squares_L = cesaro.second_moment_profile(bare.length, 1.0, 1.0, gain, layers=config.layers)
    statistics = {
        "published": over_seeds("published network: median factor off the row, at its best scale and α",
                                at_best(shape_distance(), published.config), published.profiles_SL, log=True),
        "published_largest": over_seeds("published network: largest factor off the row, at the scale and α that are best for it",
                                        farthest, published.profiles_SL, log=True),
        "beyond": over_seeds("published network: that factor over the largest off the kernel theory, scale free, which is noise's",
                             lambda p: farthest(p) - shape_distance(1)(p, theory_L), published.profiles_SL, log=True),
        "bare": over_seeds("random values alone: median factor off the row at α = ½", lambda p: shape_distance()(p, bare.operator_L),
                           bare.profiles_SL, log=True),
        "bare_fitted": over_seeds("random values alone: median factor off the row, at its best scale and α",
                                  at_best(shape_distance(), config), bare.profiles_SL, log=True),
        "squares": over_seeds("random values alone: median factor off Σ e_k ((M^k)_nj)², norms adding by depth",
                              lambda p: shape_distance()(p, np.sqrt(squares_L)), bare.profiles_SL, log=True),
        "identity": Statistic(profile.log_distance(exact, cesaro.profile(len(exact), 0.5, layers=config.layers))[1], 0.0,
                              "identity values: largest factor off the row", log=True),
    }  # fmt: skip
    measured_L = bare.rms_L
    row_L = bare.operator_L
    curves = {"norms adding by depth (scale fitted)": np.sqrt(squares_L) * np.median(measured_L / np.sqrt(squares_L)),
              "row of the operator, α = ½ (scale fitted)": row_L * np.median(measured_L / row_L)}  # fmt: skip
    figure = plot.influence_figure(measured_L, stderr_L=profile.jackknife(lambda p: p, bare.profiles_SL)[1], curves=curves,
                                   title="Random values, uniform attention, no norm, no MLP")  # fmt: skip
    return Evidence(statistics, (("Influence by position of a network of random values with residual, beside the operator's row and "
                                  "the sum of squares over numbers of hops", figure),))  # fmt: skip


def one_pass_criticism(lab: Lab) -> Evidence:
    """Criticism B. The gradient of the sum of the outputs against the Jacobian's norm, seed by seed and in the ensemble.

    Qwen2 ends in an RMSNorm, GPT-2 in a LayerNorm, whose outputs sum to zero.
    """
    kept = {name: arrays["profiles"] for name, arrays in lab.kept("one-pass").items()}
    norms = {"qwen2": lab.ensemble("parts", rope="on", mlp="on"), "gpt2": lab.ensemble("gpt2", positions="on")}
    count = min(len(kept["qwen2"]), *(len(e.profiles_SL) for e in norms.values()))
    one_SL, norm_SL = kept["qwen2"][:count], norms["qwen2"].profiles_SL[:count]
    log_SL = np.log(one_SL / norm_SL)
    log_S = np.median(np.abs(log_SL), axis=1)
    gpt2_S = np.median(kept["gpt2"][:count] / norms["gpt2"].profiles_SL[:count], axis=1)
    off_gpt2_S = np.abs(np.log(np.maximum(gpt2_S, np.finfo(np.float32).eps)))  # what float32 tells from 0
    shapes = [(profile.summarize(a).shape, profile.summarize(b).shape) for a, b in zip(one_SL, norm_SL)]
    statistics = {
        "either": mean_over_seeds("one network and text, of the architecture that is further off: median factor between the two",
                                  np.maximum(log_S, off_gpt2_S), log=True),
        "one": mean_over_seeds("one Qwen2 network and text: median factor between the two", log_S, log=True),
        "one_largest": mean_over_seeds("one network and text: largest factor", np.abs(log_SL).max(axis=1), log=True),
        "averaged": over_seeds(f"root mean square over {count} seeds: median factor", lambda a, b: profile.log_distance(a, b)[0],
                               one_SL, norm_SL, log=True),
        "recency": over_seeds("last/middle: one pass over norm", lambda a, b: log_ratio("recency")(a) - log_ratio("recency")(b),
                              one_SL, norm_SL, log=True),
        "primacy": over_seeds("first/middle: one pass over norm", lambda a, b: log_ratio("primacy")(a) - log_ratio("primacy")(b),
                              one_SL, norm_SL, log=True),
        "shapes": share_of("share of single networks that both give the same shape", sum(a == b for a, b in shapes), count),
        "layernorm": mean_over_seeds("one GPT-2 network and text, whose final LayerNorm makes the outputs sum to zero: one pass over norm",
                                     gpt2_S),
    }  # fmt: skip
    ratio = profile.jackknife(lambda joined: np.divide(*np.split(joined, 2)), np.hstack([one_SL, norm_SL]))
    figure = plot.change_figure({f"root mean square over {count} seeds": ratio, "one network": (np.exp(log_SL[0]), None)},
                                ylabel="one pass / norm of the Jacobian")  # fmt: skip
    return Evidence(statistics, (("Gradient of the sum of the outputs over the norm of the Jacobian, by position, for one network and for "
                                  "the root mean square over seeds", figure),))  # fmt: skip
