"""Our weights at birth are distributed as those of transformers' fresh models, tensor by tensor."""

import jax
import numpy as np
import pytest
from scipy import stats

from lim import checkpoint
from lim.config import Config
from lim.model import Decoder, params_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_ROPE = dict(num_hidden_layers=3, hidden_size=96, intermediate_size=160, vocab_size=211, num_attention_heads=6,
             num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.05)  # fmt: skip
CONFIGS = {
    "gpt2": transformers.GPT2Config(n_layer=3, n_embd=96, n_head=6, vocab_size=211, n_positions=50, bos_token_id=0,
                                    eos_token_id=0, tie_word_embeddings=False, initializer_range=0.05),
    "qwen2": transformers.Qwen2Config(**_ROPE),
    "llama": transformers.LlamaConfig(**_ROPE),
}  # fmt: skip


def by_name(decoder):
    leaves = jax.tree_util.tree_leaves_with_path(params_of(decoder))
    return {".".join(key.key for key in path): np.asarray(leaf, np.float64) for path, leaf in leaves}


@pytest.fixture(scope="module", params=CONFIGS)
def births(request, tmp_path_factory):
    """The config, our weights at birth and transformers' fresh ones, both by our names."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(folder)
    config = Config.from_hf(folder)
    return config, by_name(Decoder.at_birth(config, seed=0)), by_name(checkpoint.load(folder))


def test_means_and_standard_deviations(births):
    """Within five standard errors of theirs, of which √2 is theirs; constants exactly."""
    config, ours, theirs = births
    assert ours.keys() == theirs.keys()
    for name, truth in theirs.items():
        if config.family == "gpt2" and name in ("blocks.attention.out.kernel", "blocks.mlp.down.kernel"):
            continue  # some releases of transformers start them at the full standard deviation; see below
        std, error = truth.std(), truth.std() / np.sqrt(truth.size)
        assert abs(ours[name].std() - std) <= 5 * error, name  # each std is off by std/√(2n)
        assert abs(ours[name].mean() - truth.mean()) <= 5 * np.sqrt(2) * error, name
        if std == 0:
            np.testing.assert_array_equal(ours[name], truth, err_msg=name)


def test_gpt2_projections_by_definition(births):
    """GPT-2 divides the standard deviation of what writes to the stream by √(2·layers) (Radford et al. 2019, 2.3)."""
    config, ours, _ = births
    for name in ("blocks.attention.out.kernel", "blocks.mlp.down.kernel"):
        std = 0.05 / np.sqrt(2 * 3) if config.family == "gpt2" else 0.05
        assert abs(ours[name].std() / std - 1) < 5 / np.sqrt(2 * ours[name].size), name


def test_weights_are_normal_and_independent_between_layers(births):
    """Kolmogorov and Smirnov's test at 1e-4, against the normal law of the config's standard deviation."""
    config, ours, _ = births
    for name, value in ours.items():
        if value.std() == 0:
            continue
        std = config.residual_std if name.endswith(("out.kernel", "down.kernel")) else config.init_std
        assert stats.kstest(value.ravel() / std, "norm").pvalue > 1e-4, name
        if name.startswith("blocks."):
            first, second = value[0].ravel(), value[1].ravel()
            assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(first.size), name
