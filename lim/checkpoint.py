"""Hugging Face checkpoints: a folder or hub id of safetensors becomes a Decoder.

Every tensor of the files has one known place and every place is filled exactly once, or nothing is loaded and the
error lists all that is wrong. No pickle is ever read and torch is not needed.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from lim import train
from lim.config import Config
from lim.model import Decoder, from_params, params_of

# Hugging Face's name, without its prefix and with {} for the layer -> the place in the Decoder. GPT-2 keeps its
# projections as [in, out], as NNX does; torch's Linear is [out, in], marked .T. Fused tensors split in equal parts of
# their last axis. A row counts where the config has its place (qwen2 has biases, an untied model has a head).
_GPT2 = {
    "wte.weight": "embedding.embedding",
    "wpe.weight": "positions.embedding",
    "h.{}.ln_1.weight": "blocks.attention_norm.scale",
    "h.{}.ln_1.bias": "blocks.attention_norm.bias",
    "h.{}.attn.c_attn.weight": " ".join(f"blocks.attention.{part}.kernel" for part in ("query", "key", "value")),
    "h.{}.attn.c_attn.bias": " ".join(f"blocks.attention.{part}.bias" for part in ("query", "key", "value")),
    "h.{}.attn.c_proj.weight": "blocks.attention.out.kernel",
    "h.{}.attn.c_proj.bias": "blocks.attention.out.bias",
    "h.{}.ln_2.weight": "blocks.mlp_norm.scale",
    "h.{}.ln_2.bias": "blocks.mlp_norm.bias",
    "h.{}.mlp.c_fc.weight": "blocks.mlp.up.kernel",
    "h.{}.mlp.c_fc.bias": "blocks.mlp.up.bias",
    "h.{}.mlp.c_proj.weight": "blocks.mlp.down.kernel",
    "h.{}.mlp.c_proj.bias": "blocks.mlp.down.bias",
    "ln_f.weight": "final_norm.scale",
    "ln_f.bias": "final_norm.bias",
    "lm_head.weight": "head.kernel.T",
}
_LLAMA = {
    "embed_tokens.weight": "embedding.embedding",
    "layers.{}.input_layernorm.weight": "blocks.attention_norm.scale",
    "layers.{}.self_attn.q_proj.weight": "blocks.attention.query.kernel.T",
    "layers.{}.self_attn.q_proj.bias": "blocks.attention.query.bias",
    "layers.{}.self_attn.k_proj.weight": "blocks.attention.key.kernel.T",
    "layers.{}.self_attn.k_proj.bias": "blocks.attention.key.bias",
    "layers.{}.self_attn.v_proj.weight": "blocks.attention.value.kernel.T",
    "layers.{}.self_attn.v_proj.bias": "blocks.attention.value.bias",
    "layers.{}.self_attn.o_proj.weight": "blocks.attention.out.kernel.T",
    "layers.{}.post_attention_layernorm.weight": "blocks.mlp_norm.scale",
    "layers.{}.mlp.gate_proj.weight": "blocks.mlp.gate.kernel.T",
    "layers.{}.mlp.up_proj.weight": "blocks.mlp.up.kernel.T",
    "layers.{}.mlp.down_proj.weight": "blocks.mlp.down.kernel.T",
    "norm.weight": "final_norm.scale",
    "lm_head.weight": "head.kernel.T",
}
_NAMES = {"gpt2": _GPT2, "qwen2": _LLAMA, "llama": _LLAMA}
_PREFIX = {"gpt2": "transformer.", "qwen2": "model.", "llama": "model."}
# The causal mask and RoPE's frequencies, which old releases of transformers saved with the weights.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_FILE_DTYPES = ("F32", "BF16", "F16")
_DTYPES = ("float32", "bfloat16", "float16")
_INDEX = "model.safetensors.index.json"
_HUB_FILES = ["config.json", "model.safetensors", "model-*.safetensors", _INDEX,
              "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"]  # fmt: skip
_CONVERT = 'AutoModelForCausalLM.from_pretrained("OLD").save_pretrained("NEW") of transformers writes one'


def load(source: str | os.PathLike, dtype: DTypeLike = jnp.float32, kind: type[Decoder] = Decoder) -> Decoder:
    """The Decoder of a Hugging Face checkpoint of family gpt2, qwen2 or llama, or of a training's folder (see `lim.train`).

    A training's network is to be measured under `Switches(**switches_of(source))`.

    The tensors go one at a time into the stacked arrays and no weights are drawn first, so at its peak the memory
    holds the model and one or two of its tensors.

    Args:
      source: a folder with config.json and model.safetensors, or with the shards of model.safetensors.index.json
        (where both are there the single file counts, as in transformers); or a hub id such as "Qwen/Qwen2-0.5B",
        fetched through huggingface_hub and its cache.
      dtype: in which the weights are kept: float32, bfloat16 or float16, whichever of them the files hold. The
        Decoder computes in float32 all the same, so a bfloat16 checkpoint kept as such gives its numbers in half the
        memory.

      kind: the class of the Decoder, where it is a subclass, with exactly the weights that the files hold.

    Raises:
      ValueError: source cannot be had; its config.json is not implemented; or the files do not hold exactly the
        config's weights. Then the message has a line for every tensor that is missing, extra, there twice, misshapen,
        of another dtype or not finite, and for every file that cannot be read.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in _DTYPES:
        raise ValueError(f"dtype={dtype.name}: allowed are {', '.join(_DTYPES)}")
    folder = _folder(source)
    if train.about(folder) is not None:
        decoder = train.trained(folder, kind)
        nnx.update(decoder, jax.tree.map(lambda v: v.astype(dtype), params_of(decoder)))
        return decoder
    config = Config.from_hf(folder)
    try:
        structure, shapes = nnx.split(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0))))
        leaves, tree = jax.tree_util.tree_flatten_with_path(nnx.as_pure(shapes))
        stacks = {".".join(str(key.key) for key in path): np.empty(leaf.shape, dtype) for path, leaf in leaves}
    except (MemoryError, OverflowError, TypeError, ValueError) as error:  # of numpy and JAX, on sizes beyond all measure
        raise ValueError(f"{folder}: config.json asks for weights that do not fit into memory: {error}") from None

    with contextlib.ExitStack() as opened:
        tensors, faults = _open(folder, opened)
        faults += _fill(stacks, config, tensors)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ValueError(f"{folder}: cannot be loaded ({count}):" + "".join(f"\n  {printable(fault)}" for fault in faults))
    arrays = [jnp.asarray(stacks.pop(place)) for place in list(stacks)]  # popped: held no longer than needed
    return from_params(structure, jax.tree.unflatten(tree, arrays))


