"""Holds the command lines and the readers of files wrong, some thousand times, and says what they made of it.

    python tests/fuzz.py --tries=5000 --seed=1
    python tests/fuzz.py --tries=500 --targets=checkpoint,ablate

Targets are the command lines (their work is stubbed once everything is checked), the checkpoint reader on damaged Hugging
Face folders, and damaged texts, stores and results of earlier runs. A try is *refused* (status 2 and one printable line that
names a flag, a value or a file; a ValueError of the library), *accepted*, or a *fault*: any other exception or status, a hang,
a write outside --out and runs/, a read of what was not named. Some damage must be refused (`MUST`). Exit status 1 on a fault.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
SCRATCH = pathlib.Path(tempfile.mkdtemp(prefix="lim-fuzz-")).resolve()
TEMP = SCRATCH / "temporary"
TEMP.mkdir()
tempfile.tempdir = str(TEMP)
os.environ |= dict(HF_HUB_OFFLINE="1", HF_HOME=str(TEMP / "hub"), MPLCONFIGDIR=str(TEMP), HOME=str(SCRATCH), TQDM_DISABLE="1", JAX_PLATFORMS="cpu")
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT), str(HERE)]

import jax  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from absl import flags  # noqa: E402
from absl.testing import flagsaver  # noqa: E402
from test_checkpoint import GPT2, LLAMA, QWEN2, tensors, written  # noqa: E402

import lim  # noqa: E402
from experiments import cli  # noqa: E402
from lim import checkpoint, claims, recall, sweep, tokens, train, watch  # noqa: E402

COMMANDS = ("ablate", "measure", "ladder", "depth", "bench", "train", "recall", "reproduce")
SECONDS, MEMORY = 20, 6 << 30  # of a try
MUST = ("duplicate flag", "unknown flag", "truncated", "missing tensor", "extra tensor", "transposed", "wrong dtype", "wrong shape",
        "header length", "header no JSON", "offsets", "path traversal", "pickle", "empty file", "directory for file")  # fmt: skip


class Accepted(BaseException):
    """Everything was checked, and work would begin."""


class Hang(BaseException):
    """The try took too long."""


def accept(*_, **__):
    raise Accepted


DOCUMENTS = functools.cache(lambda: [text for text in tokens.standard_text().split("\n\n") if text][:2000])


# ---- what a try reads and writes ----


class Guard:
    """Notes writes and reads that nobody named, through Python's audit hook; on between `watch` and `off`."""

    READ = [ROOT, pathlib.Path(sys.prefix), pathlib.Path(sys.base_prefix), TEMP, *map(pathlib.Path, ("/proc", "/sys", "/dev", "/etc", "/usr"))]
    PLACES = {"os.mkdir": (0,), "os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "os.symlink": (1,), "os.link": (1,), "os.truncate": (0,)}

    def __init__(self):
        self.on, self.strays, self.read, self.write = False, [], [], []
        sys.addaudithook(self.hook)

    def watch(self, read, write):
        """Allows reading and writing at and below these paths."""
        self.read, self.write, self.strays = [*map(self._places, read)], [*map(self._places, write)], []
        self.read, self.write, self.on = [*self.READ, *sum(self.read, []), *sum(self.write, [])], [TEMP, *sum(self.write, [])], True

    @staticmethod
    def _places(path):
        path = pathlib.Path(os.path.abspath(path))
        with contextlib.suppress(OSError, RuntimeError):
            return [path, path.resolve()]
        return [path]

    def off(self):
        self.on = False

    def hook(self, event, args):
        if not self.on or event != "open" and event not in self.PLACES:
            return
        if event != "open":
            for i in self.PLACES[event]:
                self.check(event, args[i], self.write)
        elif isinstance(args[0], (str, bytes, os.PathLike)):
            mode, how = args[1] or "", args[2] or 0
            writes = set(mode) & set("wax+") or how & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            self.check("write" if writes else "read", args[0], self.write if writes else self.read)

    def check(self, event, path, allowed):
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        path = pathlib.Path(os.path.abspath(os.fsdecode(path)))
        if str(path) == os.devnull or path == pathlib.Path.cwd() and event == "read" or str(path).startswith("/proc/self/"):  # threads name themselves there
            return
        makes = event == "os.mkdir"  # the folders above what was named may be made, too
        if not any(path == place or place in path.parents or makes and path in place.parents for place in allowed):
            self.strays.append(f"{event} {path}")


GUARD = Guard()


@contextlib.contextmanager
def limits():
    """A hang raises; so does a demand for much memory."""

    def late(*_):
        raise Hang(f"more than {SECONDS} s")

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, 10 * SECONDS)}  # of the processor; a loaded machine's clock
    before = {number: signal.signal(number, late) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class Outcome:
    """How a try ended: refused, accepted or fault; in words, and for a fault where it was raised."""

    kind: str
    words: str = ""


def fault(error, skip=0):
    where = [f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename and "fuzz.py" not in f.filename]
    place = f"{pathlib.Path(where[-1].filename).name}:{where[-1].lineno}" if where else "?"
    return Outcome("fault", f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:160]}")


