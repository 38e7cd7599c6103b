"""What every command line shares: flags that refuse in one line, provenance, tables, files written whole.

A bad value ends a command with one line and exit status 2 before any work; other faults keep their traceback.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import fsspec
import jax
import numpy as np
from absl import app, flags, logging
from tqdm import tqdm

import lim
from lim import files
from lim.influence import entries

MOST_SEED = 2**32 - 1  # jax.random.key takes seeds modulo 2³²


class Items(flags.ArgumentParser):
    """A comma list without repeats, each item read by one function that raises ValueError."""

    syntactic_help = "a comma list makes a grid axis"

    def __init__(self, read):
        self.read = read

    def parse(self, argument):
        if isinstance(argument, tuple):
            return argument
        words = argument.split(",")
        items = tuple(Item(word.strip(), self.read(word.strip())) for word in words)
        for i, item in enumerate(items):
            if any(earlier.value == item.value for earlier in items[:i]):
                raise ValueError(f"{item.text} stands twice (the same value)")
        return items

    def flag_type(self):
        return "comma list"


@dataclasses.dataclass(frozen=True)
class Item:
    """One value of a grid axis: as it was written, and what it means."""

    text: str
    value: object


def integer(low, high=None):
    """A reader of integers in a range."""

    def read(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise ValueError(f"{text!r}: allowed are integers of at least {low}" + (f", at most {high}" if high else ""))
        return value

    return read


def real(low, high=math.inf):
    """A reader of numbers in a range."""

    def read(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{text!r}: allowed are numbers of at least {low}" + (f", at most {high}" if high < math.inf else ""))
        return value

    return read


class Single(flags.ArgumentParser):
    """One value, read by one function that raises ValueError."""

    syntactic_help = ""

    def __init__(self, read):
        self.read = read

    def parse(self, argument):
        return self.read(argument) if isinstance(argument, str) else argument

    def flag_type(self):
        return "value"


def define_axis(name, read, help):
    """A flag whose comma list is an axis of the grid; None when it is not given."""
    flags.DEFINE(Items(read), name, None, help, serializer=_Serializer())


def define(name, read, default, help):
    """A flag of one value; None when it is neither given nor has a default."""
    flags.DEFINE(Single(read), name, default, help, serializer=_Serializer())


class _Serializer(flags.ArgumentSerializer):
    def serialize(self, value):
        return ",".join(item.text for item in value) if isinstance(value, tuple) else str(value)


SWITCHES = tuple(field.name for field in dataclasses.fields(lim.Switches))


def define_switches(lists=True):
    """One flag per switch, each an axis of the grid (`lists`) or one value."""
    for field in dataclasses.fields(lim.Switches):
        read, help = functools.partial(read_switch, field.name), f"{field.metadata['doc']}: {', '.join(field.metadata['words'])} or a number"
        if lists:
            define_axis(field.name, read, help)
        else:
            define(field.name, read, None, help)


def read_switch(name, text):
    """A switch's value, refused without the name, which absl puts in front."""
    try:
        return lim.Switches.parse(name, text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"{name}=")) from None


def define_measurement():
    """The flags of a measurement: what is read out, how many probes, where results go."""
    flags.DEFINE_enum("output", "hidden", ("hidden", "stream", "logits", "top_probability"),
                      "what is read out: after the final norm, before it, the logits, or the likeliest token's probability")  # fmt: skip
    define("source", integer(0), 0, "the block whose input is perturbed; 0 is the embedding")
    define("probes", integer(2), None, "pull back this many random directions (unbiased, with a standard error)")
    flags.DEFINE_bool("exact", None, "pull back every direction; the default up to width 256, 16 probes beyond")
    define("seed", integer(0, MOST_SEED), 0, "first seed")
    flags.DEFINE_string("out", None, "folder for figures and results; default runs/NAME/FLAGS")


def probes_for(config, args):
    """The number of probes that the flags ask for, or None for every direction."""
    if args.exact and args.probes is not None:
        raise ValueError("--exact, --probes: give one of them")
    rows = entries(config, args.output)
    if args.probes is not None:
        if args.probes > rows > 1:
            raise ValueError(f"--probes={args.probes}: allowed are 2 to {rows}, the entries of {args.output}")
        return None if rows == 1 else args.probes
    return None if args.exact or (rows <= 256 and args.exact is None) else min(16, rows)


def switches_of(args, weights=None):
    """The switches that the flags give, name → number, and where they are silent those of the training that made `weights`."""
    said = {name: value for name in SWITCHES if (value := getattr(args, name)) is not None}
    if weights is None:
        return said
    from lim import checkpoint  # which brings orbax

    trained = checkpoint.switches_of(weights)
    if said.keys() & {"residual", "alpha"}:  # one of them is the weight of the skip
        trained = {name: value for name, value in trained.items() if name not in ("residual", "alpha")}
    return trained | said


def check_seeds(seed, count, flag):
    """Refuses seeds of which the last is too large, where `flag` says how many there are."""
    if seed + count - 1 > MOST_SEED:
        raise ValueError(f"--seed={seed}, --{flag}={count}: the last seed is {seed + count - 1}, allowed is at most {MOST_SEED}")


