"""The decoder: every switch does exactly what it says, left alone it is absent, and stripped bare the network is N^H."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lim.config import Config
from lim.influence import influence, squared_influence
from lim.model import Block, Decoder, birth_params, graphdef, params_of, with_identity_values
from lim.switches import WHOLE, Switches
from lim.theory import averaging, cesaro, kernel

QWEN2 = Config("qwen2", layers=3, width=24, heads=4, kv_heads=2, head_dim=6, inner=40, vocab=37, max_length=32, init_std=0.2)
GPT2 = Config("gpt2", layers=2, width=20, heads=2, kv_heads=2, head_dim=10, inner=44, vocab=37, max_length=32, init_std=0.2)
TOKENS = np.random.default_rng(0).choice(37, 13, replace=False)
DEFAULTS = dict(causal=1.0, window=WHOLE, prefix=0.0, alibi=0.0, residual=1.0, mlp=1.0, norm=1.0, uniform_attention=0.0, score_path=1.0)


def defaults(config):
    return DEFAULTS | {"rope" if config.has_rope else "positions": 1.0}


@functools.cache
def birth(config, seed=0):
    return Decoder.at_birth(config, seed)


@functools.partial(jax.jit, static_argnums=0)
def _stream(structure, params, x_LD, switches):
    decoder = nnx.merge(structure, params)
    return decoder.stream(x_LD, switches)


def stream(decoder, x_LD, **switches):
    """The stream after every block, [L, D]."""
    return np.asarray(_stream(graphdef(decoder.config), params_of(decoder), x_LD, Switches(**switches).check(decoder.config)))


@functools.partial(jax.jit, static_argnums=0)
def _logits_and_pullback(structure, params, switches):
    def f(params, x_LD):
        decoder = nnx.merge(structure, params)
        return decoder.logits(decoder.hidden(decoder.stream(x_LD, switches), switches))

    decoder = nnx.merge(structure, params)
    logits_LV, pullback = jax.vjp(f, params, decoder.embed(jnp.asarray(TOKENS), switches))
    return logits_LV, pullback(jnp.sin(logits_LV * 7))


@pytest.mark.parametrize("config", [QWEN2, GPT2], ids=lambda c: c.family)
def test_a_switch_at_its_default_equals_a_switch_left_alone(config):
    """Values to the bit. Pullbacks are summed in another order: equal to float32 rounding of sums of some 100 terms."""
    structure, params = graphdef(config), params_of(birth(config))
    alone, alone_grads = _logits_and_pullback(structure, params, Switches())
    together, together_grads = _logits_and_pullback(structure, params, Switches(**defaults(config)).check(config))
    np.testing.assert_array_equal(alone, together)
    largest = max(np.linalg.norm(a) for a in jax.tree.leaves(alone_grads))
    for a, b in zip(jax.tree.leaves(alone_grads), jax.tree.leaves(together_grads)):
        # the key bias has no gradient (softmax ignores what all scores share): what is there is rounding of the rest
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(a) + 1e-7 * largest


@pytest.mark.parametrize("config", [QWEN2, GPT2], ids=lambda c: c.family)
def test_one_compilation_serves_every_value(config):
    compiled = _logits_and_pullback._cache_size()
    for value in (0.0, 0.25, 1.0):
        switches = Switches(**{name: value for name in defaults(config) if name not in ("residual", "window", "prefix")}, alpha=value,
                            window=1 + 4 * value, prefix=8 * value)  # fmt: skip
        _logits_and_pullback(graphdef(config), params_of(birth(config)), switches.check(config))
    assert _logits_and_pullback._cache_size() == compiled + 1


def jacobian(decoder, **switches):
    """Norms of ∂ stream_i / ∂ x_j, [L, L]."""
    switches = Switches(**defaults(decoder.config) | switches).check(decoder.config)
    return np.asarray(_jacobian(graphdef(decoder.config), params_of(decoder), switches))


@functools.partial(jax.jit, static_argnums=0)
def _jacobian(structure, params, switches):
    decoder = nnx.merge(structure, params)
    x_LD = decoder.embed(jnp.asarray(TOKENS), switches)
    return jnp.linalg.norm(jax.jacrev(lambda x: decoder.stream(x, switches))(x_LD), axis=(1, 3))


@pytest.mark.parametrize("config", [QWEN2, GPT2], ids=lambda c: c.family)
def test_the_mask_hides_exactly_the_future(config):
    seen_LL = jacobian(birth(config))
    assert np.all(seen_LL[np.triu_indices(len(TOKENS), 1)] == 0)
    assert np.all(seen_LL[np.tril_indices(len(TOKENS))] > 0)
    assert np.all(jacobian(birth(config), causal=0.0) > 0)
    assert np.all(jacobian(birth(config), causal=0.5) > 0)


@pytest.mark.parametrize("window, prefix", [(3, 0), (WHOLE, 4), (2, 3)])
def test_window_and_prefix_show_exactly_what_they_say(window, prefix):
    """What reaches whom in three layers, by the paths that lead there."""
    one_LL = np.array([[(j <= i and i - j < window) or j < prefix for j in range(len(TOKENS))] for i in range(len(TOKENS))])
    reached_LL = np.linalg.matrix_power(one_LL + np.eye(len(TOKENS), dtype=int), 3) > 0
    np.testing.assert_array_equal(jacobian(birth(QWEN2), window=window, prefix=prefix) > 0, reached_LL)


def test_a_half_mask_weighs_the_future_by_half():
    """Uniform attention over weights 1 up to the row and 1 - causal beyond it."""
    decoder = with_identity_values(birth(dataclasses.replace(QWEN2, layers=1, kv_heads=4)))
    x_LD = jnp.asarray(np.random.default_rng(1).normal(size=(5, 24)), jnp.float32)
    out = stream(decoder, x_LD, causal=0.75, uniform_attention=1.0, residual=0.0, mlp=0.0, norm=0.0)
    weight_LL = np.where(np.tri(5) > 0, 1, 0.25)
    np.testing.assert_allclose(out, weight_LL / weight_LL.sum(1, keepdims=True) @ np.asarray(x_LD), rtol=1e-5, atol=1e-6)


def test_without_mask_and_rope_outputs_permute_with_inputs():
    decoder = birth(QWEN2)
    order = np.random.default_rng(2).permutation(len(TOKENS))
    x_LD = decoder.embed(jnp.asarray(TOKENS))
    base = dict(DEFAULTS, causal=0.0)
    plain = {rope: stream(decoder, x_LD, rope=rope, **base) for rope in (0.0, 1.0)}
    moved = {rope: stream(decoder, x_LD[order], rope=rope, **base) for rope in (0.0, 1.0)}
    np.testing.assert_allclose(moved[0.0], plain[0.0][order], rtol=1e-4, atol=1e-5)
    assert np.abs(moved[1.0] - plain[1.0][order]).max() > 0.01


def test_learned_positions_are_scaled():
    decoder = birth(GPT2)
    token_LD = decoder.embedding.embedding[...][TOKENS]
    table_LD = decoder.positions.embedding[...][: len(TOKENS)]
    for scale in (0.0, 0.5):
        embedded = decoder.embed(jnp.asarray(TOKENS), Switches(positions=scale))
        np.testing.assert_allclose(embedded, token_LD + scale * table_LD, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(decoder.embed(jnp.asarray(TOKENS)), token_LD + table_LD, rtol=1e-6)


def silenced(decoder):
    """A copy whose branches write nothing."""
    copy = nnx.clone(decoder)
    for linear in (copy.blocks.attention.out, copy.blocks.mlp.down):
        linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
    return copy


@pytest.mark.parametrize(
    "switches, scale",
    [
        (dict(residual=0.5), 0.5**6),  # three layers, two sub-blocks each
        (dict(residual=0.5, mlp=0.0), 0.5**3),  # the MLP sub-block is gone, skip and all
        (dict(residual=0.5, mlp=0.5), (0.5 * 0.75) ** 3),
        (dict(residual=0.0), 0.0),
        (dict(alpha=0.25, residual=None), 0.75**6),
        (dict(residual=[1.0, 0.5, 0.25]), 0.5**2 * 0.25**2),
    ],
)
def test_the_skip_alone_carries_its_weight(switches, scale):
    decoder = silenced(birth(QWEN2))
    x_LD = decoder.embed(jnp.asarray(TOKENS))
    out = stream(decoder, x_LD, **(defaults(QWEN2) | switches))
    np.testing.assert_allclose(out, scale * np.asarray(x_LD), rtol=1e-6)


def test_alpha_weighs_the_branch():
    """With one layer, no MLP: (1-α) x + α (branch), the branch being what no residual leaves."""
    decoder = birth(dataclasses.replace(QWEN2, layers=1))
    x_LD = decoder.embed(jnp.asarray(TOKENS))
    branch = stream(decoder, x_LD, **defaults(QWEN2) | dict(residual=0.0, mlp=0.0))
    mixed = stream(decoder, x_LD, **defaults(QWEN2) | dict(residual=None, mlp=0.0, alpha=0.3))
    np.testing.assert_allclose(mixed, 0.7 * np.asarray(x_LD) + 0.3 * branch, rtol=1e-5, atol=1e-6)


def test_score_path_off_stops_gradients_through_attention_weights_alone():
    structure, params = graphdef(QWEN2), params_of(birth(QWEN2))
    on, (on_grads, on_x) = _logits_and_pullback(structure, params, Switches(**defaults(QWEN2)).check(QWEN2))
    off, (grads, off_x) = _logits_and_pullback(structure, params, Switches(**defaults(QWEN2) | dict(score_path=0.0)).check(QWEN2))
    np.testing.assert_array_equal(on, off)
    for name in ("query", "key"):
        assert np.all(grads["blocks"]["attention"][name]["kernel"] == 0)
        assert np.all(np.any(on_grads["blocks"]["attention"][name]["kernel"] != 0, axis=(1, 2)))
    assert np.all(np.any(grads["blocks"]["attention"]["value"]["kernel"] != 0, axis=(1, 2)))
    assert np.abs(on_x - off_x).max() > 1e-4


def test_norm_off_makes_the_linear_network_homogeneous():
    decoder = birth(QWEN2)
    x_LD = decoder.embed(jnp.asarray(TOKENS))
    linear = defaults(QWEN2) | dict(norm=0.0, mlp=0.0, uniform_attention=1.0)
    bias_free = nnx.clone(decoder)
    np.testing.assert_allclose(stream(bias_free, 3 * x_LD, **linear), 3 * stream(bias_free, x_LD, **linear), rtol=1e-5, atol=1e-6)
    hidden_LD = np.asarray(decoder.hidden(x_LD, Switches(norm=0.0)))
    np.testing.assert_array_equal(hidden_LD, x_LD)
    half = np.asarray(decoder.hidden(x_LD, Switches(norm=jnp.asarray([1.0, 1.0, 0.5]))))
    np.testing.assert_allclose(half, 0.5 * np.asarray(x_LD) + 0.5 * np.asarray(decoder.hidden(x_LD)), rtol=1e-6)


def test_mlp_off_leaves_no_trace_of_the_mlp():
    _, (grads, _) = _logits_and_pullback(graphdef(QWEN2), params_of(birth(QWEN2)), Switches(**defaults(QWEN2) | dict(mlp=[0.0, 1.0, 0.0])).check(QWEN2))
    for linear in ("gate", "up", "down"):
        assert [bool(np.any(g)) for g in grads["blocks"]["mlp"][linear]["kernel"]] == [False, True, False]


@pytest.mark.parametrize("residual", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("causal", [0.0, 1.0])
def test_rung_1_the_bare_network_is_the_operator(residual, causal):
    """Identity values, uniform attention, no norm, no MLP: ‖∂h_L/∂x_j‖ = √D · row L of Π (s I + M), L = 256, H = 24."""
    config = Config("llama", layers=24, width=8, heads=2, kv_heads=2, head_dim=4, inner=8, vocab=256, max_length=256)
    switches = Switches(norm=0.0, mlp=0.0, uniform_attention=1.0, residual=residual, causal=causal)
    measured = influence(with_identity_values(birth(config)), np.arange(256), switches).influence_L
    expected = np.sqrt(8) * cesaro.operator_row(256, residual, 1.0, layers=24, causal=causal)
    np.testing.assert_allclose(measured, expected, rtol=1e-5, atol=1e-52)


@pytest.mark.parametrize("mask", [dict(window=9), dict(prefix=17), dict(window=5, prefix=2), dict(causal=0.5, window=30), dict(alibi=1.0)], ids=str)
def test_rung_1_under_every_mask(mask):
    """As above with the operator of each mask; ALiBi's heads carry each their own part of the stream through their own M."""
    config = Config("llama", layers=3, width=12, heads=3, kv_heads=3, head_dim=4, inner=8, vocab=64, max_length=64)
    bare = dict(norm=0.0, mlp=0.0, uniform_attention=1.0, residual=0.5)
    switches = Switches(**bare, **dict(causal=1.0, window=WHOLE, prefix=0.0, alibi=0.0) | mask)  # one compilation for all
    measured = influence(with_identity_values(birth(config)), np.arange(64), switches).influence_L
    i, j = np.indices((64, 64))
    squares_L = 0
    for slope in (1 / 16, 1 / 256, 1 / 4):  # of 3 heads: those of 2, and the first of 4
        w_LL = np.where(j <= i, 1, 1 - mask.get("causal", 1.0)) * (abs(i - j) < mask.get("window", 64))
        w_LL = np.where(j < mask.get("prefix", 0), 1, w_LL) * np.exp(-mask.get("alibi", 0) * slope * abs(i - j))
        m_LL = w_LL / w_LL.sum(1, keepdims=True)
        squares_L = squares_L + 4 * np.linalg.matrix_power(0.5 * np.eye(64) + m_LL, 3)[-1] ** 2
    np.testing.assert_allclose(measured, np.sqrt(squares_L), rtol=1e-5)
    each = averaging.masks(64, heads=3, **mask)  # and so says the theory's own
    m_NLL = np.ones((len(each), 64, 64))
    for mask, m_LL in zip(each, m_NLL):
        mask.weigh(m_LL, slice(0, 64), slice(0, 64))
    row_L = np.sqrt(sum(12 / len(each) * np.linalg.matrix_power(0.5 * np.eye(64) + m_LL, 3)[-1] ** 2 for m_LL in m_NLL))
    np.testing.assert_allclose(row_L, np.sqrt(squares_L), rtol=1e-12)


