"""Recall of a key-value pair by its place in the context: the U-shaped curve of a network that learns in minutes.

    python -m experiments.recall
    python -m experiments.recall --intervention=curriculum
    python -m experiments.recall --compare --seeds=5
    python -m experiments.recall --weights=DIR --form=uuids

Trains a network from birth on contexts of pairs followed by questions, and draws its accuracy against the place of the
right pair, at birth, along training and at the end. `--compare` trains every intervention with the same steps, batches
and contexts over several seeds, each run in a folder of its own, so that a killed comparison goes on and several
processes can share it. `--weights` asks a language model the same in text, beside the influence of each pair.
"""

import dataclasses
import functools
import json
import math
import sys

import numpy as np
import scipy
from absl import flags

import lim
from experiments import cli
from lim import checkpoint, plot, profile, recall, tokens
from lim.influence import default_chunk
from lim.train import Recipe, rounded

TRAINING = ("questions", "keys", "values", "layers", "width", "steps", "batch", "learning_rate", "evaluations")
PAIRS, TEXT_PAIRS = 16, 100  # by default
RESULT = "result.json"  # of a finished run in a comparison
OF_TEXT = ("form", "contexts", "places", "probes", "profiles")


def define_flags():
    cli.define("pairs", cli.integer(3), None, f"pairs in a context; default {PAIRS}, with --weights {TEXT_PAIRS}")
    cli.define("questions", cli.integer(1), None, "questions in a training sequence, each about another pair; default one about each")
    cli.define("keys", cli.integer(2), None, "how many different keys there are; default as many as pairs")
    cli.define("values", cli.integer(2), 16, "how many different values there are")
    cli.define("layers", cli.integer(1), 2, "number of blocks")
    cli.define("width", cli.integer(64), 64, "width of the stream, a multiple of 64")
    cli.define("steps", cli.integer(1), 600, "updates")
    cli.define("batch", cli.integer(1), 32, "sequences in an update")
    cli.define("learning_rate", cli.real(0), 3e-3, "its peak")
    cli.define("evaluations", cli.integer(1), 24, "how often recall is measured along training")
    cli.define("held_out", cli.integer(1), 100, "held-out questions about each place, whenever recall is measured")
    cli.define("seed", cli.integer(0, 2**32 - 1), 0, "of weights, batches and questions; the first one with --compare")
    flags.DEFINE_enum("intervention", "none", list(recall.INTERVENTIONS),
                      "; ".join(f"{name}: {what}" for name, what in recall.INTERVENTIONS.items()))  # fmt: skip
    flags.DEFINE_bool("compare", False, "train under every intervention, over several seeds")
    cli.define("seeds", cli.integer(2), None, "how many, with --compare; default 5")
    cli.define("shard", cli.shard, None, "i/n, with --compare: do the i-th of n parts of the runs, beside other processes")
    flags.DEFINE_string("weights", None, "ask the language model in this folder with safetensors and a tokenizer, or hub id, in "
                        f"text, {recall.TEMPLATE!r}, the second line once a pair; an answer is right if each of its tokens is the likeliest")  # fmt: skip
    flags.DEFINE_enum("form", "numbers", list(recall.FORMS),
                      "keys and values in text; " + "; ".join(f"{name}: {what}" for name, what in recall.FORMS.items()))  # fmt: skip
    cli.define("contexts", cli.integer(1), 96, "contexts in text; each is asked about every place in turn")
    cli.define("places", cli.integer(2), 11, "how many places in a context in text are asked about, evenly spaced")
    cli.define("profiles", cli.integer(1), 3, "of how many prompts in text the influence profile is measured")
    cli.define("probes", cli.integer(2), 4, "random directions that are pulled back for it")
    flags.DEFINE_string("out", None, "folder for figures and results.json; default runs/recall/FLAGS")
    flags.adopt_module_key_flags(cli)


def folder_of(args):
    """The folder for results: by default named after the flags that say what is done."""
    said = cli.given(args, ["intervention", "pairs", *TRAINING, "held_out", "seed", "compare", "seeds", "weights", *OF_TEXT])
    return cli.output_folder(args.out or f"runs/recall/{cli.slug(said)}")


def refuse_strays(args):
    """Refuses flags that say nothing about what is asked for.

    Raises:
      ValueError: names them.
    """
    if args.weights and (strays := cli.given(args, [*TRAINING, "intervention", "compare", "held_out"])):
        raise ValueError(f"--{', --'.join(strays)}: not with --weights, which trains nothing")
    if not args.weights and (strays := cli.given(args, OF_TEXT)):
        raise ValueError(f"--{', --'.join(strays)}: {'is' if len(strays) == 1 else 'are'} for --weights only")
    if not args.compare and (args.seeds or args.shard):
        raise ValueError(f"--{'seeds' if args.seeds else 'shard'}: is for --compare")
    if args.compare and args["intervention"].present:
        raise ValueError("--compare, --intervention: give one of them")


