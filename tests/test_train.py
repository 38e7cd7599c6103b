"""Training is resumed to the bit, splits a batch without changing it, refuses what it cannot do; the watch stores what it measures."""

import dataclasses
import json
import logging
import math
import os
import pathlib
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
import xarray as xr
from absl import flags
from absl.testing import flagsaver
from flax import nnx

import lim
from experiments import cli, measure
from experiments import train as experiment
from lim import checkpoint, plot, profile, rollout, tokens, train, watch
from lim.model import params_of

CONFIG = lim.Config.preset("small").replace(layers=2, width=16, vocab=31)
RECIPE = train.Recipe(steps=12, batch=4, learning_rate=1e-2)
ABOUT = dict(config=dataclasses.asdict(CONFIG), recipe=dataclasses.asdict(RECIPE), tokenizer=None, text="abc")


def batch(step):
    rng = np.random.default_rng([1, step])
    tokens_BT = np.cumsum(rng.integers(3, size=(4, 1)) + np.ones((4, 9), int), axis=1) % 31  # a counts on: learnable
    return tokens_BT.astype(np.int32), np.ones((4, 8), np.float32)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module")
def straight():
    """Ten updates without a stop: the losses and the trainer."""
    trainer = train.Trainer(CONFIG, RECIPE)
    return [trainer.update(*batch(step)) for step in range(10)], trainer


def test_it_learns_and_counts(straight):
    steps, trainer = straight
    assert [step.step for step in steps] == list(range(1, 11)) and trainer.step == 10
    assert steps[-1].loss < steps[0].loss - 0.5 and abs(steps[0].loss - np.log(31)) < 0.1


def test_resumed_to_the_bit(straight, tmp_path):
    steps, trainer = straight
    first = train.Trainer(CONFIG, RECIPE)
    checkpoints = train.Checkpoints(tmp_path)
    assert not checkpoints.restore(first, ABOUT)
    for step in range(4):
        first.update(*batch(step))
    checkpoints.save(first, 3.0, ABOUT)
    first.update(*batch(4))  # the checkpoint is written in the background, from what the weights were
    checkpoints.close()
    second = train.Trainer(CONFIG, dataclasses.replace(RECIPE))
    checkpoints = train.Checkpoints(tmp_path)
    assert checkpoints.restore(second, ABOUT) and second.step == 4
    assert [second.update(*batch(step)) for step in range(4, 10)] == steps[4:]
    assert same(second.tree(), trainer.tree())
    with pytest.raises(ValueError, match=r"holds another training: text is abc there, abd here$"):
        checkpoints.restore(second, ABOUT | dict(text="abd"))
    decoder = checkpoint.load(tmp_path)
    assert decoder.config == CONFIG and checkpoint.config_of(tmp_path) == CONFIG and checkpoint.tokenizer_of(tmp_path) is None
    again = train.Trainer(CONFIG, RECIPE)
    for step in range(4):
        again.update(*batch(step))
    assert same(params_of(decoder), params_of(again.decoder))


def test_the_best_and_the_latest_two_stay(straight, tmp_path):
    _, trainer = straight
    checkpoints, before = train.Checkpoints(tmp_path, keep=1), trainer.step
    for trainer.step, loss in zip(range(1, 7), (5.0, 2.0, 4.0, 3.0, 6.0, 7.0)):
        checkpoints.save(trainer, loss, ABOUT)
    checkpoints.close()
    trainer.step = before
    assert train.Checkpoints(tmp_path).steps() == [2, 5, 6]


def test_parts_of_a_batch_add_up(straight):
    parts = train.Trainer(CONFIG, dataclasses.replace(RECIPE, accumulate=4))
    for step, whole in enumerate(straight[0][:2]):
        seen = parts.update(*batch(step))
        np.testing.assert_allclose([seen.loss, seen.gradient_norm], [whole.loss, whole.gradient_norm], rtol=2e-5)


