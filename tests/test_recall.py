"""Recall: the task is what it says, its evaluation is right, interventions do what their names say, text asks the same."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from stand_ins import QuietDecoder

import lim
from experiments import cli
from experiments import recall as command
from lim import plot, recall
from lim.theory import kernel
from lim.train import Checkpoints, Recipe, losses

TASK = recall.Task(pairs=4, questions=2, keys=6, values=5, seed=3)
CONFIG = lim.Config("qwen2", layers=1, width=16, heads=2, kv_heads=1, head_dim=8, inner=32, vocab=TASK.vocab, max_length=32, init_std=0.3)


# ---- the task ----


def read(task, tokens_T):
    """A sequence's pairs in order, and its questions and answers, read token by token."""
    pairs = [(tokens_T[2 * n], tokens_T[2 * n + 1]) for n in range(len(tokens_T) // 2)]
    return pairs[: task.pairs], pairs[task.pairs :]


@pytest.mark.parametrize("window", [None, (1, 4), (2, 4)])
def test_every_answer_is_in_the_context_and_counts_by_its_place(window):
    weights_N = np.array([1.0, 2.0, 4.0, 8.0])
    tokens_BT, weights_BL = TASK.batch(7, 50, window, weights_N)
    assert tokens_BT.shape == (50, TASK.length) and weights_BL.shape == (50, TASK.length - 1)
    seen = set()
    for tokens_T, weights_L in zip(tokens_BT.tolist(), weights_BL):
        context, questions = read(TASK, tokens_T)
        keys = [key for key, _ in context]
        assert len(set(keys)) == 4 and set(keys) <= set(range(6)) and {value for _, value in context} <= set(range(6, 11))
        asked = [context.index(question) for question in questions]  # the key with its own value
        assert len(set(asked)) == 2 and set(asked) <= set(range(*(window or (0, 4))))
        expected_T = np.zeros(TASK.length)
        expected_T[[2 * 4 + 1, 2 * 4 + 3]] = weights_N[asked]  # the answers' own positions, each predicted one before
        np.testing.assert_array_equal(weights_L, expected_T[1:])
        seen |= set(asked)
    assert seen == set(range(*(window or (0, 4))))


def test_batches_are_a_function_of_the_step_and_contexts_the_same_under_every_intervention():
    tokens_BT, weights_BL = TASK.batch(7, 50)
    TASK.batch(8, 50)
    again = TASK.batch(7, 50)
    np.testing.assert_array_equal(tokens_BT, again[0])
    np.testing.assert_array_equal(weights_BL, again[1])
    np.testing.assert_array_equal(np.unique(weights_BL), [0, 1])
    for other in (TASK.batch(8, 50), dataclasses.replace(TASK, seed=4).batch(7, 50)):
        assert np.mean(np.all(other[0][:, :8] == tokens_BT[:, :8], axis=1)) < 0.1
    np.testing.assert_array_equal(TASK.batch(7, 50, (1, 3))[0][:, :8], tokens_BT[:, :8])


def test_values_come_with_replacement_and_all_alike():
    tokens_BT, _ = recall.Task(8, 2, 8, 4).batch(0, 4000)
    counts = np.bincount(tokens_BT[:, 1:16:2].ravel(), minlength=12)[8:]
    assert stats.chisquare(counts).pvalue > 1e-3
    assert stats.chisquare(np.bincount(tokens_BT[:, 4], minlength=8)).pvalue > 1e-3  # of keys one place each, else not independent


def test_held_out_questions_are_about_each_place_and_never_trained_on():
    task = recall.Task(16, 8, 32, 32, seed=5)
    tokens_NBT, targets_NB = task.held_out(20)
    assert tokens_NBT.shape == (16, 20, 33) and targets_NB.shape == (16, 20)
    for n in range(16):
        for tokens_T, target in zip(tokens_NBT[n], targets_NB[n]):
            assert tokens_T[-1] == tokens_T[2 * n] and target == tokens_T[2 * n + 1]
    contexts = {tuple(tokens_T[:32]) for tokens_T in tokens_NBT.reshape(-1, 33)}
    assert len(contexts) == 320
    for step in range(40):
        assert not contexts & {tuple(tokens_T[:32]) for tokens_T in task.batch(step, 320)[0]}


@pytest.mark.parametrize("field, value, allowed", [
    ("pairs", 1, "at least 2"), ("questions", 5, "at least 1, at most 4 (pairs)"), ("questions", 0, "at least 1"),
    ("keys", 3, "at least 4 (pairs)"), ("values", 1, "at least 2"), ("seed", -1, "at least 0"), ("seed", 2**32, "at most 4294967295"),
    ("pairs", 4.0, "an integer"), ("pairs", True, "an integer"),
])  # fmt: skip
def test_a_task_refuses(field, value, allowed):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(TASK, **{field: value})
    assert str(error.value).startswith(f"{field}={value!r}: must be ") and allowed in str(error.value)


# ---- evaluation ----


@pytest.mark.parametrize("kind", [lim.Decoder, QuietDecoder])
def test_evaluation_against_whole_logits(kind):
    decoder = kind.at_birth(CONFIG, 1)
    switches = lim.Switches(residual=0.5)
    found = recall.evaluate(decoder, TASK, 70, switches)  # not a multiple of what is evaluated side by side
    tokens_NBT, targets_NB = TASK.held_out(70)
    logits = np.asarray(jax.jit(jax.vmap(lambda t: decoder(t, switches)))(tokens_NBT.reshape(-1, 9)), np.float64)[:, -1].reshape(4, 70, -1)
    chosen = np.take_along_axis(logits, targets_NB[..., None], axis=2)[..., 0]
    loss_NB = np.log(np.exp(logits).sum(axis=2)) - chosen
    correct_N = (logits.argmax(axis=2) == targets_NB).sum(axis=1)
    assert found.count == 70 and 0 < correct_N.sum() < 280
    np.testing.assert_array_equal(found.correct_N, correct_N)
    np.testing.assert_allclose(found.loss_N, loss_NB.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.loss_se_N, stats.sem(loss_NB, axis=1), rtol=1e-4)


def test_wilsons_interval():
    correct_N, n, z = np.array([0, 3, 20]), 20, stats.norm.ppf(0.95)
    p = correct_N / n
    centre, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low_N, high_N = recall.Recall(correct_N, n, p, p).interval(confidence=0.9)
    np.testing.assert_allclose(low_N, (centre - half) / (1 + z**2 / n), atol=1e-12)
    np.testing.assert_allclose(high_N, (centre + half) / (1 + z**2 / n), atol=1e-12)


# ---- interventions ----


def test_hann_weights():
    for pairs in (2, 7, 16):
        assert recall.hann_weights(pairs).mean() == pytest.approx(1, abs=1e-12)
    weights_N = recall.hann_weights(1001)
    assert weights_N[500] == 1.5 and weights_N[0] == pytest.approx(0.5, abs=1e-5) and np.argmax(weights_N) == 500
    np.testing.assert_allclose(weights_N, weights_N[::-1])


def test_theory_weights_invert_the_profile_at_birth():
    task = recall.Task(16, 8, 32, 32)
    config = recall.network(task)
    influence_T = kernel.predict(config, 33).influence_L
    expected_N = [math.sqrt((influence_T[2 * n] ** 2 + influence_T[2 * n + 1] ** 2) / 2) for n in range(16)]
    np.testing.assert_allclose(recall.birth_profile(task, config), expected_N)
    chosen = recall.intervention("weights-theory", task, config)
    assert np.ptp(expected_N) > 0.1 * np.mean(expected_N) and chosen.weights_N.max() < recall.CAP
    product_N = chosen.weights_N * expected_N
    np.testing.assert_allclose(product_N, product_N[0])
    assert chosen.weights_N.mean() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("profile_N", [[1.0, 1e-3, 1.0, 1.0, 1.0, 1.0], [1e-30, 1.0, 1e30], np.full(5, 1e-9)])
def test_inverse_weights_keep_mean_and_cap(profile_N):
    weights_N = recall.inverse_weights(profile_N, cap=2.5)
    assert weights_N.mean() == pytest.approx(1, rel=1e-9) and weights_N.max() <= 2.5
    below = weights_N < 2.5
    np.testing.assert_allclose((weights_N * profile_N)[below], (weights_N * profile_N)[below][0])


@pytest.mark.parametrize("profile_N, cap", [([1.0, 2.0], 0.5), ([0.0, 0.0], 4.0)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_inverse_weights_refuse_what_has_none(profile_N, cap):
    with pytest.raises(ValueError, match="must be above 1"):
        recall.inverse_weights(profile_N, cap)


def test_the_curriculum_asks_about_the_middle_first():
    task = recall.Task(16, 4, 16, 8)
    chosen = recall.intervention("curriculum", task, None)
    assert chosen.window(task, 0.0) == (5, 11)
    widths = []
    for share in np.linspace(0, 1, 41):
        start, stop = chosen.window(task, share)
        assert abs(start - (16 - stop)) <= 1
        widths.append(stop - start)
        assert widths[-1] == pytest.approx(6 + 10 * min(share / recall.WIDENED, 1), abs=1)
        first_B = np.argmax(task.batch(3, 600, (start, stop))[0][:, :32:2] == task.batch(3, 600, (start, stop))[0][:, 32, None], axis=1)
        counts = np.bincount(first_B, minlength=16)
        assert counts[:start].sum() == counts[stop:].sum() == 0
        assert stats.chisquare(counts[start:stop]).pvalue > 1e-4  # 41 looks
    assert widths == sorted(widths) and widths[20] == 16
    assert recall.intervention("none", task, None).window(task, 0.0) == (0, 16)


def test_questions_that_a_window_has_no_place_for_do_not_count():
    task = recall.Task(6, 5, 6, 8)
    tokens_BT, weights_BL = task.batch(0, 300, (2, 4), np.arange(6.0))
    places_BQ = np.argmax(tokens_BT[:, None, 0:12:2] == tokens_BT[:, 12::2, None], axis=2)
    assert all(len(set(places_Q)) == 5 and {2, 3} <= set(places_Q) for places_Q in places_BQ.tolist())
    np.testing.assert_array_equal(weights_BL[:, 12::2], np.where((places_BQ == 2) | (places_BQ == 3), places_BQ, 0))
    counts = np.bincount(np.argmax(places_BQ == 2, axis=1))  # when it is asked about: at any time
    assert len(counts) == 5 and stats.chisquare(counts).pvalue > 1e-3
    whole = task.batch(0, 300)[0]
    assert len({tuple(places_Q) for places_Q in np.argmax(whole[:, None, 0:12:2] == whole[:, 12::2, None], axis=2)}) > 200


def test_flattening_skips_flatten_the_predicted_profile():
    task = recall.Task(16, 8, 32, 32)
    config = recall.network(task, layers=3)
    switches = recall.intervention("skip", task, config).switches
    assert np.shape(switches.residual) == (3,) and np.all((recall.SKIPS[0] <= switches.residual) & (switches.residual <= recall.SKIPS[1]))

    def spread(switches):
        influence_T = kernel.predict(config, 33, switches).influence_L[:32]
        return np.std(np.log(np.hypot(influence_T[::2], influence_T[1::2])))

    assert recall.spread(recall.birth_profile(task, config)) == pytest.approx(spread(lim.Switches()))
    reached = spread(switches)
    assert reached < 0.5 * spread(lim.Switches())
    for r in np.random.default_rng(0).uniform(*recall.SKIPS, (10, 3)):
        assert reached <= spread(lim.Switches(residual=r)) + 1e-6


def test_no_such_intervention():
    with pytest.raises(ValueError, match="intervention='prayer': allowed are none, weights-middle"):
        recall.intervention("prayer", TASK, CONFIG)


# ---- training ----

EASY = recall.Task(pairs=2, questions=2, keys=2, values=2)
NARROW = dataclasses.replace(CONFIG, layers=2, vocab=EASY.vocab, init_std=0.2)
RECIPE = Recipe(steps=240, batch=32, learning_rate=1e-2, weight_decay=0.0, warmup=0.1)


class Killed(Exception):
    pass


def test_a_small_task_is_learned_and_a_killed_training_goes_on_to_the_same_curve(tmp_path):
    how = dict(evaluations=4, count=50)
    whole = recall.train(EASY, NARROW, RECIPE, recall.Intervention(), tmp_path / "whole", **how)
    assert whole.steps_S.tolist() == [0, 60, 120, 180, 240] and whole.count == 50 and whole.accuracy_SN.shape == (5, 2)
    assert whole.accuracy_SN[0].mean() < 0.8 and whole.accuracy_SN[-1].min() > 0.9, whole.accuracy_SN
    assert whole.loss_SN[-1].max() < 0.3 and np.isnan(whole.training_S[0]) and whole.training_S[-1] < whole.training_S[1]

    def kill(step):
        if step == 130:
            raise Killed

    with pytest.raises(Killed):
        recall.train(EASY, NARROW, RECIPE, recall.Intervention(), tmp_path / "killed", **how, on_step=kill)
    with open(tmp_path / "killed" / recall.CURVE, "a") as file:
        file.write('{"step": 18')  # half a line, as a kill may leave it
    began = []
    again = recall.train(EASY, NARROW, RECIPE, recall.Intervention(), tmp_path / "killed", **how, on_step=began.append)
    assert began[0] == 120
    for name in ("steps_S", "correct_SN", "loss_SN", "loss_se_SN", "training_S"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
    with pytest.raises(ValueError, match="holds another training: intervention is {'name': 'none'.* there, {'name': 'curriculum'"):
        recall.train(EASY, NARROW, RECIPE, recall.Intervention("curriculum"), tmp_path / "whole", **how)
    with pytest.raises(ValueError, match="vocab=11: must be 4"):
        recall.train(EASY, CONFIG, RECIPE, recall.Intervention(), tmp_path / "other")


def test_every_part_of_an_intervention_reaches_the_training(tmp_path, monkeypatch):
    """The batches, the switches and the evaluations, as the intervention has them and as they would not be without it."""
    task, seen = recall.Task(pairs=6, questions=3, keys=6, values=5), []
    config = CONFIG.replace(layers=2, vocab=task.vocab)
    chosen = recall.Intervention("all", np.arange(1.0, 7) / 3.5, recall.NARROW, recall.WIDENED, lim.Switches(residual=np.array([0.5, 2.0])))
    update = recall.Trainer.update
    monkeypatch.setattr(recall.Trainer, "update", lambda self, *batch: seen.append((batch, self.switches, update(self, *batch))) or seen[-1][2])
    curve = recall.train(task, config, Recipe(steps=4, batch=3), chosen, tmp_path, evaluations=1, count=4)
    for step, ((tokens_BT, weights_BL), switches, _) in enumerate(seen):
        expected = task.batch(step, 3, chosen.window(task, step / 4), chosen.weights_N)
        np.testing.assert_array_equal(tokens_BT, expected[0])
        np.testing.assert_array_equal(weights_BL, expected[1])
        np.testing.assert_array_equal(switches.residual, [0.5, 2.0])
    plain = task.batch(0, 3)
    assert len(seen) == 4 and not np.array_equal(seen[0][0][0], plain[0]) and set(seen[-1][0][1][0]) - {0.0, 1.0}
    decoder = lim.Decoder.at_birth(config, task.seed)
    (tokens_BT, weights_BL), _, first = seen[0]
    for switches, agrees in ((chosen.switches, True), (lim.Switches(), False)):
        loss = np.average(losses(decoder, tokens_BT, switches), weights=weights_BL)
        assert (abs(first.loss / loss - 1) < 1e-4) == agrees
        assert np.allclose(curve.loss_SN[0], recall.evaluate(decoder, task, 4, switches).loss_N, rtol=1e-4) == agrees


# ---- what the numbers say ----


def test_crossings():
    accuracy_SN = np.array([[0.0, 0.6, 0.2, 0.5], [0.4, 0.1, 0.3, 0.0], [0.8, 0.9, 0.4, 0.0]])
    np.testing.assert_allclose(recall.crossings([0, 10, 30], accuracy_SN), [15, 0, math.inf, 0])


def test_thirds_and_valley():
    assert recall.thirds([1, 2, 3, 4, 5, 6, 7]) == (2.0, 4.5, 6.5)
    assert recall.valley([0.8, 0.6, 0.2, 0.3, 0.9, 0.9]) == pytest.approx(0.25 / 0.8) and math.isnan(recall.valley([0, 1, 0]))
    flat = np.random.default_rng(0).binomial(100, 0.5, (4000, 16)) / 100
    assert np.mean([recall.valley(row) for row in flat]) == pytest.approx(1, abs=0.01)  # noise alone makes no valley


def test_paired_intervals():
    a, b = np.random.default_rng(0).normal(size=(2, 5))
    mean, half = recall.t_interval(a - b, confidence=0.9)
    low, high = stats.ttest_rel(a, b).confidence_interval(0.9)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert recall.t_interval([2.0]) == (2.0, math.inf)


# ---- in text ----


def as_bytes(text):
    return list(text.encode())


def text(ids):
    return bytes(np.asarray(ids).tolist()).decode()


@pytest.mark.parametrize("form", recall.FORMS)
def test_a_context_in_text(form):
    context = recall.text_context(as_bytes, text, 5, form, np.random.default_rng(0))
    lines = [text(context.tokens_C[start:stop]) for start, stop in context.spans_N2]
    assert text(context.tokens_C) == recall.HEADER + "".join(lines)
    words = []
    for n, line in enumerate(lines):
        key, value = line.removesuffix("\n").split(": ")
        words += [key, value]
        assert text(context.prompt(n)) == text(context.tokens_C) + f"\n{key}:"
        assert text(context.answers[n]) == f" {value}" and line.endswith("\n")
        header, _, asked = recall.TEMPLATE.partition("{key}: {value}\n")
        assert text(context.prompt(n)) == header + "".join(lines) + asked.format(key=key)
    assert len(set(words)) == 10
    assert all(len(word) == (3 if form == "numbers" else 36) for word in words)
    again = recall.text_context(as_bytes, text, 5, form, np.random.default_rng(0))
    np.testing.assert_array_equal(again.tokens_C, context.tokens_C)


def test_a_tokenizer_that_puts_blanks_before_pieces_is_refused():
    spaced, read = lambda text: as_bytes(" " + text), lambda ids: text(ids)[1:]  # noqa: E731
    with pytest.raises(ValueError, match=r"^encode: pieces encoded by themselves read '.*' where the template has '.*': this tokenizer cannot"):
        recall.text_context(spaced, read, 3, "numbers", np.random.default_rng(0))


def test_no_such_form_and_too_many_numbers():
    with pytest.raises(ValueError, match="pairs=451: there are only 900 numbers"):
        recall.text_context(as_bytes, text, 451, "numbers", np.random.default_rng(0))
    with pytest.raises(ValueError, match="form='poems': allowed are numbers, uuids"):
        recall.text_context(as_bytes, text, 5, "poems", np.random.default_rng(0))


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "quiet"])
def test_asking_after_one_shared_context_is_asking_each_prompt(family):
    kind, family = (QuietDecoder, "qwen2") if family == "quiet" else (lim.Decoder, family)
    config = lim.Config(family, layers=2, width=16, heads=2, kv_heads=2, head_dim=8, inner=32, vocab=256, max_length=128, init_std=0.3)
    decoder = kind.at_birth(config, 0)
    context = recall.text_context(as_bytes, text, 4, "numbers", np.random.default_rng(1))
    # ids may be of different lengths, and the network is made to know one of the answers
    context.questions[2] = context.questions[2][:-2]
    context.answers[1] = context.answers[1][:2]
    forward = jax.jit(lambda t: decoder(t))
    prompt = np.pad(context.prompt(3), (0, 128 - len(context.prompt(3))))
    likeliest = int(jnp.argmax(forward(prompt)[len(context.prompt(3)) - 1]))
    context.answers[3] = np.array([likeliest, *context.answers[3][1:]], np.int32)
    context.answers[0] = np.array([likeliest], np.int32)
    places = [3, 1, 2, 0]
    right_P, first_P, loss_P = recall.ask(decoder, context, places, 120)
    for p, n in enumerate(places):
        whole = np.concatenate([context.prompt(n), context.answers[n]])
        logits = np.asarray(forward(np.pad(whole, (0, 128 - len(whole)))), np.float64)
        at = len(context.prompt(n)) - 1 + np.arange(len(context.answers[n]))
        log_p = logits[at] - np.log(np.exp(logits[at]).sum(axis=1, keepdims=True))
        loss = -log_p[np.arange(len(at)), context.answers[n]].sum()
        right = logits[at].argmax(axis=1) == context.answers[n]
        assert loss_P[p] == pytest.approx(loss, rel=2e-5)
        assert (right_P[p], first_P[p]) == (right.all(), right[0])
    assert first_P[0] and not right_P[0]
    with pytest.raises(ValueError, match=f"buffer={context.room(places) - 1}: must be at least {context.room(places)}"):
        recall.ask(decoder, context, places, context.room(places) - 1)


def test_a_pairs_influence_sums_squares():
    context = types.SimpleNamespace(spans_N2=np.array([[1, 3], [3, 6]]))
    np.testing.assert_allclose(recall.pair_influence(np.array([9.0, 3.0, 4.0, 1.0, 2.0, 2.0, 7.0]), context), [5, 3])


# ---- the figure ----


def test_the_figure_draws_what_it_is_given():
    panels = [plot.Panel("a", {"one": ([1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [1.5, 2.5, 3.5])}, floor=("chance", 0.25)),
              plot.Panel("b", {"two": ([5.0, 6.0], None, None), "three": ([7.0, 8.0], None, None)}, places=[0, 9], ordered=True)]  # fmt: skip
    left, right = plot.place_figure(panels).axes
    one, chance = left.lines
    assert one.get_xdata().tolist() == [1, 2, 3] and one.get_ydata().tolist() == [1.0, 2.0, 3.0] and set(chance.get_ydata()) == {0.25}
    heights = left.collections[0].get_paths()[0].vertices[:, 1]
    assert {0.5, 1.5, 2.5, 3.5} <= set(heights) and not right.collections
    assert [line.get_xdata().tolist() for line in right.lines] == [[1, 10]] * 2 and right.lines[1].get_ydata().tolist() == [7.0, 8.0]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["two", "three"]
    with pytest.raises(ValueError, match="at least one"):
        plot.place_figure([])


# ---- the command ----


def curve(*accuracy_SN):
    """A curve of these evaluations, at steps 0, 10, …, out of 100 questions each."""
    correct_SN = np.round(100 * np.array(accuracy_SN)).astype(int)
    return recall.Curve(10 * np.arange(len(correct_SN)), correct_SN, 100, 1.0 - correct_SN / 100, 0 * correct_SN, np.zeros(len(correct_SN)), 1.0)


PLAIN = curve([0.0] * 6, [0.6, 0.6, 0.2, 0.2, 1.0, 1.0], [0.8, 0.8, 0.4, 0.4, 1.0, 1.0])
RAISED = curve([0.0] * 6, [0.6, 0.6, 0.5, 0.5, 1.0, 1.0], [0.8, 0.8, 0.7, 0.7, 1.0, 1.0])


def test_the_measures_of_a_curve():
    found = {name: measure(PLAIN) for name, measure in command.MEASURES.items()}
    assert found == pytest.approx({
        "first third": 0.8, "middle third": 0.4, "last third": 1.0, "middle/ends": 0.4 / 0.9, "loss": 1 - 2.2 / 3,
        "middle along": (0.1 + 0.3) / 2, "middle half at": math.inf,
    })  # fmt: skip
    assert command.MEASURES["middle half at"](RAISED) == 10


def test_the_verdict_calls_only_what_is_clear_a_change():
    measured = {name: {key: np.array([measure(c)] * 3) for key, measure in command.MEASURES.items()} for name, c in (("none", PLAIN), ("x", RAISED))}
    scatter = np.array([-0.01, 0.0, 0.01])
    differences = {key: command.minus(measured["x"][key], measured["none"][key]) + scatter for key in command.MEASURES}
    said = command.verdict("x", differences)
    assert said.startswith("x raises the middle and makes the valley shallower: middle third +0.300 ±0.025, middle/ends +0.333 ±0.025, middle along +")
    assert said.endswith("elsewhere: loss -0.100 ±0.025.")
    lowered = {key: -values_S for key, values_S in differences.items()}
    assert command.verdict("x", lowered).startswith("x lowers the middle and deepens the valley: ")
    none = {key: scatter for key in command.MEASURES}
    assert command.verdict("x", none) == "x does not clearly change the middle: no clear change; elsewhere: no clear change."


def test_the_order_in_which_thirds_are_learned():
    said = command.order_line([RAISED, RAISED])
    assert "at step 8.333 about the first third, 10 about the middle, 5 about the last;" in said
    assert said.endswith("middle minus first +1.667, middle minus last +5 steps")


def test_a_result_whose_weights_differ_in_their_last_bit_is_still_this_runs(tmp_path):
    chosen = lambda weight: recall.Intervention("weights-theory", np.array([weight, 1.0, 1.0]))  # noqa: E731
    run = lambda weight: command.Run(TASK, CONFIG, RECIPE, chosen(weight), 2, 100)  # noqa: E731
    key, at = ("weights-theory", 0), tmp_path / "weights-theory" / "seed0"
    at.mkdir(parents=True)
    cli.write_json(at / command.RESULT, dict(about=run(0.3).about(), curve=PLAIN))
    np.testing.assert_array_equal(command.stored(tmp_path, key, run(np.nextafter(0.3, 1))).correct_SN, PLAIN.correct_SN)
    with pytest.raises(ValueError, match="holds the result of another training"):
        command.stored(tmp_path, key, run(0.3 + 1e-9))


def test_a_network_trained_on_bytes_is_asked_in_bytes(tmp_path):
    config = CONFIG.replace(vocab=257, max_length=256)
    for name, more in (("bytes", dict(tokenizer=None)), ("recall", {})):
        checkpoints = Checkpoints(tmp_path / name)
        checkpoints.save(recall.Trainer(config, RECIPE), 3.0, dict(config=dataclasses.asdict(config), recipe=dataclasses.asdict(RECIPE)) | more)
        checkpoints.close()
    args = types.SimpleNamespace(weights=str(tmp_path / "bytes"), pairs=3, places=2, contexts=1, profiles=1, form="numbers", seed=0, probes=2)
    _, (context,), *_ = command.load(args)
    assert text(context.tokens_C).startswith(recall.HEADER)
    args.weights = str(tmp_path / "recall")
    with pytest.raises(ValueError, match="is a training on recall, which reads no text"):
        command.load(args)