def config_of(source: str | os.PathLike) -> Config:
    """The Config of a checkpoint, its weights not read; arguments and errors as `load`."""
    folder = _folder(source)
    return Config.from_hf(folder) if (said := train.about(folder)) is None else Config(**said["config"])


def tokenizer_of(source: str | os.PathLike) -> str | os.PathLike | None:
    """What `lim.tokens.encode` takes as the tokenizer of a checkpoint: its source, or that of a training (None for bytes)."""
    if (said := train.about(source)) is None:
        return source
    if "tokenizer" not in said:
        raise ValueError(f"{source}: is a training on recall, which reads no text: give random tokens")
    return said["tokenizer"]


def switches_of(source: str | os.PathLike) -> dict:
    """The switches under which a training's network was trained, name → number; none for a Hugging Face checkpoint."""
    said = train.about(source) or {}
    switches = said["intervention"]["switches"] if "intervention" in said else said.get("switches", {})
    return {name: value for name, value in switches.items() if value is not None}


def printable(text: str) -> str:
    """A text whose every character can be printed: line ends and what a terminal would obey are spelled out, as in \\x1b."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _folder(source) -> pathlib.Path:
    """The folder of a checkpoint: itself, or the hub's snapshot of that id."""
    folder = pathlib.Path(os.path.expanduser(source))
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(source)):
        raise ValueError(f"{source}: no such folder (give a folder with config.json and safetensors, or a hub id)")
    try:
        from huggingface_hub import snapshot_download  # slow to import, and not needed for folders
    except ImportError:
        raise ValueError(f"{source}: no such folder; to fetch a hub id, pip install huggingface_hub") from None
    try:
        return pathlib.Path(snapshot_download(str(source), allow_patterns=_HUB_FILES))
    except Exception as error:  # each release of huggingface_hub raises other network errors
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{source}: no such folder, and the Hugging Face hub did not give it: check the spelling and the "
            f"connection (HF_TOKEN for a gated model), or download it elsewhere and give its folder; reason: {reason}"
        ) from None