def refusal(line, names):
    """A refusal must be one printable line that names something of these."""
    if line.count("\n") != 1 or not line.endswith("\n"):
        return Outcome("fault", f"not one line: {line[:300]!r}")
    if not line[:-1].isprintable():
        return Outcome("fault", f"not printable: {line[:200]!r}")
    if not any(name in line or " ".join(name.split()) in line or repr(name)[1:-1] in line for name in names):
        return Outcome("fault", f"names no flag, value or file: {line[:200]!r}")
    return Outcome("refused", line)


# ---- running a command ----


class Command:
    """One of the experiments with its flags defined alone and its work stubbed."""

    def __init__(self, name):
        self.name, self.module = name, importlib.import_module(f"experiments.{name}")

    def __enter__(self):
        before = set(flags.FLAGS)
        self.module.define_flags()
        self.flags = {name: flags.FLAGS[name] for name in flags.FLAGS if name not in before}
        return self

    def __exit__(self, *_):
        for name in list(self.flags):
            if name in flags.FLAGS:
                delattr(flags.FLAGS, name)

    def run(self, words, work=(), watch_out=True):
        """The outcome of a command line in the working directory."""
        named = [part for word in words for value in [word.partition("=")[2] or word] for part in {value, *value.split(",")} if part]
        named = [os.path.expanduser(part.removeprefix("file://")) for part in named]
        outs = [word.partition("=")[2] for word in words if re.match(r"--?(out|plot[-_]only)=", word)]
        outs += [words[i + 1] for i, word in enumerate(words[:-1]) if re.fullmatch(r"--?(out|plot[-_]only)", word)]
        outs = [os.path.expanduser(out.removeprefix("file://")) for out in outs]
        sys.argv = [f"{self.name}.py", *words]
        err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
        out = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
        status, outcome = 0, None
        with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            GUARD.watch([pathlib.Path.cwd() / "runs", *named], [pathlib.Path.cwd() / "runs", *outs])
            try:
                with limits():
                    cli.run(self.module.main)
            except Accepted:
                outcome = Outcome("accepted")
            except SystemExit as end:
                status = end.code or 0
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome = fault(error)
            finally:
                GUARD.off()
        with contextlib.suppress(Exception):
            flags.FLAGS.unparse_flags()
        jax.config.update("jax_enable_x64", False)
        err.flush()
        line = err.buffer.getvalue().decode()
        if outcome is None and status == 2:
            given = [word.lstrip("-").split("=")[0] for word in words]
            given += [name.replace("-", "_") for name in given]
            values = [word.partition("=")[2] for word in words]
            outcome = refusal(line, [*filter(None, given), *filter(None, values), *filter(None, named), *(f"{name}=" for name in self.flags)])
            if outcome.kind == "refused" and not line.startswith(f"experiments.{self.name}: "):
                outcome = Outcome("fault", f"begins otherwise: {line[:100]!r}")
        elif outcome is None:
            outcome = Outcome("accepted") if status in (0, 3) else Outcome("fault", f"status {status}: {line[-300:]!r}")
        if GUARD.strays and outcome.kind != "fault":
            outcome = Outcome("fault", f"touched what nobody named: {GUARD.strays[0].replace(str(SCRATCH), '…')}")
        return outcome


@contextlib.contextmanager
def patched(pairs):
    """Attributes replaced for a while: (object, name, value)."""
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in pairs]
    for thing, name, value in pairs:
        setattr(thing, name, value)
    try:
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)


