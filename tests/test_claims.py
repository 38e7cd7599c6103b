"""Claims: every rule answers both ways, chances and statistics equal what they should, measurements equal closed forms."""

import dataclasses
import math
import re
import string
import types

import jax
import numpy as np
import pytest

import lim
from lim import claims, ladder, profile, recall, tokens, verdict, watch
from lim.claims import birth, evidence, outside, trained
from lim.influence import Influence
from lim.rollout import Rollout
from lim.theory import cesaro, paper
from lim.train import Trainer
from lim.verdict import FAILS, HOLDS, NOT_RUN, QUALIFIED, Condition, Statistic

SIX_TOKENS = ladder.shape(64, 2, 6).replace(vocab=12)
BY_NUMBER = pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.number)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, fill):
    return fill(tmp_path_factory.mktemp("claims") / "lab")


@pytest.fixture(scope="module")
def findings(lab):
    return {claim.number: claims.judge(claim, lab) for claim in claims.CLAIMS}


# ---- verdicts ----


def statistics_for(claim, evidence, *, core=True, form=True):
    """A claim's statistics, moved to where its core holds or fails, and its form."""
    made = {}
    for name, s in evidence.statistics.items():
        own = [c for c in claim.conditions if c.statistic == name]
        fail = [c for c in own if not (core if c.core else form)]
        hold = [c for c in own if c not in fail] if core else []  # where the core fails, the form may, too
        low, high = max((c.low for c in hold), default=-math.inf), min((c.high for c in hold), default=math.inf)
        value = s.value
        if fail:  # beyond one threshold, halfway to the next
            c = fail[0]
            value = (c.high + min(high, c.high + 6)) / 2 if math.isfinite(c.high) else (c.low + max(low, c.low - 6)) / 2
        elif hold:
            value = (low if math.isfinite(low) else high - 6) / 2 + (high if math.isfinite(high) else low + 6) / 2
        made[name] = dataclasses.replace(s, value=value, error=1e-6)  # so small that no threshold is near by accident
    return made


@BY_NUMBER
def test_every_rule_answers_all_ways(claim, findings):
    evidence = findings[claim.number].evidence
    assert evidence is not None, findings[claim.number].decision
    ways = {HOLDS: dict(), FAILS: dict(core=False)}
    if any(not c.core for c in claim.conditions):
        ways[QUALIFIED] = dict(form=False)
    for verdict_, how in ways.items():
        decision = verdict.decide(claim.conditions, statistics_for(claim, evidence, **how))
        assert decision.verdict == verdict_, (claim.number, verdict_, decision)
        assert bool(decision.sentence) == (verdict_ != HOLDS) and decision.chance < 1e-6 and not decision.close


@BY_NUMBER
def test_rules_give_their_reasons_and_sentences_their_numbers(claim, findings):
    names = findings[claim.number].evidence.statistics.keys()
    assert claim.conditions and set(claim.headline) <= names and claim.headline
    for c in claim.conditions:
        assert c.why and {field for _, field, _, _ in string.Formatter().parse(c.otherwise) if field} <= names
        assert c.statistic in names and c.low < c.high


def test_chance_of_another_verdict_is_that_of_runs_with_other_seeds():
    core, form = Condition("a", True, "", "", low=0.0), Condition("b", False, "", "", high=1.0)
    rng, runs = np.random.default_rng(0), 40000
    for a, b in ((0.5, 0.0), (0.5, 2.0), (-0.2, 0.9)):
        statistics = {"a": Statistic(a, 0.4, "a"), "b": Statistic(b, 0.3, "b")}
        decision = verdict.decide((core, form), statistics)
        # the truth scatters about what was seen as what was seen does about the truth, and a run scatters about the truth
        redrawn = {name: s.value + s.error * rng.normal(size=(2, runs)).sum(0) for name, s in statistics.items()}
        verdicts = np.where(redrawn["a"] < 0, FAILS, np.where(redrawn["b"] > 1, QUALIFIED, HOLDS))
        assert decision.chance == pytest.approx(np.mean(verdicts != decision.verdict), abs=4 * 0.5 / math.sqrt(runs))
        assert decision.close == tuple(n for n, s in statistics.items() if abs(s.value - (n == "b")) < 1.96 * s.error)


