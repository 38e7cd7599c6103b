"""Next-token training of any Decoder: optax updates over any number of devices, orbax checkpoints, resumed to the bit.

Batches are a function of the step, so the step is the reader's whole position. Losses may weigh every token by itself,
which is how interventions enter.

Axes: A part of a batch, B sequence, T = L + 1 tokens of a sequence, L position (token l + 1 is predicted at l).
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from lim.attention import Array
from lim.config import Config
from lim.model import Decoder, birth_params, checked_ids, from_params, graphdef, params_of
from lim.store import TRAINING
from lim.switches import Switches

CHECKPOINTS = "checkpoints"  # of a training's folder


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train: AdamW with a linear warm-up and a cosine decay, gradients clipped by their global norm.

    Attributes:
      steps: updates in all; the schedule ends there.
      batch: sequences per update, over all devices.
      accumulate: parts that a batch is pulled back in, one after the other, to save memory; a divisor of `batch`.
      learning_rate: its peak. `warmup` is the share of steps until there, `final` the share of the peak at the end.
      weight_decay: of products' kernels and embeddings; biases and norms have none.
      clip: largest global norm of a gradient, above 0; `math.inf` clips none.
      seed: of the initial weights, where none are given; at most 2³² - 1.

    Raises:
      ValueError: names the field, its value and what is allowed.
    """

    steps: int = 1000
    batch: int = 16
    accumulate: int = 1
    learning_rate: float = 3e-3
    warmup: float = 0.05
    final: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name, least in dict(steps=1, batch=1, accumulate=1, seed=0).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
        for name, high in dict(learning_rate=math.inf, warmup=1, final=1, weight_decay=math.inf, clip=math.inf).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
                raise ValueError(f"{name}={value!r}: must be a number of at least 0" + (f", at most {high}" if high == 1 else ""))
        if self.clip == 0:
            raise ValueError(f"clip={self.clip!r}: must be a number above 0, or inf for none: 0 would train nothing")
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed}: must be at most {2**32 - 1}")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate}: must divide batch={self.batch}")

    def schedule(self) -> optax.Schedule:
        """The learning rate of each step."""
        warmup = min(math.ceil(self.warmup * self.steps), self.steps - 1)  # some step must be left to decay in
        # the step is counted from 0, so the first update is not lost to a rate of 0
        return lambda step: optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, warmup, self.steps, self.learning_rate * self.final)(step + 1)  # fmt: skip

    def optimizer(self) -> optax.GradientTransformation:
        """The update of a gradient."""
        adamw = optax.adamw(self.schedule(), b1=0.9, b2=0.95, weight_decay=self.weight_decay, mask=_decayed)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