def stubs(module, name):
    """What begins the work of each command."""
    provenance = dict(versions={}, command="", lim="0", git=None, device="", dtype="", matmul_precision="")
    common = [(lim, "check_compiler", lambda *_: None), (cli, "provenance", lambda: dict(provenance)),
              (jax.distributed, "initialize", lambda *_, **__: None)]  # fmt: skip
    common.append((tokens, "standard_documents", DOCUMENTS))
    own = dict(ablate=("measure", "show"), measure=("measure",), ladder=("climb",), depth=("predict",), bench=("in_own_process", "run_lim", "run_torch",
               "train_lim", "train_torch"), train=("run",), recall=("in_text",), reproduce=("measure",))[name]  # fmt: skip
    common += [(module, function, accept) for function in own]
    if name == "recall":
        common.append((module.Run, "train", accept))
    return common


# ---- command lines ----


FILES = ("file", "text", "short.txt", "folder", "nowhere", "binary", "utf16", "nul", "loop", "model", "training", "grid", "folder/config.json")
NUMBERS = ("0", "1", "2", "3", "4", "8", "16", "64", "128", "0.5", "1e-3")
ODD = {
    "wrong type": ("maybe", "two", "[]", "{}", "None", "1.5", "0x10", "1_0", "1e3", "+2", " 3", "1/2", "3/2", "true", "on,off", "a:b", "--", "1,2,2"),
    "empty": ("", " ", ",", ",,", "1,,2", " , "),
    "unicode": ("é", "١٢", "②", "𝟓", "\u2028", "a\nb", "\x1b[31m", "\udcff", "½", "\u202eab", "x" * 5000, "\x85"),
    "huge": ("99999999999999999999", "1e400", "9" * 5000, "1000000000", "2147483648", "4294967296", "1e38", "1e300", "16777217", "10**9", "100000"),
    "negative": ("-1", "-0", "-0.5", "-1e9", "-inf", "-99999999999999999999"),
    "nan": ("nan", "NaN", "inf", "Infinity", "-nan", "1e309"),
    "path": (*FILES, "/", ".", "..", "~", "../x", "/dev/null", "/nowhere/x", "file/below", "gs://", "memory://a", "nowhere://x", "~nobody/x", "a" * 300),
}  # fmt: skip
GOOD = dict(model=("small", "gpt2", "qwen2-0.5b", "model"), tokens=("random", "text"), weights=("model", "random", "training"), text=("text,short.txt", "text"),
            layers=("1", "2", "3,4"), width=("32", "64", "128"), length=("10", "16", "64"), shard=("0/2", "1/2"), out=("out", "here/there"), only=("3", "a,5"),
            tokenizer=("model",), plot_only=("grid",), coordinator=("host:1",), rows=("rope", "layers"),
            cols=("residual", "layers"), window=("4", "off"))  # fmt: skip


def value_of(rng, flag, kind):
    """A value for a flag: one that may be right, or odd in some way."""
    if kind in ODD:
        return rng.choice(ODD[kind])
    if choices := getattr(flag.parser, "enum_values", None):
        return rng.choice(choices)
    if flag.name in GOOD:
        return rng.choice(GOOD[flag.name])
    return rng.choice(("on", "off", "0.5", "1") if flag.name in cli.SWITCHES else NUMBERS)


def mutated(rng, word):
    """A word with a few characters changed."""
    letters = list(word)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(letters) + 1)
        letters[at : at + rng.randint(0, 1)] = rng.choice(["", "=", "-", ",", ".", "e", "9", "\t", "'", '"', "é", "/", "no"])
    return "".join(letters)


LINES = (*ODD, "valid", "duplicate flag", "unknown flag", "swapped values", "conflict", "mutated", "absl's flags")


