"""Train a network and watch its valley: influence, sinks, boundaries and gradients at log-spaced steps.

    python -m experiments.train
    python -m experiments.train --layers=24 --width=64 --length=512 --batch=4 --steps=2000
    python -m experiments.train --weights=DIR --text=a.txt,b.txt --learning_rate=1e-4

Reads bytes of what every Python brings along, or --text. The same line goes on where a run was stopped or killed, with
the same losses; a finished run is drawn again. `lim.open(OUT)` gives what was measured, step × window × position, and
--weights=OUT of experiments.measure the trained network.
"""

import dataclasses
import hashlib
import json
import math
import os
import sys

import jax
import numpy as np
from absl import flags
from tensorboardX import SummaryWriter

import lim
from experiments import cli
from lim import checkpoint, plot, profile, store, tokens, train, watch
from lim.influence import default_chunk
from lim.model import params_of
from lim.theory import averaging

DECIDE = ("model", "layers", "width", "weights", "text", "tokenizer", "length", "steps", "batch", "accumulate", "learning_rate",
          "warmup", "weight_decay", "clip", "seed", "windows", "measurements", "measure_at", "probes", *cli.SWITCHES)  # fmt: skip
RECIPE = train.Recipe()
LOG = "metrics.jsonl"
EVALUATED = 64  # held-out windows behind each printed loss, where there are as many


