"""The paper's claims (Chowdhury, Lost in the Middle at Birth, arXiv:2603.10123), each with the experiment that decides it.

Thresholds stand here, beside their reasons, before anything is run; `lim.verdict` turns statistics into verdicts. One set of
grids, kept in stores that resume, serves every claim that needs no training.

Axes: L position, S seed, N layer, D stream width.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lim import ladder, plot, profile, rollout, store, sweep, verdict
from lim.config import Config
from lim.influence import influence
from lim.model import Decoder, with_identity_values
from lim.switches import Switches
from lim.theory import cesaro, density, kernel, paper
from lim.tokens import random_tokens
from lim.verdict import Condition, Statistic

SAME = math.log(1 + profile.MARGIN)  # 10 %: what `lim.profile.shape` takes for a difference between an end and the middle
TWICE = math.log(2)
ON_OFF = {"on": 1.0, "off": 0.0}
ON, OFF = {"on": 1.0}, {"off": 0.0}


# ---- what is measured, at which size ----


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of every experiment.

    Attributes:
      name: of the scale.
      qwen2, gpt2: the two networks whose profiles are claimed, with vocabularies cut to the text, since only the tokens
        that are read matter before the head.
      length: of their text.
      swept, swept_length: the network whose depth and skip are swept, and the length of its text.
      depths, skips: the values of that sweep, each in rising order; skips hold 0 and 1.
      target, target_length: the network and the length that the claimed peak-to-valley ratio is about.
      seeds, probes: per configuration.
      extra_seeds: of what is measured outside the grids (attention mass, one-pass gradients).
    """

    name: str
    qwen2: Config
    gpt2: Config
    length: int
    swept: Config
    swept_length: int
    depths: tuple
    skips: tuple
    target: Config
    target_length: int
    seeds: int
    probes: int
    extra_seeds: int

    def spec(self) -> dict:
        """All of it as JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def small_gpt2(width: int, layers: int, length: int) -> Config:
    """A narrow GPT-2 whose width·init_std², and with it the weight of its branches, is that of GPT-2 small."""
    return Config("gpt2", layers=layers, width=width, heads=width // 32, kv_heads=width // 32, head_dim=32, inner=4 * width,
                  vocab=length, max_length=length, norm_eps=1e-5, init_std=0.02 * (768 / width) ** 0.5)  # fmt: skip


QWEN2 = Config.preset("qwen2-0.5b")
SCALES = {
    "small": Scale(
        "small", qwen2=ladder.shape(128, 24, 128), gpt2=small_gpt2(128, 12, 128), length=128, swept=ladder.shape(64, 24, 128),
        swept_length=128, depths=(2, 4, 8, 16, 24), skips=(0.0, 0.75, 1.0), target=QWEN2, target_length=2048, seeds=8,
        probes=16, extra_seeds=8,
    ),
    "paper": Scale(
        "paper", qwen2=QWEN2.replace(vocab=2048), gpt2=Config.preset("gpt2").replace(vocab=2048, max_length=2048), length=2048,
        swept=QWEN2.replace(vocab=512), swept_length=512, depths=(2, 6, 12, 24), skips=(0.0, 0.75, 1.0), target=QWEN2,
        target_length=2048, seeds=4, probes=4, extra_seeds=4,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """One configuration over its seeds.

    Attributes:
      profiles_SL: measured influence, one row per seed.
      theory_L: kernel theory with its finite-width bias, in absolute units; None where it does not apply.
      operator_L: the paper's operator at the strength that the switches imply, of sum 1.
      config, switches, length: what was measured.
    """

    profiles_SL: np.ndarray
    theory_L: np.ndarray | None
    operator_L: np.ndarray
    config: Config
    switches: Switches
    length: int

    @property
    def rms_L(self) -> np.ndarray:
        """Root mean square over seeds."""
        return profile.rms(self.profiles_SL)


class Lab:
    """The measurements of one scale and one block of seeds, kept in a folder: what is there is not measured again."""

    def __init__(self, scale: Scale, seed: int, folder):
        """Opens the folder.

        Args:
          scale: the sizes.
          seed: which block of seeds: block s holds seeds s·n to s·n + n - 1, so different blocks share nothing.
          folder: for the stores; made where there is none.

        Raises:
          ValueError: the folder holds another scale or seed.
        """
        self.scale, self.seed, self.folder = scale, seed, pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        spec, path = dict(scale=scale.spec(), seed=seed), self.folder / "lab.json"
        if path.exists():
            there = json.loads(path.read_text(encoding="utf-8"))
            if there != spec:
                other = f"scale {there['scale']['name']}, seed {there['seed']}"
                raise ValueError(f"{folder}: holds another run ({other}, or its sizes have changed since)")
        else:
            _whole(path, lambda partial: partial.write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8"))
        self._read = {}

    @property
    def seeds(self) -> tuple:
        """The block's seeds."""
        return tuple(range(self.seed * self.scale.seeds, (self.seed + 1) * self.scale.seeds))

    @property
    def extra_seeds(self) -> tuple:
        """The first of them, for what is measured outside the grids."""
        return self.seeds[: self.scale.extra_seeds]

    @functools.cached_property
    def grids(self) -> dict[str, sweep.Grid]:
        """Every grid by name. What is not an axis runs as published.

        depth: layers × skip × attention, softmax or exact averaging.
        mask: the Qwen2 network, mask × skip × score path.  parts: RoPE × MLPs.  gpt2: learned positions.
        bare: random values alone, no norm, MLP or softmax.  normed: with norms.  Both with the skip and without.
        """
        s = self.scale
        skips = {f"{skip:g}": skip for skip in s.skips}
        bare = dict(norm=OFF, mlp=OFF, uniform_attention=ON)
        grid = functools.partial(sweep.Grid, seeds=self.seeds, probes=s.probes)
        return {
            "depth": grid(s.swept, dict(layers={str(n): n for n in s.depths}, residual=skips, uniform_attention=ON_OFF),
                          length=s.swept_length),
            "mask": grid(s.qwen2, dict(causal=ON_OFF, residual=ON_OFF, score_path=ON_OFF), length=s.length),
            "parts": grid(s.qwen2, dict(rope=ON_OFF, mlp=ON_OFF), length=s.length),
            "gpt2": grid(s.gpt2, dict(positions=ON_OFF), length=s.length),
            "bare": grid(s.swept, dict(bare, residual=ON_OFF), length=s.swept_length),
            "normed": grid(s.swept, dict(mlp=OFF, uniform_attention=ON, residual=ON_OFF), length=s.swept_length),
        }  # fmt: skip

    def stored(self, name: str) -> store.Store:
        """The store of a grid, made where there is none."""
        return self.grids[name].store(self.folder / name)

    def lacking(self, name: str) -> int:
        """How many cells of a grid are to do; for what is measured outside the grids (`OUTSIDE`) 1 or 0."""
        if name in OUTSIDE:
            return int(not self._file(name).exists())
        return sum(map(len, sweep.todo(self.grids[name], self.stored(name))))

    def measure(self, name: str):
        """Runs what is lacking; yields an error, mostly empty, for each cell that is stored."""
        if name not in OUTSIDE:
            yield from (outcome.error for outcome in sweep.run(self.grids[name], self.stored(name)))
        elif self.lacking(name):
            arrays = OUTSIDE[name](self)
            _whole(self._file(name), lambda partial: np.savez(partial, **arrays))
            yield ""

    def ensemble(self, name: str, **labels) -> Ensemble:
        """One configuration of a grid that has been measured, by the text of each axis.

        Raises:
          ValueError: not all of its seeds are done, at least two: statistics of several configurations go seed by seed.
        """
        if name not in self._read:
            self._read[name] = store.open(self.folder / name).load()
        ds, grid = self._read[name], self.grids[name]
        full = {axis: labels.get(axis, next(iter(values))) for axis, values in grid.axes.items()}
        c = next(c for c in grid.configurations if c.labels == full)
        done_S = ds.status.values[c.place] == "done"
        if len(done_S) < 2 or not done_S.all():
            raise ValueError(f"grid {name}, {full}: {done_S.sum()} of {len(done_S)} seeds are done: "
                             f"{next(filter(None, map(str, ds.error.values[c.place])), 'the others are to come')}")  # fmt: skip
        theory_L = None if str(ds.theory_error.values[c.place]) else ds.theory.values[c.place][: c.length]
        return Ensemble(ds.influence.values[c.place][:, : c.length], theory_L, ds.operator.values[c.place][: c.length],
                        c.config, c.switches, c.length)  # fmt: skip

    def kept(self, name: str) -> dict:
        """Arrays, by name, of what was measured outside the grids.

        Raises:
          ValueError: it has not been.
        """
        if self.lacking(name):
            raise ValueError(f"{name}: not measured yet")
        with np.load(self._file(name), allow_pickle=False) as arrays:
            return dict(arrays)

    def _file(self, name):
        return self.folder / f"{name}.npz"


