"""Every claim of the paper, measured and decided, in one report.

    python -m experiments.reproduce --scale=small
    python -m experiments.reproduce --scale=small --only=3,5 --seed=1
    python -m experiments.reproduce --scale=paper --only=9 --out=runs/reproduce/paper

`small` takes 13 minutes on two cores; `paper` measures Qwen2-0.5B and GPT-2 small at 2048 tokens and trains 24 layers,
overnight on two cores. What is measured is kept below --out and serves every claim that needs it;
a run that was stopped goes on when the same line is given again, and --only adds to what is there. Prints the ledger, and writes
it as report/index.html, claims.md and, with every number, claims.json. Exit status: 0, 2 for a bad value, 3 when measurements
failed, 1 when results cannot be written, 130 when interrupted.
"""

import sys
import textwrap

from absl import flags

import lim
from experiments import cli
from lim import claims, report
from lim.influence import default_chunk


def define_flags():
    flags.DEFINE_enum("scale", "small", tuple(claims.SCALES), "sizes of the networks and how many seeds")
    cli.define_axis("only", number, "measure what these claims need (1 to 14, A, B); default all")
    cli.define("seed", cli.integer(0), 0, "which block of seeds; different blocks share none")
    flags.DEFINE_string("out", None, "folder for measurements, report and claims.json; default runs/reproduce/SCALE, and the seed")
    flags.adopt_module_key_flags(cli)


def number(text):
    """Reader of an item of --only."""
    numbers = list(dict.fromkeys(claim.number.split()[0] for claim in claims.CLAIMS))
    if text.upper() not in numbers:
        raise ValueError(f"{text!r}: allowed are {', '.join(numbers)}")
    return text.upper()


def wanted(args):
    """The claims that the flags ask for."""
    numbers = args.only and {item.value for item in args.only}
    return [claim for claim in claims.CLAIMS if numbers is None or claim.number.split()[0] in numbers]


def main(args):
    scale = claims.SCALES[args.scale]
    with cli.refusing():
        folder = cli.output_folder(args.out or f"runs/reproduce/{args.scale}" + (f"-seed={args.seed}" if args.seed else ""))
        try:
            lab = claims.Lab(scale, args.seed, folder / "lab")
        except ValueError as error:
            raise ValueError(f"--out={error}. Choose another") from None
        lim.check_compiler(scale.length * default_chunk(scale.qwen2, scale.length, scale.probes), scale.qwen2.width)
    failed = measure(lab, list(dict.fromkeys(name for claim in wanted(args) for name in claim.needs)))
    findings = [claims.judge(claim, lab) for claim in claims.CLAIMS]
    print(ledger(findings))
    try:
        write(findings, args, lab, folder)
    except OSError as error:
        stop(f"{folder} cannot be written: {error.strerror or error}", 1)
    if failed:
        print(f"{failed} measurements failed; the claims that need them are not run", file=sys.stderr)
        sys.exit(3)


def measure(lab, names) -> int:
    """Measures what is lacking, with a bar; says how to go on where that ends early. Returns how many failed."""
    failed = 0
    try:
        with cli.interruptible(), cli.progress(total=sum(map(lab.lacking, names)), unit="measurement") as bar:
            for name in names:
                bar.set_description(name, refresh=False)
                for error in lab.measure(name):
                    failed += bool(error)
                    bar.update()
    except KeyboardInterrupt:
        stop(f"interrupted; {sum(map(lab.lacking, names))} measurements are to do, what is done is kept, the same line goes on", 130)
    except OSError as error:
        stop(f"{lab.folder} cannot be written: {error.strerror or error}", 1)
    return failed


def stop(why, code):
    """Ends the command: one line, an exit status."""
    print(f"{cli.command_name()}: {why}", file=sys.stderr)
    sys.exit(code)


def ledger(findings) -> str:
    """The ledger as text: a line per claim, and under it what was measured and what qualifies it."""
    lines = []
    for finding in findings:
        claim, decision = finding.claim, finding.decision
        chance = "" if finding.evidence is None else f" (another run otherwise: {report.percent(decision.chance)})"
        lines.append(f"\n{claim.number}. {claim.title} [{claim.paper}]: {decision.verdict}{chance}")
        if finding.evidence:
            lines += [f"     {s.words}: {s.shown}" for s in map(finding.evidence.statistics.get, claim.headline)]
        if decision.sentence:
            lines += textwrap.wrap(decision.sentence, 110, initial_indent="     ", subsequent_indent="     ")
    return "\n".join(lines)


def write(findings, args, lab, folder):
    """claims.json, claims.md and report/index.html."""
    provenance = cli.provenance()
    line = f"python -m experiments.reproduce --scale={args.scale}" + (f" --seed={args.seed}" if args.seed else "")
    cli.write_json(folder / "claims.json", dict(
        provenance=provenance, scale=lab.scale.spec(), seed=args.seed, claims=[claims.plain_json(finding) for finding in findings],
    ))  # fmt: skip
    s, t, r = lab.scale, lab.scale.training, lab.scale.recall
    run = {
        "Command": line,
        "Networks": f"Qwen2 architecture, {s.qwen2.layers} layers of width {s.qwen2.width}; GPT-2 architecture, {s.gpt2.layers} "
                    f"layers of width {s.gpt2.width}; {s.length} random tokens. Depth is swept at width {s.swept.width}, "
                    f"{s.swept_length} tokens",
        "Per configuration": f"{s.seeds} seeds ({lab.seeds[0]} to {lab.seeds[-1]}), {s.probes} random directions of the output each",
        "Initial weights": f"spread {s.qwen2.init_std:.4g} and {s.gpt2.init_std:.4g}, so that width · spread² is that of the "
                           "published sizes",
        "Trained on text": f"Qwen2 architecture, {t.config.layers} layers of width {t.config.width}, {t.seeds} seeds: {t.recipe.steps} "
                           f"updates of {t.recipe.batch} windows of {t.length} bytes of what Python brings along; measured on "
                           f"{t.windows} held-out windows",
        "Trained to recall": f"{r.config.layers} layers of width {r.config.width}, {r.seeds} seeds times {', '.join(r.arms)}: "
                             f"{r.recipe.steps} updates of {r.recipe.batch} sequences, {r.task.pairs} pairs and {r.task.questions} "
                             "questions each",
        "Commit": str(provenance["git"]),
        "Versions": ", ".join(f"{name} {version}" for name, version in (provenance["versions"] | dict(lim=provenance["lim"])).items()),
        "Device": f"{provenance['device']}, {provenance['dtype']}, matrix products at precision {provenance['matmul_precision']}",
    }  # fmt: skip
    page = report.page(findings, scale=args.scale, command=lambda number: f"{line} --only={number.split()[0]}", run=run)
    cli.put(folder, "claims.md", lambda path: path.write_text(report.ledger_table(findings), encoding="utf-8"))
    (folder / "report").mkdir(exist_ok=True)
    cli.put(folder / "report", "index.html", lambda path: path.write_text(page, encoding="utf-8"))
    print(f"\nwrote report/index.html, claims.md and claims.json in {folder}")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