def _decayed(params):
    """Which weights decay: by name, since biases and norms are stacked to matrices."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one update saw: its number (from 1), the batch's mean loss in nats, the gradient's norm before clipping."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float


class Trainer:
    """A network, its optimizer and the number of updates it has had.

    Attributes:
      config, recipe, switches: what is trained, how, and under which ablation.
      step: updates so far.
    """

    def __init__(self, config: Config, recipe: Recipe, *, switches: Switches = Switches(), decoder: Decoder | None = None,
                 devices: Sequence[jax.Device] | None = None):  # fmt: skip
        """Starts at birth, or from the weights of `decoder`.

        Args:
          decoder: of this config; a subclass is trained as what it is. Weights that it keeps in fewer bits are trained in
            float32, where small updates are not lost.
          devices: those that share each batch; by default all of them.

        Raises:
          ValueError: a switch does not suit the config, the decoder has another one, or the devices cannot share the batch evenly.
        """
        devices = jax.devices() if devices is None else devices
        if recipe.batch // recipe.accumulate % len(devices):
            raise ValueError(f"batch={recipe.batch}, accumulate={recipe.accumulate}: parts must divide among {len(devices)} devices")
        if decoder is not None and decoder.config != config:
            raise ValueError(f"decoder: is of {decoder.config}, not of the config given, {config}")
        self.config, self.recipe, self.switches, self.step = config, recipe, switches.check(config), 0
        self._kind = Decoder if decoder is None else type(decoder)
        self._structure: nnx.GraphDef = graphdef(config) if decoder is None else nnx.split(decoder)[0]
        self._mesh = Mesh(np.array(devices), ("sequence",))
        self._everywhere = NamedSharding(self._mesh, PartitionSpec())
        if decoder is None:
            params = birth_params(config, jax.random.key(recipe.seed))
        else:
            params = jax.tree.map(lambda v: jnp.array(v, jnp.promote_types(v.dtype, jnp.float32)), params_of(decoder))  # a copy
        self._state = jax.device_put(dict(params=params, optimizer=recipe.optimizer().init(params)), self._everywhere)

    @property
    def decoder(self) -> Decoder:
        """The network as it is now, a copy: updates reuse the memory of the weights they replace."""
        return from_params(self._structure, jax.tree.map(jnp.copy, self._state["params"]))

    def update(self, tokens_BT: ArrayLike, weights_BL: ArrayLike) -> Step:
        """One update.

        Args:
          tokens_BT: the batch's token ids, int32 [B, L + 1].
          weights_BL: how much each predicted token counts, at least 0; the loss is their weighted mean.

        Raises:
          ValueError: an id is none of the vocabulary.
          FloatingPointError: the loss or the gradient is not finite; the state is then of no use.
        """
        parts = (self.recipe.accumulate, self.recipe.batch // self.recipe.accumulate)
        over_parts = NamedSharding(self._mesh, PartitionSpec(None, "sequence"))
        batch = [jax.device_put(array.reshape(*parts, -1), over_parts)
                 for array in (checked_ids(tokens_BT, self.config), np.asarray(weights_BL, np.float32))]  # fmt: skip
        self._state, loss, norm = _update(self._structure, self._state, self.switches, *batch, recipe=self.recipe, mesh=self._mesh)
        loss, norm = float(loss), float(norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(f"step {self.step + 1}: loss {loss}, gradient norm {norm}: lower the learning rate")
        self.step += 1
        return Step(self.step, loss, norm, float(self.recipe.schedule()(self.step - 1)))

    def named(self, about: Mapping[str, Any]) -> dict:
        """What a training was given, and the name of its Decoder where it is a subclass: only that one can read its weights."""
        return dict(about) if self._kind is Decoder else dict(about, decoder=f"{self._kind.__module__}.{self._kind.__qualname__}")

    def tree(self) -> dict:
        """All that a checkpoint needs, as a tree of arrays."""
        return dict(self._state, step=np.int64(self.step))

    def load(self, tree: Mapping[str, Any]) -> None:
        """Takes over what `tree` gave."""
        self.step = int(tree["step"])
        self._state = jax.device_put({name: tree[name] for name in ("params", "optimizer")}, self._everywhere)


@functools.partial(jax.jit, static_argnames=("structure", "recipe", "mesh"), donate_argnames="state")
@jax.default_matmul_precision("highest")
def _update(structure, state, switches, tokens_ABT, weights_ABL, *, recipe, mesh):
    """The state after one update, the loss and the gradient's norm."""

    def of_a_device(params, switches, tokens_ABT, weights_ABL):
        def weighted(params, tokens_BT, weights_BL):
            return jnp.sum(weights_BL * token_losses(structure, params, switches, tokens_BT)), weights_BL.sum()

        def add_part(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(weighted, has_aux=True)(params, *part)), None

        zero = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), ((jnp.zeros(()), jnp.zeros(())), params))
        return jax.lax.psum(jax.lax.scan(add_part, zero, (tokens_ABT, weights_ABL))[0], "sequence")

    all_, parts = PartitionSpec(), PartitionSpec(None, "sequence")
    over_devices = jax.shard_map(of_a_device, mesh=mesh, in_specs=(all_, all_, parts, parts), out_specs=all_, check_vma=False)
    (loss, weight), gradient = over_devices(state["params"], switches, tokens_ABT, weights_ABL)
    loss, gradient = jax.tree.map(lambda v: v / weight, (loss, gradient))
    change, optimizer = recipe.optimizer().update(gradient, state["optimizer"], state["params"])
    return dict(params=optax.apply_updates(state["params"], change), optimizer=optimizer), loss, optax.tree.norm(gradient)