def command_line(rng, command, kind):
    """Words of a command line of some kind of damage."""
    names = [name for name in command.flags if name in command.module.flags.FLAGS]
    own = [name for name in names if not name.startswith("help")]
    chosen = rng.sample(own, min(len(own), rng.randint(1, 4) if kind != "conflict" else rng.randint(4, 12)))
    words = []
    for i, name in enumerate(chosen):
        flag = flags.FLAGS[name]
        flagged = name if rng.random() < 0.8 else name.replace("_", "-")
        if flag.boolean and (kind not in ODD or rng.random() < 0.5):
            words.append(f"--{rng.choice(['', 'no'])}{flagged}")
            continue
        value = value_of(rng, flag, kind if i == 0 or rng.random() < 0.3 else "valid")
        words += [f"--{flagged}={value}"] if rng.random() < 0.9 else [f"--{flagged}", value]
    if kind == "duplicate flag":
        flag = flags.FLAGS[rng.choice(chosen)]
        again = [f"{rng.choice(['--', '-'])}{flag.name}" + ("" if flag.boolean else f"={value_of(rng, flag, 'valid')}") for _ in range(2)]
        words = [*again, *(word for word in words if flag.name not in word.replace("-", "_"))] if rng.random() < 0.5 else [*words, *again]
    if kind == "unknown flag":
        words.insert(
            rng.randrange(len(words) + 1), rng.choice(["--ropes=off", "--nothing", "stray", "--é=1", "-x", "--=3", "--no", "--layerss=2", "-", "--a b=1"])
        )
    if kind == "swapped values" and len(words) > 1:
        heads, tails = zip(*(word.partition("=")[::2] for word in words))
        words = [f"{head}={tail}" for head, tail in zip(heads, tails[1:] + tails[:1])]
    if kind == "mutated":
        at = rng.randrange(len(words))
        words[at] = mutated(rng, words[at])
    if kind == "absl's flags":
        words.append(rng.choice(["--flagfile=nowhere", "--flagfile=binary", "--flagfile=folder", "--flagfile=", "--undefok=ropes", "--verbosity=x",
                                 "--stderrthreshold=x", "--v=x", "--logger_levels=x", "--only_check_args", "--showprefixforinfo=maybe"]))  # fmt: skip
    return [word.replace("\0", "") for word in words]


def stock(folder, training):
    """The files beside every command line: texts, a checkpoint, a training, a grid, and things that are none."""
    folder.mkdir()
    (folder / "file").touch()
    (folder / "short.txt").write_text("short\n")
    (folder / "text").write_text("the quick brown fox\n\n" * 400)
    (folder / "binary").write_bytes(bytes(range(256)) * 8)
    (folder / "utf16").write_text("text", encoding="utf-16")
    (folder / "nul").write_bytes(b"\0" * 3000)
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    config = lim.Config("llama", 1, 8, 2, 2, 4, 8, 300, 64)
    hf = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, intermediate_size=8,
              vocab_size=300, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True)  # fmt: skip
    shapes = {"model.embed_tokens.weight": (300, 8), "model.norm.weight": (8,)}
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"model.layers.0.{name}.weight"] = (8,)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        shapes[f"model.layers.0.{name}.weight"] = (8, 8)
    written(folder / "model", hf, {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()})
    words = {f"{a}{b}": i for i, (a, b) in enumerate((a, b) for a in "abcdefghijklmnop" for b in "abcdefghijklmnop")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | {"[UNK]": 256}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[UNK]").save_pretrained(folder / "model")
    grid = sweep.Grid(config, {"rope": {"on": 1.0, "off": 0.0}, "layers": {"1": 1, "2": 2}}, (0, 1), length=10)
    into = grid.store(folder / "grid")
    for place in np.ndindex(2, 2):
        for seed in (0, 1):
            profile_L = 1 + np.random.default_rng(seed).random(10)
            predicted = sweep.predict(grid, grid.configurations[2 * place[0] + place[1]])
            into.write((*place, seed), "done", influence=profile_L, stderr=0 * profile_L, metrics=np.zeros(len(sweep.METRICS)),
                       **(predicted if seed == 0 else {}))  # fmt: skip
    if training:
        a_training(folder / "training")


TRAIN = "--layers=1 --width=32 --length=10 --steps=2 --batch=2 --windows=2 --measurements=2 --probes=2 --text=text".split()


def untrained(command):
    """The stubs of a training that reads and makes its folder and ends at its first update."""
    return [*stubs(command.module, "reproduce")[:3], (watch.Watch, "measure", lambda *_, **__: None), (train, "losses", lambda *_: np.ones(2)),
            (train.Trainer, "update", accept), (train.Checkpoints, "save", lambda *_: None)]  # fmt: skip


def a_training(folder):
    """A training's folder with a checkpoint at birth, made by the command up to its first update."""
    at = pathlib.Path.cwd()
    os.chdir(folder.parent)
    save = train.Checkpoints.save
    whole = (train.Checkpoints, "save", lambda self, *how: (save(self, *how), self._manager.wait_until_finished()))
    with Command("train") as command, patched([*untrained(command), whole]):
        outcome = command.run([*TRAIN, f"--out={folder}"])
    assert outcome.kind == "accepted", outcome
    os.chdir(at)


# ---- damaged files ----


def cut(rng, path):
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))] if content else b"")