def test_a_computed_number_leaves_nothing_to_chance():
    condition = Condition("a", True, "", "it is {a}", high=1.0)
    assert verdict.decide((condition,), {"a": Statistic(0.9, 0.0, "a")}) == verdict.Decision(HOLDS, "", 0.0, ())
    assert verdict.decide((condition,), {"a": Statistic(1.1, 0.0, "a")}) == verdict.Decision(FAILS, "it is 1.1", 0.0, ())
    with pytest.raises(ValueError, match="statistic 'a': is not among b"):
        verdict.decide((condition,), {"b": Statistic(1.1, 0.0, "b")})
    with pytest.raises(ValueError, match="must be a number, with an error"):
        Statistic(math.nan, 0.1, "a")


@pytest.mark.parametrize("value, error, text", [
    (0.98765, 0.0012, "0.9877 ± 0.0012"), (96.3, 1.24, "96.3 ± 1.2"), (823.0, 465.0, "823 ± 465"), (6.1e-8, 3e-9, "(6.1 ± 0.3)·10⁻⁸"),
    (-0.05, 0.004, "−0.050 ± 0.004"), (123.4, 0.0, "123"), (math.inf, 0.0, "∞"), (0.0, 0.02, "0.00 ± 0.02"),
])  # fmt: skip
def test_numbers_are_rounded_where_their_error_begins(value, error, text):
    assert verdict.rounded(value, error) == text


def test_factors_are_shown_as_factors():
    s = Statistic(math.log(2), 0.1, "twice", log=True)
    assert s.shown == "2.0 ± 0.2" and Condition("s", True, "", "", high=math.log(3)).threshold({"s": s}) == "at most 3"
    assert Statistic(-1000.0, 1.0, "tiny", log=True).shown == "−434.3 ± 0.4 decades"


# ---- what is measured ----


def test_every_claim_is_decided_with_figures(findings):
    for number, finding in findings.items():
        assert finding.decision.verdict != NOT_RUN, (number, finding.decision.sentence)
        assert 0 <= finding.decision.chance <= 1
        assert all(alt and figure.axes for alt, figure in finding.evidence.figures)


def test_statistics_equal_those_of_the_profiles_they_are_made_of(findings, lab):
    e = lab.ensemble("depth", layers="3", residual="1", uniform_attention="off")
    expected, error = profile.jackknife(profile.ratios, e.profiles_SL)
    s = findings["2"].evidence.statistics["with"]
    assert math.exp(s.value) == pytest.approx(expected["anchor"]) and math.exp(s.value) * s.error == pytest.approx(error["anchor"], rel=0.05)
    assert findings["2"].evidence.statistics["theory"].value == pytest.approx(0, abs=0.06)
    # without noise in the operator the only distance left is float64's
    assert abs(findings["1"].evidence.statistics["identity"].value) < 1e-12
    a = findings["8"].evidence.statistics
    e = lab.ensemble("parts", rope="on", mlp="on")
    assert a["largest_qwen2"].value == pytest.approx(profile.log_distance(e.rms_L, paper.fit(e.rms_L, e.config)[1], free_scale=True)[1])
    assert a["kernel_median_qwen2"].value < 0.03


def test_paired_statistics_take_seeds_together():
    rng = np.random.default_rng(1)
    common_SL = np.exp(rng.normal(size=(6, 10)))
    s = evidence.over_seeds("ratio", lambda a, b: float(np.log(a / b).mean()), 3 * common_SL, common_SL, log=True)
    assert s.value == pytest.approx(math.log(3)) and s.error < 1e-12  # apart they would scatter by a half


def test_dead_zone_slope_of_the_exact_operator_is_factorial():
    middles = [evidence.middle_over_mean(cesaro.profile(2048, 1.0, layers=H)) for H in (8, 24)]
    slope = (middles[0] - middles[1]) / (math.lgamma(24) - math.lgamma(8))
    assert 0.75 < slope < 4 / 3
    middles = [evidence.middle_over_mean(cesaro.profile(2048, 0.25, layers=H)) for H in (8, 24)]
    assert (middles[0] - middles[1]) / (math.lgamma(24) - math.lgamma(8)) < 0.5


def test_peak_to_valley_is_the_measured_one_where_the_claimed_network_is_measured(findings):
    s = findings["9"].evidence.statistics
    for key in ("last", "first", "lowest"):
        assert s[key].value == pytest.approx(s[f"{key}_here"].value) and s[key].error == pytest.approx(s[f"{key}_here"].error)