def test_devices_share_a_batch_without_changing_it(straight):
    code = f"""
import jax, json, sys
sys.path[:0] = {sys.path!r}
import test_train
from lim import train
trainer = train.Trainer(test_train.CONFIG, test_train.RECIPE)
assert len(jax.devices()) == 2
print(json.dumps([trainer.update(*test_train.batch(step)).__dict__ for step in range(3)]))
"""
    env = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2", PYTHONPATH=str(pathlib.Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for seen, whole in zip(json.loads(done.stdout), straight[0]):
        np.testing.assert_allclose([seen["loss"], seen["gradient_norm"]], [whole.loss, whole.gradient_norm], rtol=1e-4)


def test_losses_updates_and_gradients_are_those_of_the_decoder_given_under_its_switches(tmp_path):
    kind = stand_ins.QuietDecoder
    decoder, switches, (tokens_BT, weights_BL) = kind.at_birth(CONFIG.replace(init_std=0.3), 0), lim.Switches(residual=0.5), batch(0)

    def loss_L(x_LD, tokens_T):
        logits_LV = decoder.logits(decoder.hidden(decoder.stream(x_LD, switches), switches))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits_LV), tokens_T[1:, None], axis=1)[:, 0]

    log_p_BLV = jax.nn.log_softmax(jax.jit(jax.vmap(lambda t: decoder(t, switches)))(tokens_BT[:, :-1]))
    expected = -np.take_along_axis(np.asarray(log_p_BLV), tokens_BT[:, 1:, None], axis=2)[..., 0]
    published = train.losses(lim.Decoder.at_birth(decoder.config, 0), tokens_BT)
    np.testing.assert_allclose(train.losses(decoder, tokens_BT, switches), expected, rtol=1e-5)
    assert np.abs(published - expected).max() > 0.1  # or nothing would be seen
    slopes = jax.jit(jax.vmap(lambda t: jax.grad(lambda x_LD: loss_L(x_LD, t).mean())(decoder.embed(t[:-1]))))(tokens_BT)
    structure, state = nnx.split(decoder)
    found_BL = train.embedding_gradients(structure, nnx.as_pure(state), switches.check(decoder.config), tokens_BT)
    np.testing.assert_allclose(found_BL, np.linalg.norm(slopes, axis=-1), rtol=1e-4)
    trainer = train.Trainer(decoder.config, RECIPE, switches=switches, decoder=decoder)
    assert trainer.update(tokens_BT, weights_BL).loss == pytest.approx(np.mean(expected), rel=1e-5)
    assert type(trainer.decoder) is kind and nnx.split(trainer.decoder)[0] == structure
    checkpoints, about = train.Checkpoints(tmp_path), ABOUT | dict(config=dataclasses.asdict(decoder.config))
    checkpoints.save(trainer, 3.0, about)
    checkpoints.close()
    again = kind.from_pretrained(tmp_path)
    assert type(again) is kind and same(params_of(again), params_of(trainer.decoder))
    with pytest.raises(ValueError, match="holds another training: decoder is .*QuietDecoder"):
        lim.Decoder.from_pretrained(tmp_path)


def test_narrow_weights_are_trained_in_float32(tmp_path):
    narrow = lim.Decoder.at_birth(CONFIG, 0, dtype=jnp.bfloat16)
    trainer = train.Trainer(CONFIG, dataclasses.replace(RECIPE, learning_rate=1e-6), decoder=narrow)
    trainer.update(*batch(0))
    assert {v.dtype for v in jax.tree.leaves(params_of(trainer.decoder))} == {jnp.dtype("float32")}
    assert not same(params_of(trainer.decoder), params_of(narrow))  # bfloat16 would lose so small a step
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(trainer, 3.0, ABOUT)
    checkpoints.close()
    kept = checkpoint.load(tmp_path, dtype=jnp.bfloat16)
    assert {v.dtype for v in jax.tree.leaves(params_of(kept))} == {jnp.dtype("bfloat16")}