def token_losses(structure: nnx.GraphDef, params: nnx.State, switches: Switches, tokens_BT: Array) -> jax.Array:
    """-ln p of every token but the first, given those before it: [B, L] in nats; pure, for `jit` and `grad`."""
    decoder = nnx.merge(structure, params)
    logits_BLV = jax.vmap(lambda tokens_L: decoder(tokens_L, switches))(tokens_BT[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, tokens_BT[:, 1:])


@functools.partial(jax.jit, static_argnames="structure")
@jax.default_matmul_precision("highest")
def embedding_gradients(structure: nnx.GraphDef, params: nnx.State, switches: Switches, tokens_BT: Array) -> jax.Array:
    """‖∂ loss / ∂ x_j‖ per sequence and position, [B, L]: the loss is a sequence's mean, x_j the stream into the first block.

    How hard training pulls at what enters at position j.

    Args:
      structure, params: as `lim.influence.squared_influence` takes them.
    """
    decoder = nnx.merge(structure, params)

    def loss(x_LD, targets_L):
        logits_LV = decoder.logits(decoder.hidden(decoder.stream(x_LD, switches), switches))
        return optax.softmax_cross_entropy_with_integer_labels(logits_LV, targets_L).mean()

    def one(tokens_T):
        return jnp.linalg.norm(jax.grad(loss)(decoder.embed(tokens_T[:-1], switches), tokens_T[1:]), axis=-1)

    return jax.lax.map(one, tokens_BT)


@functools.partial(jax.jit, static_argnames="structure")
@jax.default_matmul_precision("highest")
def _losses(structure, params, switches, tokens_BT):
    return jax.lax.map(lambda tokens_T: token_losses(structure, params, switches, tokens_T[None])[0], tokens_BT)


def losses(decoder: Decoder, tokens_BT: ArrayLike, switches: Switches = Switches()) -> np.ndarray:
    """-ln p of every token but the first of each sequence, float64 [B, L] in nats.

    Args:
      decoder: a `lim.Decoder`.
      tokens_BT: token ids of sequences of one length, [B, L + 1].

    Raises:
      ValueError: a switch or the length does not suit the model, or an id is none of its vocabulary.
    """
    config = decoder.config
    structure, state = nnx.split(decoder)
    return np.asarray(_losses(structure, nnx.as_pure(state), switches.check(config), checked_ids(tokens_BT, config)), np.float64)


@contextlib.contextmanager
def _readable(folder):
    """Whatever orbax stumbles over in a damaged folder becomes a ValueError that names it."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EACCES, errno.EROFS):
            raise
        _hush_reads()
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{folder}: is damaged ({why}); without it the training goes on from an earlier checkpoint, or anew") from None


def _hush_reads():
    """Orbax reads arrays side by side: when one fails, others end with nobody left to tell, and would print tracebacks of it."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    shown = sys.unraisablehook
    sys.unraisablehook = lambda e: None if str(e.exc_value) == "Event loop is closed" else shown(e)


class Checkpoints:
    """A training's checkpoints in a folder: the latest two and the best few, written aside and renamed when whole."""

    def __init__(self, folder: str | os.PathLike, keep: int = 1):
        """Opens or makes the folder.

        Args:
          folder: of the training; checkpoints go to its subfolder.
          keep: how many of those with the lowest held-out loss stay besides the latest two.
        """
        policies = ocp.checkpoint_managers
        best = policies.BestN(get_metric_fn=lambda metrics: -metrics["loss"], n=keep)
        options = ocp.CheckpointManagerOptions(preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(2), best]),
                                               best_fn=lambda metrics: metrics["loss"], best_mode="min")  # fmt: skip
        with _readable(path := pathlib.Path(folder).expanduser().resolve() / CHECKPOINTS):
            self._manager = ocp.CheckpointManager(path, options=options)

    def save(self, trainer: Trainer, loss: float, about: dict) -> None:
        """Writes in the background a checkpoint of this held-out loss; `about`, JSON, is what `restore` compares."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(trainer.tree()), about=ocp.args.JsonSave(trainer.named(about)))
        self._manager.save(trainer.step, args=args, metrics=dict(loss=float(loss)))

    def restore(self, trainer: Trainer, about: dict) -> bool:
        """Puts the latest checkpoint into the trainer; False where there is none.

        Raises:
          ValueError: the checkpoint is of another training; the message names what differs.
        """
        step = self._manager.latest_step()
        if step is None:
            return False
        there, about = map(rounded, (self._restored(step, about=ocp.args.JsonRestore())["about"], trainer.named(about)))
        differ = [f"{name} is {there.get(name)} there, {about.get(name)} here" for name in there | about if there.get(name) != about.get(name)]
        if differ:
            raise ValueError(f"{self._manager.directory.parent}: holds another training: {'; '.join(differ)}")
        shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=getattr(v, "sharding", None)), trainer.tree())
        trainer.load(self._restored(step, state=ocp.args.StandardRestore(shapes))["state"])
        return True

    def _restored(self, step, **items):
        with _readable(self._manager.directory / str(step)):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    def steps(self) -> list[int]:
        """The steps whose checkpoints are there."""
        return sorted(self._manager.all_steps())

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()


def rounded(about: Any) -> Any:
    """JSON whose numbers have 12 significant digits: the last bit of another CPU makes no other training."""
    if isinstance(about, dict):
        return {name: rounded(value) for name, value in about.items()}
    if isinstance(about, list):
        return [rounded(value) for value in about]
    return float(f"{about:.12g}") if isinstance(about, float) else about


def remove(folder: str | os.PathLike) -> None:
    """Removes a training's checkpoints and measurements from a folder, if there are any."""
    for name in (CHECKPOINTS, TRAINING):
        shutil.rmtree(pathlib.Path(folder) / name, ignore_errors=True)


def about(folder: str | os.PathLike) -> dict | None:
    """What the training in a folder was given: config, recipe, tokenizer and all that decides its numbers; None if there is none."""
    path = pathlib.Path(folder).expanduser().resolve() / CHECKPOINTS
    if not any(path.glob("*/about")):  # folders of that name are of others, too
        return None
    with _readable(path), ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        if (step := manager.latest_step()) is None:
            return None
        return manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]


def trained(folder: str | os.PathLike, kind: type[Decoder] = Decoder) -> Decoder:
    """The network of the latest checkpoint of the training in a folder.

    Args:
      kind: the class that was trained.

    Raises:
      ValueError: there is none, or it is of another class.
    """
    if (said := about(folder)) is None:
        raise ValueError(f"{folder}: holds no training's checkpoint")
    config = Config(**said["config"])
    trainer = Trainer(config, dataclasses.replace(Recipe(**said["recipe"]), batch=1, accumulate=1), decoder=None if kind is Decoder else kind.at_birth(config),
                      devices=jax.devices()[:1])  # fmt: skip
    if not Checkpoints(folder).restore(trainer, {name: value for name, value in said.items() if name != "decoder"}):
        raise ValueError(f"{folder}: holds no training's checkpoint")
    return trainer.decoder
