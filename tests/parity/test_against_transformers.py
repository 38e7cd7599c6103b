"""Our Decoder gives the logits and the Jacobian of transformers' GPT-2, Qwen2 and Llama, and no near relative's.

The reference runs in torch, float32. Every weight differs from its default and every size is awkward, so that a
forgotten bias or norm weight, a wrong epsilon or RoPE base and a transposed square matrix all change the output.
"""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import lim.model
from lim import checkpoint
from lim.attention import slopes
from lim.config import Config
from lim.model import graphdef, params_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # these products are too small for more

_SQUARE = dict(num_hidden_layers=3, hidden_size=36, intermediate_size=36, vocab_size=36, num_attention_heads=6,
               rms_norm_eps=0.05, max_position_embeddings=64)  # fmt: skip
_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=50.0))
_GPT2 = dict(n_layer=3, n_embd=30, n_head=5, vocab_size=30, n_positions=41, layer_norm_epsilon=0.05,
             bos_token_id=0, eos_token_id=0)  # fmt: skip

CONFIGS = {
    "gpt2": transformers.GPT2Config(**_GPT2, n_inner=30),
    "gpt2-untied": transformers.GPT2Config(**_GPT2 | dict(vocab_size=43), tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**_SQUARE, **_ROPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2-untied": transformers.Qwen2Config(**_SQUARE, **_ROPE, num_key_value_heads=3, tie_word_embeddings=False),
    "llama": transformers.LlamaConfig(**_SQUARE, **_ROPE, num_key_value_heads=6, tie_word_embeddings=False),
    "llama-wide-heads": transformers.LlamaConfig(**_SQUARE | dict(num_attention_heads=9), **_ROPE, head_dim=10,
                                                 num_key_value_heads=3, tie_word_embeddings=True),
}  # fmt: skip


def torch_model(config, seed=0):
    """The model of a configuration with weights of order one in their effect, norms and biases included."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        draw = torch.randn(weight.shape, generator=generator)
        is_norm = "ln_" in name or "norm" in name
        weight.data = 1 + 0.5 * draw if is_norm and "weight" in name else 0.3 * draw
    return model.eval()


def converted(model, folder, shard="1GB"):
    """Our Decoder of a torch model, by way of safetensors on disk."""
    model.save_pretrained(folder, max_shard_size=shard)
    return checkpoint.load(folder)


def tokens(config, length=37, seed=1):
    return np.random.default_rng(seed).integers(config.vocab_size, size=length)


def torch_logits(model, tokens_L):
    with torch.no_grad():
        return model(torch.tensor(tokens_L)[None]).logits[0].numpy()


def torch_jacobian(model, tokens_L):
    """d (last position after the final norm) / d (input embeddings), [D, L, D]."""
    embeddings_LD = model.get_input_embeddings()(torch.tensor(tokens_L)).detach()
    last = lambda x_LD: model.base_model(inputs_embeds=x_LD[None]).last_hidden_state[0, -1]  # noqa: E731
    return torch.autograd.functional.jacobian(last, embeddings_LD).numpy()


def relative(got, truth, axes=None):
    """Largest difference over the largest magnitude, [over the given axes]."""
    got, truth = np.asarray(got, np.float64), np.asarray(truth, np.float64)
    return np.max(np.abs(got - truth).max(axes) / np.abs(truth).max(axes))


# Three blocks of about eight products in a row, each a sum of about 36 float32 terms: 24·√36 roundings of 6e-8 make
# 1e-5, and RoPE's angles of up to 37 radians carry 2e-6 into scores of a few units. The pullback runs the same way
# back, and its smallest block is 1/80 of its largest.
LOGITS, JACOBIAN = 2e-5, 1e-4

# XLA's optimiser takes far longer than these small products do.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A case -> its torch model, our Decoder of it, and tokens; made once."""

    @functools.cache
    def make(case):
        model = torch_model(CONFIGS[case])
        return model, converted(model, tmp_path_factory.mktemp(case)), tokens(model.config)

    return make


@quick
def logits(decoder, tokens_L):
    return decoder(tokens_L)


@quick
def jacobian(decoder, tokens_L):
    return jax.jacrev(lambda x_LD: decoder.hidden(decoder.read(x_LD)))(decoder.embed(tokens_L))


@quick
def jacobian_of_whole_stream(decoder, tokens_L):
    return jax.jacrev(lambda x_LD: decoder.hidden(decoder.stream(x_LD)[-1]))(decoder.embed(tokens_L))


@pytest.mark.parametrize("case", CONFIGS)
def test_logits(case, pair):
    model, decoder, tokens_L = pair(case)
    assert relative(logits(decoder, tokens_L), torch_logits(model, tokens_L)) < LOGITS


@pytest.mark.parametrize("case", ["gpt2", "qwen2", "llama", "llama-wide-heads"])
def test_jacobian(case, pair):
    """Every block d h_last / d x_j is right, on the scale of its own largest entry."""
    model, decoder, tokens_L = pair(case)
    assert relative(jacobian(decoder, tokens_L), torch_jacobian(model, tokens_L), axes=(0, 2)) < JACOBIAN


def test_jacobian_of_whole_stream(pair):
    """The same where the last block is computed at every position, not at the last alone."""
    model, decoder, tokens_L = pair("qwen2-untied")
    truth_DLD = torch_jacobian(model, tokens_L)
    assert relative(jacobian_of_whole_stream(decoder, tokens_L), truth_DLD, axes=(0, 2)) < JACOBIAN


@pytest.mark.parametrize("case", ["gpt2", "qwen2", "llama"])
def test_shards_and_bfloat16(case, tmp_path):
    """Written as bfloat16 in several shards, read as float32: the logits of the rounded weights."""
    decoder = converted(torch_model(CONFIGS[case]).bfloat16(), tmp_path, shard="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens_L = tokens(model.config)
    assert relative(logits(decoder, tokens_L), torch_logits(model, tokens_L)) < LOGITS


def _interleaved(x_LHE, positions_L, theta, scale=None):
    """RoPE's other layout, which turns dimension 2e with 2e + 1."""
    order = np.arange(x_LHE.shape[-1]).reshape(-1, 2).T.ravel()
    return rotate(x_LHE[..., order], positions_L, theta, scale)[..., np.argsort(order)]


rotate = lim.model.rotate


def mistaken(decoder, mistake, monkeypatch):
    """The Decoder with one of the classical mistakes of a port."""
    change, params = {}, params_of(decoder)
    if mistake == "interleaved RoPE":
        monkeypatch.setattr(lim.model, "rotate", _interleaved)
    elif mistake == "wrong RoPE base":
        change = dict(rope_theta=10000.0)
    elif mistake == "wrong epsilon":
        change = dict(norm_eps=1e-6)
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)

    def spoil(path, leaf):
        names = [key.key for key in path]
        if mistake == f"no {names[-1]} of {names[-2]}":
            return np.ones_like(leaf) if names[-1] == "scale" else np.zeros_like(leaf)
        is_transposed = mistake == f"transposed {names[-2]}" and names[-1] != "bias"
        return np.swapaxes(leaf, -1, -2) if is_transposed else leaf

    params = jax.tree.unflatten(tree, [spoil(path, leaf) for path, leaf in leaves])
    return nnx.merge(graphdef(decoder.config.replace(**change)), params)


MISTAKES = (
    [("qwen2", m) for m in ("interleaved RoPE", "wrong RoPE base", "wrong epsilon")]
    + [("qwen2", f"no bias of {part}") for part in ("query", "key", "value")]
    + [("qwen2", f"no scale of {norm}") for norm in ("attention_norm", "mlp_norm", "final_norm")]
    + [("qwen2", f"transposed {part}") for part in ("query", "out", "gate", "up", "down", "embedding")]
    + [("llama", f"transposed {part}") for part in ("query", "key", "value", "out", "gate", "up", "down", "head")]
    + [("gpt2", f"no bias of {part}") for part in ("query", "value", "out", "up", "down")]
    + [("gpt2", f"no scale of {norm}") for norm in ("attention_norm", "mlp_norm", "final_norm")]
    + [("gpt2", f"no bias of {norm}") for norm in ("attention_norm", "mlp_norm", "final_norm")]
    + [("gpt2", f"transposed {part}") for part in ("query", "key", "value", "out", "up", "down", "embedding")]
    + [("gpt2", "wrong epsilon"), ("gpt2", "no embedding of positions")]
)  # fmt: skip


@pytest.mark.parametrize("case, mistake", MISTAKES)
def test_a_classical_mistake_shows(case, mistake, pair, monkeypatch):
    """The comparison above is worth something: each mistake of a port is far outside its tolerance."""
    model, decoder, tokens_L = pair(case)
    compute = quick(lambda decoder, tokens_L: decoder(tokens_L)) if "RoPE" in mistake else logits
    logits_LV = compute(mistaken(decoder, mistake, monkeypatch), tokens_L)
    assert relative(logits_LV, torch_logits(model, tokens_L)) > 1000 * LOGITS


@pytest.mark.parametrize("case", CONFIGS)
def test_config_of_a_saved_model(case, tmp_path):
    """config.json as this release of transformers writes it."""
    hf = CONFIGS[case]
    hf.save_pretrained(tmp_path)
    config = Config.from_hf(tmp_path)
    assert (config.layers, config.width, config.vocab) == (hf.num_hidden_layers, hf.hidden_size, hf.vocab_size)
    assert (config.heads, config.norm_eps, config.tied) == (hf.num_attention_heads, 0.05, hf.tie_word_embeddings)
    if config.has_rope:
        assert (config.kv_heads, config.rope_theta) == (hf.num_key_value_heads, 50.0)
        assert config.head_dim == (10 if case == "llama-wide-heads" else 6)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 14, 25])
def test_alibi_has_the_slopes_of_bloom(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 5), heads, torch.float32).reshape(heads, 5)
    np.testing.assert_allclose(slopes(heads)[:, None] * np.arange(5), theirs, rtol=1e-6)