# ---- training ----


@dataclasses.dataclass(frozen=True)
class Run:
    """One training to do: its task, network, recipe and intervention, and how recall is measured along it."""

    task: recall.Task
    config: lim.Config
    recipe: Recipe
    chosen: recall.Intervention
    evaluations: int
    held_out: int

    def train(self, folder, desc) -> recall.Curve:
        """Trains, or goes on; shows progress."""
        with cli.progress(total=self.recipe.steps, desc=desc, unit="step") as bar:
            return recall.train(self.task, self.config, self.recipe, self.chosen, folder, evaluations=self.evaluations,
                                count=self.held_out, on_step=lambda step: bar.update(step - bar.n))  # fmt: skip

    def about(self):
        """What makes a result this run's, as JSON has it."""
        return json.loads(json.dumps(dict(task=dataclasses.asdict(self.task), config=dataclasses.asdict(self.config),
                                          recipe=dataclasses.asdict(self.recipe), intervention=self.chosen.about(),
                                          evaluations=self.evaluations, held_out=self.held_out)))  # fmt: skip


def plan(args):
    """The runs that the flags ask for: (intervention, seed) → Run.

    Raises:
      ValueError: names the flag, its value and what is allowed.
    """
    seeds = range(args.seed, args.seed + (args.seeds or 5)) if args.compare else [args.seed]
    pairs = args.pairs or PAIRS
    task = recall.Task(pairs, args.questions or pairs, args.keys or pairs, args.values, args.seed)
    config = recall.network(task, args.layers, args.width)
    recipe = Recipe(args.steps, args.batch, learning_rate=args.learning_rate, weight_decay=0.01, warmup=0.1)
    names = recall.INTERVENTIONS if args.compare else [args.intervention]
    chosen = {name: recall.intervention(name, task, config) for name in names}
    return {(name, seed): Run(dataclasses.replace(task, seed=seed), config, recipe, chosen[name], min(args.evaluations, args.steps), args.held_out)
            for seed in seeds for name in names}  # fmt: skip


def chance(task):
    """What answers at random reach who know the values of the context: label and accuracy."""
    # a value drawn among the N of the context is right if it is the asked pair's, or by chance equal to it
    return "any value of the context", (1 + (task.pairs - 1) / task.values) / task.pairs