@functools.partial(jax.jit, static_argnums=0)
def _moments(config, params, switches):
    return jax.lax.map(
        lambda p: squared_influence(graphdef(config), p, switches, jnp.arange(24), 23, 0, jax.random.key(0), output="hidden",
                                    source=0, rows=32, probes=None, chunk=32), params, batch_size=50)  # fmt: skip


@pytest.mark.parametrize("mask", [dict(window=6.0), dict(prefix=9.0), dict(window=4.0, prefix=2.0), dict(alibi=1.0), dict(causal=0.0, window=5.0)], ids=str)
def test_random_values_under_every_mask(mask):
    """The mean square of 400 networks of random values against the kernel theory, exact here at any width: within 3.5 standard errors."""
    config = Config("llama", layers=4, width=32, heads=4, kv_heads=2, head_dim=8, inner=8, vocab=24, max_length=24,
                    init_std=32**-0.5)  # fmt: skip
    masks = dict(causal=1.0, window=WHOLE, prefix=0.0, alibi=0.0) | mask
    switches = Switches(norm=0.0, mlp=0.0, uniform_attention=1.0, residual=0.7, **masks).check(config)
    params = jax.vmap(functools.partial(birth_params, config))(jax.random.split(jax.random.key(1), 400))
    scale_SL, mean_SL, _ = _moments(config, params, switches)
    square_SL = np.asarray(scale_SL, np.float64) ** 2 * np.asarray(mean_SL) * 32
    expected_L = kernel.predict(config, 24, switches).influence_L ** 2
    seen_L = expected_L > 0
    assert np.all(square_SL[:, ~seen_L] == 0)
    z_L = (square_SL.mean(0) - expected_L)[seen_L] / (square_SL.std(0, ddof=1) / np.sqrt(400))[seen_L]
    assert np.abs(z_L).max() < 3.5