def note_overlap(count, length, windows):
    """Says so where windows of a text overlap, and their scatter is no measure of error."""
    if windows * length > count:
        print(f"note: {windows} windows of {length} tokens overlap in a text of {count}: errors over them come out too small", file=sys.stderr)


def read_config(model):
    """The Config of a preset's name or of a folder with a config.json."""
    if model in lim.config.PRESETS or not os.path.exists(os.path.expanduser(model)):
        return lim.Config.preset(model)
    return lim.Config.from_hf(os.path.expanduser(model))


class Bar(tqdm):
    """A bar whose rate, and time left, leave out what comes first, or within half a second of it: it took a compilation."""

    first = counted = None  # when the first came; how many had come, and when, as the rate begins

    def update(self, n=1):
        shown, now = super().update(n), time.monotonic()
        self.first = self.first or now
        if now - self.first < 0.5:
            self.counted = self.n, now
        return shown

    @property
    def format_dict(self):
        before, since = self.counted or (self.n, 0)
        return super().format_dict | dict(rate=(self.n - before) / (time.monotonic() - since))  # 0 shows as ?


def progress(iterable=None, **how):
    """A bar with time left; where nobody watches a terminal, a line a minute."""
    if sys.stderr.isatty():
        return Bar(iterable, **how)
    line = "{desc} {n_fmt}/{total_fmt}, {elapsed} gone, {remaining} left, {rate_fmt}\n"
    return Bar(iterable, **how, mininterval=60, maxinterval=60, delay=60, bar_format=line, leave=False)


def model(text):
    """Reader of --model: the text itself, after seeing that `read_config` takes it."""
    read_config(text)
    return text


def run(main):
    """Runs a command: flags parsed with one-line refusals, then `main`, which takes the parsed flags."""
    logging.set_verbosity(logging.WARNING)  # else every missing accelerator is announced
    app.run(lambda argv: main(flags.FLAGS), flags_parser=_parse)


def flag_values(args):
    """Every flag of the command and its value, as text where it is not a number."""
    own = [flag for module, flags_ in args.flags_by_module_dict().items() if "absl" not in module for flag in flags_]
    return {flag.name: flag.value if isinstance(flag.value, (int, float)) or flag.value is None else
            flag.serialize().partition("=")[2] for flag in own}  # fmt: skip


def _parse(argv):
    argv = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in argv]  # --plot-only, too
    given = [name for word in argv[1:] if (name := _flag_of(word))]
    try:
        for name in given:
            if given.count(name) > 1:
                raise flags.Error(f"flag --{name} stands twice")
        rest = flags.FLAGS(argv)
    except UnicodeDecodeError as error:
        refuse(f"--flagfile: is not UTF-8 text ({error.reason} at byte {error.start})")
    except (flags.Error, ValueError) as error:  # absl refuses --noexact=2 with the latter
        refuse(_one_line(error))
    except SystemExit:  # --help: absl leaves with 1
        sys.exit(0)
    if rest[1:]:
        refuse(f"{rest[1]!r} is no flag: see --help")
    if empty := next((name for name in given if flags.FLAGS[name].value == ""), None):
        refuse(f"--{empty}=: is empty")
    return rest


def _flag_of(word):
    """The name of the flag that a word gives, with one dash or two, or as --noNAME; None if it gives none."""
    name = re.match(r"-{0,2}(\w*)", word)[1] if word.startswith("-") else ""
    off = name.removeprefix("no")
    return name if name in flags.FLAGS else off if off in flags.FLAGS and flags.FLAGS[off].boolean else None


def _one_line(error):
    text = " ".join(str(error).split())
    if (head := text.partition(": "))[0].startswith("flag --"):
        return head[0].removeprefix("flag ") + ": " + head[2]
    return text


