"""Recall of a key-value pair by its place in the context: the task behind the U-shaped curve, and what may flatten it.

A network learns to answer questions about contexts of pairs, plainly or under one of four interventions, and is asked
about every place in turn; any language model can be asked the same in text.

Axes: B sequence, N place of a pair in its context (0 the first), Q question, T token, L = T - 1 predicting position,
S step of an evaluation.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import time
import uuid
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from flax import nnx
from numpy.typing import ArrayLike

from lim import files, ladder
from lim.config import Config
from lim.model import Decoder, check_length
from lim.switches import Switches
from lim.theory import kernel
from lim.train import Checkpoints, Recipe, Trainer

CURVE = "curve.jsonl"  # of a training's folder
TRAINING, HELD_OUT = 0, 1  # streams of random numbers


# ---- the task ----


@dataclasses.dataclass(frozen=True)
class Task:
    """Contexts of pairs (key, value), then questions: keys of the context, each about another pair, and its value.

    The keys of a context are distinct, its values drawn with replacement. Token ids are keys first, then values.

    Attributes:
      pairs, questions: how many of them a sequence holds; at most as many questions as pairs. The fewer of its pairs a
        sequence asks about, the later a network finds out about keys: by far.
      keys, values: how many different ones there are.
      seed: of every random number.

    Raises:
      ValueError: names the field, its value and what is allowed.
    """

    pairs: int = 16
    questions: int = 16
    keys: int = 16
    values: int = 16
    seed: int = 0

    def __post_init__(self):
        limits = dict(pairs=(2, None), questions=(1, self.pairs), keys=(self.pairs, None), values=(2, None), seed=(0, 2**32 - 1))
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
                allowed = f"an integer of at least {low}" + (f", at most {high}" if high is not None else "")
                why = {"questions": " (pairs)", "keys": " (pairs)"}.get(name, "")
                raise ValueError(f"{name}={value!r}: must be {allowed}{why}")

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.keys + self.values

    @property
    def length(self) -> int:
        """T, the tokens of a training sequence."""
        return 2 * (self.pairs + self.questions)

    def batch(self, step: int, size: int, window: tuple[int, int] | None = None, weights_N: ArrayLike | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The training sequences of one update: a function of the arguments and the seed alone.

        Args:
          step: of the update.
          size: B.
          window: (start, stop) of the places that questions are about, by default all; those that it has no place left for
            are about others and do not count.
          weights_N: how much an answer counts, by the place of its pair; by default 1.

        Returns:
          tokens_BT, and weights_BL of the predicted tokens, 0 but for answers: as `lim.train.Trainer.update` takes them.
        """
        rng = np.random.default_rng([TRAINING, self.seed, step])
        keys_BN, values_BN = self._contexts(rng, size)
        counts_N = np.ones(self.pairs) if weights_N is None else np.array(weights_N)
        start, stop = window or (0, self.pairs)
        outside_N = np.ones(self.pairs)
        outside_N[start:stop] = 0
        chosen_BQ = np.argsort(rng.random((size, self.pairs)) + outside_N, axis=1)[:, : self.questions]
        asked_BQ = rng.permuted(np.sort(chosen_BQ, axis=1), axis=1)
        tokens_BT = np.empty((size, self.length), np.int32)
        tokens_BT[:, : 2 * self.pairs] = _interleave(keys_BN, values_BN)
        tokens_BT[:, 2 * self.pairs :] = _interleave(*(np.take_along_axis(x, asked_BQ, axis=1) for x in (keys_BN, values_BN)))
        weights_BL = np.zeros((size, self.length - 1), np.float32)
        weights_BL[:, 2 * self.pairs :: 2] = (counts_N * (1 - outside_N))[asked_BQ]
        return tokens_BT, weights_BL

    def held_out(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequences that end with a question's key, `count` about each place, from random numbers that training never sees.

        Returns:
          tokens_NBT of 2·pairs + 1 tokens, and the right answers, targets_NB.
        """
        rng = np.random.default_rng([HELD_OUT, self.seed])
        keys_BN, values_BN = self._contexts(rng, self.pairs * count)
        asked_B = np.repeat(np.arange(self.pairs), count)
        every_B = np.arange(len(asked_B))
        tokens_BT = np.concatenate([_interleave(keys_BN, values_BN), keys_BN[every_B, asked_B, None]], axis=1)
        return tokens_BT.reshape(self.pairs, count, -1), values_BN[every_B, asked_B].reshape(self.pairs, count)

    def _contexts(self, rng, size):
        keys_BN = np.argsort(rng.random((size, self.keys)), axis=1)[:, : self.pairs].astype(np.int32)
        return keys_BN, rng.integers(self.keys, self.vocab, (size, self.pairs), dtype=np.int32)


def _interleave(keys_BN, values_BN):
    return np.stack([keys_BN, values_BN], axis=-1).reshape(len(keys_BN), -1)


# ---- its evaluation ----


@dataclasses.dataclass(frozen=True)
class Recall:
    """How well each place is recalled.

    Attributes:
      correct_N: right answers out of `count` at each place.
      loss_N: mean -ln p of the right answer, in nats.
      loss_se_N: its standard error over the questions.
    """

    correct_N: np.ndarray
    count: int
    loss_N: np.ndarray
    loss_se_N: np.ndarray

    @classmethod
    def of(cls, right_NB: ArrayLike, loss_NB: ArrayLike) -> "Recall":
        """From every question: whether it was answered rightly, and the loss of its answer."""
        right_NB, loss_NB = np.asarray(right_NB), np.asarray(loss_NB, np.float64)
        count = right_NB.shape[1]
        error_N = loss_NB.std(axis=1, ddof=1) / math.sqrt(count) if count > 1 else np.full(len(loss_NB), math.nan)
        return cls(right_NB.sum(axis=1), count, loss_NB.mean(axis=1), error_N)

    @property
    def accuracy_N(self) -> np.ndarray:
        """Share of right answers."""
        return self.correct_N / self.count

    def interval(self, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Wilson's interval of the accuracy, (low_N, high_N)."""
        return wilson(self.correct_N, self.count, confidence)


def wilson(correct_N: np.ndarray, count: int, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's intervals, (low_N, high_N), of the probabilities behind `correct_N` successes in `count` trials each."""
    tests = [scipy.stats.binomtest(int(k), int(count)).proportion_ci(confidence, method="wilson") for k in correct_N]
    return np.array([t.low for t in tests]), np.array([t.high for t in tests])


def evaluate(decoder: Decoder, task: Task, count: int = 128, switches: Switches = Switches()) -> Recall:
    """Recall of the first question, directly behind the context, by the place of its pair, on `count` held-out sequences each.

    An answer is right if no other token, key or value, is likelier.
    """
    tokens_NBT, targets_NB = task.held_out(count)
    structure, state = nnx.split(decoder)
    loss_B, right_B = _answers(structure, nnx.as_pure(state), switches.check(decoder.config), tokens_NBT.reshape(-1, tokens_NBT.shape[-1]),
                               targets_NB.ravel())  # fmt: skip
    return Recall.of(np.asarray(right_B).reshape(targets_NB.shape), np.asarray(loss_B).reshape(targets_NB.shape))


@functools.partial(jax.jit, static_argnames="structure")
@jax.default_matmul_precision("highest")
def _answers(structure, params, switches, tokens_BT, targets_B):
    """-ln p of each target as the token that follows, and whether it is the likeliest."""
    decoder = nnx.merge(structure, params)

    def one(sequence):
        tokens_T, target = sequence
        stream_D = decoder.read(decoder.embed(tokens_T, switches), switches)
        logits_V = decoder.logits(decoder.hidden(stream_D, switches))
        return -jax.nn.log_softmax(logits_V)[target], jnp.argmax(logits_V) == target

    return jax.lax.map(one, (tokens_BT, targets_B), batch_size=64)


# ---- interventions ----


@dataclasses.dataclass(frozen=True)
class Intervention:
    """What is done about the middle.

    Attributes:
      name: one of `INTERVENTIONS`.
      weights_N: how much an answer counts in training, by its pair's place; mean 1. None counts all alike.
      narrow: the share of the places, in the middle, that questions are about at first.
      widened: the share of the steps from which on questions are about every place, until when the window widens linearly.
      switches: of the network, in training and evaluation.
    """

    name: str = "none"
    weights_N: np.ndarray | None = None
    narrow: float = 1.0
    widened: float = 0.0
    switches: Switches = Switches()

    def about(self) -> dict:
        """All of it, as JSON has it."""
        return jax.tree.map(lambda v: np.asarray(v).tolist(), dataclasses.asdict(self))

    def window(self, task: Task, share: float) -> tuple[int, int]:
        """(start, stop) of the places that questions are about when this share of the steps is done."""
        grown = min(share / self.widened, 1.0) if self.widened else 1.0
        width = math.ceil(task.pairs * (self.narrow + (1 - self.narrow) * grown) - 1e-9)
        start = (task.pairs - width) // 2
        return start, start + width


NARROW, WIDENED = 1 / 3, 0.5
CAP = 4.0
SKIPS = (0.5, 2.0)
INTERVENTIONS = {
    "none": "plain training",
    "weights-middle": "answers count more the nearer the middle their pair: by a Hann window on a floor, 3:1",
    "weights-theory": f"answers count by the inverse of the influence at birth that the kernel theory predicts, at most {CAP:g}",
    "curriculum": f"questions are about the middle third first, and about ever more until, after {WIDENED:.0%} of the steps, about every place",
    "skip": f"each layer's skip has the weight, from {SKIPS[0]:g} to {SKIPS[1]:g}, that flattens the kernel theory's profile",
}


def intervention(name: str, task: Task, config: Config) -> Intervention:
    """The intervention of this name, for this task and network.

    Raises:
      ValueError: there is none of that name.
    """
    if name == "weights-middle":
        return Intervention(name, weights_N=hann_weights(task.pairs))
    if name == "weights-theory":
        return Intervention(name, weights_N=inverse_weights(birth_profile(task, config)))
    if name == "curriculum":
        return Intervention(name, narrow=NARROW, widened=WIDENED)
    if name == "skip":
        return Intervention(name, switches=flattening_skip(task, config))
    if name != "none":
        raise ValueError(f"intervention={name!r}: allowed are {', '.join(INTERVENTIONS)}")
    return Intervention()


def hann_weights(pairs: int) -> np.ndarray:
    """½ + sin²(π(n + ½)/N), [N]: mean 1, three times as much in the middle as at the ends."""
    return 0.5 + np.sin(np.pi * (np.arange(pairs) + 0.5) / pairs) ** 2


def inverse_weights(profile_N: ArrayLike, cap: float = CAP) -> np.ndarray:
    """min(c / profile, cap), [N], with c such that their mean is 1.

    Raises:
      ValueError: there is no such c: `cap` is below 1, or the profile nowhere above 0.
    """
    inverse_N = 1 / np.asarray(profile_N, np.float64)
    ascending_N = np.sort(inverse_N)
    for capped in range(len(inverse_N)):  # the largest ones; what they leave of the mean is shared by the rest
        rest = ascending_N[: len(inverse_N) - capped]
        scale = (len(inverse_N) - capped * cap) / rest.sum()
        if scale * rest[-1] <= cap:
            return np.minimum(scale * inverse_N, cap)
    raise ValueError(f"cap={cap}: must be above 1, and the profile positive, for weights of mean 1")


def birth_profile(task: Task, config: Config, switches: Switches = Switches()) -> np.ndarray:
    """Influence at birth of each pair on the final norm's output at the first question's key, by the kernel theory, [N].

    Root mean square over the pair's two tokens, and over seeds; all tokens count as distinct.
    """
    influence_T = kernel.predict(config, 2 * task.pairs + 1, switches).influence_L
    return np.sqrt(np.mean(influence_T[:-1].reshape(-1, 2) ** 2, axis=1))


def spread(profile_N: ArrayLike) -> float:
    """Standard deviation of the logarithm over places: 0 for a flat profile."""
    return float(np.std(np.log(profile_N)))


def flattening_skip(task: Task, config: Config, bounds: tuple[float, float] = SKIPS) -> Switches:
    """The weight of each layer's skip, within bounds, that makes `birth_profile` flattest.

    A local minimum of `spread`, found by L-BFGS-B in the logarithms of the weights, from the network as published on.
    """

    def objective(logs):
        return spread(birth_profile(task, config, Switches(residual=np.exp(logs))))

    found = scipy.optimize.minimize(objective, np.zeros(config.layers), method="L-BFGS-B", bounds=[np.log(bounds)] * config.layers)
    return Switches(residual=np.clip(np.exp(found.x), *bounds))


# ---- training under one of them ----


def network(task: Task, layers: int = 2, width: int = 64) -> Config:
    """The Config that learns the task in minutes: `lim.ladder.shape` with the task's tokens and a narrower MLP.

    Its initial spread keeps width·init_std² at that of Qwen2-0.5B; at 0.02, as wide networks have it, attention at birth
    is so even that a narrow one finds out about keys far later, if at all.

    Raises:
      ValueError: the width is not a multiple of 64.
    """
    return ladder.shape(width, layers, task.length).replace(vocab=task.vocab, inner=2 * width)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Recall along a training.

    Attributes:
      steps_S: updates before each evaluation, from 0 to the last.
      correct_SN, count, loss_SN, loss_se_SN: as in `Recall`.
      training_S: mean training loss since the evaluation before, in nats; NaN at birth.
      seconds: that the training took, evaluations and all, over as many sittings as there were.
    """

    steps_S: np.ndarray
    correct_SN: np.ndarray
    count: int
    loss_SN: np.ndarray
    loss_se_SN: np.ndarray
    training_S: np.ndarray
    seconds: float

    @property
    def accuracy_SN(self) -> np.ndarray:
        """Share of right answers."""
        return self.correct_SN / self.count

    @property
    def final(self) -> Recall:
        """The last evaluation."""
        return Recall(self.correct_SN[-1], self.count, self.loss_SN[-1], self.loss_se_SN[-1])


def train(task: Task, config: Config, recipe: Recipe, chosen: Intervention, folder: str | os.PathLike, *, evaluations: int = 16,
          count: int = 128, on_step: Callable[[int], object] = lambda step: None) -> Curve:  # fmt: skip
    """Trains a network from birth on the task, evaluating it at regular steps; resumes where the folder's checkpoints end.

    Args:
      config, recipe: the network, with the task's vocabulary, and how to train it. The task's seed draws its weights, too.
      chosen: the intervention; all of them take the same steps, batches and contexts.
      folder: for checkpoints and the curve.
      evaluations: how many after the one at birth; `count` questions about each place.
      on_step: called with the number of updates done, also once with that of a resumed training.

    Raises:
      ValueError: the folder holds another training; the vocabulary or the length does not fit the task.
      FloatingPointError: the training diverges.
    """
    if config.vocab != task.vocab:
        raise ValueError(f"vocab={config.vocab}: must be {task.vocab}, the task's keys and values")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, recipe, switches=chosen.switches, decoder=Decoder.at_birth(config, task.seed), devices=jax.local_devices()[:1])
    about = dict(task=dataclasses.asdict(task), config=dataclasses.asdict(config), recipe=dataclasses.asdict(recipe),
                 intervention=chosen.about(), evaluations=evaluations, count=count)  # fmt: skip
    at = {round(recipe.steps * k / evaluations) for k in range(evaluations + 1)}
    checkpoints = Checkpoints(folder)
    try:
        resumed = checkpoints.restore(trainer, about)
        rows = [row for row in _read_curve(folder / CURVE) if resumed and row["step"] <= trainer.step]
        with files.whole(folder / CURVE) as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        began = time.monotonic() - (rows[-1]["seconds"] if rows else 0.0)
        losses: list[float] = []
        on_step(trainer.step)
        while True:
            if trainer.step in at and (not rows or rows[-1]["step"] < trainer.step):
                recall = evaluate(trainer.decoder, task, count, chosen.switches)
                rows.append(dict(step=trainer.step, correct=recall.correct_N.tolist(), loss=recall.loss_N.tolist(),
                                 loss_se=recall.loss_se_N.tolist(), training=float(np.mean(losses)) if losses else None,
                                 seconds=time.monotonic() - began))  # fmt: skip
                _append(folder / CURVE, rows[-1])  # before the checkpoint, which a resumed training starts from
                checkpoints.save(trainer, float(recall.loss_N.mean()), about)
                losses = []
            if trainer.step == recipe.steps:
                break
            window = chosen.window(task, trainer.step / recipe.steps)
            losses.append(trainer.update(*task.batch(trainer.step, recipe.batch, window, chosen.weights_N)).loss)
            on_step(trainer.step)
    finally:
        checkpoints.close()
    steps_S, correct_SN = (np.array([row[name] for row in rows]) for name in ("step", "correct"))
    loss_SN, loss_se_SN, training_S = (np.array([row[name] for row in rows], np.float64) for name in ("loss", "loss_se", "training"))
    return Curve(steps_S, correct_SN, count, loss_SN, loss_se_SN, training_S, rows[-1]["seconds"])


def _read_curve(path):
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # a killed process left half a line, after which nothing can follow
            break
    return rows


def _append(path, row):
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


# ---- what the numbers say ----


def crossings(steps_S: ArrayLike, accuracy_SN: ArrayLike, level: float = 0.5) -> np.ndarray:
    """The step at which each place first reaches the level, [N], linear between evaluations; infinite where it never does."""
    steps_S, accuracy_SN = np.asarray(steps_S, np.float64), np.asarray(accuracy_SN, np.float64)
    found_N = np.full(accuracy_SN.shape[1], math.inf)
    for n, accuracy_S in enumerate(accuracy_SN.T):
        above = np.flatnonzero(accuracy_S >= level)
        if len(above):
            s = above[0]
            low = accuracy_S[s - 1] if s else level
            part = (level - low) / (accuracy_S[s] - low) if s else 0.0
            found_N[n] = steps_S[s] - (1 - part) * (steps_S[s] - steps_S[s - 1]) if s else steps_S[0]
    return found_N


def thirds(values_N: ArrayLike) -> tuple[float, ...]:
    """Means over the first, the middle and the last third of places (as equal as whole places can be)."""
    return tuple(float(np.mean(part)) for part in np.array_split(np.asarray(values_N, np.float64), 3))


def valley(values_N: ArrayLike) -> float:
    """The middle third over the mean of the two end thirds; NaN where these are 0.

    Not the lowest place over the ends: the lowest of many is lowered by noise, and the more the fewer answers are right.
    """
    first, middle, last = thirds(values_N)
    ends = (first + last) / 2
    return middle / ends if ends else math.nan


def t_interval(values_S: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Mean over seeds and half the width of Student's interval, infinite for one seed."""
    values_S = np.asarray(values_S, np.float64)
    if len(values_S) < 2:
        return float(values_S.mean()), math.inf
    error = values_S.std(ddof=1) / math.sqrt(len(values_S))
    return float(values_S.mean()), float(scipy.stats.t.ppf((1 + confidence) / 2, len(values_S) - 1) * error)


# ---- the same question in text ----

FORMS = {
    "numbers": "three digits",
    "uuids": "random UUIDs (version 4)",
}
HEADER = "Key-value pairs, then one of the keys again, and its value:\n\n"
TEMPLATE = HEADER + "{key}: {value}\n" + "\n{key}:"  # the second line once a pair; the answer follows


@dataclasses.dataclass(frozen=True)
class TextContext:
    """A context of pairs in text, and the question about each of them, in a tokenizer's ids.

    Attributes:
      tokens_C: the context.
      spans_N2: where each pair lies in it, [start, stop).
      questions: for each pair the ids that follow the context, up to the answer.
      answers: for each pair the ids of its value.
    """

    tokens_C: np.ndarray
    spans_N2: np.ndarray
    questions: list[np.ndarray]
    answers: list[np.ndarray]

    def prompt(self, n: int) -> np.ndarray:
        """Context and question about pair n, without the answer."""
        return np.concatenate([self.tokens_C, self.questions[n]])

    def room(self, places: Sequence[int] | np.ndarray) -> int:
        """Tokens that the context, the longest of these pairs' questions and the longest answer take, the last two in whole eights."""
        return len(self.tokens_C) + _eights(self.questions, places) + _eights(self.answers, places)


def _eights(parts, places):
    """Length of the longest of these parts, rounded up so that few different lengths are compiled for."""
    return 8 * math.ceil(max(len(parts[n]) for n in places) / 8)


def text_context(encode: Callable[[str], ArrayLike], decode: Callable[[np.ndarray], str], pairs: int, form: str,
                 rng: np.random.Generator) -> TextContext:  # fmt: skip
    """A random context of distinct keys and values, after `TEMPLATE`.

    Each piece is encoded by itself and the ids are joined, so that a key and a value have the same ids wherever they stand.

    Args:
      encode: a text's token ids; decode: the text of token ids.
      pairs: N.
      form: of keys and values, one of `FORMS`.
      rng: a numpy Generator.

    Raises:
      ValueError: there is no such form, or too few numbers for so many pairs; or the joined ids are of another text, as
        where a tokenizer puts a blank before every piece.
    """
    words = _words(form, 2 * pairs, rng)
    keys, values = words[:pairs], words[pairs:]
    pieces = [np.asarray(encode(HEADER), np.int32)]
    key_ids = [np.asarray(encode(f"{key}:"), np.int32) for key in keys]
    answers = [np.asarray(encode(f" {value}"), np.int32) for value in values]
    line_end = np.asarray(encode("\n"), np.int32)
    ends = []
    for key, answer in zip(key_ids, answers):
        pieces += [key, answer, line_end]
        ends.append(sum(map(len, pieces)))
    starts = [len(pieces[0]), *ends[:-1]]
    questions = [np.concatenate([line_end, ids]) for ids in key_ids]
    context = TextContext(np.concatenate(pieces), np.stack([starts, ends], axis=1), questions, answers)
    meant = HEADER + "".join(f"{key}: {value}\n" for key, value in zip(keys, values)) + f"\n{keys[0]}: {values[0]}"
    if (said := decode(np.concatenate([context.prompt(0), answers[0]]))) != meant:
        at = len(os.path.commonprefix([said, meant]))
        raise ValueError(f"encode: pieces encoded by themselves read {said[max(0, at - 9) : at + 9]!r} where the template has "
                         f"{meant[max(0, at - 9) : at + 9]!r}: this tokenizer cannot ask the question as it is written")  # fmt: skip
    return context


def _words(form, count, rng):
    """Distinct random words."""
    if form == "numbers":
        if count > 900:
            raise ValueError(f"pairs={count // 2}: there are only 900 numbers of three digits, so at most 450 pairs")
        return [str(n) for n in 100 + rng.choice(900, count, replace=False)]
    if form == "uuids":
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]
    raise ValueError(f"form={form!r}: allowed are {', '.join(FORMS)}")


def ask(decoder: Decoder, context: TextContext, places: Sequence[int] | np.ndarray, buffer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Asks about several pairs of one context, which is read only once.

    Args:
      decoder: a `lim.Decoder`.
      places: the pairs to ask about, [P].
      buffer: room in tokens for the context and the longest question with its answer; contexts with the same room share
        a compilation.

    Returns:
      right_P: whether each token of the answer is the likeliest after the right ones before it, so that greedy decoding
      writes the answer; first_P: whether the first one is; loss_P: -ln p of the whole answer, in nats.

    Raises:
      ValueError: the room is too small, or larger than the model's position table.
    """
    check_length(decoder.config, buffer)
    parts = [np.concatenate([context.questions[n], context.answers[n]]) for n in places]
    start, room = len(context.tokens_C), context.room(places)
    if room > buffer:
        raise ValueError(f"buffer={buffer}: must be at least {room}, for context, question and answer")
    tokens_B = np.zeros(buffer, np.int32)
    tokens_B[:start] = context.tokens_C
    parts_PM = np.stack([np.pad(part, (0, room - start - len(part))) for part in parts])
    asked_P = np.array([len(context.questions[n]) for n in places])
    lengths_P = [len(context.answers[n]) for n in places]
    structure, state = nnx.split(decoder)
    scored = _ask(structure, nnx.as_pure(state), tokens_B, start, parts_PM, asked_P, answer=_eights(context.answers, places))
    each = [(right_A[:length].all(), right_A[0], loss_A[:length].sum(dtype=np.float64))
            for loss_A, right_A, length in zip(*map(np.asarray, scored), lengths_P)]  # fmt: skip
    right_P, first_P, loss_P = map(np.array, zip(*each))
    return right_P, first_P, loss_P


@functools.partial(jax.jit, static_argnames=("structure", "answer"))
@jax.default_matmul_precision("highest")
def _ask(structure, params, context_B, start, parts_PM, asked_P, *, answer):
    """-ln p of `answer` tokens of each part from its token `asked` on, behind `start` tokens of context, and whether each is likeliest.

    Block by block the context goes through once, and each part's rows with the context's stream before them: what the
    buffer holds from `start` on lies in a causal row's future until the part is laid over it.
    """
    decoder, published = nnx.merge(structure, params), Switches()
    rows_M = start + jnp.arange(parts_PM.shape[1])

    def laid(over, part):
        return jax.lax.dynamic_update_slice_in_dim(over, part, start, axis=0)

    def step(streams, block):
        x_BD, parts_PMD = streams
        parts_PMD = jax.lax.map(lambda part_MD: block(laid(x_BD, part_MD), published, rows_M), parts_PMD)
        return (block(x_BD, published), parts_PMD), None

    def scores(part):
        hidden_MD, part_M, asked = part
        logits_AV = decoder.logits(jax.lax.dynamic_slice_in_dim(hidden_MD, asked - 1, answer))  # a token is predicted one before it
        target_A = jax.lax.dynamic_slice_in_dim(part_M, asked, answer)
        return optax.softmax_cross_entropy_with_integer_labels(logits_AV, target_A), jnp.argmax(logits_AV, axis=1) == target_A

    embedded_PMD = jax.lax.map(lambda part_M: decoder.embed(laid(context_B, part_M))[rows_M], parts_PM)
    (_, parts_PMD), _ = jax.lax.scan(step, (decoder.embed(context_B), embedded_PMD), decoder.blocks)
    return jax.lax.map(scores, (decoder.hidden(parts_PMD), parts_PM, asked_P))


def pair_influence(influence_T: np.ndarray, context: TextContext) -> np.ndarray:
    """Influence of each pair: the root of the sum of squares over its tokens, [N], from a prompt's profile."""
    return np.array([math.sqrt(np.sum(np.square(influence_T[start:stop]))) for start, stop in context.spans_N2])
