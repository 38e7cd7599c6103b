"""How fast influence is, against PyTorch's autograd on the Hugging Face model and against the machine's limit.

    python -m experiments.bench
    python -m experiments.bench --models=qwen2-0.5b --lengths=2048 --probes=4 --repeats=1
    python -m experiments.bench --device=gpu --lengths=2048 --probes=64
    python -m experiments.bench --scaling=128,256,512,1024,2048,4096 --probes=4
    python -m experiments.bench --training=4 --models=small --lengths=512

Every contender pulls the same number of cotangents of the last final-normed output back to the embeddings, float32, in a
process of its own (so that its peak memory is its own), once to warm up and once timed (an update of a training three
times, for the median); contenders take turns, and the table shows medians over repeats. The limit is the time of the
matrix products that no method avoids (forward pass included) at the fastest rate that any library reached on 2048³
products in this run, on 4096³ on a GPU.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import lim
from experiments import cli
from lim import plot, train
from lim.influence import default_chunk
from lim.theory import cesaro, kernel

CONTENDERS = ("lim", "torch one by one", "torch batched", "torch jacrev")
TRAINERS = ("lim", "torch")


def define_flags():
    cli.define("models", cli.Items(cli.model).parse, cli.Items(cli.model).parse("qwen2-0.5b,gpt2"), "presets, a comma list")
    cli.define_axis("lengths", cli.integer(2), "numbers of tokens; default 256,1024")
    cli.define("probes", cli.integer(2, 128), 8, "cotangents pulled back in a run")
    cli.define("repeats", cli.integer(1), 3, "how often each contender runs")
    flags.DEFINE_enum("device", "cpu", ("cpu", "gpu"), "where to run")
    flags.DEFINE_bool("theory", True, "also time the operator at 10⁶ positions and the kernel theory at 2048")
    cli.define_axis("scaling", cli.integer(2), "only this library, at these lengths, and at 6 to 48 layers of the middle one: scaling_*.png")
    cli.define("training", cli.integer(1), None, "instead of influence: an AdamW update of so many windows, against PyTorch's")
    flags.DEFINE_string("out", None, "folder for results.json; default runs/bench/FLAGS")
    cli.define("layers", cli.integer(2), None, "number of blocks, if not the model's own")
    flags.DEFINE_enum("contender", None, sorted({*CONTENDERS, *TRAINERS}), "run this one alone, on one model and length, and print its numbers as JSON")
    flags.adopt_module_key_flags(cli)


def per_block(config, length):
    """Of a block: weights of its products, multiplications per product of attention's admitted pairs, width of its keys."""
    heads, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    mlps = 2 if config.family == "gpt2" else 3
    return config.width * (2 * heads + 2 * keys + mlps * config.inner), length * (length + 1) / 2 * heads, keys


def training_flops(config, length, batch):
    """Floating-point operations of the products that an update on `batch` windows needs at least.

    Of every block and of the head the weights, once forward and twice back, and attention's products of the admitted pairs,
    two forward and four back.
    """
    weights, pairs, _ = per_block(config, length)
    return batch * (config.layers * (6 * weights * length + 12 * pairs) + 6 * length * config.width * config.vocab)


def needed_flops(config, length, cotangents):
    """Floating-point operations of the products that a forward pass and `cotangents` pullbacks need at least.

    Of every block the weights, once each way, and attention's products of the admitted pairs, two forward and four back;
    of the last block only keys and values of all rows. Weights get no gradient.
    """
    weights, pairs, keys = per_block(config, length)
    inner = config.layers - 1
    forward = 2 * inner * (weights * length + 2 * pairs) + 4 * length * config.width * keys
    back = 2 * inner * (weights * length + 4 * pairs) + 4 * length * config.width * keys
    return forward + cotangents * back


def product_rate(multiply, size, repeats=6):
    """Fastest rate of `repeats` square products in flop/s; `multiply` makes one and waits for it."""
    multiply()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run_lim(config, length, probes, size):
    """Seconds of a warm run and of the first with its compilation, the product rate, and the peak of a device's memory."""
    decoder, tokens_L = lim.Decoder.at_birth(config, 0), lim.random_tokens(config.vocab, length, 0)
    lim.check_compiler(length * default_chunk(config, length, probes), config.width)
    measure = lambda: lim.influence(decoder, tokens_L, probes=probes)  # noqa: E731
    first = timed(measure)
    x = jnp.ones((size, size))
    multiply = jax.jit(lambda x: jax.lax.dot(x, x, precision="highest"))
    rates = [product_rate(lambda: multiply(x).block_until_ready(), size)]
    seconds = timed(measure)
    rates.append(product_rate(lambda: multiply(x).block_until_ready(), size))
    device = jax.devices()[0].memory_stats() or {}
    return dict(seconds=seconds, first=first, rate=max(rates), device_memory=device.get("peak_bytes_in_use"))