@pytest.mark.parametrize("residual", [0.0, 0.7])
def test_rung_2_random_values_add_by_depth(residual):
    """E ‖∂h_L/∂x_j‖² / D = Σ_k e_k ((M^k)_{Lj})², exact at any width: 400 seeds, within 3.5 of their standard errors.

    Positions are strongly correlated (they share the seed's values), so the largest of 24 z-scores is that of a few.
    """
    config = Config("llama", layers=4, width=32, heads=4, kv_heads=2, head_dim=8, inner=8, vocab=24, max_length=24,
                    init_std=32**-0.5)  # fmt: skip
    switches = Switches(norm=0.0, mlp=0.0, uniform_attention=1.0, residual=residual).check(config)
    params = jax.vmap(functools.partial(birth_params, config))(jax.random.split(jax.random.key(0), 400))
    scale_SL, mean_SL, _ = jax.lax.map(
        lambda p: squared_influence(graphdef(config), p, switches, jnp.arange(24), 23, 0, jax.random.key(0), output="hidden",
                                    source=0, rows=32, probes=None, chunk=32), params, batch_size=50)  # fmt: skip
    square_SL = np.asarray(scale_SL, np.float64) ** 2 * np.asarray(mean_SL)  # times rows, over the width
    gain = (config.width * config.init_std**2) * (config.heads * config.head_dim * config.init_std**2)
    expected_L = cesaro.second_moment_profile(24, residual, 1.0, gain, layers=4)
    z_L = (square_SL.mean(0) - expected_L) / (square_SL.std(0, ddof=1) / np.sqrt(400))
    assert np.abs(z_L).max() < 3.5
    relative_error = square_SL.std(0, ddof=1) / np.sqrt(400) / expected_L
    assert relative_error.max() < 0.1  # the test has the power to see 30 %


