"""A Config is what config.json says or nothing: what does not fit together or is not implemented is refused."""

import dataclasses
import json
import math

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from lim.config import PRESETS, Config

# As the published checkpoints hold them, written by transformers 4: RoPE's base stands at the top.
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_type": "cls_index", "vocab_size": 50257,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 131072, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
ALL = {"gpt2": GPT2, "qwen2-0.5b": QWEN2, "smollm2-135m": LLAMA}


def changed(config, **changes):
    """A copy with changes; ... takes a key away."""
    return {key: value for key, value in (config | changes).items() if value is not ...}


def refusal(config):
    with pytest.raises(ValueError) as error:
        Config.from_hf(config)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ALL)
def test_published_files_are_the_presets(name, tmp_path):
    preset = Config.preset(name)
    assert Config.from_hf(ALL[name]) == preset == PRESETS[name]
    (tmp_path / "config.json").write_text(json.dumps(ALL[name]))
    assert Config.from_hf(tmp_path) == Config.from_hf(str(tmp_path / "config.json")) == preset


@pytest.mark.parametrize("name", ALL)
def test_files_of_transformers(name, tmp_path):
    """Written by the library itself, from 5 on with rope_parameters; sizes and doubles survive."""
    kind = dict(gpt2="GPT2Config", qwen2="Qwen2Config", llama="LlamaConfig")[ALL[name]["model_type"]]
    getattr(transformers, kind).from_dict(ALL[name]).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    if int(transformers.__version__.partition(".")[0]) >= 5:
        assert "rope_theta" not in written
    assert Config.from_hf(tmp_path) == Config.preset(name)


# How many numbers the published checkpoints hold.
COUNTS = {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200,
          "qwen2-0.5b": 494032768, "qwen2-1.5b": 1543714304, "qwen2-7b": 7615616512, "smollm2-135m": 134515008,
          "smollm2-360m": 361821120}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_presets_have_the_published_number_of_parameters(name):
    c = PRESETS[name]
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = 2 * c.width * (q + kv) + (q + 2 * kv) * c.qkv_bias + c.width * (c.family == "gpt2")
    mlp = 2 * c.width * c.inner + c.inner + c.width if c.family == "gpt2" else 3 * c.width * c.inner
    norm = c.width * (2 if c.family == "gpt2" else 1)
    count = c.layers * (attention + mlp + 2 * norm) + norm + c.vocab * c.width * (1 if c.tied else 2)
    assert count + c.max_length * c.width * (not c.has_rope) == COUNTS[name]