def test_what_a_trainer_and_losses_refuse():
    with pytest.raises(ValueError, match="^decoder: is of .*layers=2.*, not of the config given, .*layers=1"):
        train.Trainer(CONFIG.replace(layers=1), RECIPE, decoder=lim.Decoder.at_birth(CONFIG))
    tokens_BT, weights_BL = batch(0)
    tokens_BT[0, 3] = -100
    with pytest.raises(ValueError, match="tokens hold the id -100: allowed are 0 to 30"):
        train.Trainer(CONFIG, RECIPE).update(tokens_BT, weights_BL)
    with pytest.raises(ValueError, match="tokens hold the id -100: allowed are 0 to 30"):
        train.losses(lim.Decoder.at_birth(CONFIG), tokens_BT)


def test_no_clipping():
    assert train.Recipe(clip=1e6).optimizer() and math.isinf(train.Recipe(clip=math.inf).clip)
    gradient = dict(kernel=jnp.array([3e3, 4e3]))
    changes = [recipe.optimizer().update(gradient, recipe.optimizer().init(gradient), gradient)[0]
               for recipe in (train.Recipe(clip=math.inf), train.Recipe(clip=1e9))]  # fmt: skip
    np.testing.assert_array_equal(changes[0]["kernel"], changes[1]["kernel"])


def test_the_last_bit_of_a_number_makes_no_other_training(tmp_path):
    checkpoints, trainer = train.Checkpoints(tmp_path), train.Trainer(CONFIG, RECIPE)
    about = lambda weight: ABOUT | dict(intervention=dict(weights_N=[weight, 1.0]))  # noqa: E731
    checkpoints.save(trainer, 3.0, about(0.3))
    checkpoints.close()
    checkpoints = train.Checkpoints(tmp_path)
    assert checkpoints.restore(trainer, about(np.nextafter(0.3, 1)))
    with pytest.raises(ValueError, match="holds another training: intervention is"):
        checkpoints.restore(trainer, about(0.3 + 1e-9))


def test_checkpoints_of_others_are_no_training(tmp_path):
    (tmp_path / "checkpoints" / "500").mkdir(parents=True)
    (tmp_path / "checkpoints" / "500" / "pytorch_model.bin").write_bytes(b"not lim's")
    assert train.about(tmp_path) is None


def test_a_copy_of_the_weights_is_trained(straight):
    decoder = lim.Decoder.at_birth(CONFIG, RECIPE.seed)
    before = jax.tree.map(np.array, params_of(decoder))
    trainer = train.Trainer(CONFIG, RECIPE, decoder=decoder)
    assert trainer.update(*batch(0)) == straight[0][0]  # the seed's weights, given
    held = trainer.decoder
    trainer.update(*batch(1))
    assert same(params_of(decoder), before) and not same(params_of(held), params_of(trainer.decoder))