@pytest.mark.parametrize("position", [0, 5, -1])
def test_reading_one_position_equals_reading_all(position):
    decoder = birth(QWEN2)
    x_LD = decoder.embed(jnp.asarray(TOKENS))
    whole_LD = stream(decoder, x_LD)
    np.testing.assert_allclose(decoder.read(x_LD, position=position), whole_LD[position], rtol=1e-5, atol=1e-6)
    later = decoder.stream(decoder.stream(x_LD, stop=1), start=1)
    np.testing.assert_allclose(later, whole_LD, rtol=1e-5, atol=1e-6)


def test_birth_is_reproducible_and_layers_differ():
    one, again, other = (params_of(Decoder.at_birth(QWEN2, seed)) for seed in (0, 0, 1))
    batched = jax.vmap(functools.partial(birth_params, QWEN2))(jax.vmap(jax.random.key)(jnp.arange(2)))
    for a, b, c, ab in zip(*map(jax.tree.leaves, (one, again, other, batched))):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.stack([a, c]), ab)
    kernel = one["blocks"]["attention"]["query"]["kernel"]
    assert np.abs(kernel[0] - kernel[1]).max() > 0.1
    assert np.abs(kernel - other["blocks"]["attention"]["query"]["kernel"]).max() > 0.1


@pytest.mark.parametrize("config", [QWEN2, pytest.param(GPT2, marks=pytest.mark.slow)], ids=lambda c: c.family)
def test_float64_agrees_with_float32_to_its_rounding(config):
    with jax.enable_x64(True):
        double = influence(Decoder.at_birth(config, 0, dtype=jnp.float64), TOKENS, output="logits", chunk=64).influence_L
    single = influence(birth(config), TOKENS, output="logits", chunk=64).influence_L
    relative = np.abs(single / double - 1)
    assert 1e-9 < relative.max() < 2e-5  # and float64 is not float32 in disguise