def test_rope_theta_is_read_wherever_it_stands():
    theta = lambda **changes: Config.from_hf(changed(LLAMA, **changes)).rope_theta  # noqa: E731
    assert theta(rope_theta=7) == 7.0
    assert theta(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == 5e5
    assert theta(rope_theta=None, rope_parameters={"rope_theta": 5e5}) == 5e5
    assert theta(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == 5e5
    assert theta(rope_theta=3.0, rope_scaling={"type": "default"}) == 3.0
    both = dict(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert "rope_theta has several values: 10000.0, 500000.0" in refusal(changed(LLAMA, **both))


@pytest.mark.parametrize("scaling", [
    dict(rope_scaling={"type": "linear", "factor": 2.0}),
    dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
    dict(rope_parameters={"rope_type": "yarn", "rope_theta": 100000, "factor": 4.0}),
    dict(rope_parameters={"rope_type": "default", "rope_theta": 100000}, rope_scaling={"type": "dynamic"}),
    dict(rope_scaling={"type": None}),
])  # fmt: skip
def test_scaled_rope_is_refused(scaling):
    assert "RoPE scaling of type" in refusal(changed(LLAMA, **scaling))


@pytest.mark.parametrize("config, change, word", [
    (GPT2, dict(activation_function="relu"), "activation_function='relu'"),
    (GPT2, dict(activation_function="gelu"), "activation_function='gelu'"),
    (GPT2, dict(scale_attn_weights=False), "scale_attn_weights=False"),
    (GPT2, dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
    (GPT2, dict(add_cross_attention=True), "add_cross_attention=True"),
    (QWEN2, dict(hidden_act="gelu"), "hidden_act='gelu'"),
    (QWEN2, dict(use_sliding_window=True, max_window_layers=23), "sliding-window"),
    (LLAMA, dict(use_sliding_window=True), "sliding-window"),
    (LLAMA, dict(quantization_config=dict(quant_method="gptq")), "quantization_config: quantised weights are not implemented"),
    (QWEN2, dict(layer_types=["full_attention"] * 23 + ["sliding_attention"]), "sliding-window"),
    (QWEN2, dict(layer_types=3), "sliding-window"),
    (QWEN2, dict(num_key_value_heads=...), "num_key_value_heads is missing"),
    (LLAMA, dict(mlp_bias=True), "mlp_bias=True"),
    (LLAMA, dict(attention_bias=True), "attention_bias=True"),
    (LLAMA, dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (LLAMA, dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    (LLAMA, dict(rope_parameters="default"), "is not an object"),
    (LLAMA, dict(tie_word_embeddings="false"), "tie_word_embeddings='false'"),
    (LLAMA, dict(hidden_size=575), "is not a multiple of the 9 heads"),
    (LLAMA, dict(num_key_value_heads=2), "kv_heads=2: must divide heads=9"),
    (LLAMA, dict(head_dim=63), "head_dim=63: RoPE rotates pairs"),
    (LLAMA, dict(rms_norm_eps=0), "norm_eps=0: must be a positive number"),
    (LLAMA, dict(rms_norm_eps=math.nan), "norm_eps=nan: must be a positive number"),
    (LLAMA, dict(rope_theta="1e5"), "rope_theta='1e5': must be a positive number"),
    (LLAMA, dict(rope_theta=-1), "rope_theta=-1.0: must be a positive number"),
    (LLAMA, dict(initializer_range=-0.02), "init_std=-0.02: must be a positive number"),
    (LLAMA, dict(num_hidden_layers=0), "layers=0: must be a positive integer"),
    (LLAMA, dict(vocab_size=49152.0), "vocab=49152.0: must be a positive integer"),
    (LLAMA, dict(num_hidden_layers=True), "layers=True: must be a positive integer"),
    (GPT2, dict(n_embd="768"), "'768'"),
    (GPT2, dict(model_type="bert"), "model_type='bert': allowed are gpt2, qwen2, llama"),
    (GPT2, dict(model_type=...), "model_type=None"),
    (GPT2, dict(model_type=["gpt2"]), "model_type=['gpt2']"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused(config, change, word):
    assert word in refusal(changed(config, **change))


@pytest.mark.parametrize("config, key", [(GPT2, key) for key in ("n_embd", "n_head", "n_layer", "n_positions",
    "vocab_size", "layer_norm_epsilon")] + [(LLAMA, key) for key in ("hidden_size", "num_attention_heads",
    "num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps")])  # fmt: skip
def test_sizes_have_no_default(config, key):
    assert f"{key} is missing" in refusal(changed(config, **{key: ...}))
    assert f"{key} is missing" in refusal(changed(config, **{key: None}))


def test_all_faults_are_listed():
    faults = dict(hidden_act="relu", mlp_bias=True, vocab_size=..., rms_norm_eps=...)
    message = refusal(changed(LLAMA, **faults))
    for word in ("hidden_act='relu'", "mlp_bias=True", "vocab_size is", "rms_norm_eps is"):
        assert word in message


def test_defaults_are_those_of_the_family():
    """What transformers assumes where a file is silent."""
    silent = dict(tie_word_embeddings=..., initializer_range=...)
    assert Config.from_hf(changed(GPT2, **silent)).tied is True
    assert Config.from_hf(changed(QWEN2, **silent)).tied is False
    config = Config.from_hf(changed(LLAMA, **silent, num_key_value_heads=..., head_dim=...))
    assert (config.tied, config.init_std, config.kv_heads, config.head_dim) == (False, 0.02, 9, 64)
    assert Config.from_hf(changed(LLAMA, head_dim=32)).head_dim == 32
    gpt2 = Config.from_hf(changed(GPT2, n_inner=100, head_dim=32))  # transformers' GPT-2 has no head_dim
    assert (gpt2.inner, gpt2.head_dim) == (100, 64)
    assert Config.from_hf(changed(GPT2, n_inner=None)).inner == 3072


@pytest.mark.parametrize("config, kind, changes", [
    (LLAMA, "LlamaConfig", dict(rope_theta=...)),
    (QWEN2, "Qwen2Config", dict(rope_theta=...)),
    (LLAMA, "LlamaConfig", dict(rope_theta=..., rope_parameters={"rope_type": "default"})),
    (QWEN2, "Qwen2Config", dict(num_key_value_heads=None)),
    (QWEN2, "Qwen2Config", dict(use_sliding_window=True)),
    (QWEN2, "Qwen2Config", dict(use_sliding_window=True, max_window_layers=1, sliding_window=None)),
    (QWEN2, "Qwen2Config", dict(use_sliding_window=True, max_window_layers=1, layer_types=["full_attention"] * 24)),
])  # fmt: skip
def test_what_is_silent_or_null_is_read_as_transformers_reads_it(config, kind, changes):
    ours = Config.from_hf(changed(config, **changes))
    theirs = getattr(transformers, kind).from_dict(changed(config, **changes))
    assert ours.kv_heads == theirs.num_key_value_heads and set(getattr(theirs, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    theta = theirs.rope_parameters["rope_theta"] if hasattr(theirs, "rope_parameters") else theirs.rope_theta
    assert ours.rope_theta == theta


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(ALL.values())), st.data())
def test_odd_files_raise_only_value_errors(config, data):
    values = st.none() | st.booleans() | st.integers(-9, 999) | st.floats() | st.text(max_size=4) | st.lists(st.none())
    values |= st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "type"]), values, max_size=2)
    keys = st.sampled_from([*config, "head_dim", "rope_parameters", "rope_scaling", "layer_types", "mlp_bias"])
    odd = config | data.draw(st.dictionaries(keys, values, min_size=1, max_size=4))
    try:
        assert isinstance(Config.from_hf(odd), Config)
    except ValueError:
        pass


def test_unreadable_files_are_refused(tmp_path):
    for content in ("", "{", "[1]", "3", "\x00", "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        assert str(tmp_path / "config.json") in refusal(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    assert "cannot be read as a config.json" in refusal(tmp_path)
    assert "cannot be read as a config.json" in refusal(tmp_path / "absent")


def test_unknown_preset():
    with pytest.raises(ValueError, match="model='gpt3': allowed are small, gpt2, .*or a folder with a config.json"):
        Config.preset("gpt3")


@pytest.mark.parametrize("change, word", [
    (dict(family="bert"), "family='bert'"),
    (dict(layers=0), "layers=0"),
    (dict(width=1.5), "width=1.5"),
    (dict(vocab=True), "vocab=True"),
    (dict(norm_eps=0.0), "norm_eps=0.0"),
    (dict(rope_theta=math.inf), "rope_theta=inf"),
    (dict(init_std="0.02"), "init_std='0.02'"),
    (dict(kv_heads=3), "kv_heads=3: must divide heads=4"),
    (dict(head_dim=31), "head_dim=31: RoPE rotates pairs"),
    (dict(family="gpt2"), "kv_heads=2: gpt2 has as many as heads=4"),
])  # fmt: skip
def test_sizes_that_do_not_fit(change, word):
    with pytest.raises(ValueError) as error:
        Config.preset("small").replace(heads=4, **change)  # naming heads, a new width scales nothing
    assert word in str(error.value)


def test_a_new_width_keeps_the_proportions():
    small = Config.preset("small")
    wide = small.replace(width=256)
    assert (wide.heads, wide.kv_heads, wide.head_dim, wide.inner) == (4, 2, 64, 768)
    assert small.replace(width=8).head_dim == 2
    assert (small.replace(width=256, inner=5).inner, small.replace(width=256, inner=5).head_dim) == (5, 32)
    for width, message in ((12, "must be a multiple of 8"), (0, "positive integer"), (2.0, "positive integer")):
        with pytest.raises(ValueError, match=message):
            small.replace(width=width)
    assert Config.preset("gpt2").replace(width=36).head_dim == 3  # without RoPE heads may be odd
    for config in PRESETS.values():  # the named step is the least one
        step = next(w for w in range(1, config.width + 1) if _fits(config, w))
        with pytest.raises(ValueError, match=f"must be a multiple of {step} to keep"):
            config.replace(width=step + 1 if step > 1 else 1)


def _fits(config, width):
    try:
        return bool(config.replace(width=width))
    except ValueError:
        return False


def test_what_the_family_decides():
    gpt2, qwen2, llama = (Config.preset(name) for name in ("gpt2", "qwen2-0.5b", "smollm2-135m"))
    assert [c.has_rope for c in (gpt2, qwen2, llama)] == [False, True, True]
    assert [c.qkv_bias for c in (gpt2, qwen2, llama)] == [True, True, False]
    assert gpt2.residual_std == pytest.approx(0.02 / math.sqrt(24), rel=1e-15)
    assert (qwen2.residual_std, llama.residual_std) == (0.02, 1 / 24)
    assert len({*PRESETS.values()}) == len(PRESETS)  # hashable, and all different


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta", "init_std"])
@pytest.mark.parametrize("value", [True, 10**400, float("nan"), float("inf"), 0, "1"])
def test_what_is_no_positive_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*: must be a positive number"):
        dataclasses.replace(Config.preset("small"), **{name: value})
