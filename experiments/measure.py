"""Measure the influence profile of one model, your checkpoint or a network at birth, on real text.

    python -m experiments.measure
    python -m experiments.measure --weights=DIR --tokens=FILE.txt --length=512 --probes=16 --windows=4 --compare=random

Windows of the text are measured one by one, and the median over them is shown. `--compare=random` measures the same
architecture at birth on the same windows, beside the kernel theory and the paper's operator.
"""

import dataclasses
import sys

import numpy as np
from absl import flags

import lim
from experiments import cli
from lim import checkpoint, plot, profile, rollout, sweep, tokens
from lim.influence import default_chunk, entries
from lim.theory import kernel, paper


def define_flags():
    cli.define("model", cli.model, None, f"with random weights: one of {', '.join(lim.config.PRESETS)}, or a folder "
               "with a config.json; default small")  # fmt: skip
    flags.DEFINE_string("weights", "random", "random, a folder with safetensors, a hub id, or the folder of an experiments.train")
    flags.DEFINE_string("tokens", None, "a UTF-8 text file, or random; default a text that every Python holds")
    cli.define("length", cli.integer(2), 256, "tokens in a window")
    cli.define("windows", cli.integer(1), 4, "windows of the text, evenly spaced")
    flags.DEFINE_enum("compare", None, ["random"], "measure the same architecture at birth, too")
    flags.DEFINE_bool("rollout", False, "add the attention rollout, with strengths measured from norms")
    cli.define_switches(lists=False)
    cli.define_measurement()
    flags.adopt_module_key_flags(cli)


def load(args):
    """The decoder to measure, its windows [W, L] and its switches, checked.

    Raises:
      ValueError: names the flag or file, its value and what is allowed.
    """
    if args.weights == "random":
        config = cli.read_config(args.model or "small")
        config = config.replace(max_length=max(config.max_length, args.length))
        decoder = None  # each window draws its own
    else:
        if args.model is not None:
            raise ValueError("--model, --weights: the weights' folder holds their config; give one of them")
        decoder = lim.Decoder.from_pretrained(args.weights)
        config = decoder.config
        if args.length > config.max_length:
            raise ValueError(f"--length={args.length}: {args.weights} holds at most {config.max_length} positions")
    cli.check_seeds(args.seed, args.windows, "windows")
    switches = lim.Switches(**cli.switches_of(args, None if args.weights == "random" else args.weights))
    switches.check(config)
    if args.rollout and args.source:
        raise ValueError(f"--source={args.source}, --rollout: the rollout starts at the embedding, source 0")
    if not args.source < config.layers:
        raise ValueError(f"--source={args.source}: allowed are 0 to {config.layers - 1}")
    cli.probes_for(config, args)
    if args.tokens == "random":
        windows_WL = np.stack([lim.random_tokens(config.vocab, args.length, args.seed + w) for w in range(args.windows)])
    else:
        text = tokens.standard_text() if args.tokens is None else tokens.read_text(args.tokens)
        ids = tokens.encode(text, None if decoder is None else checkpoint.tokenizer_of(args.weights), config.vocab)
        windows_WL = tokens.windows(ids, args.length, args.windows)
        cli.note_overlap(len(ids), args.length, args.windows)
    return decoder, config, windows_WL, switches


def words(switches):
    """name → text of the switches that are set, one number or one per layer."""
    return {name: ",".join(f"{v:g}" for v in np.atleast_1d(value)) for name, value in dataclasses.asdict(switches).items() if value is not None}


def measure(decoder, config, windows_WL, switches, args, name):
    """Profiles and their probes' standard errors, [W, L]; without a decoder, window w is given to seed w's network.

    What float32 does not hold ends the command with one line.
    """
    measured = []
    for w, tokens_L in enumerate(cli.progress(windows_WL, desc=name, unit="window")):
        network = lim.Decoder.at_birth(config, args.seed + w) if decoder is None else decoder
        measured.append(lim.influence(network, tokens_L, switches, output=args.output, source=args.source,
                                      probes=cli.probes_for(config, args), seed=args.seed + w))  # fmt: skip
        if why := sweep.fault(measured[-1].influence_L):
            cli.refuse(f"{name}, window {w + 1} of {len(windows_WL)}: {why}")
    return np.stack([m.influence_L for m in measured]), np.stack([m.stderr_L for m in measured])