def test_the_schedule():
    rate = train.Recipe(steps=100, learning_rate=2.0, warmup=0.1, final=0.25).schedule()
    np.testing.assert_allclose([rate(0), rate(4), rate(9)], [0.2, 1.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose([rate(54), rate(99)], [0.5 + 1.5 / 2, 0.5], rtol=1e-5)


@pytest.mark.parametrize("fields", [dict(steps=1), dict(steps=1, warmup=1.0), dict(steps=5, warmup=0.9), dict(steps=3, warmup=0.0)])
def test_short_schedules_rise_and_end(fields):
    recipe = train.Recipe(**fields)
    rates = [float(recipe.schedule()(step)) for step in range(recipe.steps)]
    assert all(0 < rate <= recipe.learning_rate * (1 + 1e-6) for rate in rates)
    assert rates[-1] == pytest.approx(recipe.learning_rate * recipe.final)


def test_a_switch_of_what_a_family_lacks_may_be_off():
    """GPT-2 has no RoPE: off is as good as left out, in a measurement and in a training."""
    config = lim.Config.preset("gpt2").replace(layers=1, width=16, heads=2, kv_heads=2, head_dim=8, inner=32, vocab=31, max_length=16)
    published, off = (train.Trainer(config, RECIPE, switches=switches) for switches in (lim.Switches(), lim.Switches(rope=0.0)))
    assert published.update(*batch(0)) == off.update(*batch(0))
    np.testing.assert_array_equal(*(train.losses(published.decoder, batch(0)[0], s) for s in (lim.Switches(), lim.Switches(rope=0.0))))


@pytest.mark.parametrize("said, under", [
    (dict(switches=dict(rope=0.0)), dict(rope=0.0)),
    (dict(switches={}), {}),
    (dict(intervention=dict(switches=dict(residual=[0.5, 2.0], rope=None))), dict(residual=[0.5, 2.0])),
])  # fmt: skip
def test_a_training_is_measured_under_its_switches(said, under, tmp_path):
    """What was trained without RoPE is measured without, unless the flags say otherwise."""
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(train.Trainer(CONFIG, RECIPE), 3.0, ABOUT | said)
    checkpoints.close()
    assert checkpoint.switches_of(tmp_path) == under
    words = dict(weights=str(tmp_path), model=None, tokens="random", length=8, windows=1, source=0, rollout=False, probes=None, exact=None,
                 output="hidden", seed=0, **dict.fromkeys(cli.SWITCHES))  # fmt: skip
    assert measure.load(types.SimpleNamespace(**words))[-1] == lim.Switches(**under)
    words["alpha"] = 0.25
    without_skip = {name: value for name, value in under.items() if name != "residual"}
    assert measure.load(types.SimpleNamespace(**words))[-1] == lim.Switches(**without_skip, alpha=0.25)


def test_a_training_on_recall_reads_no_text(tmp_path):
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(train.Trainer(CONFIG, RECIPE), 3.0, {name: value for name, value in ABOUT.items() if name != "tokenizer"})
    checkpoints.close()
    with pytest.raises(ValueError, match="is a training on recall, which reads no text: give random tokens"):
        checkpoint.tokenizer_of(tmp_path)


def test_the_level_of_uniform_attention_is_what_a_rollout_measures():
    decoder = lim.Decoder.at_birth(CONFIG, 0)
    for mask in (dict(causal=1.0), dict(causal=0.0), dict(window=5.0), dict(window=5.0, prefix=2.0), dict(alibi=1.0)):
        every = lim.Switches(**(dict(causal=1.0, window=100.0, prefix=0.0, alibi=0.0) | mask), uniform_attention=1.0)
        seen = rollout.measure(decoder, lim.random_tokens(31, 12, 0), every).first_token_N
        plan = types.SimpleNamespace(config=CONFIG, switches=lim.Switches(**mask))
        np.testing.assert_allclose(seen, experiment.uniform_level(plan, 12), rtol=1e-5, atol=1e-7)


def test_a_trained_network_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trainer, checkpoints = train.Trainer(CONFIG, RECIPE), train.Checkpoints("~/run")
    trainer.update(*batch(0))
    checkpoints.save(trainer, 3.0, ABOUT)
    checkpoints.close()
    assert same(params_of(train.trained("~/run")), trainer.tree()["params"]) and os.listdir(tmp_path) == ["run"]


def test_what_diverges_is_refused(straight):
    broken = train.Trainer(CONFIG, RECIPE)
    broken._state["params"]["embedding"]["embedding"] = broken._state["params"]["embedding"]["embedding"] * np.float32(1e30)
    with pytest.raises(FloatingPointError, match=r"^step 1: loss .*lower the learning rate$"):
        broken.update(*batch(0))


@pytest.mark.parametrize("fields, message", [
    (dict(steps=0), "steps=0: must be an integer of at least 1"),
    (dict(batch=6, accumulate=4), "accumulate=4: must divide batch=6"),
    (dict(learning_rate=-1.0), "learning_rate=-1.0: must be a number of at least 0"),
    (dict(warmup=1.5), "warmup=1.5: must be a number of at least 0, at most 1"),
    (dict(clip=float("nan")), "clip=nan: must be a number"),
    (dict(clip=0.0), "clip=0.0: must be a number above 0, or inf for none"),
    (dict(seed=2**32), "seed=4294967296: must be at most 4294967295"),
])  # fmt: skip
def test_recipes_that_are_refused(fields, message):
    with pytest.raises(ValueError) as refused:
        train.Recipe(**fields)
    assert str(refused.value).startswith(message)


def test_measured_steps_are_log_spaced():
    assert watch.log_spaced(1000, 5) == [0, 1, 10, 100, 1000] and watch.log_spaced(7, 2) == [0, 7]
    assert watch.log_spaced(3, 10) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="measurements=1"):
        watch.log_spaced(10, 1)


@pytest.fixture(scope="module")
def packed():
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh"), rng.integers(4, 40))) for _ in range(30)]
    return tokens.pack(texts, None, 257), texts


def test_windows_in_which_documents_begin(packed):
    packed, _ = packed
    windows_WT = watch.boundary_windows(packed, 20, 6)
    assert windows_WT.shape == (6, 21) and np.all((windows_WT[:, 2:18] == 256).any(1))
    lonely = tokens.pack(["a" * 300], None, 257)
    assert watch.boundary_windows(lonely, 20, 6).shape == (6, 21)
    with pytest.raises(ValueError, match="windows=60: the held-out text of .* tokens has only"):
        watch.boundary_windows(packed, 20, 60)


def test_the_watch_stores_what_it_measures(packed, tmp_path):
    packed, _ = packed
    config = CONFIG.replace(vocab=257)
    windows_WT = watch.boundary_windows(packed, 12, 3)
    how = dict(steps=[0, 2, 9], windows_WT=windows_WT, separator=256, layers=2, spec=dict(text="a"), attributes=dict(flags={}))
    seen = watch.Watch(tmp_path, **how)
    decoder, switches = lim.Decoder.at_birth(config, 3), lim.Switches(residual=0.5)
    assert not seen.done(2) and seen.done(1)  # 1 is none to measure
    seen.measure(2, decoder, switches, probes=4)
    seen = watch.Watch(tmp_path, **how)
    assert seen.done(2) and not seen.done(9)
    ds = lim.open(tmp_path).load()
    at = ds.sel(step=2)
    for w, tokens_T in enumerate(windows_WT):
        direct = lim.influence(decoder, tokens_T[:-1], switches, probes=4)
        np.testing.assert_array_equal(at.influence[w], direct.influence_L)
        np.testing.assert_array_equal(at.stderr[w], direct.stderr_L)
    rolled = [rollout.measure(decoder, tokens_T[:-1], switches) for tokens_T in windows_WT]
    np.testing.assert_allclose(at.first_token, np.mean([r.first_token_N for r in rolled], axis=0), rtol=1e-12)
    np.testing.assert_allclose(at.rollout, np.mean([r.rollout_L for r in rolled], axis=0), rtol=1e-12)
    np.testing.assert_allclose(at.loss, train.losses(decoder, windows_WT, switches).mean(0), rtol=1e-12)
    gradient_WL = train.embedding_gradients(nnx.split(decoder)[0], params_of(decoder), switches.check(config), windows_WT)
    np.testing.assert_allclose(at.gradient, profile.rms(np.asarray(gradient_WL, float)), rtol=1e-12)
    assert np.isnan(ds.influence.sel(step=9)).all() and list(ds.done) == [0, 1, 0]
    np.testing.assert_array_equal(ds.boundary, windows_WT[:, :-1] == 256)
    shutil.rmtree(tmp_path / "training.zarr" / "done")  # as after a kill while the store was made
    assert not watch.Watch(tmp_path, **how).done(2) and np.isnan(lim.open(tmp_path).influence).all()
    with pytest.raises(ValueError, match="holds another training: text is a there, b here"):
        watch.Watch(tmp_path, **how | dict(spec=dict(text="b")))


@pytest.mark.parametrize("damage", ["metadata", "step"])
def test_a_damaged_checkpoint_is_refused_by_name(damage, tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda e: printed.append(str(e.exc_value)))
    trainer = train.Trainer(CONFIG, train.Recipe(2, 2))
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(trainer, 1.0, {})
    checkpoints.close()
    folder = tmp_path / train.CHECKPOINTS / "0"
    if damage == "metadata":
        (folder / "about" / "metadata").unlink()
    else:
        (folder / "state" / "_METADATA").write_text("{")
    again = train.Checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoints/0: is damaged \(.*an earlier checkpoint"):
        again.restore(trainer, {})
    again.close()
    for said in ("Event loop is closed", "another"):  # the first is of orbax's other reads, which nobody waits for any more
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(said)))
    assert printed == ["another"] and logging.getLogger("asyncio").level == logging.CRITICAL


