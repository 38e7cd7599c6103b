"""Config: the sizes and the family of a decoder, from a preset or from a Hugging Face config.json.

A Config holds everything that fixes the network at birth (shapes, norms, activations, the spread of the initial
weights), so the Decoder that runs it and the theory that predicts it read the same numbers.
"""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

FAMILIES = ("gpt2", "qwen2", "llama")


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder-only transformer of one of three families.

    Attributes:
      family: "gpt2" (LayerNorm, learned positions, tanh-GELU MLP, biases everywhere), "qwen2" (RMSNorm, RoPE, SwiGLU,
        biases on queries, keys and values) or "llama" (as qwen2, without biases).
      layers: number of blocks; each holds one attention and one MLP sub-block.
      width: D, the width of the residual stream.
      heads, kv_heads, head_dim: query heads, key/value heads (a divisor of `heads`), width of one head.
      inner: inner width of the MLP.
      vocab: number of tokens.
      max_length: rows of the learned position table (gpt2: a hard limit), or the longest sequence seen in training.
      norm_eps: added to the mean square (RMSNorm) or the variance (LayerNorm).
      rope_theta: base of RoPE's frequencies; unused by gpt2.
      tied: the head shares the token embedding.
      init_std: standard deviation of the initial weights (biases start at 0, norm weights at 1).

    Raises:
      ValueError: a size is not a positive integer, or the sizes do not fit together.

    Example:
      >>> config = lim.Config.preset("small")
      >>> config.family, config.layers, config.width
      ('qwen2', 6, 128)
      >>> config.replace(width=64).inner  # heads and MLP keep their proportions
      192
      >>> lim.Config.preset("gpt2").has_rope
      False
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    max_length: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tied: bool = True
    init_std: float = 0.02

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r}: allowed are {', '.join(FAMILIES)}")
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "inner", "vocab", "max_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a positive integer")
        for name in ("norm_eps", "rope_theta", "init_std"):
            value = getattr(self, name)
            # a comparison, which unlike math.isfinite takes an integer beyond float64; NaN fails it too
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
                raise ValueError(f"{name}={value!r}: must be a positive number")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")
        if self.family == "gpt2" and self.kv_heads != self.heads:
            raise ValueError(f"kv_heads={self.kv_heads}: gpt2 has as many as heads={self.heads}")
        if self.has_rope and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: RoPE rotates pairs, so it must be even")

    @property
    def has_rope(self) -> bool:
        """Whether positions enter as rotations of queries and keys (else as a learned table)."""
        return self.family != "gpt2"

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.family != "llama"

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the two projections that write to the stream (attention out, MLP down).

        GPT-2 scales them by 1/√(2·layers), one factor for every write to the stream; Qwen2 and Llama do not.
        """
        return self.init_std / math.sqrt(2 * self.layers) if self.family == "gpt2" else self.init_std

    def replace(self, **changes: Any) -> "Config":
        """A copy with some fields changed; changing `width` alone keeps the proportions of heads and MLP.

        With a new width the number of heads stays, and head width and inner width scale along.
        """
        if "width" in changes and not {"heads", "kv_heads", "head_dim", "inner"} & changes.keys():
            width = changes["width"]
            if not isinstance(width, int) or width < 1:
                raise ValueError(f"width={width!r}: must be a positive integer")
            scaled = {name: getattr(self, name) * width / self.width for name in ("head_dim", "inner")}
            for name, value in scaled.items():
                if value != int(value) or (name == "head_dim" and self.has_rope and value % 2):
                    step = self.width // math.gcd(self.width, self.head_dim // (2 if self.has_rope else 1), self.inner)
                    raise ValueError(f"width={width}: must be a multiple of {step} to keep this model's proportions")
                changes[name] = int(value)
        return dataclasses.replace(self, **changes)

    @classmethod
    def preset(cls, name: str) -> "Config":
        """The Config of a published size; `lim.config.PRESETS` lists the names.

        Raises:
          ValueError: no preset has that name.
        """
        if name not in PRESETS:
            raise ValueError(f"model={name!r}: allowed are {', '.join(PRESETS)}, or a folder with a config.json")
        return PRESETS[name]

    @classmethod
    def from_hf(cls, source: str | os.PathLike | dict) -> "Config":
        """Reads a Hugging Face config.json.

        Args:
          source: the file, the folder that holds it, or its content as a dict.

        Raises:
          ValueError: lists everything in it that is missing or that this library does not implement.
        """
        if isinstance(source, dict):
            return _from_hf(source, "config")
        path = pathlib.Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be read as a config.json: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}: must hold a JSON object")
        return _from_hf(content, str(path))


_GPT2 = Config("gpt2", layers=12, width=768, heads=12, kv_heads=12, head_dim=64, inner=3072, vocab=50257,
               max_length=1024, norm_eps=1e-5)  # fmt: skip
_QWEN2 = Config("qwen2", layers=24, width=896, heads=14, kv_heads=2, head_dim=64, inner=4864, vocab=151936,
                max_length=131072, norm_eps=1e-6, rope_theta=1e6)  # fmt: skip
_SMOLLM2 = Config("llama", layers=30, width=576, heads=9, kv_heads=3, head_dim=64, inner=1536, vocab=49152,
                  max_length=8192, norm_eps=1e-5, rope_theta=1e5, init_std=1 / 24)  # fmt: skip

PRESETS = {
    "small": Config("qwen2", layers=6, width=128, heads=4, kv_heads=2, head_dim=32, inner=384, vocab=4096, max_length=4096),  # fmt: skip
    "gpt2": _GPT2,
    "gpt2-medium": _GPT2.replace(layers=24, width=1024, heads=16, kv_heads=16, head_dim=64, inner=4096),
    "gpt2-large": _GPT2.replace(layers=36, width=1280, heads=20, kv_heads=20, head_dim=64, inner=5120),
    "gpt2-xl": _GPT2.replace(layers=48, width=1600, heads=25, kv_heads=25, head_dim=64, inner=6400),
    "qwen2-0.5b": _QWEN2,
    "qwen2-1.5b": _QWEN2.replace(layers=28, width=1536, heads=12, kv_heads=2, head_dim=128, inner=8960),
    "qwen2-7b": _QWEN2.replace(layers=28, width=3584, heads=28, kv_heads=4, head_dim=128, inner=18944, vocab=152064, tied=False),  # fmt: skip
    "smollm2-135m": _SMOLLM2,
    "smollm2-360m": _SMOLLM2.replace(layers=32, width=960, heads=15, kv_heads=5, head_dim=64, inner=2560, init_std=0.02),  # fmt: skip
}


def _from_hf(hf: dict, where: str) -> Config:
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type={family!r}: allowed are {', '.join(FAMILIES)}")
    faults = []
    if hf.get("quantization_config") is not None:
        faults.append("quantization_config: quantised weights are not implemented")

    def get(key, *default):
        value = hf.get(key)
        if value is None:
            if not default:
                faults.append(f"{key} is missing")
                return 1
            return default[0]
        return value

    def require(key, allowed, default):
        if (value := get(key, default)) not in allowed:
            faults.append(f"{key}={value!r} is not implemented (allowed: {', '.join(map(repr, allowed))})")

    if family == "gpt2":
        require("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
        require("scale_attn_weights", (True,), True)
        require("scale_attn_by_inverse_layer_idx", (False,), False)
        require("add_cross_attention", (False,), False)
        width, heads = get("n_embd"), get("n_head")
        sizes = dict(layers=get("n_layer"), width=width, heads=heads, kv_heads=heads, inner=get("n_inner", None),
                     vocab=get("vocab_size"), max_length=get("n_positions"), norm_eps=get("layer_norm_epsilon"),
                     tied=get("tie_word_embeddings", True))  # fmt: skip
        if sizes["inner"] is None:
            sizes["inner"] = 4 * width if isinstance(width, int) else width
    else:
        require("hidden_act", ("silu", "swish"), "silu")
        require("mlp_bias", (False,), False)
        require("attention_bias", (False,), False)
        layers = get("num_hidden_layers")
        if _slides(hf, layers):
            faults.append("sliding-window attention is not implemented (use_sliding_window, max_window_layers, layer_types)")
        width, heads = get("hidden_size"), get("num_attention_heads")
        # null means `heads`; absent, it does so in llama, but is another number in qwen2.
        kv_heads = get("num_key_value_heads", heads) if family == "llama" or "num_key_value_heads" in hf else get("num_key_value_heads")
        sizes = dict(layers=layers, width=width, heads=heads, kv_heads=kv_heads,
                     inner=get("intermediate_size"),
                     vocab=get("vocab_size"), max_length=get("max_position_embeddings"), norm_eps=get("rms_norm_eps"),
                     rope_theta=_rope_theta(hf, faults), tied=get("tie_word_embeddings", False))  # fmt: skip
    require("tie_word_embeddings", (True, False), sizes["tied"])
    sizes["head_dim"] = None if family == "gpt2" else get("head_dim", None)
    if sizes["head_dim"] is None:
        if all(isinstance(n, int) and n > 0 for n in (width, heads)) and width % heads == 0:
            sizes["head_dim"] = width // heads
        elif not faults:
            faults.append(f"width {width!r} is not a multiple of the {heads!r} heads, and head_dim is missing")
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults)}")
    try:
        return Config(family, init_std=get("initializer_range", 0.02), **sizes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _slides(hf: dict, layers: Any) -> bool:
    """Whether any layer has a sliding window: as `layer_types` says, else those from `max_window_layers` (by default 28) on."""
    if (kinds := hf.get("layer_types")) is not None:
        return not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    if not hf.get("use_sliding_window") or hf.get("sliding_window", 4096) is None:
        return False
    first = hf.get("max_window_layers", 28)
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)


def _rope_theta(hf: dict, faults: list) -> float:
    """RoPE's base from `rope_theta` (transformers ≤ 4) or `rope_parameters` (≥ 5), 10,000 where both are silent; a scaled RoPE is a fault."""
    places = [hf, *(hf[key] for key in ("rope_parameters", "rope_scaling") if hf.get(key) is not None)]
    if not all(isinstance(place, dict) for place in places):
        faults.append("rope_parameters or rope_scaling is not an object")
        return 1.0
    for kind in (place.get("rope_type", place.get("type", "default")) for place in places[1:]):
        if kind != "default":
            faults.append(f"RoPE scaling of type {kind!r} is not implemented")
    if any(place.get("partial_rotary_factor") not in (None, 1.0) for place in places):
        faults.append("partial_rotary_factor is not implemented")
    thetas = [place["rope_theta"] for place in places if place.get("rope_theta") is not None]
    if not thetas:
        return 10_000.0
    if any(theta != thetas[0] for theta in thetas):
        faults.append(f"rope_theta has several values: {', '.join(map(repr, thetas))}")
    theta = thetas[0]
    number = isinstance(theta, (int, float)) and not isinstance(theta, bool) and abs(theta) < 1e300
    return float(theta) if number else theta  # what is no number Config refuses, as it was written