def test_a_decoder_that_is_gone_leaves_no_weights_behind():
    """Not even until the garbage collector comes by: over seeds of a large model they would pile up."""
    gc.collect()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        decoder = Decoder.at_birth(QWEN2, 3)
        influence(decoder, TOKENS)
        assert len(jax.live_arrays()) > before
        del decoder
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", [-1, 2**32, True, 1.5])
def test_seeds_that_jax_would_take_for_another(seed):
    with pytest.raises(ValueError, match=f"^seed={seed}: must be an integer from 0 to 4294967295$"):
        Decoder.at_birth(QWEN2, seed)


@pytest.mark.parametrize("bad", [-1, 37])
def test_ids_that_the_compiler_would_clamp(bad):
    with pytest.raises(ValueError, match=f"^tokens hold the id {bad}: allowed are 0 to 36$"):
        birth(QWEN2)(jnp.array([0, bad, 36]))


def test_a_length_beyond_the_position_table_is_refused():
    with pytest.raises(ValueError, match="length=33: gpt2's table holds 32 positions"):
        birth(GPT2)(jnp.zeros(33, jnp.int32))


def test_identity_values_need_heads_that_partition_the_stream():
    with pytest.raises(ValueError, match="identity values need"):
        with_identity_values(birth(QWEN2))


class Forgetful(Block):
    """Returns every row, whichever it is asked for: its row 0 would pass for the read-out."""

    def __call__(self, x_LD, switches, rows_Q=None):
        return super().__call__(x_LD, switches)


class ForgetfulDecoder(Decoder):
    Block = Forgetful


def test_a_block_that_returns_other_rows_than_it_was_asked_for_is_refused():
    decoder = ForgetfulDecoder(QWEN2, nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Forgetful returned an array \[5, \d+\] where one row was asked for \(rows_Q\), \[1, \d+\]"):
        influence(decoder, np.arange(5))