def roll_out(decoder, config, windows_WL, switches, args):
    """The rollout of each window, of the checkpoint or of the windows' networks at birth."""
    return [
        rollout.measure(lim.Decoder.at_birth(config, args.seed + w) if decoder is None else decoder, tokens_L, switches)
        for w, tokens_L in enumerate(cli.progress(windows_WL, desc="rollout", unit="window"))
    ]


def combine(profiles_WL, at_birth):
    """The profile that stands for several, and its standard error: rms over networks at birth, else median over windows."""
    if at_birth:
        return profile.jackknife(lambda p: p, profiles_WL)
    return profile.median_profile(profiles_WL, logs=True)


def drawn(profiles_WL, probe_WL, at_birth):
    """`combine`, and what the standard error is, for the legend: of one window the probes', nan if every direction was pulled back."""
    shown_L, stderr_L = combine(profiles_WL, at_birth)
    if len(profiles_WL) == 1:  # how windows or networks scatter is not known
        return shown_L, np.where(probe_WL[0] > 0, probe_WL[0], np.nan), "standard error of the probes"
    return shown_L, stderr_L, "standard error"


def birth_theory(config, windows_WL, switches, args):
    """The kernel theory of the windows' networks at birth (rms over windows), with its refusal where it has none."""
    try:
        each = [kernel.predict(config, args.length, switches, output=args.output, source=args.source, tokens=tokens_L)
                for tokens_L in cli.progress(windows_WL, desc="kernel theory", unit="window")]  # fmt: skip
    except ValueError as error:
        return None, str(error)
    return dataclasses.replace(each[0], influence_L=profile.rms([t.influence_L for t in each])), None


def row(name, profiles_WL, at_birth):
    """One line of the table, with jackknife errors over windows or seeds."""
    s = profile.summarize_seeds(profiles_WL) if at_birth else profile.summarize_windows(profiles_WL)
    return s, [name, s.shape, cli.number(s.primacy, s.primacy_se), cli.number(s.recency, s.recency_se),
               cli.number(s.anchor, s.anchor_se), str(s.valley + 1), cli.number(s.middle_over_valley), cli.number(s.last)]  # fmt: skip


def changes(trained_WL, birth_WL):
    """How many times each ratio of birth the trained network's is, window by window: the median, and its standard error.

    A ratio that is 0 or infinite in some window, where an end or a middle is not heard, is left out.
    """
    found = {}
    for key in ("primacy", "recency", "anchor"):
        trained_W, birth_W = np.array([[profile.ratios(profile_L)[key] for profile_L in profiles_WL] for profiles_WL in (trained_WL, birth_WL)])
        if np.all((0 < trained_W) & (trained_W < np.inf) & (0 < birth_W) & (birth_W < np.inf)):
            change_W = trained_W / birth_W
            (median,), (error,) = profile.median_profile(change_W[:, None], logs=True)
            found[key] = dict(median=median, stderr=error)
    return found


