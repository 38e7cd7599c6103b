"""The claims about training: each a function of a lab that returns `Evidence`.

Networks of several seeds are trained, so errors are over networks. Held-out windows are shared among them.

Axes: S seed, M measured step, W held-out window, L position, N layer, O offset from a boundary, P place of a pair.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lim import plot, profile, recall
from lim.claims.evidence import Evidence, log_ratio, mean_over_seeds, over_networks, share_error, share_of
from lim.claims.lab import Lab
from lim.claims.outside import averaged_attention
from lim.verdict import Statistic


def over_windows(statistic: Callable[[np.ndarray], float], profiles_WL: Sequence[np.ndarray] | np.ndarray) -> float:
    """The mean over windows of a function of a profile."""
    return float(np.mean([statistic(profile_L) for profile_L in profiles_WL]))


def peak(profile_L: ArrayLike) -> float:
    """ln of the higher end over the middle."""
    return max(log_ratio("primacy")(profile_L), log_ratio("recency")(profile_L))


def depth(profile_L: ArrayLike) -> float:
    """ln of the lower end over the lowest position, `lim.summarize`'s valley depth: how deep the U is."""
    return math.log(profile.summarize(profile_L).valley_depth)


def valley_in_training(lab: Lab) -> Evidence:
    """Claim 10. Both ends over the middle on held-out text, at birth and trained, window by window."""
    networks = list(lab.kept("training").values())
    steps, last = networks[0]["step"], int(networks[0]["step"][-1])
    primacy, recency = log_ratio("primacy"), log_ratio("recency")
    at = {key: np.array([[over_windows(statistic, profiles_WL) for profiles_WL in n["influence"]] for n in networks])
          for key, statistic in dict(primacy=primacy, recency=recency, depth=depth, peak=peak).items()}  # fmt: skip
    names = dict(primacy="first/middle", recency="last/middle", depth="lower end/lowest", peak="higher end/middle")
    statistics = {}
    for key, values_SM in at.items():
        statistics[f"{key}_birth"] = mean_over_seeds(f"{names[key]} at birth", values_SM[:, 0], log=True)
        statistics[key] = mean_over_seeds(f"{names[key]} after {last} updates", values_SM[:, -1], log=True)
        statistics[f"{key}_growth"] = mean_over_seeds(f"{names[key]}: trained over birth", values_SM[:, -1] - values_SM[:, 0], log=True)
    both = [np.mean([min(primacy(p), recency(p)) > math.log(1 + profile.MARGIN) for p in n["influence"][-1]]) for n in networks]
    statistics["windows"] = mean_over_seeds("share of held-out windows with both ends above the middle, trained", both)
    for name, m, words in (("bits_birth", 0, "at birth"), ("bits", -1, f"after {last} updates")):
        bits = [n["loss"][m].mean() / math.log(2) for n in networks]
        statistics[name] = mean_over_seeds(f"held-out loss in bits per token {words}", bits)
    # geometric means, so that no window or network weighs more by its scale
    profiles_ML = np.exp(np.mean([np.log(n["influence"]).mean(1) for n in networks], axis=0))
    life = plot.life_figure([int(step) for step in steps], profiles_ML)
    few = {f"step {steps[m]}": (profiles_ML[m] / profiles_ML[m].mean(), None) for m in sorted({0, len(steps) // 2, len(steps) - 1})}
    bundle = plot.bundle_figure(few, axis="training", ylabel="influence / its mean over positions")
    return Evidence(statistics, (
        ("Influence over its mean by position, on held-out text, at birth, during training and at its end", bundle),
        ("The same as a map of the number of updates against position", life),
    ))  # fmt: skip


def boundary_peaks(lab: Lab) -> Evidence:
    """Claim 11. Influence where documents begin against the same places of other windows, at birth and trained."""
    networks = list(lab.kept("training").values())
    length = networks[0]["influence"].shape[-1]
    radius = min(8, length // 16)
    found = [[profile.boundaries(n["influence"][m], n["boundary"], radius) for m in (0, -1)] for n in networks]
    trained = [after.d_O[radius + after.peak] for _, after in found]
    before = [birth.d_O[radius + after.peak] for birth, after in found]  # where the trained one peaks
    # the networks share their windows, so that they are averaged first, not their p
    log_SWL, boundary_WL = np.log([n["influence"][-1] for n in networks]), networks[0]["boundary"]
    p = profile.boundaries(np.exp(log_SWL.mean(0)), boundary_WL, radius).peak_p

    def largest(log_WL, boundary_WL):
        return float(np.abs(profile.boundaries(np.exp(log_WL), boundary_WL, radius, shuffles=200).d_O[radius:]).max())

    def score(log_SWL):
        log_WL = log_SWL.mean(0)
        others = [largest(log_WL, np.roll(boundary_WL, shift, axis=0)) for shift in range(1, len(boundary_WL))]
        return (largest(log_WL, boundary_WL) - np.mean(others)) / np.std(others, ddof=1)

    nats = [(after.aligned_O - after.shuffled_O)[radius + after.peak] for _, after in found]
    statistics = {
        "trained": mean_over_seeds(f"largest effect 0 to {radius} tokens behind a separator, trained (Cohen's d)", trained),
        "birth": mean_over_seeds("effect at the same distance at birth (Cohen's d)", before),
        "added": mean_over_seeds("the one less the other", np.subtract(trained, before)),
        "p": Statistic(round(p, 4), 0.0, "p ≤ (share of shuffles with as large an effect, in the geometric mean of the networks)"),
        "score": over_networks("how far its largest effect lies above that of other windows' boundaries, in their standard deviations",
                               score, log_SWL),
        "factor": mean_over_seeds("influence there over its neighbourhood's, trained", nats, log=True),
        "where": mean_over_seeds("tokens behind the separator where the effect is largest, trained", [after.peak for _, after in found]),
        "count": Statistic(float(found[0][1].count), 0.0, "boundaries averaged per network"),
    }  # fmt: skip
    series = {}
    for which, words in ((0, "at birth"), (1, "trained")):
        aligned_SO = np.array([pair[which].aligned_O for pair in found])
        series[words] = aligned_SO.mean(0), aligned_SO.std(0, ddof=1) / math.sqrt(len(found))
    series["shuffled"] = np.mean([after.shuffled_O for _, after in found], axis=0), np.mean([after.spread_O for _, after in found], axis=0)
    figure = plot.lines_figure(found[0][1].offsets_O, series, xlabel="tokens behind the separator of two documents",
                               ylabel="ln influence above its running median")  # fmt: skip
    return Evidence(statistics, (("Influence around the beginnings of documents, at birth and trained, with that of shuffled places",
                                  figure),))  # fmt: skip


def sinks_trained(lab: Lab) -> Evidence:
    """Claim 12, trained. Attention on the first token over exact averaging's, by layer, and the order of layers."""
    networks = list(lab.kept("training").values())
    averaging = averaged_attention(networks[0]["influence"].shape[-1])
    log_MSN = np.log(np.array([[n["first_token"][m] for n in networks] for m in (0, -1)]) / averaging)
    layers = np.arange(1, log_MSN.shape[-1] + 1)
    top = int(log_MSN[1].mean(0).argmax())
    order = [profile.spearman(np.exp(row_N), layers) for row_N in log_MSN[1]]
    first = np.array([[n["rollout"][m][0] for n in networks] for m in (0, -1)])
    statistics = {
        "sink": mean_over_seeds(f"attention on the first token over the average's, trained: layer {top + 1}, the highest of {len(layers)}",
                                log_MSN[1, :, top], log=True),
        "birth": mean_over_seeds("the same layer at birth", log_MSN[0, :, top], log=True),
        "all": mean_over_seeds("mean over layers, trained", log_MSN[1].mean(1), log=True),
        "order": mean_over_seeds("rank correlation of that attention with the layer's number, trained", order),
        "rollout": mean_over_seeds("rollout's weight of the first position: trained over birth", np.log(first[1] / first[0]), log=True),
    }  # fmt: skip
    series = {}
    for words, log_SN in zip(("at birth", "trained"), log_MSN):
        ratio_SN = np.exp(log_SN)
        series[words] = ratio_SN.mean(0), ratio_SN.std(0, ddof=1) / math.sqrt(len(ratio_SN))
    figure = plot.lines_figure(layers, series, levels={"exact averaging": 1.0}, xlabel="layer", yscale="log",
                               ylabel="attention on the first token / averaging's")  # fmt: skip
    return Evidence(statistics, (("Attention on the first token over that of exact averaging, by layer, at birth and trained", figure),))


def by_arm(lab: Lab) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """arm → (steps, accuracy [S, M, P]) of the seeds whose plain training learned. Where nothing is learned, no place can be behind.

    Raises:
      ValueError: fewer than two seeds learned.
    """
    r, kept = lab.scale.recall, lab.kept("recall")
    seeds = [s for s, learned in zip(lab.block(r.seeds), learning(lab, r.arms[0])) if learned]
    if len(seeds) < 2:
        raise ValueError(f"recall: plain training learned the task on {len(seeds)} of {r.seeds} seeds within {r.recipe.steps} updates, "
                         "and it takes two")  # fmt: skip
    return {arm: (kept[f"{arm}-{seeds[0]}"]["step"], np.array([kept[f"{arm}-{s}"]["accuracy"] for s in seeds])) for arm in r.arms}


def learning(lab: Lab, arm: str) -> list[bool]:
    """Whether each seed learned the task: some third of the places reached one half."""
    kept, r = lab.kept("recall"), lab.scale.recall
    return [bool(np.isfinite(third_crossings(kept[f"{arm}-{s}"])).any()) for s in lab.block(r.seeds)]


def third_crossings(curve: Mapping[str, np.ndarray]) -> np.ndarray:
    """Updates until one half of the answers about the first, middle and last third are right, [3]; infinite where never."""
    return recall.crossings(curve["step"], [recall.thirds(accuracy_P) for accuracy_P in curve["accuracy"]])


def gradient_valley(lab: Lab) -> Statistic:
    """At birth: the gradient of the answer's loss about the lower end over that about the middle, the valley that is to be crossed."""
    gradients = lab.kept("recall-gradients").values()
    first_S, middle_S, last_S = np.log([recall.thirds(kept["gradient"]) for kept in gradients]).T
    lower = min(first_S - middle_S, last_S - middle_S, key=np.mean)
    return mean_over_seeds("gradient of the answer's loss at birth: lower end over middle third", lower, log=True)


def middle_learns_later(lab: Lab) -> Evidence:
    """Claim 13. When plain training reaches half of the answers about each third of the context, and gradients at birth by place."""
    steps, accuracy_SMP = by_arm(lab)[lab.scale.recall.arms[0]]
    crossed_S3 = np.array([third_crossings(dict(step=steps, accuracy=accuracy_MP)) for accuracy_MP in accuracy_SMP])
    first, middle, last = np.log(np.minimum(crossed_S3, steps[-1])).T  # what never crossed did so later than that
    gradient_SP = np.array([kept["gradient"] for kept in lab.kept("recall-gradients").values()])
    low = np.array([np.log(recall.thirds(gradient_P)) for gradient_P in gradient_SP])
    statistics = {
        "valley": gradient_valley(lab),
        "slower": mean_over_seeds("updates until half is right: middle third over the ends (geometric mean)", middle - (first + last) / 2,
                                  log=True),
        "slowest": mean_over_seeds("the same: middle third over the later end", middle - np.maximum(first, last), log=True),
        "first": mean_over_seeds("updates until half is right: first third", first, log=True),
        "middle": mean_over_seeds("updates until half is right: middle third", middle, log=True),
        "last": mean_over_seeds("updates until half is right: last third", last, log=True),
        "suppressed": mean_over_seeds("gradient of the answer's loss at birth: ends over middle third (geometric mean)",
                                      (low[:, 0] + low[:, 2]) / 2 - low[:, 1], log=True),
        "gradient_first": mean_over_seeds("gradient at birth: first over middle third", low[:, 0] - low[:, 1], log=True),
        "gradient_last": mean_over_seeds("gradient at birth: last over middle third", low[:, 2] - low[:, 1], log=True),
        "learned": share_of("share of seeds on which plain training learned: on these a third reached one half, and only they count",
                            len(accuracy_SMP), lab.scale.recall.seeds),
    }  # fmt: skip
    thirds_SM3 = np.array([[recall.thirds(accuracy_P) for accuracy_P in accuracy_MP] for accuracy_MP in accuracy_SMP])
    mean_M3, error_M3 = thirds_SM3.mean(0), thirds_SM3.std(0, ddof=1) / math.sqrt(len(thirds_SM3))
    series = {f"{name} third": (mean_M3[:, i], error_M3[:, i]) for i, name in enumerate(("first", "middle", "last"))}
    progress = plot.lines_figure(steps, series, levels={"one half": 0.5}, xlabel="updates", ylabel="right answers")
    share_SP = gradient_SP / np.exp(np.log(gradient_SP).mean(1, keepdims=True))
    mean_P, error_P = share_SP.mean(0), share_SP.std(0, ddof=1) / math.sqrt(len(share_SP))
    panel = plot.Panel("gradient of the answer's loss by the pair's embedding, at birth, over its mean",
                       {"plain": (mean_P, mean_P - error_P, mean_P + error_P)})  # fmt: skip
    return Evidence(statistics, (
        ("Share of right answers about the first, middle and last third of the context along plain training, mean over networks", progress),
        ("Norm of the gradient of the answer's loss at the asked pair, by its place, at birth", plot.place_figure([panel])),
    ))  # fmt: skip


def crossing_the_valley(lab: Lab) -> Evidence:
    """Claim 14. Accuracy by thirds at the end of plain training, and what interventions of the same budget add in the middle."""
    arms = {arm: accuracy_SMP[:, -1] for arm, (_, accuracy_SMP) in by_arm(lab).items()}
    plain, *aimed = arms
    thirds = {arm: np.array([recall.thirds(row_P) for row_P in accuracy_SP]).T for arm, accuracy_SP in arms.items()}
    first, middle, last = thirds[plain]
    best = max(aimed, key=lambda arm: thirds[arm][1].mean())
    updates = lab.scale.recall.recipe.steps
    # answers about a third: where all were right, another might not have been
    asked = len(middle) * (lab.scale.recall.task.pairs // 3) * lab.scale.recall.count
    ends, middles = (first + last) / 2, {arm: middle_S for arm, (_, middle_S, _) in thirds.items()}
    least = {arm: share_error(middle_S.mean(), asked) for arm, middle_S in middles.items()}
    least_ends = share_error(ends.mean(), 2 * asked)
    statistics = {
        "valley": gradient_valley(lab),
        "gap": mean_over_seeds(f"plain training after {updates} updates: right answers at the ends less those in the middle",
                               ends - middle, least=math.hypot(least_ends, least[plain])),
        "lift": mean_over_seeds(f"right answers in the middle: the best intervention ({best}) less plain training, seed by seed",
                                middles[best] - middle, least=math.hypot(least[best], least[plain])),
        "ends": mean_over_seeds("plain training: right answers about the ends", ends, least=least_ends),
    }  # fmt: skip
    for arm, middle_S in middles.items():
        words = "plain training" if arm == plain else arm
        statistics[f"middle_{arm}"] = mean_over_seeds(f"{words}: right answers about the middle", middle_S, least=least[arm])
    for arm in arms:
        learned = learning(lab, arm)
        statistics[f"learned_{arm}"] = share_of(f"{arm}: share of all seeds on which a third reached one half", sum(learned), len(learned))
    curves = {}
    for arm, accuracy_SP in arms.items():
        mean_P, error_P = accuracy_SP.mean(0), accuracy_SP.std(0, ddof=1) / math.sqrt(len(accuracy_SP))
        curves[arm] = mean_P, mean_P - error_P, mean_P + error_P
    panel = plot.Panel(f"right answers after {updates} updates", curves, ylim=(-0.02, 1.02))
    return Evidence(statistics, (("Share of right answers by the place of the pair after training, plain and under each intervention",
                                  plot.place_figure([panel])),))  # fmt: skip