# ---- the command ----


@pytest.fixture
def parsed():
    """Reads a command line of experiments.train as the command does, and forgets its flags."""
    others = set(flags.FLAGS)
    mine = {flag.name for module, defined in flags.FLAGS.flags_by_module_dict().items() if module.startswith("experiments") for flag in defined}
    flags.FLAGS.remove_flag_values(mine & others)  # that another test module left
    experiment.define_flags()
    as_defined = flagsaver.save_flag_values()

    def parse(words):
        flagsaver.restore_flag_values({name: dict(flag) for name, flag in as_defined.items()})
        return flags.FLAGS(["train", *words.split()]) and flags.FLAGS

    yield parse
    flags.FLAGS.unparse_flags()
    flags.FLAGS.remove_flag_values(set(flags.FLAGS) - (others - mine))


@pytest.fixture
def texts(tmp_path):
    """Flags of a tiny training on two texts."""
    for name in "ab":
        (tmp_path / name).write_text("a text to train on " * 9)
    return f"--text={tmp_path}/a,{tmp_path}/b --length=12 --batch=2 --windows=2 --steps=4 --probes=2"


def test_a_training_from_weights_is_known_by_the_weights(parsed, texts, tmp_path):
    config = CONFIG.replace(vocab=257)
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        checkpoints = train.Checkpoints(tmp_path / name)
        checkpoints.save(train.Trainer(config, RECIPE, decoder=lim.Decoder.at_birth(config, seed)), 3.0, ABOUT | dict(config=dataclasses.asdict(config)))
        checkpoints.close()
    said = {}
    for name in ("one", "same", "other"):
        plan, decoder = experiment.read(parsed(f"{texts} --weights={tmp_path}/{name}"))
        said[name] = plan.about["weights"]
        assert decoder.config == config and said[name] == experiment.digest_of(decoder)
    assert said["one"] == said["same"] != said["other"] and said["one"].startswith("sha256:")
    with pytest.raises(ValueError, match="one, --out=.*one: are one folder"):
        experiment.read(parsed(f"{texts} --weights={tmp_path}/one --out={tmp_path}/other/../one"))
    plan, decoder = experiment.read(parsed(texts))
    assert decoder is None and plan.about["weights"] is None and plan.config.vocab == 257