def _open(folder, opened):
    """Opens the weight files: for every tensor the open file that holds it (None: faulty already), and the faults."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if not single.is_file() and not index.is_file():
        pickle = "pytorch_model.bin is a pickle, never read; " if any(folder.glob("pytorch_model*.bin*")) else ""
        raise ValueError(f"{folder}: no model.safetensors and no {_INDEX}; {pickle}{_CONVERT}")
    shards, faults = ({single: None}, []) if single.is_file() else _shards(index)
    tensors: dict[str, Any] = {}
    for file, listed in shards.items():
        try:
            handle = opened.enter_context(safe_open(file, framework="numpy"))
        except (OSError, SafetensorError) as error:
            fault = f"{file.name} cannot be read: {error}"
            if listed is None:
                raise ValueError(f"{folder}: {fault}") from None
            faults.append(fault)
            tensors |= dict.fromkeys(listed)
            continue
        held = set(handle.keys())
        listed = held if listed is None else listed
        faults += [f"{file.name} lacks {name}, which the index puts there" for name in sorted(listed - held)]
        faults += [f"{file.name} holds {name}, which the index does not put there" for name in sorted(held - listed)]
        tensors |= dict.fromkeys(listed - held) | dict.fromkeys(listed & held, handle)
    return tensors, faults


def _shards(index):
    """The index of shards: the names it puts into each file, and its faults."""
    faults: list[str] = []

    def once(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        faults.extend(f"{_INDEX} names {name} {count} times" for name, count in counts.items() if count > 1)
        return dict(pairs)

    try:
        entries = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=once)["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: cannot be read as an index of shards: {error!r}") from None
    shards: dict[pathlib.Path, set[str]] = {}
    for name, file in entries:
        # A bare name, so that no index leads out of its folder. Links are followed: the hub's cache is made of them.
        if isinstance(file, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            shards.setdefault(index.with_name(file), set()).add(name)
        else:
            faults.append(f"{_INDEX} puts {name} into {file!r}: must be a .safetensors file of the same folder")
    return shards, faults


def _slots(stacks, config):
    """For each tensor, by its name without prefix, the views of the stacks that it fills, in the file's layout."""
    slots = {}
    for template, names in _NAMES[config.family].items():
        places = [(stacks.get(name.removesuffix(".T")), name.endswith(".T")) for name in names.split()]
        if places[0][0] is None:
            continue
        for layer in range(config.layers) if "{}" in template else [...]:
            slots[template.format(layer)] = [stack[layer].T if flip else stack[layer] for stack, flip in places]
    return slots


def _fill(stacks, config, tensors):
    """Fills the stacks; returns a fault for every tensor that does not fit and every one that is missing."""
    if config.layers > len(tensors):  # before each of as many is looked for
        return [f"config.json has {config.layers} layers, and the files hold {len(tensors)} tensors"]
    slots, faults, good = _slots(stacks, config), [], set()
    found: dict[str, str] = {}
    needed = set(slots)
    head, embedding = "lm_head.weight", next(iter(slots))
    if config.tied:  # a head may be there all the same: it goes into a spare, to be compared
        slots[head] = [np.empty_like(slots[embedding][0])]
    for name in sorted(tensors):
        short = name.removeprefix(_PREFIX[config.family])
        if short in found:
            faults.append(f"{name} is there twice, also as {found[short]}")
        found[short] = name
        if tensors[name] is None or _BUFFERS.fullmatch(short):
            continue
        wrong = _copy(tensors[name], name, slots[short]) if short in slots else [f"{name} is extra"]
        faults += wrong
        if not wrong:
            good.add(short)
    faults += [f"{name} is missing" for name in sorted(needed - set(found))]
    known = {name.removesuffix(".T") for names in _NAMES[config.family].values() for name in names.split()}
    faults += [f"{place} of the Decoder has no tensor in checkpoints of {config.family}" for place in sorted(set(stacks) - known)]
    if config.tied and {head, embedding} <= good and not np.array_equal(slots[head][0], slots[embedding][0]):
        faults.append(f"{found[head]} differs from {found[embedding]}, but config.json ties them (tie_word_embeddings)")
    return faults


def _copy(handle, name, views):
    """Copies one tensor of an open file into the views, side by side along their last axis; returns the faults."""
    tensor, faults = handle.get_slice(name), []
    shape = (*views[0].shape[:-1], sum(view.shape[-1] for view in views))
    if tuple(tensor.get_shape()) != shape:
        faults.append(f"{name} has shape {tensor.get_shape()}: this config needs {list(shape)}")
    if tensor.get_dtype() not in _FILE_DTYPES:
        faults.append(f"{name} holds {tensor.get_dtype()}: allowed are {', '.join(_FILE_DTYPES)}")
    if faults:
        return faults
    with np.errstate(over="ignore"):  # what overflows the dtype shows as infinite
        for view, part in zip(views, np.split(handle.get_tensor(name), len(views), axis=-1)):
            view[...] = part
    bad = sum(view.size - np.count_nonzero(np.isfinite(view)) for view in views)
    return [f"{name} holds NaN or infinite values ({bad} of {math.prod(shape)})"] if bad else []