def test_too_few_seeds_and_missing_measurements_are_not_run(tmp_path, tiny):
    lab = claims.Lab(tiny, 0, tmp_path / "lab")
    claim = next(c for c in claims.CLAIMS if c.number == "4")
    assert claims.judge(claim, lab).decision.sentence == "not measured yet: mask"
    into = lab.stored("mask")
    for cell in np.ndindex(lab.grids["mask"].shape):
        into.write(cell, "failed", error="influence is not finite")
    decision = claims.judge(claim, lab).decision
    assert decision.verdict == NOT_RUN and "0 of 4 seeds are done: influence is not finite" in decision.sentence


def test_a_scatter_drawn_anew_is_told_from_a_change_of_shape():
    """Every network's scatter and size drawn anew, nothing else: `share` is what its words say, and errors leave the sizes out."""
    rng, seeds, length = np.random.default_rng(0), 8, 4000
    profiles = lambda: np.exp(0.05 * rng.normal(size=(seeds, length)) + 0.1 * rng.normal(size=(seeds, 1)))  # noqa: E731
    lab = types.SimpleNamespace(ensemble=lambda name, **place: types.SimpleNamespace(profiles_SL=profiles()))
    statistics = birth.rotary(lab).statistics
    said = float(re.search(r"\((.*) if RoPE drew", statistics["share"].words)[1])
    # a spread of eight is 5 % low in the median (χ² of 7 degrees), unequal sizes leave 4 % fewer seeds: 7 % in all, and 2 % by chance
    assert statistics["share"].value == pytest.approx(said, rel=0.12) and said == 0.34
    assert 0.02 < statistics["significant"].value < 0.2
    _, error_L = birth.change_of_shape(*(lab.ensemble("") for _ in range(2)))
    assert np.median(error_L) == pytest.approx(0.05 * np.sqrt(2 / seeds), rel=0.25)


def test_a_folder_of_another_run_is_refused_and_blocks_of_seeds_share_nothing(tmp_path, tiny):
    seeds = [claims.Lab(tiny, seed, tmp_path / str(seed)).seeds for seed in range(3)]
    assert len({s for block in seeds for s in block}) == 12
    claims.Lab(tiny, 1, tmp_path / "1")
    with pytest.raises(ValueError, match="holds another run .scale tiny, seed 1"):
        claims.Lab(tiny, 0, tmp_path / "1")


def test_scales_are_grids_that_fit():
    for scale in claims.SCALES.values():
        for text in scale.skips:
            assert 0 <= text <= 1
        assert {0.0, 1.0} < set(scale.skips) and len(scale.depths) >= 3 and list(scale.depths) == sorted(scale.depths)
        lab = claims.Lab.__new__(claims.Lab)
        lab.scale, lab.seed = scale, 0
        assert all(grid.configurations for grid in lab.grids.values())
        for config, published in ((scale.qwen2, lim.Config.preset("qwen2-0.5b")), (scale.gpt2, lim.Config.preset("gpt2"))):
            assert config.width * config.init_std**2 == pytest.approx(published.width * published.init_std**2)


def test_the_identity_network_is_the_operator_at_every_depth(tmp_path, tiny):
    scale = dataclasses.replace(tiny, swept=SIX_TOKENS, swept_length=6)
    made = outside.OUTSIDE["identity"](claims.Lab(scale, 0, tmp_path / "lab"))["swept"]()["profiles"]
    for measured_L, strength_N in zip(made, outside.identity_strengths(2), strict=True):
        np.testing.assert_allclose(measured_L, cesaro.profile(6, strength_N), rtol=1e-5)


def test_gradients_of_outputs_and_answers_equal_pullbacks_through_the_whole_network():
    decoder, task, count = lim.Decoder.at_birth(SIX_TOKENS, 1), recall.Task(pairs=2, questions=2, keys=6, values=6), 3

    @jax.jit
    def pull(tokens_L, cotangent_D):
        output_D, pullback = jax.vjp(lambda x_LD: decoder.hidden(decoder.stream(x_LD)[-1]), decoder.embed(tokens_L))
        return output_D, pullback(cotangent_D)[0]

    def answer(tokens_L, target, at):
        output_D, _ = pull(tokens_L, np.ones(64, np.float32))
        cotangent_D = jax.grad(lambda y_D: -jax.nn.log_softmax(decoder.logits(y_D))[target])(output_D)
        return np.sum(np.square(pull(tokens_L, cotangent_D)[1][at]))

    tokens_NBT, targets_NB = task.held_out(count)
    tokens_L = tokens_NBT[0, 0]
    expected_L = np.linalg.norm(pull(tokens_L, np.ones(64, np.float32))[1], axis=1)
    np.testing.assert_allclose(outside.one_pass(decoder, tokens_L), expected_L, rtol=2e-4)
    expected_N = [np.sqrt(np.mean([answer(tokens_NBT[n, b], targets_NB[n, b], slice(2 * n, 2 * n + 2)) for b in range(count)]))
                  for n in range(2)]  # fmt: skip
    np.testing.assert_allclose(outside.answer_gradients(decoder, task, count), expected_N, rtol=1e-3)