def test_the_same_weights_at_another_spelling_are_the_same_training(parsed, texts, tmp_path, monkeypatch):
    config = stand_ins.LLAMA | dict(vocab_size=300, max_position_embeddings=64)
    folder = stand_ins.write_byte_tokenizer(stand_ins.written(tmp_path / "weights", config, stand_ins.tensors(config)))
    monkeypatch.setattr(tokens, "separator", lambda tokenizer: 256)  # which this tokenizer does not name
    one, other = (experiment.read(parsed(f"{texts} --weights={spelled}"))[0].about for spelled in (folder, folder / ".." / "weights"))
    assert one == other and one["weights"].startswith("sha256:")


def test_a_tokenizer_of_many_words_widens_the_default_model_alone(parsed, texts, tmp_path):
    import tokenizers
    import transformers

    words = {"<end>": 4999} | {f"w{n}": n for n in range(4999)} | {"[UNK]": 5000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="[UNK]").save_pretrained(tmp_path / "words")
    assert experiment.read(parsed(f"{texts} --tokenizer={tmp_path}/words"))[0].config.vocab == 5001
    with pytest.raises(ValueError, match="vocab=4096: too small for the separator"):
        experiment.read(parsed(f"{texts} --tokenizer={tmp_path}/words --model=small"))


@pytest.mark.parametrize("clip, means", [("inf", math.inf), ("2", 2.0)])
def test_clipping_by_flag(clip, means, parsed, texts):
    assert experiment.read(parsed(f"{texts} --clip={clip}"))[0].recipe.clip == means


