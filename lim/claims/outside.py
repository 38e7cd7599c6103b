"""What the claims need beside the grids: the operator itself, attention, one-pass gradients, theory, trainings, recall.

A measurement has parts, each a function that returns arrays by name; `lim.claims.lab.Lab` keeps them apart.

Axes: L position, S seed, N layer, D stream width, K strengths.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lim import recall, rollout, store, tokens, watch
from lim.influence import influence
from lim.model import Decoder, graphdef, params_of, with_identity_values
from lim.switches import Switches
from lim.theory import kernel
from lim.tokens import random_tokens
from lim.train import Checkpoints, Trainer

if TYPE_CHECKING:  # it imports this module
    from lim.claims.lab import Scale


def identity_strengths(layers: int) -> np.ndarray:
    """The strengths of `identity_network`, [K, N]."""
    constant = [np.full(layers, a) for a in (0.1, 0.25, 0.5)]
    return np.array([*(np.arange(layers) < depth for depth in range(1, layers + 1)), *constant], np.float64)


def target_lengths(scale: "Scale") -> list[int]:
    """Lengths at which the claimed network is predicted."""
    return sorted({scale.length, scale.target_length // 4, scale.target_length})


@functools.partial(jax.jit, static_argnames="structure")
@jax.default_matmul_precision("highest")
def _sum_gradient(structure, params, tokens_L):
    decoder, switches = nnx.merge(structure, params), Switches()
    x_LD = decoder.embed(tokens_L, switches)
    gradient_LD = jax.grad(lambda x_LD: decoder.hidden(decoder.read(x_LD, switches, -1), switches).sum())(x_LD)
    return jnp.linalg.norm(gradient_LD, axis=1)


def one_pass(decoder: Decoder, tokens_L: np.ndarray) -> np.ndarray:
    """The one-pass measure: the norm at each position of the gradient of the sum of the outputs, ‖1ᵀ ∂output/∂x_j‖, [L].

    The output is that of the last position after the final norm. At birth 1/√D is as good as a random direction, so its
    square has the mean of ‖J_j‖_F². Under a LayerNorm the outputs sum to zero, whatever the input.
    """
    structure, state = nnx.split(decoder)
    return np.asarray(_sum_gradient(structure, nnx.as_pure(state), tokens_L), np.float64)


def averaged_attention(length: int) -> float:
    """Attention on the first token under exact averaging, mean over the rows of the second half, as `lim.rollout` measures it."""
    return float(np.mean(1 / np.arange(length // 2 + 1, length + 1)))


def answer_gradients(decoder: Decoder, task: recall.Task, count: int) -> np.ndarray:
    """‖∂ loss / ∂ x‖ of a pair, by its place: the loss is that of the answer about it, x the stream into the first block, [N].

    Root of the sum of squares over the pair's two tokens, and root mean square over `count` held-out questions a place.
    """
    tokens_NBT, targets_NB = task.held_out(count)
    flat_BT = tokens_NBT.reshape(-1, tokens_NBT.shape[-1])
    squares_BT = _answer_squares(params_of(decoder), flat_BT, targets_NB.ravel(), config=decoder.config)
    squares_NBN2 = np.asarray(squares_BT, np.float64)[:, :-1].reshape(task.pairs, count, task.pairs, 2)
    places = np.arange(task.pairs)
    return np.sqrt(squares_NBN2[places, :, places].sum(-1).mean(-1))


@functools.partial(jax.jit, static_argnames="config")
@jax.default_matmul_precision("highest")
def _answer_squares(params, tokens_BT, targets_B, *, config):
    decoder, published = nnx.merge(graphdef(config), params), Switches()

    def one(question):
        tokens_T, target = question

        def loss(x_TD):
            return -jax.nn.log_softmax(decoder.logits(decoder.hidden(decoder.read(x_TD, published), published)))[target]

        return jnp.sum(jnp.square(jax.grad(loss)(decoder.embed(tokens_T, published))), axis=1)

    return jax.lax.map(one, (tokens_BT, targets_B), batch_size=64)


# ---- at birth ----


def _identity(lab):
    swept, length = lab.scale.swept, lab.scale.swept_length
    config = dataclasses.replace(swept, kv_heads=swept.heads, head_dim=swept.width // swept.heads)
    decoder, tokens_L = with_identity_values(Decoder.at_birth(config, lab.seeds[0])), random_tokens(config.vocab, length, lab.seeds[0])
    bare = dict(norm=0.0, mlp=0.0, uniform_attention=1.0, rope=0.0)
    # every direction is as good as another here, so that two say all
    profiles = [influence(decoder, tokens_L, Switches(alpha=strength_N, **bare), probes=2).influence_L
                for strength_N in identity_strengths(config.layers)]  # fmt: skip
    return dict(profiles=np.array(profiles) / math.sqrt(config.width))


def _attention(lab):
    config, length = lab.scale.qwen2, lab.scale.length
    each = [rollout.measure(Decoder.at_birth(config, seed), random_tokens(config.vocab, length, seed)) for seed in lab.extra_seeds]
    return dict(first=np.array([r.first_token_N for r in each]), rollout=np.array([r.rollout_L for r in each]))


def _one_pass(lab, config):
    texts = {seed: random_tokens(config.vocab, lab.scale.length, seed) for seed in lab.extra_seeds}
    return dict(profiles=np.array([one_pass(Decoder.at_birth(config, seed), tokens_L) for seed, tokens_L in texts.items()]))


def _target(lab):
    return {str(n): kernel.predict(lab.scale.target, n).influence_L for n in target_lengths(lab.scale)}


# ---- trained ----


@functools.cache
def documents() -> tuple[tokens.Packed, tokens.Packed]:
    """What Python brings along as bytes, packed: to train on, and held out."""
    training, held_out = (tokens.pack(part, None, tokens.BYTES + 1) for part in tokens.split(tokens.standard_documents()))
    return training, held_out


def _training(lab, seed):
    """One network from birth to the last update; measured into a store of its own, checkpoints beside it, so that it resumes."""
    t, folder = lab.scale.training, lab.folder / f"training-{seed}"
    packed, held_out = documents()
    windows_WT = watch.boundary_windows(held_out, t.length, t.windows)
    reader = tokens.Reader(packed.ids, t.length, t.recipe.batch, seed)
    about = lab.scale.spec()["training"] | dict(seed=seed, text=zlib.crc32(packed.ids.tobytes() + held_out.ids.tobytes()))
    seen = watch.Watch(folder, steps=watch.log_spaced(t.recipe.steps, t.measurements), windows_WT=windows_WT,
                       separator=tokens.BYTES, layers=t.config.layers, spec=about, attributes={})  # fmt: skip
    trainer = Trainer(t.config, t.recipe, decoder=Decoder.at_birth(t.config, seed), devices=jax.local_devices()[:1])
    weights_BL, every = np.ones((t.recipe.batch, t.length), np.float32), math.ceil(t.recipe.steps / 10)
    checkpoints = Checkpoints(folder)
    try:
        checkpoints.restore(trainer, about)
        while True:
            if not seen.done(trainer.step):
                seen.measure(trainer.step, trainer.decoder, probes=t.probes)
            if trainer.step == t.recipe.steps:
                break
            loss = trainer.update(reader(trainer.step), weights_BL).loss
            if trainer.step % every == 0:
                checkpoints.save(trainer, loss, about)
    finally:
        checkpoints.close()
    ds = store.open(folder).load()
    return {name: ds[name].values for name in ("step", *ds.data_vars)}


def _recall(lab, arm, seed):
    """One network of one arm; `lim.recall.train` keeps checkpoints and curve in a folder of its own."""
    r = lab.scale.recall
    task = dataclasses.replace(r.task, seed=seed)
    curve = recall.train(task, r.config, r.recipe, recall.intervention(arm, task, r.config), lab.folder / f"recall-{arm}-{seed}",
                         evaluations=r.evaluations, count=r.count)  # fmt: skip
    return dict(step=curve.steps_S, accuracy=curve.accuracy_SN)


def _recall_gradients(lab, seed):
    r = lab.scale.recall
    return dict(gradient=answer_gradients(Decoder.at_birth(r.config, seed), dataclasses.replace(r.task, seed=seed), r.count))


OUTSIDE: dict[str, Callable[[Any], dict[str, Callable[[], dict]]]] = {
    "identity": lambda lab: {"swept": lambda: _identity(lab)},
    "attention": lambda lab: {"qwen2": lambda: _attention(lab)},
    "one-pass": lambda lab: {name: functools.partial(_one_pass, lab, getattr(lab.scale, name)) for name in ("qwen2", "gpt2")},
    "target": lambda lab: {"theory": lambda: _target(lab)},
    "training": lambda lab: {str(seed): functools.partial(_training, lab, seed) for seed in lab.block(lab.scale.training.seeds)},
    "recall": lambda lab: {f"{arm}-{seed}": functools.partial(_recall, lab, arm, seed)
                           for arm in lab.scale.recall.arms for seed in lab.block(lab.scale.recall.seeds)},
    "recall-gradients": lambda lab: {str(seed): functools.partial(_recall_gradients, lab, seed)
                                     for seed in lab.block(lab.scale.recall.seeds)},
}  # fmt: skip