def hf_config(config, transformers):
    """The Hugging Face config of the same sizes."""
    if config.family == "gpt2":
        return transformers.GPT2Config(vocab_size=config.vocab, n_positions=config.max_length, n_embd=config.width,
                                       n_layer=config.layers, n_head=config.heads, n_inner=config.inner)  # fmt: skip
    sizes = dict(vocab_size=config.vocab, hidden_size=config.width, num_hidden_layers=config.layers,
                 num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, intermediate_size=config.inner,
                 max_position_embeddings=config.max_length)  # fmt: skip
    return transformers.Qwen2Config(**sizes) if config.family == "qwen2" else transformers.LlamaConfig(**sizes)


def run_torch(contender, config, length, probes, size, device):
    """The same of PyTorch on the Hugging Face model without its head."""
    import torch
    import transformers

    where = torch.device("cuda" if device == "gpu" else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = transformers.AutoModel.from_config(
        hf_config(config, transformers), attn_implementation="sdpa" if contender == "torch one by one" else "eager"
    ).to(where, torch.float32).eval().requires_grad_(False)  # fmt: skip
    x_LD = model.get_input_embeddings()(torch.arange(length, device=where) % config.vocab)[None].requires_grad_()
    frame_KD = torch.linalg.qr(torch.randn(config.width, probes)).Q.T.to(where)
    read = lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state[0, -1]  # noqa: E731

    def measure():
        if contender == "torch jacrev":
            pulled = torch.func.jacrev(lambda x: frame_KD @ read(x), chunk_size=4)(x_LD)
            return pulled.square().sum(-1).mean(0).sqrt().cpu()
        hidden_D = read(x_LD)
        if contender == "torch batched":
            (pulled,) = torch.autograd.grad(hidden_D, x_LD, frame_KD, is_grads_batched=True)
            return pulled.square().sum(-1).mean(0).sqrt().cpu()
        squares = [torch.autograd.grad(hidden_D, x_LD, ct_D, retain_graph=True)[0].square().sum(-1) for ct_D in frame_KD]
        return torch.stack(squares).mean(0).sqrt().cpu()

    first = timed(measure)
    a = torch.ones(size, size, device=where)

    def multiply():
        (a @ a).cpu() if device == "gpu" else a @ a

    rates = [product_rate(multiply, size)]
    seconds = timed(measure)
    rates.append(product_rate(multiply, size))
    return dict(seconds=seconds, first=first, rate=max(rates),
                device_memory=torch.cuda.max_memory_allocated() if device == "gpu" else None)  # fmt: skip


def train_lim(config, length, batch, size):
    """As `run_lim`, of an update."""
    trainer = train.Trainer(config, train.Recipe(batch=batch), devices=jax.devices()[:1])
    tokens_BT = np.random.default_rng(0).integers(config.vocab, size=(batch, length + 1), dtype=np.int32)
    update = lambda: trainer.update(tokens_BT, np.ones((batch, length), np.float32))  # noqa: E731
    first = timed(update)
    x = jnp.ones((size, size))
    multiply = jax.jit(lambda x: jax.lax.dot(x, x, precision="highest"))
    rates = [product_rate(lambda: multiply(x).block_until_ready(), size)]
    seconds = statistics.median(timed(update) for _ in range(3))
    rates.append(product_rate(lambda: multiply(x).block_until_ready(), size))
    device = jax.devices()[0].memory_stats() or {}
    return dict(seconds=seconds, first=first, rate=max(rates), device_memory=device.get("peak_bytes_in_use"))


def train_torch(config, length, batch, size, device):
    """The same of PyTorch on the Hugging Face model: clipped gradients, AdamW."""
    import torch
    import transformers

    where = torch.device("cuda" if device == "gpu" else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    hf = hf_config(config, transformers)
    hf.tie_word_embeddings = config.tied
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa").to(where, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens_BT = torch.randint(config.vocab, (batch, length + 1), device=where)

    def update():
        optimizer.zero_grad()
        logits = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens_BT[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    first = timed(update)
    a = torch.ones(size, size, device=where)

    def multiply():
        (a @ a).cpu() if device == "gpu" else a @ a

    rates = [product_rate(multiply, size)]
    seconds = statistics.median(timed(update) for _ in range(3))
    rates.append(product_rate(multiply, size))
    return dict(seconds=seconds, first=first, rate=max(rates),
                device_memory=torch.cuda.max_memory_allocated() if device == "gpu" else None)  # fmt: skip


def run_contender(args):
    """One contender's numbers as a line of JSON: what each process of the bench does."""
    if len(args.models) != 1 or len(args.lengths or ()) != 1:
        raise ValueError(f"--contender={args.contender}: needs one of --models and one of --lengths")
    (model,), (length,) = args.models, args.lengths
    config, size = cli.read_config(model.value), 4096 if args.device == "gpu" else 2048
    config = config.replace(max_length=max(length.value, config.max_length), layers=args.layers or config.layers)
    if args.contender not in contenders(args):
        raise ValueError(f"--contender={args.contender}: allowed are {', '.join(contenders(args))}")
    if args.training and args.contender == "lim":
        numbers = train_lim(config, length.value, args.training, size)
    elif args.training:
        numbers = train_torch(config, length.value, args.training, size, args.device)
    elif args.contender == "lim":
        numbers = run_lim(config, length.value, args.probes, size)
    else:
        numbers = run_torch(args.contender, config, length.value, args.probes, size, args.device)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(numbers | dict(memory=numbers["device_memory"] or memory)))


def contenders(args):
    """Who takes part."""
    return TRAINERS if args.training else CONTENDERS


def in_own_process(contender, model, length, args, layers=None):
    """What `run_contender` prints, or why it ended without."""
    line = [sys.executable, "-m", "experiments.bench", f"--contender={contender}", f"--models={model}", f"--lengths={length}",
            f"--probes={args.probes}", f"--device={args.device}", *([f"--layers={layers or args.layers}"] if layers or args.layers else []),
            *([f"--training={args.training}"] if args.training else [])]  # fmt: skip
    platform = dict(cpu="cpu", gpu="cuda")[args.device]  # else JAX would take a GPU where torch is told to take the CPU
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | dict(JAX_PLATFORMS=platform))
    if done.returncode:
        return dict(failed=(done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def measure(args, lengths):
    """{(model, length): {contender: [numbers of each repeat]}}."""
    cases = [(model.text, length) for model in args.models for length in lengths]
    runs = {case: {contender: [] for contender in contenders(args)} for case in cases}
    with cli.progress(total=len(cases) * len(contenders(args)) * args.repeats, unit="run") as bar:
        for (model, length), of_case in runs.items():
            for _ in range(args.repeats):
                for contender, repeats in of_case.items():
                    if not any("failed" in numbers for numbers in repeats):
                        repeats.append(in_own_process(contender, model, length, args))
                    bar.update()
    return runs


def table(runs, args):
    """One row per contender and case: medians over repeats."""
    ran = {case: {contender: [n for n in repeats if "failed" not in n] for contender, repeats in of_case.items()} for case, of_case in runs.items()}
    rate = max((n["rate"] for of_case in ran.values() for repeats in of_case.values() for n in repeats), default=float("nan"))
    rows, failures = [], []
    for (model, length), of_case in runs.items():
        median = {contender: {key: statistics.median(n[key] for n in repeats) for key in ("seconds", "first", "memory")}
                  for contender, repeats in ran[model, length].items() if repeats}  # fmt: skip
        failures += [f"{model}, {length}, {contender}: {n['failed']}" for contender, repeats in of_case.items() for n in repeats if "failed" in n]
        peers = [m["seconds"] for contender, m in median.items() if contender != "lim"]
        config = cli.read_config(model)
        config = config.replace(layers=args.layers or config.layers)
        flops = training_flops(config, length, args.training) if args.training else needed_flops(config, length, args.probes)
        limit = flops / rate
        for contender in contenders(args):
            if contender not in median:
                continue
            m = median[contender]
            ratio = f"{min(peers) / m['seconds']:.2f}" if peers else "–"
            each = f"{args.training * length / m['seconds']:.0f}" if args.training else f"{m['seconds'] / args.probes:.3g}"
            rows.append([model, length, contender, each, ratio, f"{limit / m['seconds']:.2f}",
                         f"{m['memory'] / 1e9:.1f}", f"{m['first'] - m['seconds']:.1f}"])  # fmt: skip
    header = ["model", "length", "contender", "tokens/s" if args.training else "s/cotangent", "speed / best peer", "share of limit", "peak GB", "first run +s"]
    return cli.table(header, rows), rate, failures


def time_theory():
    """Seconds of the averaging operator at 10⁶ positions and 96 layers, and of the kernel theory of Qwen2-0.5B at 2048."""
    return {"operator, L = 1e6, H = 96": timed(lambda: cesaro.profile(10**6, np.full(96, 0.5))),
            "kernel theory, qwen2-0.5b, L = 2048": timed(lambda: kernel.predict(lim.Config.preset("qwen2-0.5b"), 2048))}  # fmt: skip


def scaling(args, folder):
    """Seconds and memory against length and depth, with fitted powers: a table and two figures."""
    model, lengths = args.models[0].text, [item.value for item in args.scaling]
    middle, own = sorted(lengths)[len(lengths) // 2], args.layers or cli.read_config(model).layers
    sweeps = {"length": [(length, own) for length in lengths], "layers": [(middle, layers) for layers in (6, 12, 24, 48)]}
    measured = {axis: [in_own_process("lim", model, *size[:1], args, size[1]) for size in sizes] for axis, sizes in sweeps.items()}
    for axis, numbers in measured.items():
        sizes = np.array([size[axis == "layers"] for size in sweeps[axis]])
        seconds = np.array([n.get("seconds", np.nan) for n in numbers]) / args.probes
        memory = np.array([n.get("memory", np.nan) for n in numbers]) / 1e9
        print(cli.table([axis, "s/cotangent", "peak GB"], [[size, f"{s:.3g}", f"{m:.1f}"] for size, s, m in zip(sizes, seconds, memory)]))
        for size, n in zip(sizes, numbers):
            if "failed" in n:
                print(f"did not run: {axis} {size}: {n['failed']}")
        series, fitted = {}, np.isfinite(seconds) & (sizes >= np.median(sizes))
        if fitted.sum() < 2:
            continue
        for name, values in {"seconds per cotangent": seconds, "peak memory, GB": memory}.items():
            power, level = np.polyfit(np.log(sizes[fitted]), np.log(values[fitted]), 1)
            print(f"{name}: about {axis}^{power:.2f} over the upper half")
            series[f"{name}: {axis}^{power:.2f}"] = values, None, np.exp(level) * sizes**power
        figure = plot.convergence_figure(sizes, series, xlabel=axis, ylabel="", yscale="log", lines="power of the upper half", caption=cli.command(),
                                         title=f"{model}: cost of {args.probes} cotangents against {axis}")  # fmt: skip
        plot.save(figure, folder / f"scaling_{axis}.png")
    return measured


def main(args):
    if args.contender:
        with cli.refusing():
            return run_contender(args)
    with cli.refusing():
        folder = cli.output_folder(args.out)
        if args.scaling and (args.training or args.lengths or len(args.models) > 1 and "models" in cli.given(args, ["models"])):
            raise ValueError("--scaling: is of influence, of one model, at its own lengths; leave out --training, --lengths and further --models")
        lengths = [item.value for item in args.lengths or cli.Items(cli.integer(2)).parse("256,1024")]
        provenance = cli.provenance()
    if args.scaling:
        cli.write_json(folder / "scaling.json", dict(provenance=provenance, flags=cli.flag_values(args), **scaling(args, folder)))
        return print(f"\nwrote scaling.json and figures in {folder}")
    runs = measure(args, lengths)
    text, rate, failures = table(runs, args)
    work = f"an update on {args.training} windows" if args.training else f"{args.probes} cotangents"
    print(f"\nmatrix products here: {rate / 1e9:.0f} GFLOP/s; {work} a run, medians of {args.repeats}\n")
    print(text)
    for failure in failures:
        print(f"did not run: {failure}")
    theory = time_theory() if args.theory and not args.training else {}
    for name, seconds in theory.items():
        print(f"{name}: {seconds:.1f} s")
    runs = [dict(model=model, length=length, contenders=of_case) for (model, length), of_case in runs.items()]
    cli.write_json(folder / "results.json", dict(provenance=provenance, flags=cli.flag_values(args), rate=rate, runs=runs, theory=theory))
    print(f"\nwrote {folder / 'results.json'}")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