def flipped(rng, path, start=0, stop=None):
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 4)):
        if len(content[start:stop]):
            content[rng.randrange(start, min(stop or len(content), len(content)))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def as_folder(rng, path):
    path.unlink()
    path.mkdir()


def linked_in_a_loop(rng, path):
    path.unlink()
    path.symlink_to(path.name)


def linked_outside(rng, path):
    outside = path.parent.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def deep(rng, path):
    path.write_text(rng.choice(['{"a":' * 100_000, "[" * 100_000]))


def garbage(rng, path):
    path.write_bytes(rng.choice([b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"\0" * 100, rng.randbytes(64), b'{"a":' * 50, b"NaN", b"[NaN]", b"{}"]))


STRANGE = (
    None,
    True,
    False,
    "",
    "x",
    "12",
    [],
    [1],
    {},
    {"a": 1},
    0,
    -1,
    0.5,
    2.0,
    float("nan"),
    float("inf"),
    10**9,
    2**31,
    2**63,
    10**30,
    10**400,
    1e308,
    -1e308,
)


def strange_json(rng, path):
    """One value somewhere in a JSON file becomes another, goes, or gets company."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError):
        return garbage(rng, path)
    places, stack = [], [content]
    while stack:
        thing = stack.pop()
        for key in list(thing if isinstance(thing, dict) else range(len(thing))):
            places.append((thing, key))
            if isinstance(thing[key], (dict, list)):
                stack.append(thing[key])
    if not places:
        return garbage(rng, path)
    thing, key = rng.choice(places)
    if rng.random() < 0.2:
        del thing[key]
    else:
        thing[key] = copy.deepcopy(rng.choice(STRANGE))
    with contextlib.suppress(ValueError):  # an integer of more digits than Python writes
        path.write_text(json.dumps(content))


ANY_FILE = {"truncated": cut, "bit flips": flipped, "directory for file": as_folder, "symlink loop": linked_in_a_loop, "symlink outside": linked_outside,
            "empty file": lambda rng, path: path.write_bytes(b""), "missing file": lambda rng, path: path.unlink(), "garbage": garbage,
            "deep JSON": deep}  # fmt: skip


def header_of(path):
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :], 8 + size


def put_header(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def damaged_header(rng, path, kind):
    header, data, size = header_of(path)
    name = rng.choice(sorted(header))
    entry = header[name]
    if kind == "flips in data":
        return flipped(rng, path, size)
    if kind == "flips in header":
        return flipped(rng, path, 0, size)
    if kind == "header length":
        length = rng.choice([0, 1, size - 9, size - 7, 2**31, 2**40, 2**63, 2**64 - 1, len(data) + size])
        return path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    if kind == "header no JSON":
        return put_header(path, rng.choice([b"x", b"[]", b"null", b"", b"\xff" * 20, b"[" * 100_000, b'{"__metadata__": 3}', b'{"a": {}}']), data)
    if kind == "duplicate keys":
        text = json.dumps(header)
        return put_header(path, (text[:-1] + f', "{name}": ' + json.dumps(entry) + "}").encode(), data)
    if kind == "offsets":
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice(
            [[-1, end], [end, begin], [begin, 2**40], [begin, end - 4], [begin, end + 4], [begin], [begin + 1, end + 1], [2**63, 2**63]]
        )
    if kind == "wrong dtype":
        entry["dtype"] = rng.choice(["I32", "F64", "U8", "BOOL", "F8_E4M3", "X", "", None, 3])
    if kind == "wrong shape":
        entry["shape"] = rng.choice([[-1], [0], [2**40], [1, *entry["shape"]], [2**32, 2**32], ["x"], None, [], [*entry["shape"], 2]])
    if kind == "renamed":
        header[rng.choice([name.upper(), "", "a\nb", "\x1b[31m" + name, name.replace("0", "00"), name.replace("layers.0", "layers.-1"), "x" * 100_000])] = (
            header.pop(name)
        )
    put_header(path, header, data)


def damaged_tensors(rng, folder, config, kind):
    weights = tensors(config)
    name = rng.choice(sorted(name for name in weights if weights[name].ndim == 2 and weights[name].shape[0] != weights[name].shape[1]))
    if kind == "missing tensor":
        del weights[name]
    if kind == "extra tensor":
        weights[rng.choice(["x", f"{name}.weight", f"{name[:-7]}s.weight", name.replace("weight", "layers.2.weight")])] = weights[name]
    if kind == "transposed":
        weights[name] = np.ascontiguousarray(weights[name].T)
    written(folder, config, weights, rng.choice([1, 3]))


def damaged_index(rng, folder, config, kind):
    written(folder, config, tensors(config), 2)
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    if kind == "path traversal":
        outside = folder.parent / "outside"
        written(outside, config, tensors(config))
        name = rng.choice(sorted(content["weight_map"]))
        content["weight_map"][name] = rng.choice(["../outside/model.safetensors", str(outside / "model.safetensors"), "/etc/passwd", "..",
                                                  "./model.safetensors", "a/../b.safetensors", "\0.safetensors", "x\n.safetensors",
                                                  "~/x.safetensors", "model.safetensors/", "%2e%2e.safetensors/..", "..\\x.safetensors"])  # fmt: skip
        return path.write_text(json.dumps(content))
    rng.choice([strange_json, deep, garbage, cut, as_folder, linked_in_a_loop])(rng, path)


HEADERS = ("flips in data", "flips in header", "header length", "header no JSON", "duplicate keys", "offsets", "wrong dtype", "wrong shape", "renamed")
TENSORS = ("missing tensor", "extra tensor", "transposed")
CHECKPOINTS = (*HEADERS, *TENSORS, "path traversal", "index", "config.json", "config.json", "config.json", "pickle", *ANY_FILE)


def damaged_checkpoint(rng, folder, kind):
    """A Hugging Face folder with one kind of damage."""
    config = rng.choice([GPT2, LLAMA, QWEN2])
    if kind in TENSORS:
        return damaged_tensors(rng, folder, config, kind)
    if kind in ("path traversal", "index"):
        return damaged_index(rng, folder, config, kind)
    written(folder, config, tensors(config), rng.choice([1, 1, 2]))
    weights = rng.choice(sorted(folder.glob("*.safetensors")))
    if kind == "config.json":
        for _ in range(rng.randint(1, 2)):
            strange_json(rng, folder / "config.json")
    elif kind == "pickle":
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        (folder / rng.choice(["pytorch_model.bin", "model.safetensors"])).write_bytes(b"\x80\x04c__main__\naccept\n)R.")
    elif kind in HEADERS:
        damaged_header(rng, weights, kind)
    else:
        ANY_FILE[kind](rng, rng.choice([weights, folder / "config.json"]) if kind != "deep JSON" else folder / "config.json")


def read_checkpoint(folder):
    """The outcome of `lim.Decoder.from_pretrained`; what it opens without Python is looked at, too."""
    opened, real = [], checkpoint.safe_open
    with patched([(checkpoint, "safe_open", lambda path, **how: opened.append(path) or real(path, **how))]):
        GUARD.watch([folder, folder.parent / "outside"] if any(path.is_symlink() for path in folder.iterdir()) else [folder], [])
        try:
            with limits():
                lim.Decoder.from_pretrained(str(folder))
            outcome = Outcome("accepted")
        except ValueError as error:
            lines = str(error).split("\n")
            outcome = refusal(lines[0] + "\n", [str(folder)])
            if bad := [line for line in lines if not line.isprintable()]:
                outcome = Outcome("fault", f"not printable: {bad[0][:200]!r}")
            if len(lines) > 1 and not (re.search(r"cannot be loaded \(\d+ faults?\):$", lines[0]) and all(line.startswith("  ") for line in lines[1:])):
                outcome = Outcome("fault", f"not one line: {str(error)[:300]!r}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = fault(error)
        finally:
            GUARD.off()
    GUARD.strays += [f"read {path}" for path in opened if os.path.dirname(os.path.abspath(path)) != str(folder)]
    if GUARD.strays and outcome.kind != "fault":
        outcome = Outcome("fault", f"touched what nobody named: {GUARD.strays[0].replace(str(SCRATCH), '…')}")
    return outcome


TEXTS = {
    "invalid UTF-8": lambda rng: b"text \xff\xc3 " * 900 if rng.random() < 0.5 else b"a" * 5000 + rng.randbytes(9),
    "NUL": lambda rng: b"\0" * rng.choice([1, 5000]),
    "empty file": lambda rng: rng.choice([b"", b"\n\n", b"\xef\xbb\xbf", b" \t"]),
    "huge line": lambda rng: b"word " * rng.choice([200_000, 1_000_000]),
    "controls": lambda rng: bytes(rng.randrange(32) for _ in range(4000)),
    "short": lambda rng: b"ab",
    "other encodings": lambda rng: ("text and more " * 300).encode(rng.choice(["utf-16", "utf-32", "utf-7", "utf-8-sig", "cp500"])),
}  # fmt: skip


def damaged_result(rng, folder, kind):
    """Damages one file of a folder of results."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    metadata = [path for path in files if path.suffix == ".json" or path.name in ("_METADATA", "curve.jsonl")]
    path = rng.choice(metadata if metadata and (kind in ("strange JSON", "deep JSON") or rng.random() < 0.5) else files)
    (strange_json if kind == "strange JSON" else ANY_FILE[kind])(rng, path)


RESULTS = (*ANY_FILE, "strange JSON", "strange JSON", "strange JSON")


# ---- the tries ----


def tried_lines(rng, tries, name):
    with Command(name) as command, patched(stubs(command.module, name)):
        for _ in range(tries):
            kind = rng.choice(LINES)
            words = command_line(rng, command, kind)
            with scratch(True):
                yield kind, command.run(words), f"{name} {words}"


def tried_checkpoints(rng, tries):
    for _ in range(tries):
        kind = rng.choice(CHECKPOINTS)
        with scratch(False) as at:
            damaged_checkpoint(rng, at / "model", kind)
            yield kind, read_checkpoint(at / "model"), kind


def tried_texts(rng, tries):
    lines = dict(ablate="--tokens=bad", measure="--tokens=bad", train="--text=bad")
    lines |= {name: f"{line} {more}" for name, line in lines.items() for more in ["--length=10"]}
    for name, line in lines.items():
        with Command(name) as command, patched(stubs(command.module, name)):
            for _ in range(-(-tries // len(lines))):
                kind = rng.choice(list(TEXTS))
                with scratch(False) as at:
                    (at / "bad").write_bytes(TEXTS[kind](rng))
                    yield kind, command.run(line.split()), f"{name} {kind}"


def tried_stores(rng, tries):
    """A grid that is drawn or gone on with, and one that is opened by the library."""
    resume = "--model=small --layers=1,2 --rope=on,off --length=10 --seeds=2 --width=32 --out=mine".split()
    with Command("ablate") as command:
        drawing = [stub for stub in stubs(command.module, "ablate") if stub[1] != "show"] + [(command.module, "figures", lambda *_: ())]
        with patched(stubs(command.module, "ablate")):
            with scratch(False) as at:
                assert command.run(resume).kind == "accepted"
                shutil.move(at / "mine", SCRATCH / "mine")
        for _ in range(tries):
            kind = rng.choice(RESULTS)
            draw = rng.random() < 0.6
            with scratch(False) as at, patched(drawing if draw else stubs(command.module, "ablate")):
                shutil.copytree(SCRATCH / ("stock/grid" if draw else "mine"), at / "mine")
                damaged_result(rng, at / "mine", kind)
                yield kind, command.run(["--plot-only=mine"] if draw else resume), f"{'draw' if draw else 'resume'}, {kind}"


def tried_trainings(rng, tries):
    """A training that is gone on with."""
    with Command("train") as command, patched(untrained(command)):
        for _ in range(tries):
            kind = rng.choice(RESULTS)
            with scratch(False) as at:
                shutil.copy(SCRATCH / "stock" / "text", at / "text")
                shutil.copytree(SCRATCH / "stock" / "training", at / "mine")
                damaged_result(rng, at / "mine", kind)
                yield kind, command.run([*TRAIN, "--out=mine"]), kind


def tried_results(rng, tries):
    """Results of a comparison of recall, and the lab of the claims."""
    for name, line in dict(recall="--compare --seeds=2 --pairs=3 --out=mine", reproduce="--out=mine").items():
        with Command(name) as command, patched(stubs(command.module, name)):
            with scratch(False) as at:
                if name == "reproduce":
                    claims.Lab(claims.SCALES["small"], 0, at / "mine" / "lab")
                else:
                    command.run(line.split())
                    for key, run in command.module.plan(parsed(line, name)).items():
                        curve = recall.Curve(*(np.zeros((2, 3)) for _ in range(2)), 3, *(np.zeros((2, 3)) for _ in range(2)), np.zeros(2), 1.0)
                        (folder := at / "mine" / key[0] / f"seed{key[1]}").mkdir(parents=True)
                        cli.write_json(folder / "result.json", dict(about=run.about(), curve=curve))
                shutil.rmtree(SCRATCH / "mine", ignore_errors=True)
                shutil.move(at / "mine", SCRATCH / "mine")
            for _ in range(-(-tries // 2)):
                kind = rng.choice(RESULTS)
                with scratch(False) as at, patched([(command.module, "show", accept)] if name == "recall" else []):
                    shutil.copytree(SCRATCH / "mine", at / "mine")
                    damaged_result(rng, at / "mine", kind)
                    yield kind, command.run(line.split()), f"{name}, {kind}"


def parsed(line, name):
    flags.FLAGS([name, *(word.replace("-", "_").replace("__", "--", 1) for word in line.split())])
    return flags.FLAGS


@contextlib.contextmanager
def scratch(stocked):
    """A working directory of its own, with the stock of files or without."""
    at, before = SCRATCH / "try" / "here", pathlib.Path.cwd()
    at.parent.mkdir()
    at.mkdir()
    for thing in (SCRATCH / "stock").iterdir() if stocked else ():
        if thing.name in ("grid", "training", "model"):  # many files: linked, and made whole again if a try removed some
            if not (SCRATCH / thing.name).exists():
                shutil.copytree(thing, SCRATCH / thing.name)
            if not any(thing.iterdir()):
                thing.rmdir()
                shutil.copytree(SCRATCH / thing.name, thing)
            (at / thing.name).symlink_to(thing)
        else:
            (shutil.copytree if thing.is_dir() else shutil.copy)(thing, at / thing.name, **({} if thing.is_dir() else dict(follow_symlinks=False)))
    os.chdir(at)
    try:
        yield at
    finally:
        os.chdir(before)
        shutil.rmtree(at.parent, ignore_errors=True)


SHARES = {"checkpoint": 30, "texts": 5, "stores": 8, "trainings": 3, "results": 3} | dict.fromkeys(COMMANDS, 7)
TRIED = dict(checkpoint=tried_checkpoints, texts=tried_texts, stores=tried_stores, trainings=tried_trainings, results=tried_results)


def main(tries, seed, targets, seconds=20, show=3):
    """Tries so many times in all; prints the table and the faults; returns how many there were."""
    global SECONDS
    resource.setrlimit(resource.RLIMIT_AS, (int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * 4096 + MEMORY,) * 2)
    if set(targets) != {"checkpoint"}:
        stock(SCRATCH / "stock", "trainings" in targets)
    SECONDS = seconds
    table, faults = collections.Counter(), collections.defaultdict(list)
    for target in targets:
        rng, began = random.Random(f"{seed} {target}"), time.process_time()
        count = max(1, round(tries * SHARES[target] / sum(SHARES[t] for t in targets)))
        made = TRIED[target](rng, count) if target in TRIED else tried_lines(rng, count, target)
        for kind, outcome, what in made:
            if outcome.kind == "accepted" and kind in MUST and target not in ("stores", "trainings", "results"):
                outcome = Outcome("fault", f"accepted: {kind}")
            table[target, kind, outcome.kind] += 1
            if outcome.kind == "fault":
                print(f"{what}: {outcome.words}"[:600], file=sys.stderr, flush=True)
                faults[target, re.sub(r"\d{6,}", "9…", outcome.words)[:110]].append(f"{what}: {outcome.words}")
        print(f"{target}: {count} tries, {time.process_time() - began:.1f} s of the processor", file=sys.stderr, flush=True)
    rows, total = [], collections.Counter()
    for target, kind in dict.fromkeys((target, kind) for target, kind, _ in sorted(table)):
        counts = [table[target, kind, outcome] for outcome in ("refused", "accepted", "fault")]
        total.update(dict(zip(("refused", "accepted", "fault"), counts)))
        rows.append([target, kind, sum(counts), *counts])
    rows.append(["all", "", sum(total.values()), *(total[outcome] for outcome in ("refused", "accepted", "fault"))])
    print(cli.table(["target", "damage", "tries", "refused", "accepted", "faults"], rows))
    for (target, words), whats in sorted(faults.items(), key=lambda item: -len(item[1])):
        print(f"\nfault, {len(whats)} times, {target}: {words}", *(f"   {what[:600]}" for what in whats[:show]), sep="\n")
    return total["fault"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(SHARES), help="a comma list")
    parser.add_argument("--seconds", type=int, default=20, help="of the processor, after which a try hangs")
    chosen = parser.parse_args()
    try:
        faulty = main(chosen.tries, chosen.seed, chosen.targets.split(","), chosen.seconds)
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    sys.exit(bool(faulty))
