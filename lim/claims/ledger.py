"""The paper's claims (Chowdhury, Lost in the Middle at Birth, arXiv:2603.10123), each with the experiment that decides it.

Thresholds stand here, beside their reasons; one that was set after a run says so, but for what was mended on 2026-11-30, after two blocks
of seeds had been seen: docs/claims-small.md lists it. `lim.verdict` turns statistics into verdicts.
"""

import dataclasses
import math
from collections.abc import Callable

from lim import verdict
from lim.claims import birth, trained
from lim.claims.evidence import SAME, TWICE, Evidence
from lim.claims.lab import Lab
from lim.verdict import CORE, FORM, GIVEN, Condition


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the ledger.

    Attributes:
      number: of the claim, as text; A and B are criticisms of the paper.
      title, statement: a few words, and the claim in full.
      paper: the number that the paper gives, as text.
      plain: what it means, for a reader outside the field.
      needs: names of the grids and of what else (`OUTSIDE`) it reads.
      test: a function of a `Lab` that returns `Evidence`.
      conditions: what decides, a sequence of `lim.verdict.Condition`.
      headline: names of the statistics that the ledger shows.
    """

    number: str
    title: str
    statement: str
    paper: str
    plain: str
    needs: tuple
    test: Callable[[Lab], Evidence]
    conditions: tuple
    headline: tuple


@dataclasses.dataclass(frozen=True)
class Finding:
    """A claim, what was found about it (None where it was not run), and the verdict."""

    claim: Claim
    evidence: Evidence | None
    decision: verdict.Decision


def judge(claim: Claim, lab: Lab) -> Finding:
    """Puts a claim to the test on what has been measured, and decides. Where something lacks, it is not run, with the reason."""
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


# ---- the ledger's rows ----

_END = "an end within 10 % of the middle is none, as in every table here"
_FACTOR = "a number within a factor of 2 is that number to the precision of an order of magnitude"
_ABOUT_100 = (1.5 * math.log(10), 2.5 * math.log(10))
_TENFOLD = (0.5 * math.log(10), 1.5 * math.log(10))
_POINTS = "what differs by less than 10 percentage points is called the same"


def _above(statistic, otherwise, part=CORE):
    """An end that must stand above the middle, or one influence above another."""
    return Condition(statistic, part, _END, otherwise, low=SAME)


def _not_above(statistic, otherwise, part=FORM):
    return Condition(statistic, part, _END, otherwise, high=SAME)


_VALLEY = Condition("valley", GIVEN, "what has no valley cannot show what one does; " + _END,
                    "there is no valley in this network's gradients: about the lower end they are {valley} times those about the middle",
                    low=SAME)  # fmt: skip

CLAIMS = (
    Claim(
        "1", "Primacy from the mask",
        "A causal mask without residual gives the density (ln 1/x)^(H−1)/(H−1)!, a log-divergent primacy tail.",
        "exact formula",
        "If every layer averages over the past and nothing else, early tokens take part in more averages than late ones. Stacked, the "
        "averages pile influence up at the start. Here that is checked first on a network that is nothing but averaging, then with each "
        "real part added: random weights, norms, MLPs, softmax.",
        ("identity", "depth", "bare", "normed"), birth.primacy_tail,
        (
            Condition("identity", CORE, "float32 through 24 layers loses less than one part in a thousand",
                      "the network of identity values is off the operator by a factor of up to {identity}", high=1e-3),
            _above("primacy", "without residual the first position does not stand above the middle: {primacy}"),
            Condition("published_median", FORM, "within 10 % is what this report calls the same",
                      "the published network without residual is off the operator's row by a factor of {published_median} in the median "
                      "({MLPs_median} with exact averaging in place of softmax)", high=SAME),
            Condition("published_largest", FORM, _FACTOR,
                      "and by up to {published_largest} at single positions ({MLPs_largest} with exact averaging)", high=TWICE),
            Condition("continuum", FORM, "within 10 % is what this report calls the same",
                      "the density (ln 1/x)^(H−1)/(H−1)! is itself off that row, at this length, by {continuum} in its middle half",
                      high=SAME),
        ),
        ("primacy", "published_median"),
    ),
    Claim(
        "2", "Recency from the residual",
        "The residual connection makes an isolated delta at the last position, of mass (1−α)^H.",
        "(1−α)^H",
        "The skip carries each token's own signal straight up, so the last token hears itself without any averaging. That should set it "
        "apart from its neighbour. How much of all influence it then holds is a question of how strong each layer's branch is against "
        "the skip.",
        ("identity", "depth"), birth.recency_anchor,
        (
            _above("with", "with the residual the last position does not stand apart from the next-to-last: {with}"),
            _not_above("without", "without the residual the last position stands apart, too, by {without}: softmax's queries are its own "
                                  "(with exact averaging {averaging})"),
            Condition("mass", FORM, _FACTOR, "its share of influence is {share}, {mass} times (1−α)^H at the α = ½ of equal skip and "
                                              "branch: norms let the branch fade against the growing stream, so no constant α describes "
                                              "it", low=-TWICE, high=TWICE),
        ),
        ("with", "share"),
    ),
    Claim(
        "3", "A dead zone between the ends",
        "Between primacy and recency lies a dead zone of order 1/(H−1)!.",
        "1/(H−1)!",
        "The middle is too late for the averages and too early for the skip. Does it die, and how fast does it fade as layers are "
        "added: factorially (each layer worse than the one before), exponentially, or as a mere power of the depth.",
        ("depth",), birth.dead_zone,
        (
            Condition("middle", CORE, "dead is what gets a tenth of the average at most, whatever the ends get",
                      "in the deepest standard block the middle still gets {middle} of the average influence, and it fades as a power of H "
                      "with exponent {power}, against ln (H−1)! with slope {standard} (without residual {none})", high=-math.log(10)),
            Condition("standard", FORM, "a factorial law has slope 1 (1.1 to 1.2 at finite depth); a quarter off is another law",
                      "against ln (H−1)! the middle of the standard block falls with slope {standard}, as a power of H with exponent "
                      "{power}; slopes are {constant} with a skip of constant weight, {none} without residual and {averaging} there with exact averaging",
                      low=0.75, high=4 / 3),
        ),
        ("middle", "standard"),
    ),
    Claim(
        "4", "Two causes, two ends",
        "The mask causes primacy and the residual causes recency, independently of each other.",
        "four shapes",
        "Take the mask away and the start should lose its advantage; take the skip away and the end should. If the two causes are "
        "independent, all four combinations show exactly the ends whose cause is there.",
        ("mask",), birth.four_shapes,
        (
            _above("primacy_on_on", "with mask and residual there is no primacy: {primacy_on_on}"),
            _above("recency_on_on", "with mask and residual there is no recency: {recency_on_on}"),
            _not_above("primacy_off_on", "without the mask primacy stays: {primacy_off_on}", CORE),
            _above("primacy_on_off", "the mask alone makes no primacy: first/middle {primacy_on_off}"),
            _above("recency_off_on", "the residual alone makes no recency: last/middle {recency_off_on}"),
            _not_above("primacy_off_off", "without either there is primacy: {primacy_off_off}"),
            _not_above("recency_off_off", "without either there is recency: {recency_off_off}"),
            _not_above("recency_on_off", "without the residual the last position still stands {recency_on_off} times above the middle, "
                                         "through softmax's queries (through values alone {recency_values})"),
        ),
        ("primacy_on_on", "recency_on_on"),
    ),
    Claim(
        "5", "RoPE changes nothing at birth",
        "At birth rotary position embedding leaves the profile as it is.",
        "no change",
        "RoPE turns queries and keys by their position. In an untrained network they say nothing yet, so turning them should not matter. "
        "Every other random number is kept, so any change is RoPE's. A profile's overall size differs from network to network anyway, so "
        "shapes are compared.",
        ("parts", "gpt2"), birth.rotary,
        (
            Condition("share", CORE, "a change below the spread of one seed cannot be seen in any one network; shapes since a second run",
                      "RoPE changes the mean shape by {share} times what one seed differs from another", high=1.0),
            Condition("change", FORM, "5 %: half of what this report calls a difference",
                      "RoPE changes the median position by a factor of {change} beside the others", high=math.log(1.05)),
        ),
        ("change", "share"),
    ),
    Claim(
        "6", "MLPs keep the topology",
        "The MLP sub-blocks do not change the topology of the profile.",
        "no change of shape",
        "MLPs act on every position by itself and mix nothing. They may scale influence up or down, but should not move its peaks.",
        ("parts",), birth.mlps,
        (
            _above("primacy_on", "with MLPs the first position is not above the middle: {primacy_on}"),
            _above("recency_on", "with MLPs the last position is not above the middle: {recency_on}"),
            _above("primacy_off", "without MLPs the first position is not above the middle: {primacy_off}"),
            _above("recency_off", "without MLPs the last position is not above the middle: {recency_off}"),
            Condition("side", FORM, "the end that is higher is part of a shape; ends within 10 % of each other are level",
                      "the higher end changes sides: first/last is {tilt_off} without MLPs and {tilt_on} with them", low=-SAME),
            Condition("order_theory", FORM, "a rank correlation of 0.9 leaves room for neighbours of nearly the same height; that of "
                      "measured profiles is lowered by noise",
                      "the order of positions changes: rank correlation {order_theory} in the kernel theory, {order} measured", low=0.9),
        ),
        ("order_theory", "tilt_off", "tilt_on"),
    ),
    Claim(
        "7", "Scores carry nothing at birth",
        "At birth the gradient through the softmax scores vanishes; the values carry the profile.",
        "vanishes",
        "Influence can travel in two ways: through what is passed on (values), and through who is listened to (scores). Cutting the "
        "second way in the same network shows what it carries.",
        ("mask",), birth.score_path,
        (
            Condition("middle", CORE, "where values carry the profile, cutting the scores changes it by less than 10 %",
                      "cutting the scores changes the median position by a factor of {middle}", low=-SAME, high=SAME),
            Condition("middle", FORM, "what vanishes is below 1 %",
                      "it changes influence by a factor of {middle} at the median position (to first order in the variance of the "
                      "logits, {logits} here)", low=-0.01, high=0.01),
            Condition("largest", FORM, "no position may depend on it by more than 10 %",
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
        ("parts", "gpt2"), birth.agreement,
        tuple(
            condition
            for key, name in (("qwen2", "Qwen2"), ("gpt2", "GPT-2"))
            for condition in (
                Condition(f"median_{key}", CORE, "two curves agree whose shapes differ by less than 10 % at the median position, noise aside; "
                          "a rank correlation would be high for any two that fall",
                          f"{name}: sizes are off by a factor of {{median_{key}}} in the median even at the best α", high=SAME),
                Condition(f"spearman_{key}", FORM, "0.985 rounds to the claimed 0.99",
                          f"{name}: the rank correlation is {{spearman_{key}}} (that of the kernel theory {{kernel_spearman_{key}}})", low=0.985),
                Condition(f"transport_{key}", FORM, "0.025 rounds to the claimed 0.02",
                          f"{name}: the scaled Wasserstein distance is {{transport_{key}}} (that of the kernel theory {{kernel_transport_{key}}})",
                          high=0.025),
                Condition(f"largest_{key}", FORM, _FACTOR, f"{name}: it is off by {{largest_{key}}} at the worst position", high=TWICE),
            )
        ),
        ("median_qwen2", "median_gpt2", "spearman_qwen2", "transport_qwen2"),
    ),
    Claim(
        "9", "Peak to valley about 10²",
        "At birth the peaks stand about 10² above the valley.",
        "about 10²",
        "How many times more does the answer feel the last token than one in the middle? The ratio grows with the length of the text, so "
        "it is given for the length that the paper used; and it matters whether the valley is the middle, or the lowest point.",
        ("parts", "target"), birth.peak_to_valley,
        (
            _above("first", "the first position is not above the middle: {first}"),
            _above("last", "the last position is not above the middle: {last}"),
            Condition("last", CORE, "about 10² is 10^1.5 to 10^2.5", "last/middle is {last}", *_ABOUT_100),
            Condition("lowest", FORM, "whatever is called the valley, the number should be that", "highest/lowest is {lowest}",
                      *_ABOUT_100),
            Condition("first", FORM, "both peaks, if peaks are claimed", "first/middle is {first}", *_ABOUT_100),
            Condition("below", FORM, "a valley in the middle is as low there as anywhere, to 10 %",
                      "the lowest position is not in the middle but at {where} of the text, in theory, and the middle is {below} times as "
                      "high", high=SAME),
        ),
        ("last", "first"),
    ),
    Claim(
        "10", "Pretraining keeps the U",
        "Pretraining keeps the U-shape and deepens its valley from about 10² to about 10³.",
        "10² to 10³",
        "What is there at birth could be washed out by training, or carved deeper. Networks are trained here on packed documents and "
        "measured on texts that they never saw. Their ratios at birth depend on size and length, so the growth is what is compared.",
        ("training",), trained.valley_in_training,
        (
            _above("primacy", "after training the first position does not stand above the middle: {primacy}"),
            _above("recency", "after training the last position does not stand above the middle: {recency}"),
            Condition("depth_growth", CORE, "a valley is as deep as its lower end stands above its lowest place; deeper by less than 10 % is "
                      "what this report calls the same",
                      "the valley is not deeper: the lower end stands {depth} times above the lowest position, {depth_birth} at birth "
                      "(the higher end stands {peak} times above the middle, {peak_birth} at birth)", low=SAME),
            Condition("depth_growth", FORM, "from 10² to 10³ is a factor of 10, to half an order of magnitude",
                      "the lower end over the lowest position grows by a factor of {depth_growth}", *_TENFOLD),
        ),
        ("depth_growth", "peak_growth"),
    ),
    Claim(
        "11", "Peaks at document boundaries",
        "Training on packed documents adds local peaks at their boundaries.",
        "local peaks",
        "Training texts are glued together from documents; a network could learn to listen for the seams. Influence just behind a seam "
        "is compared with the same places of other texts, in units of its ordinary scatter along a text.",
        ("training",), trained.boundary_peaks,
        (
            Condition("added", CORE, "a small effect in Cohen's terms, 0.2, is the least to be called a peak",
                      "training adds {added} units of scatter where documents begin ({trained} after {birth} at birth)", low=0.2),
            Condition("score", CORE, "5 % of the largest of many chance numbers lie 1.87 standard deviations above their mean (Gumbel's law); "
                      "the networks share their windows, whose accidents only other windows' boundaries can judge",
                      "other windows' boundaries show as large an effect: it lies {score} of their standard deviations above theirs, "
                      "p ≤ {p}", low=1.87),
            Condition("factor", FORM, "within 10 % of its neighbourhood is no difference, as at the ends",
                      "the peak stands only {factor} times above its neighbourhood", low=SAME),
        ),
        ("trained", "added"),
    ),
    Claim(
        "12", "Sinks from geometry: at birth",
        "Attention sinks are a consequence of the geometry: is there one at birth, when geometry is all there is?",
        "(no number)",
        "Trained networks pile attention on the first token. If geometry did that, an untrained network would show it, too: is any "
        "layer's attention on the first token above that of a plain average? The rollout, which multiplies the layers' attention, is "
        "shown beside it.",
        ("attention",), birth.sinks_at_birth,
        (
            Condition("sink", CORE, "a sink holds at least twice what averaging gives; published ones hold tens of times that",
                      "no layer attends to the first token as to a sink: the highest puts {sink} times an average's attention there ({equal} "
                      "if all were equal), all together {all}; only the product of the layers singles it out, by {rollout}", low=TWICE),
        ),
        ("sink", "rollout"),
    ),
    Claim(
        "12 trained", "Sinks from geometry: trained",
        "Attention sinks are a consequence of the geometry: where they grow in training, do they grow where it says?",
        "(no number)",
        "The geometry favours the first token more with every layer. If it made sinks, training should turn that advantage into "
        "attention, and the more so the higher the layer.",
        ("training",), trained.sinks_trained,
        (
            Condition("sink", GIVEN, "a sink holds at least twice what averaging gives; where none formed, its cause was not tested",
                      "no sink formed: the highest layer puts {sink} times an average's attention on the first token, all together {all}",
                      low=TWICE),
            Condition("order", CORE, "a rank correlation of 0.5 is the least to be called a trend",
                      "there is a sink ({sink} in the highest layer, {birth} there at birth), but it does not grow from layer to layer: "
                      "rank correlation with the layer's number {order}", low=0.5),
        ),
        ("sink", "order"),
    ),
    Claim(
        "13", "The middle learns more slowly",
        "The middle learns more slowly, because its gradients are suppressed.",
        "(no number)",
        "Little influence means little gradient: what stands in the middle should be learned last. Networks learn to recall a value by "
        "its key from a list of pairs; when do they get half of the answers right, for pairs at the beginning, in the middle and at the "
        "end?",
        ("recall", "recall-gradients"), trained.middle_learns_later,
        (
            _VALLEY,
            Condition("slower", CORE, "later by less than 10 % is what this report calls the same",
                      "the middle takes {slower} times as many updates as the ends", low=SAME),
            Condition("slowest", FORM, "what learns more slowly in the middle does so against both ends",
                      "one end takes as long as the middle, which takes {slowest} times as many updates as that end", low=0.0),
        ),
        ("slower", "valley"),
    ),
    Claim(
        "14", "Training will not cross the valley",
        "Standard training will not cross the valley; curricula or loss weights are needed.",
        "(no number)",
        "If so, plain training should end with a middle that is recalled worse than the ends, and only training that aims at the middle "
        "would lift it. All arms have the same number of updates, the same contexts and the same initial weights.",
        ("recall", "recall-gradients"), trained.crossing_the_valley,
        (
            _VALLEY,
            Condition("gap", CORE, _POINTS, "plain training crosses it at this scale: it recalls {middle_none} of the middle and {ends} "
                                            "of the ends",
                      low=0.1),
            Condition("lift", FORM, _POINTS + "; the best of several interventions is taken, which favours the claim",
                      "no intervention helps: the best adds {lift} to the share of right answers in the middle", low=0.1),
        ),
        ("gap", "valley"),
    ),
    Claim(
        "A", "Criticism: a row is not a gradient",
        "A row of the operator's product M^H is not the norm of a transformer's Jacobian.",
        "(public discussion)",
        "The paper adds up paths as if every layer passed values on unchanged. Random weights turn them, so that paths add up as "
        "independent things do: in squares. How far does that take the norm from the row?",
        ("identity", "bare", "parts"), birth.operator_row_criticism,
        (
            Condition("beyond", CORE, "two curves are not the same if they part anywhere, which a median cannot see; noise makes any curve stray "
                      "somewhere, so that what the kernel theory strays is taken off, and 10 % beyond it is what this report calls a "
                      "difference",
                      "at its best α the row is nowhere farther from the published network's norm than noise takes the kernel theory: "
                      "{published_largest} at the worst position", low=SAME),
            Condition("published", FORM, "within 10 % a row would do as well, at most positions",
                      "at the α that is best for it the row is within a factor of {published} of the norm in the median (off by "
                      "{published_largest} at the worst position)", low=SAME),
            Condition("bare_fitted", FORM, "the network that is closest to the operator, at the best α there, too",
                      "for random values alone it is within a factor of {bare_fitted}", low=SAME),
        ),
        ("published", "published_largest", "bare_fitted"),
    ),
    Claim(
        "B", "Criticism: one gradient is not the norm",
        "The gradient of the sum of the outputs, one backward pass, is not the norm of the Jacobian.",
        "(public discussion)",
        "One backward pass looks at the output from one direction, the norm from all. At birth no direction is special, so one look is "
        "an honest but rough sample: averaged over networks the two should meet.",
        ("parts", "gpt2", "one-pass"), birth.one_pass_criticism,
        (
            Condition("either", CORE, "within 10 % one pass would do as well; a measure of transformers must do for either architecture",
                      "for one network and text one pass is within a factor of {one} of the norm (Qwen2) and {layernorm} (GPT-2)", low=SAME),
            Condition("averaged", FORM, "if not even the mean over seeds agrees, the measures differ in kind",
                      "Qwen2: averaged over seeds the two agree to a factor of {averaged}, so it is scatter (a factor of {one} for one "
                      "network) and no bias, and ensemble ratios may be taken from either; GPT-2: after a LayerNorm one pass measures "
                      "nothing, {layernorm} of the norm", low=SAME),
        ),
        ("one", "layernorm", "averaged"),
    ),
)  # fmt: skip