def _whole(path, write):
    """`write(partial path)`, then the file is there whole."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# ---- statistics ----


def over_seeds(words, statistic, *ensembles, log=False) -> Statistic:
    """A statistic of root-mean-square profiles, with its jackknife error over seeds; several ensembles go seed by seed.

    Args:
      words, log: of the `Statistic`.
      statistic: takes one profile [L] per ensemble and returns a number.
      ensembles: arrays [S, L] of one shape; row s of each is of the same seed.
    """
    parts = len(ensembles)
    value, error = profile.jackknife(lambda joined: statistic(*np.split(joined, parts)), np.hstack(ensembles))
    return Statistic(value, error if math.isfinite(error) else 0.0, words, log)


def mean_over_seeds(words, values_S, log=False) -> Statistic:
    """The mean of one number per seed, and its standard error."""
    return Statistic(float(np.mean(values_S)), float(np.std(values_S, ddof=1) / math.sqrt(len(values_S))), words, log)


def log_ratio(name):
    """ln of one of `profile.ratios`: a function of a profile."""

    def statistic(profile_L):
        with np.errstate(divide="ignore"):
            return float(np.log(profile.ratios(profile_L)[name]))

    return statistic


def shape_distance(which=0):
    """Median (0) or largest (1) |ln ratio| of two profiles after the best scale: a function of both."""
    return lambda one_L, other_L: profile.log_distance(one_L, other_L, free_scale=True)[which]


def middle_over_mean(profile_L) -> float:
    """ln of influence in the middle over the mean influence: the density in the middle."""
    return math.log(profile.middle(profile_L) / np.mean(profile_L))


def fitted_row(measured_L, config, causal=1.0):
    """The paper's operator at its best constant strength, in the profile's units."""
    return paper.fit(measured_L, config.layers, causal=causal)[1]


def holdable(row_L):
    """Where float32 holds a profile: above 1e-30 of its largest entry."""
    return row_L > 1e-30 * row_L.max()


# ---- claims ----


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What an experiment found.

    Attributes:
      statistics: name → `Statistic`; those that no condition names are there to be read.
      figures: (what it shows, in words for those who cannot see it; the figure) each.
    """

    statistics: dict
    figures: tuple


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the ledger.

    Attributes:
      number: of the claim, as text; A and B are criticisms of the paper.
      title, statement: a few words, and the claim in full.
      paper: the number that the paper gives, as text.
      plain: what it means, for a reader outside the field.
      needs: names of the grids and of what else (`OUTSIDE`) it reads.
      test: a function of a `Lab` that returns `Evidence`; None where it cannot be run yet.
      conditions: what decides, a sequence of `lim.verdict.Condition`.
      headline: names of the statistics that the ledger shows.
      why_not: why there is no test.
    """

    number: str
    title: str
    statement: str
    paper: str
    plain: str
    needs: tuple = ()
    test: Callable[[Lab], Evidence] | None = None
    conditions: tuple = ()
    headline: tuple = ()
    why_not: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A claim, what was found about it (None where it was not run), and the verdict."""

    claim: Claim
    evidence: Evidence | None
    decision: verdict.Decision


def judge(claim: Claim, lab: Lab) -> Finding:
    """Puts a claim to the test on what has been measured, and decides. Where something lacks, it is not run, with the reason."""
    if claim.test is None:
        return Finding(claim, None, verdict.Decision(verdict.NOT_RUN, claim.why_not))
    if lacking := [name for name in claim.needs if lab.lacking(name)]:
        return Finding(claim, None, verdict.Decision(verdict.NOT_RUN, f"not measured yet: {', '.join(lacking)}"))
    try:
        evidence = claim.test(lab)
    except ValueError as error:
        return Finding(claim, None, verdict.Decision(verdict.NOT_RUN, str(error)))
    return Finding(claim, evidence, verdict.decide(claim.conditions, evidence.statistics))