def define_flags():
    cli.define("model", cli.model, "small", f"one of {', '.join(lim.config.PRESETS)}, or a folder with a config.json")
    cli.define("layers", cli.integer(1), None, "number of blocks, if not the model's own")
    cli.define("width", cli.integer(1), None, "width of the stream, if not the model's own; heads and MLP keep their proportions")
    flags.DEFINE_string("weights", None, "start from these (a folder or hub id) instead of at birth")
    flags.DEFINE_list("text", None, "UTF-8 files, each a document; default pydoc's topics and the standard library's functions")
    flags.DEFINE_string("tokenizer", None, "a folder or hub id; default the bytes of the text, or that of --weights")
    cli.define("length", cli.integer(10), 256, "tokens in a window")
    cli.define("steps", cli.integer(1), 400, "updates in all")
    cli.define("batch", cli.integer(1), 8, "windows in an update, over all devices")
    cli.define("accumulate", cli.integer(1), RECIPE.accumulate, "parts of a batch, one after the other, to save memory")
    cli.define("learning_rate", cli.real(0), RECIPE.learning_rate, "at its peak, behind a linear warm-up; then a cosine down to a tenth")
    cli.define("warmup", cli.real(0, 1), RECIPE.warmup, "share of the steps until the peak")
    cli.define("weight_decay", cli.real(0), RECIPE.weight_decay, "of kernels and embeddings")
    cli.define("clip", lambda text: math.inf if text == "inf" else cli.real(0)(text), RECIPE.clip, "largest norm of a gradient; inf for none")
    cli.define("seed", cli.integer(0), 0, "of weights and of the order of windows")
    cli.define("windows", cli.integer(2), 8, "held-out windows that are measured, with beginnings of documents in them where there are")
    cli.define("measurements", cli.integer(2, 10_000), 10, "steps at which influence is measured, the first and the last among them")
    cli.define_axis("measure_at", cli.integer(0), "further steps at which it is measured")
    cli.define("probes", cli.integer(2), 16, "random directions per measured profile; see experiments.ablate")
    cli.define("save_every", cli.integer(1), None, "steps from checkpoint to checkpoint; default a tenth of all")
    cli.define("keep", cli.integer(1), 1, "checkpoints with the lowest held-out loss that stay, besides the latest two")
    flags.DEFINE_bool("resume", True, "go on where a run with the same flags left off; --noresume starts again")
    flags.DEFINE_string("out", None, "folder of results; default runs/train/ and the flags that are given")
    cli.define_switches(lists=False)
    flags.adopt_module_key_flags(cli)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the flags mean: the network, the texts, and what decides the numbers, as JSON."""

    config: lim.Config
    recipe: train.Recipe
    switches: lim.Switches
    packed: tokens.Packed
    held_out: tokens.Packed
    held_out_texts: list
    separator: int
    about: dict


def read(args) -> tuple[Plan, lim.Decoder | None]:
    """The plan of the flags, and the network of --weights.

    Raises:
      ValueError: names the flag or file, its value and what is allowed.
    """
    if args.weights and args.out and os.path.realpath(os.path.expanduser(args.weights)) == os.path.realpath(os.path.expanduser(args.out)):
        raise ValueError(f"--weights={args.weights}, --out={args.out}: are one folder; what is trained from these weights goes to another")
    tokenizer = args.tokenizer or (args.weights and checkpoint.tokenizer_of(args.weights))
    if tokenizer == args.weights is not None and os.path.isdir(folder := os.path.realpath(os.path.expanduser(tokenizer))):
        tokenizer = folder  # however it is spelled, and for whoever asks the training for its tokenizer from elsewhere
    if args.weights is not None:
        if also := cli.given(args, ("model", "layers", "width")):
            raise ValueError(f"--{', --'.join(also)}: --weights has a config of its own; leave out either")
        config = checkpoint.config_of(args.weights)
        if args.length > config.max_length:
            raise ValueError(f"--length={args.length}: {args.weights} holds at most {config.max_length} positions")
    else:
        config = cli.read_config(args.model)
        sizes = {name: value for name in ("layers", "width") if (value := getattr(args, name)) is not None}
        config = config.replace(max_length=max(config.max_length, args.length), **sizes)
        if tokenizer is None:
            config = config.replace(vocab=tokens.BYTES + 1)
        elif not cli.given(args, ("model",)):
            config = config.replace(vocab=max(config.vocab, tokens.vocabulary(tokenizer)))
    recipe = train.Recipe(**{field.name: getattr(args, field.name) for field in dataclasses.fields(train.Recipe) if field.name in args})
    chosen = cli.switches_of(args, args.weights)
    switches = lim.Switches(**chosen)
    switches.check(config)
    if args.probes > config.width:
        raise ValueError(f"--probes={args.probes}: allowed are 2 to {config.width}, the width")
    if "" in (args.text or []):
        raise ValueError(f"--text={','.join(args.text)}: holds an empty name; allowed are names of files, with commas between them")
    documents = tokens.standard_documents() if args.text is None else [tokens.read_text(path) for path in args.text]
    if len(documents) == 1:
        documents = documents[0].split("\n\n")
    if len(documents) == 1:
        raise ValueError(f"--text={args.text[0]}: one document cannot be parted; give 2 files or more, or one with blank lines between documents")
    trained, held_out = tokens.split(documents)
    packed, evaluated = (tokens.pack(part, tokenizer, config.vocab) for part in (trained, held_out))
    measured = {*watch.log_spaced(args.steps, args.measurements), *(item.value for item in args.measure_at or ())}
    if max(measured) > args.steps:
        raise ValueError(f"--measure_at={max(measured)}: allowed are 0 to {args.steps}, the steps")
    tokens.Reader(packed.ids, args.length, args.batch)  # refuses a text that is too short
    watch.boundary_windows(evaluated, args.length, args.windows)
    digest = hashlib.sha256(packed.ids.tobytes() + evaluated.ids.tobytes()).hexdigest()
    decoder = None if args.weights is None else lim.Decoder.from_pretrained(args.weights)
    about = dict(config=dataclasses.asdict(config), recipe=dataclasses.asdict(recipe), text=digest, tokenizer=tokenizer, length=args.length,
                 weights=None if decoder is None else digest_of(decoder), switches=chosen, windows=args.windows,
                 measured=sorted(measured), probes=args.probes)  # fmt: skip
    return Plan(config, recipe, switches, packed, evaluated, held_out, tokens.separator(tokenizer), json.loads(json.dumps(about))), decoder


def digest_of(decoder):
    """What tells these weights from others, wherever they lie: a hash of every one, by its place."""
    said = hashlib.sha256()
    for path, values in jax.tree_util.tree_leaves_with_path(params_of(decoder)):
        said.update(f"{jax.tree_util.keystr(path)} {values.dtype} {values.shape}".encode() + np.asarray(values).tobytes())
    return f"sha256:{said.hexdigest()}"


def even_windows(ids, length):
    """Up to `EVALUATED` windows of the held-out text that do not overlap, [W, L + 1]."""
    return tokens.windows(ids, length + 1, max(1, min(EVALUATED, len(ids) // (length + 1))))


class Log:
    """metrics.jsonl, one line an update, and the same as TensorBoard events; a resumed run drops what came after its checkpoint."""

    def __init__(self, folder, lines, step):
        kept = [line for at, line in lines if at <= step]
        cli.put(folder, LOG, lambda path: path.write_text("".join(kept), encoding="utf-8"))
        self.file = (folder / LOG).open("a", encoding="utf-8")
        self.events = SummaryWriter(str(folder / "events"), purge_step=step + 1, write_to_disk=True)

    @staticmethod
    def read(folder):
        """(step, line) of every whole line that an earlier run left.

        Raises:
          ValueError: the log is damaged, or a folder.
        """
        if not (path := folder / LOG).exists():
            return []
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
            return [(int(json.loads(line)["step"]), line) for line in lines]
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: is damaged ({type(error).__name__}); remove it, and the log begins anew") from None

    def write(self, **values):
        """One line; `step` must be among the values."""
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        for name in values.keys() - {"step"}:
            self.events.add_scalar(name, values[name], values["step"])

    def close(self):
        self.file.close()
        self.events.close()


def run(plan, args, folder, trainer, lines, attributes):
    """Trains, measures and saves until all is done; returns the number of updates it has then, fewer if it was stopped."""
    with cli.refusing():  # what an earlier run left may be damaged
        checkpoints = train.Checkpoints(folder, args.keep)
        checkpoints.restore(trainer, plan.about)
        seen = watch.Watch(folder, steps=plan.about["measured"], windows_WT=watch.boundary_windows(plan.held_out, args.length, args.windows),
                           separator=plan.separator, layers=plan.config.layers, spec=plan.about, attributes=attributes)  # fmt: skip
    log = Log(folder, lines, trainer.step)
    try:
        return updated(plan, args, trainer, checkpoints, seen, log)
    finally:  # however it ends: the newest checkpoint may still be on its way to the disk
        log.close()
        checkpoints.close()


def updated(plan, args, trainer, checkpoints, seen, log):
    """The updates of `run`, from where the trainer stands."""
    reader = tokens.Reader(plan.packed.ids, args.length, args.batch, plan.recipe.seed)
    held_out_WT, every = even_windows(plan.held_out.ids, args.length), args.save_every or -(-plan.recipe.steps // 10)
    weights_BL = np.ones((args.batch, args.length), np.float32)
    per_update, first = args.batch * args.length, trainer.step
    bar = cli.progress(total=plan.recipe.steps * per_update, initial=trainer.step * per_update, unit="tok", unit_scale=True)
    with bar, cli.stopping() as stop:
        while True:
            step = trainer.step
            if not seen.done(step):
                bar.set_description(f"step {step}: measuring")
                seen.measure(step, trainer.decoder, plan.switches, probes=args.probes)
                bar.unpause()  # time left is of the updates
            last = step == plan.recipe.steps or stop()
            if step not in checkpoints.steps() and (step % every == 0 or last):
                held_out = float(train.losses(trainer.decoder, held_out_WT, plan.switches).mean())
                log.write(step=step, held_out=held_out)
                checkpoints.save(trainer, held_out, plan.about)
            if last:
                break
            update = trainer.update(reader(step), weights_BL)
            if step == first:  # compilation is over
                bar.unpause()
            log.write(**dataclasses.asdict(update))
            bar.set_description(f"step {update.step}, loss {update.loss:.3f}", refresh=False)
            bar.update(per_update)
    return trainer.step


def show(ds, plan, folder):
    """Tables and figures of what is measured so far."""
    ds = ds.isel(step=np.flatnonzero(ds.done.values))
    bits = len(plan.held_out.ids) / plan.held_out.text_bytes / np.log(2)  # nats per token → bits per byte
    rows, peaks = [], {}
    for step in ds.step.values:
        at = ds.sel(step=step)
        s = profile.summarize_windows(at.influence.values)
        try:
            peaks[step] = profile.boundaries(at.influence.values, ds.boundary.values)
            effect = f"{peaks[step].d_O[len(peaks[step].d_O) // 2 + peaks[step].peak]:+.2f} at +{peaks[step].peak} (p {peaks[step].peak_p:.3g})"
        except ValueError:
            effect = "–"
        rows.append([step, f"{at.loss.mean().item() * bits:.3f}", s.shape, cli.number(s.primacy, s.primacy_se), cli.number(s.recency, s.recency_se),
                     f"{at.first_token.mean().item():.3g}", effect])  # fmt: skip
    length = ds.sizes["position"]
    level = uniform_level(plan, length)
    print(f"\nOver {ds.sizes['window']} held-out windows: means of bits/byte and first-token mass, medians of first/middle and last/middle (± standard")
    print(f"error over windows). First-token mass: attention of the second half, mean over layers ({level:.3g} if attention is uniform);")
    print("boundary: largest |d| at or behind the separator (+0) of two documents")
    print(cli.table(["step", "bits/byte", "shape", "first/middle", "last/middle", "first-token mass", "boundary d"], rows))
    texts = [text.encode() for text in plan.held_out_texts]
    joined = b"\n".join(texts)
    print("\nBits per byte of the held-out text without a network: "
          f"{bits * np.log(2) * tokens.unigram_bits(plan.packed.ids, plan.held_out.ids, plan.config.vocab):.3f} by token frequencies, "
          f"{tokens.zlib_bits([joined]):.3f} by zlib on the whole, "
          f"{tokens.zlib_bits([joined[i : i + length] for i in range(0, len(joined), length)]):.3f} by zlib on pieces of {length} bytes")  # fmt: skip
    print(f"\nLast against first measured step, per window, in factors (± standard error): {change(ds)}")
    draw(ds, peaks, folder, level)


def uniform_level(plan, length):
    """Attention on the first token, mean over heads and the second half, if it is uniform over what the mask admits."""
    said = {name: value for name in ("causal", "window", "prefix", "alibi") if (value := getattr(plan.switches, name)) is not None}
    rows, each = slice(length // 2, length), averaging.masks(length, **said, heads=plan.config.heads)
    firsts_NR1 = np.ones((len(each), length - length // 2, 1))
    for mask, first_R1 in zip(each, firsts_NR1):
        mask.weigh(first_R1, rows, slice(0, 1))
    return firsts_NR1.mean()


def change(ds):
    """How the two ends changed against the middle, geometric mean over windows."""
    if ds.sizes["step"] < 2:
        return "needs two"
    first, last = (np.array([[np.log(r["primacy"]), np.log(r["recency"])] for r in map(profile.ratios, ds.influence.values[m])]) for m in (0, -1))
    mean, error = (last - first).mean(0), (last - first).std(0, ddof=1) / np.sqrt(len(first))
    return ", ".join(f"{name} × {cli.number(np.exp(m), np.exp(m) * e)}" for name, m, e in zip(("first/middle", "last/middle"), mean, error))


def draw(ds, peaks, folder, level):
    """The heat map of step against position, profiles, boundaries and sinks."""
    profiles_ML = np.median(ds.influence.values, axis=1)
    steps = [int(step) for step in ds.step.values]
    cli.put(folder, "valley.png", lambda path: plot.save(plot.life_figure(steps, profiles_ML, caption=cli.command()), path))
    cli.put(folder, "gradient.png", lambda path: plot.save(plot.life_figure(
        steps, ds.gradient.values, label="gradient of the loss by the embedding", caption=cli.command()), path))  # fmt: skip
    few = sorted({steps[0], steps[len(steps) // 3], steps[2 * len(steps) // 3], steps[-1]})
    bundle = {str(step): (profiles_ML[steps.index(step)] / np.mean(profiles_ML[steps.index(step)]), None) for step in few}
    cli.put(folder, "profiles.png", lambda path: plot.save(plot.bundle_figure(
        bundle, axis="step", ylabel="influence / its mean over positions", caption=cli.command()), path))  # fmt: skip
    written = ["valley.png", "gradient.png", "profiles.png", "sinks.png"]
    ends = {f"step {step}": ds.sel(step=step) for step in (steps[0], steps[-1])}
    sinks = {name: (at.first_token.values, None) for name, at in ends.items()}
    cli.put(folder, "sinks.png", lambda path: plot.save(plot.lines_figure(
        ds.layer.values, sinks, levels={"uniform attention": level}, xlabel="layer", ylabel="attention mass on the first token", yscale="log",
        caption=cli.command()), path))  # fmt: skip
    if steps[-1] in peaks:
        shown = {f"step {step}": (peaks[step].aligned_O, None) for step in (steps[0], steps[-1]) if step in peaks}
        shown["shuffled (band: ± its spread)"] = (peaks[steps[-1]].shuffled_O, peaks[steps[-1]].spread_O)
        cli.put(folder, "boundaries.png", lambda path: plot.save(plot.lines_figure(
            peaks[steps[-1]].offsets_O, shown, levels={}, xlabel="tokens behind the separator of two documents",
            ylabel="ln influence above its running median", caption=cli.command()), path))  # fmt: skip
        written.append("boundaries.png")
    print(f"\nwrote {', '.join(written)}, metrics.jsonl, {store.TRAINING}, {train.CHECKPOINTS} in {folder}")


def main(args):
    with cli.refusing():
        plan, decoder = read(args)
        folder = cli.output_folder(args.out or os.path.join("runs", "train", cli.slug(cli.given(args, DECIDE))))
        lim.check_compiler(args.length * default_chunk(plan.config, args.length, args.probes), plan.config.width)
        trainer = train.Trainer(plan.config, plan.recipe, switches=plan.switches, decoder=decoder)
        del decoder  # it has copied the weights
        if not args.resume:  # all that could be refused is past
            train.remove(folder)
        attributes = dict(flags=cli.flag_values(args), provenance=cli.provenance())
        lines = Log.read(folder) if args.resume else []
        if (folder / store.TRAINING / "done").exists():  # refused here, before any work, if it is of another training
            store.check_same(str(folder / store.TRAINING), plan.about)
    print(f"{plan.config.family}, {plan.config.layers} layers, width {plan.config.width}: {len(plan.packed.ids):,} tokens to train on, "
          f"{len(plan.held_out.ids):,} held out, {plan.recipe.steps * args.batch * args.length:,} to be read")  # fmt: skip
    try:
        reached = run(plan, args, folder, trainer, lines, attributes)
    except FloatingPointError as error:
        sys.exit(f"{cli.command_name()}: {error}; checkpoints up to then are kept in {folder}")
    show(lim.open(folder).load(), plan, folder)
    if reached < plan.recipe.steps:
        print(f"{cli.command_name()}: stopped after {reached} of {plan.recipe.steps} steps, which are kept; the same line goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