def test_noresume_removes_nothing_before_the_new_training_can_start(monkeypatch, tmp_path, capsys):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)

    def refuses(*_, **__):
        raise ValueError("batch=8, accumulate=1: parts must divide among 3 devices")

    monkeypatch.setattr(experiment, "read", lambda args: (types.SimpleNamespace(config=CONFIG, recipe=RECIPE, switches=lim.Switches()), None))
    monkeypatch.setattr(lim, "check_compiler", lambda *_: None)
    monkeypatch.setattr(train, "Trainer", refuses)
    with pytest.raises(SystemExit) as end:
        experiment.main(types.SimpleNamespace(out=str(tmp_path), resume=False, length=12, probes=2))
    assert end.value.code == 2 and "must divide among 3 devices" in capsys.readouterr().err and (tmp_path / "checkpoints" / "4").exists()


@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_however_a_training_ends_its_newest_checkpoint_is_written_out(error, monkeypatch, tmp_path):
    trainer, plan = train.Trainer(CONFIG, RECIPE), types.SimpleNamespace(about=dict(ABOUT, measured=[]), config=CONFIG, held_out=None, separator=0)
    monkeypatch.setattr(watch, "boundary_windows", lambda *_: None)
    monkeypatch.setattr(watch, "Watch", lambda *_, **__: None)

    def ends(plan, args, trainer, checkpoints, seen, log):
        checkpoints.save(trainer, 3.0, plan.about)
        raise error

    closed, close = [], train.Checkpoints.close
    monkeypatch.setattr(train.Checkpoints, "close", lambda self: closed.append(self) or close(self))
    monkeypatch.setattr(experiment, "updated", ends)
    with pytest.raises(error):
        experiment.run(plan, types.SimpleNamespace(keep=1, length=12, windows=2), tmp_path, trainer, [], {})
    assert len(closed) == 1 and train.Checkpoints(tmp_path).steps() == [0]


def test_what_is_shown_of_a_training(monkeypatch, capsys, tmp_path):
    """A loss of ln 8 nats a token is 3 bits; two bytes a token but for the separators make it a little more than half of that a byte."""
    rng, windows, length = np.random.default_rng(0), 4, 60
    influence_MWL = np.exp(0.01 * rng.normal(size=(2, windows, length)))
    boundary_WL = np.zeros((windows, length), bool)
    boundary_WL[np.arange(windows), 25 + 3 * np.arange(windows)] = True
    influence_MWL[1, boundary_WL] *= 3
    axes = dict(influence=("step", "window", "position"), loss=("step", "position"), first_token=("step", "layer"), gradient=("step", "position"))
    values = dict(influence=influence_MWL, loss=np.full((2, length), math.log(8)), first_token=np.full((2, 2), 0.00271828), gradient=np.ones((2, length)))
    ds = xr.Dataset({name: (axes[name], values[name]) for name in axes} | dict(boundary=(("window", "position"), boundary_WL), done=("step", [1, 1])),
                    coords=dict(step=[0, 10], layer=[1, 2]))  # fmt: skip
    held_out = types.SimpleNamespace(ids=np.zeros(110, int), text_bytes=200)
    plan = types.SimpleNamespace(config=CONFIG, switches=lim.Switches(), packed=held_out, held_out=held_out, held_out_texts=["ab", "cd"])
    drawn = []
    monkeypatch.setattr(plot, "lines_figure", lambda x, series, **_: drawn.append(series))
    monkeypatch.setattr(plot, "life_figure", lambda *_, **__: None)
    monkeypatch.setattr(plot, "bundle_figure", lambda *_, **__: None)
    monkeypatch.setattr(plot, "save", lambda figure, path: path.write_text(""))
    experiment.show(ds, plan, tmp_path)
    out = capsys.readouterr().out
    first, last = (line.split() for line in out.splitlines() if line.strip().startswith(("0  ", "10  ")))
    assert first[1] == last[1] == f"{3 * 110 / 200:.3f}" and "0.00272" in first and "0.00272" in last
    assert "means of bits/byte and first-token mass, medians of first/middle and last/middle" in out and "behind the separator" in out
    assert "at +0 (p" in " ".join(last)
    lines = drawn[-1]
    assert [error_O is None for _, error_O in lines.values()] == [True, True, False] and list(lines)[2].startswith("shuffled")