def main(args):
    with cli.refusing():
        folder = cli.output_folder(args.out)
        decoder, config, windows_WL, switches = load(args)
        cotangents = cli.probes_for(config, args) or entries(config, args.output)
        lim.check_compiler(args.length * default_chunk(config, args.length, cotangents), config.width)
        provenance = cli.provenance()
    under = "".join(f", {name}={text}" for name, text in words(switches).items())
    print(f"{args.weights}: {config.family}, {config.layers} layers, width {config.width}{under}; {len(windows_WL)} windows of {args.length} tokens. "
          "The first compiles, too.", file=sys.stderr)  # fmt: skip
    runs = {}
    if decoder is not None:
        runs[args.weights] = measure(decoder, config, windows_WL, switches, args, "checkpoint")
    if decoder is None or args.compare:
        runs["at birth"] = measure(None, config, windows_WL, switches, args, "at birth")
    content = dict(provenance=provenance, flags=cli.flag_values(args), config=config, tokens=windows_WL,
                   runs={each: dict(influence=p, stderr=e) for each, (p, e) in runs.items()})  # fmt: skip
    cli.write_json(folder / "results.json", content)  # kept, whatever becomes of the rest

    summaries, rows = {}, []
    for name, (profiles_WL, _) in runs.items():
        summaries[name], line = row(name, profiles_WL, at_birth=name == "at birth")
        rows.append(line)
    print(f"\n{len(windows_WL)} windows of {args.length} tokens: of a checkpoint the median over windows of each ratio (lowest at, middle/lowest "
          "and last: of the median profile),\nroot mean square over networks at birth (± standard error over windows or networks)")  # fmt: skip
    print(cli.table(["network", "shape", "first/middle", "last/middle", "last/next", "lowest at", "middle/lowest", "last"], rows))

    changed = changes(*(profiles_WL for profiles_WL, _ in runs.values())) if len(runs) == 2 else {}
    if changed:
        ends = dict(primacy="first/middle", recency="last/middle", anchor="last/next")
        print("From birth to the checkpoint, window by window (median, ± standard error over windows): "
              + ", ".join(f"{ends[key]} times {cli.number(each['median'], each['stderr'])}" for key, each in changed.items()))  # fmt: skip

    name = next(iter(runs))
    at_birth = name == "at birth"
    profiles_WL, probe_WL = runs[name]
    shown_L, stderr_L, error = drawn(profiles_WL, probe_WL, at_birth)
    curves, comparisons, theory = {}, [], None
    if "at birth" in runs:
        birth_WL = runs["at birth"][0]
        birth_L = profile.rms(birth_WL)
        theory, refusal = birth_theory(config, windows_WL, switches, args)
        if not at_birth:
            curves["same architecture at birth"] = birth_L
        if theory is None:
            print(f"no kernel theory: {refusal}")
        else:
            curves["kernel theory at birth (band: one seed's scatter)"] = (theory.finite_width_L, theory.cv / 2)
            comparisons.append(["at birth", "kernel theory", *distances(birth_WL, lambda rms_L: theory.finite_width_L, scaled=False)])
    rolled = None
    if args.rollout:
        rolled = roll_out(decoder, config, windows_WL, switches, args)
        rollout_L = np.mean([each.rollout_L for each in rolled], axis=0)
        curves["attention rollout (scale fitted)"] = rollout_L * np.exp(np.median(np.log(shown_L / np.maximum(rollout_L, 1e-300))))
        comparisons.append([name, "attention rollout", *distances(profiles_WL, lambda shown_L: rollout_L, True, at_birth)])
        print("\nStrength of each layer's attention at the last position, and its attention to the first token")
        print(cli.table(["layer", "strength", "first token"], [
            [n + 1, f"{a:.3g}", f"{f:.3g}"] for n, (a, f) in enumerate(zip(np.mean([r.strengths_N for r in rolled], axis=0),
                                                                       np.mean([r.first_token_N for r in rolled], axis=0)))]))  # fmt: skip
    strength, fitted_L = paper.fit(shown_L, config, switches, source=args.source)
    curves[f"paper's operator, a fitted: {strength:.3f}"] = fitted_L
    for each, (profiles, _) in runs.items():
        combined_L, _ = combine(profiles, each == "at birth")
        fit = lambda p: paper.fit(p, config, switches, source=args.source)  # noqa: E731
        comparisons.append([each, f"paper's operator, fitted a={fit(combined_L)[0]:.3f}",
                            *distances(profiles, lambda p: fit(p)[1], True, each == "at birth")])  # fmt: skip
    print("\nDistance of the predictions: rank correlation, and median and largest |ln measured/predicted| over positions")
    print(cli.table(["network", "prediction", "Spearman", "median", "max"], comparisons))

    for each, kept in content["runs"].items():
        kept["summary"] = summaries[each]
    content |= dict(change=changed, theory=theory, paper=dict(strength=strength, profile=fitted_L), rollout=rolled)
    cli.write_json(folder / "results.json", content)
    figure = plot.influence_figure(shown_L, stderr_L=stderr_L, error=error, curves=curves, summary=summaries[name], caption=cli.command(),
                                   measured_label=name, title=f"{config.family}, {config.layers} layers, width {config.width}")  # fmt: skip
    plot.save(figure, folder / "influence.png")
    print(f"\nwrote {folder / 'influence.png'} and {folder / 'results.json'}")


def distances(profiles_WL, predict, scaled, at_birth=True):
    """Spearman, median and largest log-distance of the combined profile from `predict` of it, as text.

    At birth with standard errors: `predict`, which may fit something, sees the profile without each network.
    """
    names = ("spearman", *(f"{'shape_' * scaled}log_{which}" for which in ("median", "max")))
    if at_birth:
        value, error = profile.jackknife(lambda p: profile.compare(p, predict(p)), profiles_WL)
    else:
        combined_L, _ = combine(profiles_WL, False)
        value, error = profile.compare(combined_L, predict(combined_L)), {}
    return [cli.number(value[name], error.get(name, np.nan)) for name in names]


if __name__ == "__main__":
    define_flags()
    cli.run(main)