def one(folder, run):
    """Trains once, prints accuracy by place, draws the curve."""
    curve = run.train(folder, run.chosen.name)
    final = curve.final
    low_N, high_N = final.interval()
    crossed_N = recall.crossings(curve.steps_S, curve.accuracy_SN)
    print(f"\nRecall after {run.recipe.steps} steps by the place of the pair, {curve.count} questions each (95 % Wilson intervals), and the step "
          "at which half of the answers were right")  # fmt: skip
    print(cli.table(["place", "accuracy", "from", "to", "loss", "half at step"], [
        [n + 1, f"{final.accuracy_N[n]:.3f}", f"{low_N[n]:.3f}", f"{high_N[n]:.3f}", cli.number(final.loss_N[n], final.loss_se_N[n]), step_text(crossed_N[n])]
        for n in range(run.task.pairs)]))  # fmt: skip
    thirds = recall.thirds(final.accuracy_N)
    print("\nmean accuracy: first third {:.3f}, middle {:.3f}, last {:.3f}".format(*thirds))
    if run.chosen.switches.residual is not None:
        print(skip_line(run))
    shown = [s for s in range(len(curve.steps_S)) if s == 0 or s == len(curve.steps_S) - 1 or s % max(1, len(curve.steps_S) // 5) == 0]
    curves = {("at birth" if s == 0 else f"step {curve.steps_S[s]}"): (
        curve.accuracy_SN[s], *((low_N, high_N) if s == len(curve.steps_S) - 1 else (None, None))) for s in shown}  # fmt: skip
    losses = {label: (curve.loss_SN[s], None, None) for label, s in zip(curves, shown)}
    panels = [plot.Panel("right answers", curves, floor=chance(run.task), ordered=True, ylim=(-0.02, 1.02)),
              plot.Panel("loss of the answer, nats", losses, ordered=True)]  # fmt: skip
    plot.save(plot.place_figure(panels, title=f"Recall by place ({run.chosen.name})", caption=cli.command()), folder / "recall.png")
    return dict(run=run, curve=curve, wilson=[low_N, high_N], crossings=crossed_N, thirds=thirds)


def step_text(step):
    return f"{step:.0f}" if math.isfinite(step) else "never"


def skip_line(run):
    """What the skips' weights do to the predicted profile."""
    before, after = (recall.birth_profile(run.task, run.config, s) for s in (lim.Switches(), run.chosen.switches))
    weights = ", ".join(f"{r:.3g}" for r in run.chosen.switches.residual)
    return (f"skips of weight {weights}: kernel theory's spread of ln influence over places "
            f"{recall.spread(before):.3f} → {recall.spread(after):.3f}")  # fmt: skip


# ---- comparison ----


def compare(args, folder, runs):
    """Does this process's part of the runs, and shows all of them if they are there."""
    part, parts = map(int, (args.shard or "0/1").split("/"))
    for key, run in runs.items():  # a strange result is refused before any work
        stored(folder, key, run)
    for key, run in list(runs.items())[part::parts]:
        if stored(folder, key, run) is None:
            at = run_folder(folder, key)
            curve = run.train(at, f"{key[0]}, seed {key[1]}")
            cli.write_json(at / RESULT, dict(about=run.about(), curve=curve))
    curves = {key: stored(folder, key, run) for key, run in runs.items()}
    missing = sum(curve is None for curve in curves.values())
    if missing:
        print(f"{len(runs) - missing} of {len(runs)} runs are done; the table comes with the last of them")
        return None
    by_name = {name: [curve for (own, _), curve in curves.items() if own == name] for name in recall.INTERVENTIONS}
    return show(folder, by_name, runs["skip", args.seed])


def run_folder(folder, key):
    return folder / key[0] / f"seed{key[1]}"


def stored(folder, key, run):
    """A finished run's curve, or None.

    Raises:
      ValueError: the folder holds another training's, or what it holds is damaged.
    """
    path = run_folder(folder, key) / RESULT
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_bytes())
        ours = rounded(result["about"]) == rounded(run.about())
        values = {name: np.array(v, np.float64) if isinstance(v, list) else v for name, v in result["curve"].items()}
        curve = recall.Curve(**values) if ours else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"--out={folder}: {path} is damaged ({type(error).__name__}); without it the training is run again") from None
    if not ours:
        raise ValueError(f"--out={folder}: {path} holds the result of another training")
    return curve


MEASURES = {
    "first third": lambda curve: recall.thirds(curve.accuracy_SN[-1])[0],
    "middle third": lambda curve: recall.thirds(curve.accuracy_SN[-1])[1],
    "last third": lambda curve: recall.thirds(curve.accuracy_SN[-1])[2],
    "middle/ends": lambda curve: recall.valley(curve.accuracy_SN[-1]),
    "loss": lambda curve: float(np.mean(curve.loss_SN[-1])),
    "middle along": lambda curve: recall.thirds(along(curve))[1],
    "middle half at": lambda curve: float(half_at(curve)[1]),
}


def half_at(curve):
    """The steps at which the mean accuracy of the first, the middle and the last third reaches one half."""
    return recall.crossings(curve.steps_S, np.array([recall.thirds(accuracy_N) for accuracy_N in curve.accuracy_SN]))


def order_line(curves):
    """Whether the middle is learned last: steps to one half by thirds, and their paired differences over seeds."""
    first_S, middle_S, last_S = np.transpose([half_at(curve) for curve in curves])
    return (f"Plain training answers half of the questions at step {with_interval(first_S)} about the first third, {with_interval(middle_S)} "
            f"about the middle, {with_interval(last_S)} about the last;\nmiddle minus first {with_interval(minus(middle_S, first_S), sign=True)}, "
            f"middle minus last {with_interval(minus(middle_S, last_S), sign=True)} steps")  # fmt: skip


