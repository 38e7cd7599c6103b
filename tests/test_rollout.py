"""Rollout: equal to explicit matrices, to the operator where the network is the operator, and to theory at birth."""

import jax.numpy as jnp
import numpy as np
import pytest

from lim import recall, rollout, train
from lim.claims import outside
from lim.config import Config
from lim.model import Decoder, graphdef, params_of
from lim.switches import Switches
from lim.theory import cesaro, kernel
from lim.tokens import random_tokens

QWEN2 = Config("qwen2", layers=3, width=24, heads=4, kv_heads=2, head_dim=6, inner=40, vocab=37, max_length=32, init_std=0.2)
TOKENS = np.random.default_rng(0).choice(37, 13, replace=False)


def by_hand(decoder, tokens_L, switches, read):
    """The same from its definition, in float64 numpy with explicit heads and matrices; RoPE and softmax left to the model."""
    config, switches = decoder.config, switches.check(decoder.config)
    x_LD = decoder.embed(jnp.asarray(tokens_L), switches)
    strengths, matrices, first = [], [], []
    for n in range(config.layers):
        branch = 1.0 if switches.alpha is None else float(switches.alpha)
        skip = 1 - branch if switches.alpha is not None else 1.0 if switches.residual is None else float(switches.residual)
        kernels = {name: np.asarray(getattr(decoder.blocks.attention, name).kernel[...][n], np.float64)
                   for name in ("query", "key", "value", "out")}  # fmt: skip
        biases = {name: np.asarray(getattr(decoder.blocks.attention, name).bias[...][n], np.float64) for name in ("query", "key")}
        x = np.asarray(x_LD, np.float64)
        h = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + config.norm_eps)
        per_head = config.head_dim
        values = np.zeros_like(x)
        attention = np.zeros((len(x), len(x)))
        angle = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(per_head // 2) / (per_head // 2))
        turn = lambda v: np.concatenate([v[:, :3] * np.cos(angle) - v[:, 3:] * np.sin(angle),  # noqa: E731
                                         v[:, 3:] * np.cos(angle) + v[:, :3] * np.sin(angle)], axis=1)  # fmt: skip
        for head in range(config.heads):
            own, shared = slice(head * per_head, (head + 1) * per_head), head // (config.heads // config.kv_heads)
            theirs = slice(shared * per_head, (shared + 1) * per_head)
            q, k = (turn((h @ kernels[name] + biases[name])[:, cut]) for name, cut in (("query", own), ("key", theirs)))
            scores = np.where(np.tri(len(x)) > 0, q @ k.T / np.sqrt(per_head), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            attention += weights / weights.sum(1, keepdims=True) / config.heads
            values += h @ kernels["value"][:, theirs] @ kernels["out"][own]
        hop, stay = branch**2 * attention @ np.sum(values**2, 1), skip**2 * np.sum(x**2, 1)
        strengths.append((hop / (hop + stay))[read])
        share = np.sqrt(hop) / (np.sqrt(hop) + np.sqrt(stay))
        matrices.append(np.diag(1 - share) + share[:, None] * attention)
        first.append(attention[len(x) // 2 :, 0].mean())
        x_LD = decoder.stream(x_LD, switches, n, n + 1)
    return strengths, np.linalg.multi_dot(matrices[::-1])[read], first


@pytest.mark.parametrize("switches, read", [(Switches(), -1), (Switches(residual=0.5), 7), (Switches(alpha=0.3), -1)], ids=["published", "residual", "alpha"])
def test_rollout_equals_explicit_matrices(switches, read):
    decoder = Decoder.at_birth(QWEN2, 0)
    measured = rollout.measure(decoder, TOKENS, switches, read=read)
    for got, expected in zip((measured.strengths_N, measured.rollout_L, measured.first_token_N), by_hand(decoder, TOKENS, switches, read)):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert abs(measured.rollout_L.sum() - 1) < 1e-5


def test_at_birth_the_strengths_are_the_theorys():
    """Averaged over seeds. One seed's strengths scatter with ‖W_O W_V‖², by √(2/(width·kv)) and as the stream's does."""
    config = Config.preset("small").replace(layers=4, width=256)
    predicted_N = kernel.effective_strengths(config, 48)
    seeds = [rollout.measure(Decoder.at_birth(config, seed), random_tokens(config.vocab, 48, seed)).strengths_N for seed in range(8)]
    error_N = np.std(seeds, axis=0, ddof=1) / np.sqrt(8)
    # and 1/width of finite-width bias
    assert np.all(np.abs(np.mean(seeds, axis=0) / predicted_N - 1) < 4 * error_N / predicted_N + 2 / 256)


def test_uniform_attention_rolls_out_to_the_operator():
    """Equal values at every position and no residual: the rollout is the row of M^H."""
    measured = rollout.measure(Decoder.at_birth(QWEN2, 0), TOKENS, Switches(uniform_attention=1.0, residual=0.0))
    np.testing.assert_allclose(measured.rollout_L, cesaro.profile(13, 1.0, layers=3), rtol=1e-5)


def test_no_product_is_rounded_below_float32():
    """Accelerators take products in fewer bits unless told otherwise; what is measured must not depend on it."""
    config, switches, B, T = QWEN2, Switches(), 2, 9
    params, structure = params_of(Decoder.at_birth(config, 0)), graphdef(config)
    tokens_BT, targets_B = np.zeros((B, T), np.int32), np.zeros(B, np.int32)
    traced = [
        rollout._measure.trace(structure, params, switches, tokens_BT[0], T - 1),
        train.embedding_gradients.trace(structure, params, switches, tokens_BT),
        train._losses.trace(structure, params, switches, tokens_BT),
        recall._answers.trace(structure, params, switches, tokens_BT, targets_B),
        recall._ask.trace(structure, params, tokens_BT[0], 3, tokens_BT[:, :4], targets_B, answer=2),
        outside._answer_squares.trace(params, tokens_BT, targets_B, config=config),
        outside._sum_gradient.trace(structure, params, tokens_BT[0]),
    ]
    for function in traced:
        products = [line for line in function.lower().as_text().splitlines() if "dot_general" in line]
        assert len(products) > 5 and all("precision = [HIGHEST, HIGHEST]" in line for line in products), function.fun_name


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="read=13: allowed are 0 to 12"):
        rollout.measure(Decoder.at_birth(QWEN2, 0), TOKENS, read=13)