def refuse(message):
    """Ends the command: one line, exit status 2."""
    from lim.checkpoint import printable  # which brings orbax, not needed by what goes well

    print(f"{command_name()}: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def refusing():
    """Turns the library's refusals (ValueError, and files that cannot be had) into one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        refuse(str(error))


def command_name():
    return "experiments." + pathlib.Path(sys.argv[0]).stem


def command():
    """The line that makes this run again."""
    return f"python -m {command_name()} " + " ".join(shlex.quote(word) for word in sys.argv[1:])


def output_folder(out, urls=False):
    """The folder for results, made and known to be writable, by default named after the flags given; a URL (gs://…), where
    the command takes any, is left as text, for fsspec."""
    if out is not None and "://" in out:
        if not urls:
            raise ValueError(f"--out={out}: must be a folder on this machine; experiments.ablate alone writes to URLs")
        return out.rstrip("/")
    if out is None:
        out = f"runs/{command_name().removeprefix('experiments.')}/{slug(given(flags.FLAGS, flag_values(flags.FLAGS)))}"
    folder = pathlib.Path(os.path.expanduser(out))  # a shell leaves --out=~/x as it is
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out={folder}: cannot be written: {error.strerror}") from None
    return folder


def put(folder, name, write):
    """`write(path)` a file called `name` into a folder or below a URL, whole or not at all."""
    if isinstance(folder, pathlib.Path):
        with files.whole(folder / name) as partial:
            write(partial)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write(local := pathlib.Path(scratch) / name)
        place, path = fsspec.url_to_fs(f"{folder}/{name}")
        place.put_file(str(local), path)


def given(args, names):
    """The flags among `names` that the command line gives: name → text."""
    return {name: args[name].serialize().partition("=")[2] or str(args[name].value) for name in names if args[name].present}


def slug(words):
    """A name of a folder that says what these flags say: rope=off_residual=0.5."""
    name = "_".join(f"{key}={text}" for key, text in words.items()) or "as-published"
    name = re.sub(r"[^\w.,=+-]", "-", name)
    return name if len(name) <= 100 else f"{name[:90]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def shard(text):
    """Reader of --shard: the text itself, after seeing that it is i/n."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise ValueError(f"{text!r}: allowed is i/n with i from 0 to n-1, as in 0/8 to 7/8")
    return text


def define_workers():
    """The flags of a grid's workers: how it goes on, and how it is split."""
    flags.DEFINE_bool("resume", True, "go on where a store with the same flags left off; --noresume replaces it")
    flags.DEFINE_bool("retry_failed", False, "run failed cells again")
    define("batch", integer(1), None, "cells in a batch over all local devices; default about a second's work")
    define("shard", shard, None, "i/n: run the i-th of n parts; independent workers over one store, as in a job array")
    flags.DEFINE_bool("distributed", False, "split the cells over the processes of a TPU pod or of srun or mpirun")
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where --distributed does not find out by itself")
    define("processes", integer(1), None, "how many processes there are, with --coordinator")
    define("process", integer(0), None, "which of them this one is, with --coordinator")


def workers(args):
    """(i, n): which part of the grid is this process's; joins the other processes where the flags ask for it.

    Raises:
      ValueError: names the flag, its value and what is allowed.
    """
    manual = dict(coordinator=args.coordinator, processes=args.processes, process=args.process)
    lacking = [f"--{name}" for name, value in manual.items() if value is None]
    if len(lacking) < 3 and not args.distributed:
        raise ValueError(f"--{next(name for name, value in manual.items() if value is not None)}: is for --distributed")
    if not args.resume and (args.shard or args.distributed):
        raise ValueError("--noresume: replaces the store, which one of several workers must not do: remove it first")
    if not args.distributed:
        i, n = map(int, (args.shard or "0/1").split("/"))
        return i, n
    if args.shard:
        raise ValueError("--shard, --distributed: give one of them")
    if 0 < len(lacking) < 3:
        raise ValueError(f"{', '.join(lacking)}: --coordinator, --processes and --process go together")
    if not lacking and args.process >= args.processes:
        raise ValueError(f"--process={args.process}: allowed are 0 to {args.processes - 1}")
    if not lacking and not re.fullmatch(r"[^:]+:\d+", args.coordinator):
        raise ValueError(f"--coordinator={args.coordinator}: allowed is HOST:PORT")
    try:
        # who is done waits for the others at the end: for days, since killing them is what the default of 5 minutes does
        jax.distributed.initialize(args.coordinator, args.processes, args.process, heartbeat_timeout_seconds=600,
                                   shutdown_timeout_seconds=30 * 86400)  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"--distributed: {error}") from None
    return jax.process_index(), jax.process_count()


@contextlib.contextmanager
def interruptible():
    """A polite kill (SIGTERM, as schedulers send it) ends the run as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def stopping():
    """Yields a function that tells whether Ctrl-C or SIGTERM came, for work that stops by itself; a second one ends it at once."""
    came = []

    def note(number, _):
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def provenance():
    """What a reader needs to trust or repeat the numbers: versions, device, commit, the command."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy", "scipy")}
    here = pathlib.Path(__file__).resolve().parent
    commit = None
    if shutil.which("git"):
        git = subprocess.run(["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = git.stdout.strip() or None
    return dict(
        command=command(), lim=importlib.metadata.version("lim"), python=platform.python_version(), versions=versions,
        device=jax.devices()[0].device_kind, devices=jax.local_device_count(), dtype="float32",
        matmul_precision="highest", git=commit,
    )  # fmt: skip


def write_json(path, content):
    """Writes strict JSON whole or not at all; what is not finite becomes null, arrays become lists."""
    text = json.dumps(_plain(content), indent=1, allow_nan=False)
    with files.whole(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return value.item()
    return value


def number(value, error=math.nan):
    """A number to as many digits as its standard error bears (4 where it has none), with the error behind ±.

    Where the larger of the two is below 0.001 or from 10,000 on, both have its power of ten behind them.
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"
    if not (math.isfinite(error) and error > 0):
        return f"{value:.4g}"
    if not 1e-3 <= (size := max(abs(value), error)) < 1e4:
        power = math.floor(math.log10(size))
        return f"({number(value / 10**power, error / 10**power)})e{power}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    if digits > 4:  # as of ranks that all but agree
        return f"{value:.5f} ±{error:.0e}"
    return f"{value:.{digits}f} ±{error:.{digits}f}"


def table(header, rows):
    """Columns aligned on the right."""
    rows = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])