def show(folder, curves, skip_run):
    """Tables, sentences and the figure of a comparison."""
    measured = {name: {key: np.array([measure(c) for c in cs]) for key, measure in MEASURES.items()} for name, cs in curves.items()}
    seeds = len(curves["none"])
    print(f"\nAt the end, over {seeds} seeds: mean accuracy by thirds of the places, the middle third over the mean of the two end thirds, mean loss in nats;\n"
          "of the middle third, the mean accuracy along training and the step at which it reached one half (± half a 95 % Student interval)")  # fmt: skip
    print(cli.table(["intervention", *MEASURES], [[name, *(with_interval(v) for v in values.values())] for name, values in measured.items()]))
    print("\nDifference from plain training of the same seed (± half a 95 % Student interval over seeds)")
    differences = {name: {key: minus(values[key], measured["none"][key]) for key in MEASURES}
                   for name, values in measured.items() if name != "none"}  # fmt: skip
    print(cli.table(["intervention", *MEASURES], [[name, *(with_interval(d, sign=True) for d in each.values())] for name, each in differences.items()]))
    print("\n" + order_line(curves["none"]))
    print("\n" + skip_line(skip_run))
    print("\n" + "\n".join(verdict(name, each) for name, each in differences.items()))
    print(f"(A change is what is clear of 0; of {sum(map(len, differences.values()))} differences one in twenty would be, were there none.)")
    panels = [plot.Panel("right answers at the end", {name: band([c.accuracy_SN[-1] for c in cs]) for name, cs in curves.items()},
                         floor=chance(skip_run.task), ylim=(-0.02, 1.02)),
              plot.Panel("right answers, mean along training",
                         {name: band([along(c) for c in cs]) for name, cs in curves.items()}, ylim=(-0.02, 1.02))]  # fmt: skip
    plot.save(plot.place_figure(panels, title=f"Recall by place, {seeds} seeds (bands: 95 % of the mean)", caption=cli.command()), folder / "compare.png")
    return dict(measured=measured, differences=differences)


def along(curve):
    """Mean accuracy over the steps of training by place, [N]: how early each is learned."""
    return scipy.integrate.trapezoid(curve.accuracy_SN, curve.steps_S, axis=0) / curve.steps_S[-1]


def minus(values_S, baseline_S):
    """Differences by seed; NaN where both never reached the level."""
    with np.errstate(invalid="ignore"):
        return values_S - baseline_S


def band(rows_SN):
    """Mean over seeds and the limits of its interval."""
    means, halves = zip(*(recall.t_interval(values_S) for values_S in np.transpose(rows_SN)))
    return np.array(means), np.subtract(means, halves), np.add(means, halves)


def with_interval(values_S, sign=False):
    """Mean and half interval as text; how many seeds have a finite number where not all do."""
    finite = np.isfinite(values_S)
    if not finite.all():
        return f"{finite.sum()} of {len(values_S)} seeds"
    mean, half = recall.t_interval(values_S)
    text = cli.number(mean, half)
    return "+" + text if sign and mean > 0 and not text.startswith("(") else text


def verdict(name, differences):
    """What the paired differences carry, in a sentence: what is not clear of 0 is not called a change."""
    means = {key: recall.t_interval(values_S) for key, values_S in differences.items() if np.all(np.isfinite(values_S))}
    signs = {key: int(np.sign(mean)) if abs(mean) > half else 0 for key, (mean, half) in means.items()}

    def clear(words):
        """What changed among these measures."""
        changed = [f"{key} {with_interval(differences[key], sign=True)}" for key in words if signs.get(key)]
        return ", ".join(changed) if changed else "no clear change"

    crosses = {1: "raises the middle", 0: "does not clearly change the middle", -1: "lowers the middle"}[signs.get("middle third", 0)]
    depth = {1: " and makes the valley shallower", 0: "", -1: " and deepens the valley"}[signs.get("middle/ends", 0)]
    return (f"{name} {crosses}{depth}: {clear(['middle third', 'middle/ends', 'middle along', 'middle half at'])}; "
            f"elsewhere: {clear(['first third', 'last third', 'loss'])}.")  # fmt: skip


# ---- a language model in text ----


def load(args):
    """The language model, its contexts, the places asked about and the room for a prompt with its answer.

    Raises:
      ValueError: names the flag, its value and what is allowed.
    """
    pairs = args.pairs or TEXT_PAIRS
    if args.places > pairs:
        raise ValueError(f"--places={args.places}: allowed are 2 to {pairs}, the pairs")
    if args.profiles > args.contexts:
        raise ValueError(f"--profiles={args.profiles}: allowed are 1 to {args.contexts}, the contexts")
    if under := checkpoint.switches_of(args.weights):
        raise ValueError(f"--weights={args.weights}: was trained under {', '.join(under)}; networks are asked as published")
    tokenizer = checkpoint.tokenizer_of(args.weights)
    decoder = lim.Decoder.from_pretrained(args.weights)
    encode = functools.partial(tokens.encode, tokenizer=tokenizer, vocab=decoder.config.vocab)
    decode = functools.partial(tokens.decode, tokenizer=tokenizer)
    contexts = [recall.text_context(encode, decode, pairs, args.form, np.random.default_rng([args.seed, i])) for i in range(args.contexts)]
    places = np.round(np.linspace(0, pairs - 1, args.places)).astype(int)
    room = max(context.room(places) for context in contexts)
    if room > decoder.config.max_length:
        raise ValueError(f"--pairs={pairs}: prompts reach {room} tokens, and {args.weights} holds at most {decoder.config.max_length} positions")
    if args.probes > decoder.config.width:
        raise ValueError(f"--probes={args.probes}: allowed are 2 to {decoder.config.width}")
    lim.check_compiler(room * default_chunk(decoder.config, room, args.probes), decoder.config.width)
    return decoder, contexts, places, room