@pytest.mark.slow
def test_a_training_is_measured_from_birth_and_goes_on_where_it_was_stopped(tmp_path, tiny, monkeypatch):
    texts = [tokens.pack([part] * 60, None, 257) for part in ("some documents to learn from", "others")]
    monkeypatch.setattr(outside, "documents", lambda: texts)
    # what compiles for long has tests of its own; these numbers follow from the weights, too
    size_L = lambda decoder, tokens_L: np.linalg.norm(decoder.embed(tokens_L), axis=1)  # noqa: E731
    monkeypatch.setattr(watch, "influence", lambda decoder, tokens_L, *_, **__: Influence(x := size_L(decoder, tokens_L), 0 * x, 2, False, 2))
    monkeypatch.setattr(watch.rollout, "measure", lambda *given: Rollout(np.ones(2), x := size_L(*given[:2]), x[:2]))
    monkeypatch.setattr(watch.train, "embedding_gradients", lambda structure, params, switches, tokens_BT: tokens_BT[:, 1:])
    whole, stopped = (claims.Lab(tiny, 0, tmp_path / name) for name in ("whole", "stopped"))
    expected = outside.OUTSIDE["training"](whole)["0"]()
    assert expected["step"].tolist() == [0, 2] and np.all(expected["done"]) and expected["influence"].shape == (2, 3, 20)
    update, done = Trainer.update, []

    def dies(self, *batch):
        done.append(self.step)
        if len(done) == 2:
            raise KeyboardInterrupt
        return update(self, *batch)

    monkeypatch.setattr(Trainer, "update", dies)
    with pytest.raises(KeyboardInterrupt):
        outside.OUTSIDE["training"](stopped)["0"]()
    again = outside.OUTSIDE["training"](stopped)["0"]()
    assert done == [0, 1, 1] and expected["loss"][1].mean() < expected["loss"][0].mean()
    for name, values in expected.items():
        np.testing.assert_array_equal(again[name], values, err_msg=name)


# ---- trained ----


def test_statistics_of_trainings_equal_what_they_were_made_with(findings):
    s = {number: findings[number].evidence.statistics for number in ("10", "11", "12 trained")}
    assert math.exp(s["10"]["primacy_birth"].value) == pytest.approx(2, rel=0.1) and s["10"]["bits_birth"].value == pytest.approx(5 / math.log(2))
    assert s["10"]["primacy_growth"].value == pytest.approx(math.log(4), rel=0.2)
    assert 1.3 < math.exp(s["11"]["factor"].value) < 2.2 and s["11"]["where"].value == 1
    assert s["12 trained"]["sink"].value == pytest.approx(math.log(2)) and s["12 trained"]["order"].value == pytest.approx(1)


def test_what_never_crosses_does_so_later_than_the_end_and_what_learns_nothing_does_not_count(lab, monkeypatch):
    kept, steps = lab.kept("recall"), np.arange(3)
    monkeypatch.setattr(lab, "kept", {"recall": kept, "recall-gradients": lab.kept("recall-gradients")}.get)
    for seed in range(2):
        kept[f"none-{seed}"] = dict(step=steps, accuracy=np.array([[0, 0, 0], [1, 0.2, 1], [1, 0.4, 1]]))
    s = trained.middle_learns_later(lab).statistics
    assert s["slower"].value == pytest.approx(math.log(4)) and s["slowest"].error == 0 and s["learned"].value == 1
    kept["none-0"] = dict(step=steps, accuracy=np.zeros((3, 3)))
    with pytest.raises(ValueError, match="learned the task on 1 of 2 seeds within 2 updates"):
        trained.crossing_the_valley(lab)