def plain_json(finding: Finding) -> dict:
    """A finding for claims.json: every number behind it, and no figure."""
    claim, decision = finding.claim, finding.decision
    statistics = finding.evidence.statistics if finding.evidence else {}
    conditions = [dict(dataclasses.asdict(c), met=c.met(statistics), chance_met=c.chance(statistics)) for c in claim.conditions
                  if statistics]  # fmt: skip
    return dict(number=claim.number, title=claim.title, statement=claim.statement, paper=claim.paper, verdict=decision.verdict,
                sentence=decision.sentence, chance_of_another_verdict=decision.chance, close=list(decision.close),
                statistics={name: dict(dataclasses.asdict(s), shown=s.shown) for name, s in statistics.items()},
                conditions=conditions)  # fmt: skip


def deepest(scale) -> str:
    """The text of the deepest network of the depth sweep."""
    return str(scale.depths[-1])


def primacy_tail(lab) -> Evidence:
    """Claim 1. Networks without a skip, from the one that is the operator itself up to the published one, against a row of M^H."""
    depth, scale = deepest(lab.scale), lab.scale
    strengths, exact = identity_network(lab)
    rows = [cesaro.profile(scale.swept_length, strength_N) for strength_N in strengths]
    worst = max(profile.log_distance(measured_L[holdable(row_L)], row_L[holdable(row_L)])[1] for measured_L, row_L in zip(exact, rows))
    networks = {
        "random values": lab.ensemble("bare", residual="off"),
        "and norms": lab.ensemble("normed", residual="off"),
        "and MLPs": lab.ensemble("depth", layers=depth, residual="0", uniform_attention="on"),
        "and softmax: as published": lab.ensemble("depth", layers=depth, residual="0", uniform_attention="off"),
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
    published = networks["and softmax: as published"]
    statistics["primacy"] = over_seeds("as published: first/middle", log_ratio("primacy"), published.profiles_SL, log=True)
    half = slice(scale.swept_length // 4, 3 * scale.swept_length // 4)
    continuum_L = density.continuum_profile(scale.swept_length, 1.0, layers=int(depth))
    statistics["continuum"] = Statistic(profile.log_distance(row_L[half], continuum_L[half])[0], 0.0,
                                        "the density against the operator at this length, middle half: median factor off", log=True)  # fmt: skip
    drawn = {name: (e.rms_L / e.rms_L.sum(), row_L) for name, e in networks.items()}
    figure = plot.bundle_figure(drawn, axis="network", ylabel="share of influence", decades=40)
    return Evidence(statistics, ((f"Share of influence by position of networks of {depth} layers without residual: random values, "
                                  "with norms, with MLPs, with softmax, each beside the row of the averaging operator", figure),))  # fmt: skip


def identity_network(lab):
    """(strengths [K, N], influence/√D [K, L]) of the swept network with identity values, which is the operator itself.

    A layer of strength 0 passes the stream on, so one compiled network serves every depth: strength 1 in the first H layers,
    for every H, and then constant strengths, ½ the last.
    """
    return identity_strengths(lab.scale.swept.layers), lab.kept("identity")["profiles"]


def identity_strengths(layers: int) -> np.ndarray:
    """The strengths of `identity_network`, [K, N]."""
    constant = [np.full(layers, a) for a in (0.1, 0.25, 0.5)]
    return np.array([*(np.arange(layers) < depth for depth in range(1, layers + 1)), *constant], np.float64)


def recency_anchor(lab) -> Evidence:
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
        "averaging": over_seeds("no residual, attention exactly uniform: last / next-to-last", anchor, averaging.profiles_SL, log=True),
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


def dead_zone(lab) -> Evidence:
    """Claim 3. How the middle's share of influence falls with depth: against ln (H-1)! a factorial law has slope 1."""
    scale = lab.scale
    constant = f"{next(s for s in scale.skips if 0 < s < 1 and s >= 0.75):g}"
    laws = {"no residual, uniform attention": ("0", "on"), "no residual, as published": ("0", "off"),
            f"skip × {constant}: constant α": (constant, "off"), "standard block": ("1", "off")}  # fmt: skip
    keys = ("averaging", "none", "constant", "standard")
    low, high = scale.depths[-3], scale.depths[-1]
    factorial = math.lgamma(high) - math.lgamma(low)
    statistics, series = {}, {}
    for key, (name, (skip, uniform)) in zip(keys, laws.items()):
        across = [lab.ensemble("depth", layers=str(n), residual=skip, uniform_attention=uniform) for n in scale.depths]
        points = [profile.jackknife(lambda p: math.exp(middle_over_mean(p)), e.profiles_SL) for e in across]
        predicted = [math.nan if e.theory_L is None else math.exp(middle_over_mean(e.theory_L)) for e in across]
        series[name] = (*map(np.array, zip(*points)), np.array(predicted))
        ends = across[-3].profiles_SL, across[-1].profiles_SL
        statistics[key] = over_seeds(f"{name}: d ln(middle/mean) / d ln (H-1)!, H = {low} to {high}, sign changed",
                                     lambda a, b: (middle_over_mean(a) - middle_over_mean(b)) / factorial, *ends)  # fmt: skip
        if key == "standard":
            statistics["power"] = over_seeds(f"standard block: exponent of a power of H, H = {low} to {high}",
                                             lambda a, b: (middle_over_mean(b) - middle_over_mean(a)) / math.log(high / low), *ends)  # fmt: skip
            for ratio in ("primacy", "recency"):
                end = dict(primacy="first", recency="last")[ratio]
                statistics[ratio] = over_seeds(f"standard block: {end}/middle", log_ratio(ratio), across[-1].profiles_SL, log=True)
    figure = plot.convergence_figure(scale.depths, series, xlabel="layers H", ylabel="influence of the middle / mean influence",
                                     yscale="log")  # fmt: skip
    return Evidence(statistics, (("Influence of the middle over the mean influence against depth on logarithmic axes: without residual, "
                                  "with a skip of constant weight and for the standard block", figure),))  # fmt: skip


def four_shapes(lab) -> Evidence:
    """Claim 4. Mask on and off times residual on and off: which end stands above the middle, and whether the effects interact."""
    cells = {(c, r): lab.ensemble("mask", causal=c, residual=r, score_path="on") for c in ("on", "off") for r in ("on", "off")}
    value_path = lab.ensemble("mask", causal="on", residual="off", score_path="off")
    statistics = {}
    for (causal, residual), ensemble in cells.items():
        for ratio, end in (("primacy", "first"), ("recency", "last")):
            statistics[f"{ratio}_{causal}_{residual}"] = over_seeds(
                f"mask {causal}, residual {residual}: {end}/middle", log_ratio(ratio), ensemble.profiles_SL, log=True)  # fmt: skip
    statistics["recency_values"] = over_seeds("mask on, residual off, gradients through values alone: last/middle",
                                              log_ratio("recency"), value_path.profiles_SL, log=True)  # fmt: skip
    order = [cells[key].profiles_SL for key in (("on", "on"), ("on", "off"), ("off", "on"), ("off", "off"))]
    for ratio in ("primacy", "recency"):
        f = log_ratio(ratio)
        interact = lambda a, b, c, d: abs(f(a) - f(b) - f(c) + f(d))  # noqa: E731
        statistics[f"interaction_{ratio}"] = over_seeds(f"{ratio}: factor by which the two effects together miss their product",
                                                        interact, *order, log=True)  # fmt: skip
    panels = [plot.Cell("", e.rms_L, profile.jackknife(lambda p: p, e.profiles_SL)[1], e.theory_L, dict(causal=c, residual=r),
                        profile.summarize_seeds(e.profiles_SL)) for (c, r), e in cells.items()]  # fmt: skip
    figure = plot.grid_figure(panels, rows="causal", cols="residual", share_y=False, decades=30)
    return Evidence(statistics, (("Influence by position in four panels, causal mask on and off times residual on and off, "
                                  "measured and predicted by the kernel theory", figure),))  # fmt: skip


def change(one: Ensemble, other: Ensemble):
    """(ratio_L, stderr_L) of two root-mean-square profiles, seed by seed."""
    return profile.jackknife(lambda joined: np.divide(*np.split(joined, 2)), np.hstack([one.profiles_SL, other.profiles_SL]))


def rotary(lab) -> Evidence:
    """Claim 5. The same seeds with RoPE and without: the change, against how much one seed differs from another."""
    on, off = (lab.ensemble("parts", rope=rope, mlp="on") for rope in ("on", "off"))
    learned, none = (lab.ensemble("gpt2", positions=positions) for positions in ("on", "off"))
    log_SL = np.log(on.profiles_SL)
    spread = float(np.median(np.std(log_SL, axis=0, ddof=1)))
    distance = lambda a, b: profile.log_distance(a, b)[0]  # noqa: E731
    ratio_L, error_L = change(on, off)
    statistics = {
        "change": over_seeds("RoPE on/off: median factor", distance, on.profiles_SL, off.profiles_SL, log=True),
        "largest": over_seeds("RoPE on/off: largest factor of a position", lambda a, b: profile.log_distance(a, b)[1],
                              on.profiles_SL, off.profiles_SL, log=True),
        "share": over_seeds("RoPE on/off: the median change over the spread of one seed",
                            lambda a, b: distance(a, b) / spread, on.profiles_SL, off.profiles_SL),
        "spread": Statistic(spread, 0.0, "spread of one seed: median factor", log=True),
        "significant": Statistic(float(np.mean(abs(ratio_L - 1) > 2 * error_L)), 0.0,
                                 "share of positions changed by more than 2 standard errors (0.05 to 0.1 by chance)"),
        "learned": over_seeds("GPT-2's learned positions on/off: median factor, scale free", shape_distance(),
                              learned.profiles_SL, none.profiles_SL, log=True),
        "learned_largest": over_seeds("GPT-2's learned positions on/off: largest factor, scale free", shape_distance(1),
                                      learned.profiles_SL, none.profiles_SL, log=True),
    }  # fmt: skip
    gpt2_L, gpt2_error_L = change(learned, none)
    scale = np.median(gpt2_L)
    figure = plot.change_figure({"RoPE on / off": (ratio_L, error_L),
                                 "learned positions on / off (GPT-2), over the median": (gpt2_L / scale, gpt2_error_L / scale)},
                                ylabel="ratio of influence")  # fmt: skip
    return Evidence(statistics, (("Ratio of influence with and without RoPE, and with and without GPT-2's learned positions, by position, "
                                  "with standard errors", figure),))  # fmt: skip


def mlps(lab) -> Evidence:
    """Claim 6. The shape with MLPs and without: which ends stand above the middle, and the order of positions."""
    cells = {mlp: lab.ensemble("parts", rope="on", mlp=mlp) for mlp in ("on", "off")}
    statistics = {f"{ratio}_{mlp}": over_seeds(f"MLPs {mlp}: {end}/middle", log_ratio(ratio), e.profiles_SL, log=True)
                  for mlp, e in cells.items() for ratio, end in (("primacy", "first"), ("recency", "last"))}  # fmt: skip
    both = [e.profiles_SL for e in cells.values()]
    statistics["order"] = over_seeds("rank correlation of the profiles with and without MLPs", profile.spearman, *both)
    statistics["size"] = over_seeds("MLPs on/off: median factor, scale free", shape_distance(), *both, log=True)
    statistics["size_largest"] = over_seeds("MLPs on/off: largest factor, scale free", shape_distance(1), *both, log=True)
    figure = plot.bundle_figure({mlp: (e.rms_L, e.theory_L) for mlp, e in cells.items()}, axis="MLPs")
    return Evidence(statistics, (("Influence by position with MLPs and without, measured and predicted", figure),))


def score_path(lab) -> Evidence:
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
    changes = {"measured": change(whole, values)}
    if whole.theory_L is not None and values.theory_L is not None:
        changes["kernel theory, first order in z"] = (whole.theory_L / values.theory_L, None)
        statistics["predicted"] = Statistic(float(np.median(np.log(changes["kernel theory, first order in z"][0]))), 0.0,
                                            "kernel theory: median position", log=True)  # fmt: skip
    figure = plot.change_figure(changes, ylabel="influence, whole / values alone")
    return Evidence(statistics, (("Influence with the whole gradient over that with gradients through values alone, by position, "
                                  "measured and predicted", figure),))  # fmt: skip


def agreement(lab) -> Evidence:
    """Claim 8. The paper's operator at its best constant strength (and at the implied ½), and the kernel theory, in several distances.

    The best strength is fitted to the very profile it is compared with, which favours the paper.
    """
    statistics, figures = {}, []
    networks = {"qwen2": ("Qwen2", lab.ensemble("parts", rope="on", mlp="on")), "gpt2": ("GPT-2", lab.ensemble("gpt2", positions="on"))}
    for key, (name, e) in networks.items():
        fit = functools.partial(fitted_row, config=e.config)
        measures = {
            "spearman": ("Spearman, the paper's operator", lambda p: profile.spearman(p, fit(p)), False),
            "implied": ("Spearman, the same at α = ½", lambda p: profile.spearman(p, e.operator_L), False),
            "transport": ("Wasserstein, positions scaled to [0, 1]", lambda p: profile.wasserstein(p, fit(p), scaled=True), False),
            "tokens": ("Wasserstein, in tokens", lambda p: profile.wasserstein(p, fit(p)), False),
            "median": ("the paper's operator: median factor off, scale and α fitted", lambda p: shape_distance()(p, fit(p)), True),
            "largest": ("the paper's operator: largest factor off, scale and α fitted", lambda p: shape_distance(1)(p, fit(p)), True),
        }  # fmt: skip
        if e.theory_L is not None:
            measures |= {
                "kernel_spearman": ("Spearman, kernel theory", lambda p: profile.spearman(p, e.theory_L), False),
                "kernel_median": ("kernel theory: median factor off, nothing fitted",
                                  lambda p: profile.log_distance(p, e.theory_L)[0], True),
                "kernel_largest": ("kernel theory: largest factor off, nothing fitted",
                                   lambda p: profile.log_distance(p, e.theory_L)[1], True),
            }  # fmt: skip
        for measure, (words, statistic, log) in measures.items():
            statistics[f"{measure}_{key}"] = over_seeds(f"{name}: {words}", statistic, e.profiles_SL, log=log)
        strength, row_L = paper.fit(e.rms_L, e.config.layers)
        curves = {} if e.theory_L is None else {"kernel theory, nothing fitted": e.theory_L}
        curves |= {f"paper, α fitted: {strength:.3f}": row_L, "paper, α = ½": e.operator_L * e.rms_L.mean() / e.operator_L.mean()}
        figure = plot.influence_figure(e.rms_L, stderr_L=profile.jackknife(lambda p: p, e.profiles_SL)[1], curves=curves, title=name,
                                       summary=profile.summarize_seeds(e.profiles_SL))  # fmt: skip
        figures.append((f"Influence by position of the {name} network at birth beside the kernel theory and the paper's operator at its "
                        "best and at its implied strength", figure))  # fmt: skip
    return Evidence(statistics, tuple(figures))


def peak_to_valley(lab) -> Evidence:
    """Claim 9. Ends over middle and over the lowest position, for the claimed network and length.

    The kernel theory of the claimed network, times measured/theory of the network measured here: where that is the claimed
    one, theory drops out, and the number is the measured one. The lowest position of a noisy profile follows the noise, so
    it is read where the theory has its own.
    """
    scale, e = lab.scale, lab.ensemble("parts", rope="on", mlp="on")
    if e.theory_L is None:
        raise ValueError("there is no kernel theory of this network")
    same = dataclasses.replace(scale.target, vocab=e.config.vocab) == e.config and scale.target_length == e.length
    lengths = target_lengths(scale)
    theories = lab.kept("target")
    target_L = theories[str(scale.target_length)]
    lowest = int(e.theory_L.argmin())
    ratios = {
        "last": ("last/middle", log_ratio("recency")),
        "first": ("first/middle", log_ratio("primacy")),
        "lowest": ("highest/lowest", lambda p: math.log(p.max() / p[lowest])),
    }
    statistics = {}
    for key, (words, statistic) in ratios.items():
        there = math.log(target_L.max() / target_L.min()) if key == "lowest" else statistic(target_L)
        offset = 0.0 if same else there - statistic(e.theory_L)
        how = "measured" if same else "kernel theory, times measured/theory of the network measured here"
        statistics[key] = over_seeds(f"{words} at L = {scale.target_length} ({how})", lambda p: statistic(p) + offset,
                                     e.profiles_SL, log=True)  # fmt: skip
        statistics[f"{key}_here"] = over_seeds(f"{words} of the network measured here, L = {e.length}", statistic, e.profiles_SL,
                                               log=True)  # fmt: skip
        statistics[f"{key}_theory"] = over_seeds(f"{words} here: measured over kernel theory",
                                                 lambda p: statistic(p) - statistic(e.theory_L), e.profiles_SL, log=True)  # fmt: skip
    statistics["where"] = Statistic((int(target_L.argmin()) + 0.5) / len(target_L), 0.0,
                                    "where the lowest position is, as a fraction of the text (theory)")  # fmt: skip
    drawn = {"last/middle": lambda p: profile.ratios(p)["recency"], "first/middle": lambda p: profile.ratios(p)["primacy"],
             "highest/lowest": lambda p: p.max() / p.min()}  # fmt: skip
    series = {f"{words}, kernel theory": (None, None, np.array([ratio(theories[str(n)]) for n in lengths])) for words, ratio in drawn.items()}
    here = np.array([math.exp(statistics["last_here"].value) if n == e.length else math.nan for n in lengths])
    series["last/middle, measured here"] = (here, here * statistics["last_here"].error, None)
    figure = plot.convergence_figure(lengths, series, xlabel="length L", ylabel="ratio of influence", yscale="log")
    return Evidence(statistics, (("Ends over middle and highest over lowest influence against the length of the text, kernel theory of "
                                  "Qwen2-0.5B, with the measured network as a point", figure),))  # fmt: skip


def target_lengths(scale) -> list[int]:
    """Lengths at which the claimed network is predicted."""
    return sorted({scale.length, scale.target_length // 4, scale.target_length})


def sinks_at_birth(lab) -> Evidence:
    """Claim 12 at birth. Attention on the first token over what exact averaging puts there, layer by layer, and the rollout's."""
    scale, kept = lab.scale, lab.kept("attention")
    averaging = np.mean(1 / np.arange(scale.length // 2 + 1, scale.length + 1))
    log_SN = np.log(kept["first"] / averaging)
    top = int(log_SN.mean(0).argmax())
    rollout_SL = kept["rollout"]
    statistics = {
        "sink": mean_over_seeds(f"attention on the first token over the average's: layer {top + 1}, the highest of {log_SN.shape[1]}",
                                log_SN[:, top], log=True),
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


def operator_row_criticism(lab) -> Evidence:
    """Criticism A. A row of the operator's product against the Jacobian's norm: bare random values, and the published network."""
    bare, published = lab.ensemble("bare", residual="on"), lab.ensemble("parts", rope="on", mlp="on")
    exact = identity_network(lab)[1][-1]
    config = bare.config
    gain = config.width * config.init_std**2 * config.heads * config.head_dim * config.residual_std**2
    squares_L = cesaro.second_moment_profile(bare.length, 1.0, 1.0, gain, layers=config.layers)
    statistics = {
        "published": over_seeds("published network: median factor off the row, scale and α fitted",
                                lambda p: shape_distance()(p, fitted_row(p, published.config)), published.profiles_SL, log=True),
        "published_last": over_seeds("published network: largest factor off the row, scale and α fitted",
                                     lambda p: shape_distance(1)(p, fitted_row(p, published.config)), published.profiles_SL, log=True),
        "bare": over_seeds("random values alone: median factor off the row at α = ½", lambda p: shape_distance()(p, bare.operator_L),
                           bare.profiles_SL, log=True),
        "bare_fitted": over_seeds("random values alone: median factor off the row, α fitted",
                                  lambda p: shape_distance()(p, fitted_row(p, config)), bare.profiles_SL, log=True),
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


@functools.partial(jax.jit, static_argnames="structure")
def _sum_gradient(structure, params, tokens_L):
    decoder, switches = nnx.merge(structure, params), Switches()
    x_LD = decoder.embed(tokens_L, switches)
    gradient_LD = jax.grad(lambda x_LD: decoder.hidden(decoder.read(x_LD, switches, -1), switches).sum())(x_LD)
    return jnp.linalg.norm(gradient_LD, axis=1)


def one_pass(decoder, tokens_L) -> np.ndarray:
    """The one-pass measure: the norm at each position of the gradient of the sum of the outputs, ‖1ᵀ ∂output/∂x_j‖, [L].

    The output is that of the last position after the final norm. At birth 1/√D is as good as a random direction, so its
    square has the mean of ‖J_j‖_F². Under a LayerNorm the outputs sum to zero, whatever the input.
    """
    structure, state = nnx.split(decoder)
    with jax.default_matmul_precision("highest"):
        return np.asarray(_sum_gradient(structure, nnx.as_pure(state), tokens_L), np.float64)


def one_pass_criticism(lab) -> Evidence:
    """Criticism B. The gradient of the sum of the outputs against the Jacobian's norm, seed by seed and in the ensemble."""
    kept = lab.kept("one-pass")
    norms = {"qwen2": lab.ensemble("parts", rope="on", mlp="on"), "gpt2": lab.ensemble("gpt2", positions="on")}
    count = min(len(kept["qwen2"]), *(len(e.profiles_SL) for e in norms.values()))
    one_SL, norm_SL = kept["qwen2"][:count], norms["qwen2"].profiles_SL[:count]
    log_SL = np.log(one_SL / norm_SL)
    shapes = [(profile.summarize(a).shape, profile.summarize(b).shape) for a, b in zip(one_SL, norm_SL)]
    gpt2_SL = np.log(np.maximum(kept["gpt2"][:count], 1e-300) / norms["gpt2"].profiles_SL[:count])
    statistics = {
        "one": mean_over_seeds("one network and text: median factor between the two", np.median(np.abs(log_SL), axis=1), log=True),
        "one_largest": mean_over_seeds("one network and text: largest factor", np.abs(log_SL).max(axis=1), log=True),
        "averaged": over_seeds(f"root mean square over {count} seeds: median factor", lambda a, b: profile.log_distance(a, b)[0],
                               one_SL, norm_SL, log=True),
        "recency": over_seeds("last/middle: one pass over norm", lambda a, b: log_ratio("recency")(a) - log_ratio("recency")(b),
                              one_SL, norm_SL, log=True),
        "primacy": over_seeds("first/middle: one pass over norm", lambda a, b: log_ratio("primacy")(a) - log_ratio("primacy")(b),
                              one_SL, norm_SL, log=True),
        "shapes": Statistic(float(np.mean([a == b for a, b in shapes])), 0.0, "share of single networks that both give the same shape"),
        "layernorm": mean_over_seeds("GPT-2, whose final LayerNorm makes the outputs sum to zero: one pass over norm",
                                     np.median(gpt2_SL, axis=1), log=True),
    }  # fmt: skip
    ratio = profile.jackknife(lambda joined: np.divide(*np.split(joined, 2)), np.hstack([one_SL, norm_SL]))
    figure = plot.change_figure({f"root mean square over {count} seeds": ratio, "one network": (np.exp(log_SL[0]), None)},
                                ylabel="one pass / norm of the Jacobian")  # fmt: skip
    return Evidence(statistics, (("Gradient of the sum of the outputs over the norm of the Jacobian, by position, for one network and for "
                                  "the root mean square over seeds", figure),))  # fmt: skip


def _measure_identity(lab):
    swept, length = lab.scale.swept, lab.scale.swept_length
    config = dataclasses.replace(swept, kv_heads=swept.heads, head_dim=swept.width // swept.heads)
    decoder, tokens_L = with_identity_values(Decoder.at_birth(config, lab.seeds[0])), random_tokens(config.vocab, length, lab.seeds[0])
    bare = dict(norm=0.0, mlp=0.0, uniform_attention=1.0, rope=0.0)
    # every direction is as good as another here, so that two say all
    profiles = [influence(decoder, tokens_L, Switches(alpha=strength_N, **bare), probes=2).influence_L
                for strength_N in identity_strengths(config.layers)]  # fmt: skip
    return dict(profiles=np.array(profiles) / math.sqrt(config.width))


def _measure_attention(lab):
    config, length = lab.scale.qwen2, lab.scale.length
    each = [rollout.measure(Decoder.at_birth(config, seed), random_tokens(config.vocab, length, seed)) for seed in lab.extra_seeds]
    return dict(first=np.array([r.first_token_N for r in each]), rollout=np.array([r.rollout_L for r in each]))


def _measure_one_pass(lab):
    def each(config):
        texts = {seed: random_tokens(config.vocab, lab.scale.length, seed) for seed in lab.extra_seeds}
        return np.array([one_pass(Decoder.at_birth(config, seed), tokens_L) for seed, tokens_L in texts.items()])

    return dict(qwen2=each(lab.scale.qwen2), gpt2=each(lab.scale.gpt2))


def _predict_target(lab):
    return {str(n): kernel.predict(lab.scale.target, n).influence_L for n in target_lengths(lab.scale)}


OUTSIDE = {"identity": _measure_identity, "attention": _measure_attention, "one-pass": _measure_one_pass, "target": _predict_target}


# ---- the ledger's rows ----

_END = "an end within 10 % of the middle is none, as in every table here"
_FACTOR = "a number within a factor of 2 is that number to the precision of an order of magnitude"
_ABOUT_100 = (1.5 * math.log(10), 2.5 * math.log(10))
_TRAIN = "needs a training run of this project's own, which is not part of this report yet"


def _above(statistic, otherwise, core=True):
    """An end that must stand above the middle, or one influence above another."""
    return Condition(statistic, core, _END, otherwise, low=SAME)


def _not_above(statistic, otherwise, core=False):
    return Condition(statistic, core, _END, otherwise, high=SAME)


CLAIMS = (
    Claim(
        "1", "Primacy from the mask",
        "A causal mask without residual gives the density (ln 1/x)^(H−1)/(H−1)!, a log-divergent primacy tail.",
        "exact formula",
        "If every layer averages over the past and nothing else, early tokens take part in more averages than late ones. Stacked, "
        "the averages pile influence up at the start. Here that is checked first on a network that is nothing but averaging, then "
        "with each real part added: random weights, norms, MLPs, softmax.",
        ("identity", "depth", "bare", "normed"), primacy_tail,
        (
            Condition("identity", True, "float32 through 24 layers loses less than one part in a thousand",
                      "the network of identity values is off the operator by a factor of up to {identity}", high=1e-3),
            _above("primacy", "without residual the first position does not stand above the middle: {primacy}"),
            Condition("published_median", False, "within 10 % is what this report calls the same",
                      "the published network without residual is off the formula by a factor of {published_median} in the median "
                      "({MLPs_median} with exact averaging in place of softmax)", high=SAME),
            Condition("published_largest", False, _FACTOR,
                      "and by up to {published_largest} at single positions ({MLPs_largest} with exact averaging)", high=TWICE),
        ),
        ("primacy", "published_median"),
    ),
    Claim(
        "2", "Recency from the residual",
        "The residual connection makes an isolated delta at the last position, of mass (1−α)^H.",
        "(1−α)^H",
        "The skip carries each token's own signal straight up, so the last token hears itself without any averaging. That should "
        "set it apart from its neighbour. How much of all influence it then holds is a question of how strong each layer's branch "
        "is against the skip.",
        ("identity", "depth"), recency_anchor,
        (
            _above("with", "with the residual the last position does not stand apart from the next-to-last: {with}"),
            _not_above("without", "without the residual the last position stands apart, too, by {without}: softmax's queries are its own "
                       "(with exact averaging {averaging})"),
            Condition("mass", False, _FACTOR, "its share of influence is {share}, {mass} times (1−α)^H at the α = ½ of equal skip and branch: "
                      "norms let the branch fade against the growing stream, so no constant α describes it", low=-TWICE, high=TWICE),
        ),
        ("with", "share"),
    ),
    Claim(
        "3", "A dead zone between the ends",
        "Between primacy and recency lies a dead zone of order 1/(H−1)!.",
        "1/(H−1)!",
        "The middle is too late for the averages and too early for the skip. The question is how fast it fades as layers are added: "
        "factorially (each layer worse than the one before), exponentially, or as a mere power of the depth.",
        ("depth",), dead_zone,
        (
            _above("primacy", "the first position does not stand above the middle: {primacy}"),
            _above("recency", "the last position does not stand above the middle: {recency}"),
            Condition("standard", False, "a factorial law has slope 1 (1.1 to 1.2 at finite depth); a quarter off is another law",
                      "against ln (H−1)! the middle of the standard block falls with slope {standard}, as a power of H with exponent {power}; "
                      "slopes are {constant} at a constant α, {none} without residual and {averaging} there with exact averaging",
                      low=0.75, high=4 / 3),
        ),
        ("standard", "power"),
    ),
    Claim(
        "4", "Two causes, two ends",
        "The mask causes primacy and the residual causes recency, independently of each other.",
        "four shapes",
        "Take the mask away and the start should lose its advantage; take the skip away and the end should. If the two causes are "
        "independent, all four combinations show exactly the ends whose cause is there.",
        ("mask",), four_shapes,
        (
            _above("primacy_on_on", "with mask and residual there is no primacy: {primacy_on_on}"),
            _above("recency_on_on", "with mask and residual there is no recency: {recency_on_on}"),
            _not_above("primacy_off_on", "without the mask primacy stays: {primacy_off_on}", core=True),
            _above("primacy_on_off", "the mask alone makes no primacy: first/middle {primacy_on_off}"),
            _above("recency_off_on", "the residual alone makes no recency: last/middle {recency_off_on}"),
            _not_above("primacy_off_off", "without either there is primacy: {primacy_off_off}"),
            _not_above("recency_off_off", "without either there is recency: {recency_off_off}"),
            _not_above("recency_on_off", "without the residual the last position still stands {recency_on_off} times above the middle, through "
                       "softmax's queries (through values alone {recency_values})"),
            Condition("interaction_primacy", False, _FACTOR, "the two effects on the first position do not multiply: they miss their product "
                      "by a factor of {interaction_primacy}", high=TWICE),
            Condition("interaction_recency", False, _FACTOR, "those on the last miss it by {interaction_recency}", high=TWICE),
        ),
        ("primacy_on_on", "recency_on_on"),
    ),
    Claim(
        "5", "RoPE changes nothing at birth",
        "At birth rotary position embedding leaves the profile as it is.",
        "no change",
        "RoPE turns queries and keys by their position. In an untrained network they say nothing yet, so turning them should not "
        "matter. Every other random number is kept, so any change is RoPE's.",
        ("parts", "gpt2"), rotary,
        (
            Condition("share", True, "a change below the spread of one seed cannot be seen in any one network",
                      "RoPE changes the profile by {share} times what one seed differs from another", high=1.0),
            Condition("change", False, "5 %: half of what this report calls a difference",
                      "RoPE changes the median position by a factor of {change}", high=math.log(1.05)),
        ),
        ("change", "share"),
    ),
    Claim(
        "6", "MLPs keep the topology",
        "The MLP sub-blocks do not change the topology of the profile.",
        "no change of shape",
        "MLPs act on every position by itself and mix nothing. They may scale influence up or down, but should not move its peaks.",
        ("parts",), mlps,
        (
            _above("primacy_on", "with MLPs the first position is not above the middle: {primacy_on}"),
            _above("recency_on", "with MLPs the last position is not above the middle: {recency_on}"),
            _above("primacy_off", "without MLPs the first position is not above the middle: {primacy_off}"),
            _above("recency_off", "without MLPs the last position is not above the middle: {recency_off}"),
            Condition("order", False, "a rank correlation of 0.9 leaves room for neighbours that a few seeds cannot tell apart, and no more",
                      "the order of positions changes: rank correlation {order}", low=0.9),
        ),
        ("order", "size"),
    ),
    Claim(
        "7", "Scores carry nothing at birth",
        "At birth the gradient through the softmax scores vanishes; the values carry the profile.",
        "vanishes",
        "Influence can travel in two ways: through what is passed on (values), and through who is listened to (scores). Cutting the "
        "second way in the same network shows what it carries.",
        ("mask",), score_path,
        (
            Condition("middle", True, "where values carry the profile, cutting the scores changes it by less than 10 %",
                      "cutting the scores changes the median position by a factor of {middle}", low=-SAME, high=SAME),
            Condition("middle", False, "what vanishes is below 1 %", "it changes influence by a factor of {middle} at the median position "
                      "(to first order in the variance of the logits, {logits} here)", low=-0.01, high=0.01),
            Condition("largest", False, "no position may depend on it by more than 10 %",
                      "and by {largest} where it matters most (last position {last})", high=SAME),
        ),
        ("middle", "largest"),
    ),
    Claim(
        "8", "Theory and networks agree",
        "The theory agrees with untrained Qwen2 (24 layers) and GPT-2: Spearman 0.99, Wasserstein 0.02.",
        "Spearman 0.99, Wasserstein 0.02",
        "Rank correlation asks whether two curves order the positions alike, which any two falling curves do. So the sizes are compared, "
        "too: by what factor does the paper's formula miss, even at its best α, and by what factor the kernel theory of the real "
        "architecture, in which nothing is fitted?",
        ("parts", "gpt2"), agreement,
        tuple(
            condition
            for key, name in (("qwen2", "Qwen2"), ("gpt2", "GPT-2"))
            for condition in (
                Condition(f"spearman_{key}", True, "0.985 rounds to the claimed 0.99",
                          f"{name}: the rank correlation is {{spearman_{key}}}", low=0.985),
                Condition(f"transport_{key}", False, "0.025 rounds to the claimed 0.02",
                          f"{name}: the scaled Wasserstein distance is {{transport_{key}}}", high=0.025),
                Condition(f"median_{key}", False, "agreement in size: within 10 % at the median position",
                          f"{name}: sizes are off by a factor of {{median_{key}}} in the median even with α fitted", high=SAME),
                Condition(f"largest_{key}", False, _FACTOR, f"{name}: and by {{largest_{key}}} at the worst position", high=TWICE),
            )
        ),
        ("spearman_qwen2", "spearman_gpt2", "largest_qwen2"),
    ),
    Claim(
        "9", "Peak to valley about 10²",
        "At birth the peaks stand about 10² above the valley.",
        "about 10²",
        "How many times more does the answer feel the last token than one in the middle? The ratio grows with the length of the text, so "
        "it is given for the length that the paper used; and it matters whether the valley is the middle, or the lowest point.",
        ("parts", "target"), peak_to_valley,
        (
            _above("first", "the first position is not above the middle: {first}"),
            _above("last", "the last position is not above the middle: {last}"),
            Condition("last", True, "about 10² is 10^1.5 to 10^2.5", "last/middle is {last}", *_ABOUT_100),
            Condition("lowest", False, "whatever is called the valley, the number should be that", "highest/lowest is {lowest}",
                      *_ABOUT_100),
            Condition("first", False, "both peaks, if peaks are claimed", "first/middle is {first}", *_ABOUT_100),
            Condition("where", False, "a valley in the middle lies in the central half",
                      "the lowest position is not in the middle but at {where} of the text", low=0.25, high=0.75),
        ),
        ("last", "first"),
    ),
    Claim(
        "10", "Pretraining keeps the U", "Pretraining keeps the U-shape and deepens its valley to about 10³.", "about 10³",
        "What is there at birth could be washed out by training, or carved deeper.", why_not=_TRAIN,
    ),
    Claim(
        "11", "Peaks at document boundaries", "Training on packed documents adds local peaks at their boundaries.", "local peaks",
        "Training texts are glued together from documents; a network could learn to listen for the seams.", why_not=_TRAIN,
    ),
    Claim(
        "12", "Sinks from geometry: at birth",
        "Attention sinks are a consequence of the geometry: is there one at birth, when geometry is all there is?",
        "(no number)",
        "Trained networks pile attention on the first token. If geometry did that, an untrained network would show it, too: is any layer's "
        "attention on the first token above that of a plain average? The rollout, which multiplies the layers' attention, is shown beside it.",
        ("attention",), sinks_at_birth,
        (
            Condition("sink", True, "a sink holds at least twice what averaging gives; published ones hold tens of times that",
                      "no layer attends to the first token as to a sink: the highest puts {sink} times an average's attention there, all together "
                      "{all}; only the product of the layers singles it out, by {rollout}", low=TWICE),
        ),
        ("sink", "rollout"),
    ),
    Claim(
        "12 trained", "Sinks from geometry: trained", "Attention sinks are a consequence of the geometry: do they grow where it says?",
        "(no number)", "Whether training turns the geometry's first-token advantage into attention.", why_not=_TRAIN,
    ),
    Claim(
        "13", "The middle learns more slowly", "The middle learns more slowly, because its gradients are suppressed.", "(no number)",
        "Little influence means little gradient: what stands in the middle should be learned last.", why_not=_TRAIN,
    ),
    Claim(
        "14", "Training will not cross the valley", "Standard training will not cross the valley; curricula or loss weights are needed.",
        "(no number)", "If so, only training that aims at the middle would lift it.", why_not=_TRAIN,
    ),
    Claim(
        "A", "Criticism: a row is not a gradient",
        "A row of the operator's product M^H is not the norm of a transformer's Jacobian.",
        "(public discussion)",
        "The paper adds up paths as if every layer passed values on unchanged. Random weights turn them, so that paths add up as "
        "independent things do: in squares. How far does that take the norm from the row?",
        ("identity", "bare", "parts"), operator_row_criticism,
        (
            Condition("published", True, "within 10 % a row would do as well", "at its best α the row is within a factor of {published} of the "
                      "published network's norm in the median", low=SAME),
            Condition("bare", False, "the network that is closest to the operator",
                      "for random values alone the row is within a factor of {bare}", low=SAME),
        ),
        ("published", "bare"),
    ),
    Claim(
        "B", "Criticism: one gradient is not the norm",
        "The gradient of the sum of the outputs, one backward pass, is not the norm of the Jacobian.",
        "(public discussion)",
        "One backward pass looks at the output from one direction, the norm from all. At birth no direction is special, so one look is an "
        "honest but rough sample: averaged over networks the two should meet.",
        ("parts", "gpt2", "one-pass"), one_pass_criticism,
        (
            Condition("one", True, "within 10 % one pass would do as well",
                      "for one network and text one pass is within a factor of {one} of the norm", low=SAME),
            Condition("averaged", False, "if not even the mean over seeds agrees, the measures differ in kind",
                      "averaged over seeds the two agree to a factor of {averaged}, so it is scatter (a factor of {one} for one network) "
                      "and no bias, and ensemble ratios may be taken from either; but after a LayerNorm (GPT-2) one pass measures "
                      "nothing: {layernorm} of the norm", low=SAME),
        ),
        ("one", "averaged"),
    ),
)  # fmt: skip