def in_text(args, folder, decoder, contexts, places, room):
    """Asks every context about every place, measures influence profiles, prints and draws both."""
    asked = [recall.ask(decoder, context, places, room) for context in cli.progress(contexts, desc="asking", unit="context")]
    right_PB, first_PB, loss_PB = (np.stack(column, axis=1) for column in zip(*asked))
    found = recall.Recall.of(right_PB, loss_PB)
    low_P, high_P = found.interval()
    about_P = places[np.round(np.linspace(0, len(places) - 1, args.profiles)).astype(int)]
    profiles_WN = []
    for context, n in cli.progress(list(zip(contexts, about_P)), desc="influence", unit="prompt"):
        prompt = context.prompt(n)
        padded = np.pad(prompt, (0, room - len(prompt)))  # behind what is read, so without influence: one compilation for all
        measured = lim.influence(decoder, padded, read=len(prompt) - 1, probes=args.probes, seed=args.seed)
        profiles_WN.append(recall.pair_influence(measured.influence_L, context))
    median_N, error_N = profile.median_profile(np.array(profiles_WN), logs=True)
    print(f"\n{args.weights}, {len(contexts)} contexts of {len(median_N)} pairs, about {len(contexts[0].tokens_C)} tokens: recall by the place of the "
          "pair (95 % Wilson intervals; right:\nevery token of the answer is the likeliest), loss of the answer in nats, and the pair's influence on "
          f"the final norm's output at the\nquestion's end, whichever pair is asked (median over {args.profiles} prompts, each about one pair)")  # fmt: skip
    print(cli.table(["place", "accuracy", "from", "to", "first token", "loss", "influence"], [
        [n + 1, f"{found.accuracy_N[i]:.3f}", f"{low_P[i]:.3f}", f"{high_P[i]:.3f}", f"{first_PB[i].mean():.3f}",
         cli.number(found.loss_N[i], found.loss_se_N[i]), cli.number(median_N[n], error_N[n])] for i, n in enumerate(places)]))  # fmt: skip
    print(f"\nrank correlation over places of influence with accuracy {correlation(median_N[places], found.accuracy_N)}, "
          f"with loss {correlation(median_N[places], found.loss_N)}")  # fmt: skip
    all_N = np.arange(len(median_N))
    panels = [plot.Panel("right answers", {"accuracy (band: 95 %)": (found.accuracy_N, low_P, high_P)}, ylim=(-0.02, 1.02), places=places),
              plot.Panel("loss of the answer, nats", {"loss (band: ± standard error)": (
                  found.loss_N, found.loss_N - found.loss_se_N, found.loss_N + found.loss_se_N)}, places=places),
              plot.Panel("influence of the pair, whichever is asked", {f"median of {args.profiles} prompts": (median_N, None, None)}, yscale="log",
                         places=all_N)]  # fmt: skip
    plot.save(plot.place_figure(panels, title="Recall in text by place", caption=cli.command()), folder / "recall.png")
    return dict(places=places, recall=found, wilson=[low_P, high_P], right=right_PB, first_token=first_PB, loss=loss_PB, influence=profiles_WN)


def correlation(x, y):
    """Spearman's, as text."""
    value = scipy.stats.spearmanr(x, y).statistic if len(set(x)) > 1 and len(set(y)) > 1 else math.nan
    return cli.number(value)


def main(args):
    with cli.refusing():
        refuse_strays(args)
        work = load(args) if args.weights else plan(args)
        folder = folder_of(args)
        provenance = cli.provenance()
    try:
        with cli.refusing(), cli.interruptible():
            if args.weights:
                found = in_text(args, folder, *work)
            elif args.compare:
                found = compare(args, folder, work)
            else:
                found = one(folder, *work.values())
    except FloatingPointError as error:
        sys.exit(f"{cli.command_name()}: {error}; what was evaluated before is kept in {folder}")
    except KeyboardInterrupt:
        print(f"interrupted{'' if args.weights else '; the same command goes on from the last evaluation'}", file=sys.stderr)
        sys.exit(130)
    if found is not None:
        cli.write_json(folder / "results.json", dict(provenance=provenance, flags=cli.flag_values(args)) | found)
        print(f"\nwrote {folder / 'results.json'} and the figure beside it")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
