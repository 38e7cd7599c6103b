"""The kernel theory against a reference that writes every expectation out: over four positions at a time, no algebra.

`reference` below knows neither M's running sums nor the matrices T, S, V, R: it builds the covariance of all pairs of
logits as a tensor, from it the mean of all pairs of softmax weights, and sums. MLP expectations are two-dimensional
Gauss-Hermite sums.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest
from scipy.special import expit

import lim
from lim import ladder
from lim.config import PRESETS, Config
from lim.switches import Switches
from lim.theory import averaging, kernel

# s = 40·σ² is 0.32 or so: softmax corrections of several percent, and a norm_eps that matters beside q0 = σ².
QWEN = Config("qwen2", layers=3, width=40, heads=4, kv_heads=2, head_dim=6, inner=56, vocab=50, max_length=64,
              norm_eps=1e-3, rope_theta=100.0, init_std=0.09)  # fmt: skip
LLAMA = dataclasses.replace(QWEN, family="llama", norm_eps=2e-2)
GPT2 = Config("gpt2", layers=3, width=40, heads=4, kv_heads=4, head_dim=12, inner=160, vocab=50, max_length=64,
              norm_eps=1e-3, init_std=0.1)  # fmt: skip
LENGTH = 6
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def silu(u):
    return u * expit(u)


def silu_slope(u):
    return expit(u) * (1 + u * (1 - expit(u)))


def gelu(u):
    return u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))


def gelu_slope(u):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))
    return (1 + tanh) / 2 + u / 2 * (1 - tanh**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * u**2)


def pair_mean(f, covariance):
    deviation = np.sqrt(np.diag(covariance))
    rho = covariance / np.outer(deviation, deviation)
    found = np.empty_like(covariance)
    for i, j in np.ndindex(*covariance.shape):
        r = np.clip(rho[i, j], -1, 1)
        u, v = deviation[i] * NODES[:, None], deviation[j] * (r * NODES[:, None] + np.sqrt(1 - r * r) * NODES)
        found[i, j] = WEIGHTS @ (f(u) * f(v)) @ WEIGHTS
    return found


def reference(config, length, switches=Switches(), output="hidden", source=0, read=-1, tokens=None,
              corrections=True, rope=False):  # fmt: skip
    """influence_L, by sums over four positions."""

    def layered(name, default):
        value = getattr(switches, name)
        return np.broadcast_to(default if value is None else value, (config.layers,)).astype(float)

    s = config.width * config.init_std**2
    g = s * config.heads * config.head_dim * config.residual_std**2
    z, mlp_gain = s * s, config.inner * config.residual_std**2
    skip, branch = layered("residual", 1.0), np.ones(config.layers)
    if switches.alpha is not None:
        branch = layered("alpha", 1.0)
        skip = 1 - branch
    mlp, norm, causal = layered("mlp", 1.0), layered("norm", 1.0), layered("causal", 1.0)
    share, score, turn = 1 - layered("uniform_attention", 0.0), layered("score_path", 1.0), layered("rope", 1.0)
    if not corrections:
        share = 0 * share
    i = np.arange(length)
    tokens = i if tokens is None else np.asarray(tokens)
    c = config.init_std**2 * (tokens[:, None] == tokens)
    if config.family == "gpt2":
        positions = 1.0 if switches.positions is None else switches.positions
        c = c + (positions * config.init_std) ** 2 * np.eye(length)

    def attention(n, k):
        """Means over pairs of weights and of value deviations, with what RoPE and chance overlaps put in."""
        w = np.where(i[:, None] >= i, 1.0, 1 - causal[n])
        m = w / w.sum(1, keepdims=True)
        gap = i[:, None] - i
        cosine = np.ones((length,) * 4)
        if rope:
            theta = turn[n] * config.rope_theta ** (-np.arange(config.head_dim // 2) / (config.head_dim // 2))
            cosine = np.mean(np.cos((gap[:, :, None, None] - gap)[..., None] * theta), -1)  # (i-j) - (k-l)
        logits = z * k[:, None, :, None] * k[None, :, None, :] * cosine
        centre = np.eye(length)[None] - m[:, None, :]  # [i, j, j']: d_ij = Σ_j' centre l_ij'
        dd = np.einsum("ijx,kly,ixky->ijkl", centre, centre, logits)
        var = np.einsum("ijij->ij", dd)
        half = (var - (m * var).sum(1, keepdims=True)) / 2
        mean = 1 + share[n] ** 2 * dd + share[n] * (half[:, :, None, None] + half)
        mm = m[:, :, None, None] * m
        kappa = np.diag(k)
        chance = (np.outer(kappa, kappa) - k**2) ** 2 / (config.width * np.outer(kappa, kappa))
        lifted = z * np.einsum("ijkl,ijkl,jl->ik", mm, cosine, chance)  # what E adds where K_jl meets a logit's own
        deviations = np.einsum("ijx,kly,xy->ijkl", centre, centre, k)
        return mm, mean, deviations, cosine, lifted

    stages = []
    for n in range(config.layers):
        p = norm[n] / np.sqrt(np.diag(c) + config.norm_eps) + 1 - norm[n]
        k = c * np.outer(p, p)
        mm, mean, deviations, cosine, lifted = attention(n, k)
        a = np.einsum("ijkl,ijkl,jl->ik", mm, mean, k) + share[n] ** 2 * k * lifted
        stages.append((p, k, mm, mean, deviations, cosine, lifted))
        c = skip[n] ** 2 * c + branch[n] ** 2 * g * a
        p = norm[n] / np.sqrt(np.diag(c) + config.norm_eps) + 1 - norm[n]
        u = s * c * np.outer(p, p)
        if config.family == "gpt2":
            add, slope = pair_mean(gelu, u), s * pair_mean(gelu_slope, u)
        else:
            values = pair_mean(silu, u)
            add, slope = u * values, s * (u * pair_mean(silu_slope, u) + values)
        stages.append((p, mlp_gain * slope))
        c = (mlp[n] * skip[n] + 1 - mlp[n]) ** 2 * c + (mlp[n] * branch[n]) ** 2 * mlp_gain * add
    gamma = np.zeros((length, length))
    gamma[read, read] = 1.0
    if output == "hidden":
        gamma *= (norm[-1] / np.sqrt(c[read, read] + config.norm_eps) + 1 - norm[-1]) ** 2
    for n in reversed(range(source, config.layers)):
        p, slope = stages[2 * n + 1]
        gamma = ((mlp[n] * skip[n] + 1 - mlp[n]) ** 2 + (mlp[n] * branch[n]) ** 2 * np.outer(p, p) * slope) * gamma
        p, k, mm, mean, deviations, cosine, lifted = stages[2 * n]
        pulled = np.einsum("ik,ijkl,ijkl->jl", gamma, mm, mean)
        # gradients of the logits, and through them to keys (of query times query) and queries (of key times key)
        scores = (share[n] * score[n]) ** 2 * gamma[:, None, :, None] * mm * deviations
        pulled += np.einsum("ijkl,ik,ijkl->jl", scores, z * k, cosine)
        pulled += np.einsum("ijkl,jl,ijkl->ik", scores, z * k, cosine)
        pulled += (share[n] * score[n]) ** 2 * gamma * lifted
        gamma = skip[n] ** 2 * gamma + branch[n] ** 2 * g * np.outer(p, p) * pulled
    return np.sqrt(config.width * np.diag(gamma))


CASES = {
    "qwen2": (QWEN, {}, {}),
    "llama": (LLAMA, {}, {}),
    "gpt2": (GPT2, {}, {}),
    "uniform theory": (QWEN, {}, dict(corrections=False)),
    "rope": (QWEN, {}, dict(rope=True)),
    "rope, stretched in one layer": (QWEN, dict(rope=(0.5, 0.0, 2.0)), dict(rope=True)),
    "rope, no score path": (QWEN, dict(score_path=0.0), dict(rope=True)),
    "rope, full attention": (QWEN, dict(causal=0.0), dict(rope=True)),
    "positions off": (GPT2, dict(positions=0.0), dict(tokens=(3, 4, 5, 6, 7, 8))),
    "positions doubled": (GPT2, dict(positions=2.0), {}),
    "full attention": (QWEN, dict(causal=0.0), {}),
    "blended mask": (GPT2, dict(causal=0.4), {}),
    "masks by layer": (QWEN, dict(causal=(1.0, 0.0, 0.7)), {}),
    "no skip": (QWEN, dict(residual=0.0), {}),
    "heavy skip": (GPT2, dict(residual=1.7), {}),
    "skips by layer": (QWEN, dict(residual=(0.0, 1.0, 0.5)), {}),
    "alpha": (QWEN, dict(alpha=0.3), {}),
    "alphas by layer": (LLAMA, dict(alpha=(1.0, 0.0, 0.4)), {}),
    "no mlp": (QWEN, dict(mlp=0.0), {}),
    "no mlp, half skip": (QWEN, dict(mlp=0.0, residual=0.5), {}),
    "mlps by layer": (GPT2, dict(mlp=(1.0, 0.0, 0.5), alpha=0.6), {}),
    "no norm": (dataclasses.replace(QWEN, layers=2, init_std=0.22), dict(norm=0.0), {}),
    "no norm, gpt2": (dataclasses.replace(GPT2, layers=2, init_std=0.2), dict(norm=0.0), {}),
    "no norm, full attention, rope": (dataclasses.replace(QWEN, layers=2, init_std=0.22), dict(norm=0.0, causal=0.0),
                                      dict(rope=True)),
    "norms by layer": (LLAMA, dict(norm=(1.0, 0.0, 0.5)), {}),
    "final norm off": (QWEN, dict(norm=(1.0, 1.0, 0.0)), {}),
    "uniform attention": (QWEN, dict(uniform_attention=1.0), {}),
    "half uniform attention": (GPT2, dict(uniform_attention=(0.5, 1.0, 0.2)), {}),
    "no score path": (QWEN, dict(score_path=0.0), {}),
    "half score path": (QWEN, dict(score_path=(0.5, 1.0, 0.0)), {}),
    "stream": (GPT2, {}, dict(output="stream")),
    "inner source": (QWEN, {}, dict(source=1)),
    "last source": (QWEN, {}, dict(source=2)),
    "inner read-out": (QWEN, {}, dict(read=2)),
    "inner read-out, full attention": (QWEN, dict(causal=0.0), dict(read=-3)),
    "repeated tokens": (QWEN, {}, dict(tokens=(7, 1, 7, 7, 2, 1))),
    "repeated tokens, gpt2": (GPT2, {}, dict(tokens=(7, 1, 7, 7, 2, 1))),
    "one position": (QWEN, {}, dict(length=1)),
    "everything": (dataclasses.replace(LLAMA, init_std=0.16),
                   dict(alpha=(0.3, 0.6, 0.9), causal=(0.2, 1.0, 0.9), uniform_attention=0.3, score_path=0.7,
                        mlp=(0.5, 1.0, 0.8), norm=(0.9, 0.6, 0.8), rope=1.5),
                   dict(rope=True, output="stream", source=1, read=3, tokens=(7, 1, 7, 7, 2, 1))),
}  # fmt: skip


@pytest.fixture(params=[2, 1000], ids="{}-row blocks".format)
def blocks(request, monkeypatch):
    """Small blocks, so that short sequences cross their borders too."""
    monkeypatch.setattr(averaging, "BLOCK_ENTRIES", request.param * LENGTH)
    monkeypatch.setattr(kernel, "BAND", request.param + 1)


@functools.cache
def expected_influence(name):
    config, switches, options = CASES[name]
    return reference(config, switches=Switches(**switches), **{"length": LENGTH, **options})


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_sums_over_four_positions(name, blocks):
    config, switches, options = CASES[name]
    found = kernel.predict(config, switches=Switches(**switches), **{"length": LENGTH, **options}).influence_L
    expected = expected_influence(name)
    # Both are float64 sums of a few hundred terms in three layers; entries beyond a causal read-out are 0 in both.
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


# ---- closed forms ----


def averages(length, causal=1.0):
    m = np.where(np.tri(length) > 0, 1.0, 1 - causal)
    return m / m.sum(1, keepdims=True)


def test_one_layer_by_hand():
    # Two distinct tokens, uniform attention, no MLP: q = (q0 + g, q0 + g/2), and the second output feels x_1 by half an
    # average and x_2 by the skip and half an average.
    config = dataclasses.replace(QWEN, layers=1, norm_eps=1e-30)
    found = kernel.predict(config, 2, Switches(mlp=0.0, uniform_attention=1.0))
    q0 = 0.09**2
    g = (40 * q0) * (4 * 6 * q0)
    square = np.array([g / 4 / q0, 1 + g / 4 / q0]) / (q0 + g / 2)
    np.testing.assert_allclose(found.influence_L, np.sqrt(40 * square), rtol=1e-14)
    np.testing.assert_allclose(found.attention_stream_NL, [[q0, q0]], rtol=1e-14)
    np.testing.assert_allclose(found.mlp_stream_NL, [[q0 + g, q0 + g / 2]], rtol=1e-14)
    np.testing.assert_allclose(found.final_stream_L, [q0 + g, q0 + g / 2], rtol=1e-14)


@pytest.mark.parametrize("causal", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("weights", [dict(residual=(0.0, 1.0, 0.5)), dict(alpha=(1.0, 0.2, 0.5)), {}])
def test_random_values_alone_add_norms_by_depth(weights, causal):
    # No norm, no MLP, uniform attention: paths through one set of layers share weights and add coherently, so
    # influence²/D = Σ_k e_k ((M^k)_nj)², e_k the coefficient of z^k in Π (skip² + g branch² z).
    length, read = 9, 6
    found = kernel.predict(QWEN, length, Switches(norm=0.0, mlp=0.0, uniform_attention=1.0, causal=causal, **weights),
                           read=read).influence_L  # fmt: skip
    g = (40 * 0.09**2) * (4 * 6 * 0.09**2)
    branch = np.array(weights.get("alpha", np.ones(3)))
    skip = 1 - branch if "alpha" in weights else np.array(weights.get("residual", np.ones(3)))
    e = np.polynomial.Polynomial([1.0])
    for s, b in zip(skip, branch):
        e *= np.polynomial.Polynomial([s * s, g * b * b])
    powers = [np.linalg.matrix_power(averages(length, causal), k)[read] for k in range(4)]
    expected = sum(coefficient * power**2 for coefficient, power in zip(e.coef, powers))
    np.testing.assert_allclose(found, np.sqrt(40 * expected), rtol=1e-12, atol=1e-30)


def test_long_sequences_agree_with_dense_products():
    # Several blocks and bands at their real sizes; uniform attention and one softmax layer's value path, by matrices.
    length = 600
    config = dataclasses.replace(QWEN, layers=1, max_length=1024)
    found = kernel.predict(config, length, Switches(mlp=0.0, score_path=0.0), output="stream").influence_L
    m = averages(length)
    q0, z = 0.09**2, (40 * 0.09**2) ** 2
    g, p = (40 * q0) * (24 * q0), 1 / math.sqrt(q0 + 1e-3)
    k = q0 * p * p  # distinct tokens: K is k times the identity, so that M K Mᵀ = k M Mᵀ
    b, last = k * m @ m.T, np.zeros(length)
    last[-1] = 1.0
    row, c = m[-1], np.diag(b)
    w = k * (c[-1] - k * row + (k - k) / 2)
    fluctuation = z * k * row**2 * (k - 2 * k * row + c[-1])  # of softmax weight j at the last position, with itself
    square = last + g * p * p * (row**2 + fluctuation + 2 * z * row**2 * w)
    np.testing.assert_allclose(found, np.sqrt(40 * square), rtol=1e-12)


# ---- limits and symmetries ----


def test_read_out_feels_nothing_behind_a_causal_mask():
    whole = kernel.predict(QWEN, 12, read=7)
    part = kernel.predict(QWEN, 8)
    np.testing.assert_allclose(whole.influence_L[:8], part.influence_L, rtol=1e-13)
    np.testing.assert_array_equal(whole.influence_L[8:], 0.0)
    np.testing.assert_array_equal(kernel.predict(QWEN, 12, read=-5).influence_L, whole.influence_L)


def test_full_attention_has_no_order():
    found = kernel.predict(QWEN, 9, Switches(causal=0.0), read=4).influence_L
    others = np.delete(found, 4)
    np.testing.assert_allclose(others, others[0], rtol=1e-13)
    assert found[4] > others[0]


def test_equal_tokens_make_attention_uniform():
    # All positions hold the same stream, so no logit deviates from the mean and every correction is 0.
    same = np.full(7, 3)
    softmax, uniform = (kernel.predict(QWEN, 7, tokens=same, corrections=on) for on in (True, False))
    np.testing.assert_allclose(softmax.influence_L, uniform.influence_L, rtol=1e-13)
    np.testing.assert_allclose(softmax.final_stream_L, softmax.final_stream_L[0], rtol=1e-13)


def test_only_repetitions_of_tokens_matter():
    found = kernel.predict(QWEN, 5, tokens=np.array([9, 4, 9, 0, 4])).influence_L
    np.testing.assert_array_equal(found, kernel.predict(QWEN, 5, tokens=[0, 1, 0, 2, 1]).influence_L)
    assert np.max(np.abs(found / kernel.predict(QWEN, 5).influence_L - 1)) > 0.01


def test_slow_rope_is_no_rope():
    slow = kernel.predict(QWEN, 6, Switches(rope=1e-4), rope=True).influence_L
    np.testing.assert_array_equal(slow, kernel.predict(QWEN, 6).influence_L)
    almost = kernel.predict(QWEN, 6, Switches(rope=2e-3), rope=True).influence_L
    np.testing.assert_allclose(almost, slow, rtol=1e-4)


def test_squares_stay_positive_over_sixty_decades():
    # Without a skip the last positions are felt through their queries alone; cancellation must not drown them.
    config = dataclasses.replace(PRESETS["gpt2"], layers=12)
    found = kernel.predict(config, 48, Switches(residual=0.0)).influence_L
    assert np.all(np.diff(np.log(found)) < 0) and found[-1] < 1e-10 * found[0]


def test_profile_of_qwen2():
    # Against numbers computed apart from this code, by a plain implementation that tabulates the MLP's expectations
    # (and so is good to 1e-5), for the published sizes with uniform attention and no ε.
    config = dataclasses.replace(PRESETS["qwen2-0.5b"], norm_eps=1e-30)
    found = kernel.predict(config, 64, corrections=False).influence_L
    np.testing.assert_allclose(found[[0, 32, 62, 63]], [1693.589, 283.1703, 194.9646, 717.3419], rtol=1e-5)


# ---- finite width ----


def test_final_norm_alone_has_exact_moments():
    # alpha = 0: J is the norm's Jacobian (1 - x̂x̂ᵀ)/√q̂ at a Gaussian x, E‖J‖²/D = (D-1)/(D-2)/q0 = (1 + 1/D + …)/q0,
    # and its relative variance is that of 1/χ²_D, 2/(D-4) = 2/D + ….
    config = dataclasses.replace(QWEN, norm_eps=1e-30)
    bias, variance = kernel.finite_width(config, Switches(alpha=0.0))
    np.testing.assert_allclose([bias, variance], [1 / 40, 2 / 40], rtol=1e-5)
    assert kernel.finite_width(config, Switches(alpha=0.0), output="stream") == (0.0, 0.0)


def test_a_linear_network_is_unbiased():
    np.testing.assert_allclose(kernel.finite_width(QWEN, Switches(norm=0.0, mlp=0.0)), (0.0, 0.0), atol=1e-9)


def single_position(config, rng, seeds, skip, branch, source, output):
    """‖J‖² of RMSNorm networks with drawn weights at one position: each array has a leading axis of seeds."""
    d, std, rank = config.width, config.init_std, config.kv_heads * config.head_dim
    shared = math.sqrt(config.heads / config.kv_heads) * std  # heads that share values add up in W_O

    def draw(*shape, scale=std):
        return rng.normal(size=(seeds, *shape)) * scale

    def normed(x, j):
        q = np.mean(x**2, axis=1, keepdims=True)
        return x / np.sqrt(q), (j - x * (np.swapaxes(x, 1, 2) @ j) / (d * q)) / np.sqrt(q)

    x, unit = draw(d, 1), np.broadcast_to(np.eye(d), (seeds, d, d))
    j = unit
    for layer in range(config.layers):
        j = unit if layer == source else j
        h, dh = normed(x, j)
        value, out = draw(rank, d), draw(d, rank, scale=branch * shared)
        x, j = skip * x + out @ (value @ h), skip * j + out @ (value @ dh)
        h, dh = normed(x, j)
        up, down = draw(config.inner, d), draw(d, config.inner, scale=branch * config.residual_std)
        if config.family == "gpt2":
            x, j = skip * x + down @ gelu(up @ h), skip * j + down @ (gelu_slope(up @ h) * (up @ dh))
        else:
            gate = draw(config.inner, d)
            u, v = gate @ h, up @ h
            tangent = silu_slope(u) * v * (gate @ dh) + silu(u) * (up @ dh)
            x, j = skip * x + down @ (silu(u) * v), skip * j + down @ tangent
    return np.sum((normed(x, j)[1] if output == "hidden" else j) ** 2, axis=(1, 2))


@pytest.mark.parametrize("family, inner, kv_heads, weights, source, output", [
    ("qwen2", 96, 4, dict(residual=1.0), 0, "hidden"), ("qwen2", 192, 2, dict(residual=1.0), 0, "hidden"),
    ("qwen2", 192, 4, dict(residual=0.7), 0, "hidden"), ("qwen2", 96, 4, dict(alpha=0.3), 0, "hidden"),
    ("qwen2", 96, 4, dict(residual=1.0), 1, "hidden"), ("qwen2", 96, 4, dict(residual=1.0), 0, "stream"),
    ("gpt2", 96, 4, dict(alpha=0.3), 0, "hidden"), ("gpt2", 96, 4, dict(residual=0.5), 0, "hidden"),
])  # fmt: skip
def test_finite_width_against_drawn_networks(family, inner, kv_heads, weights, source, output):
    seeds = 1500
    config = Config(family, layers=2, width=48, heads=4, kv_heads=kv_heads, head_dim=12, inner=inner, vocab=9,
                    max_length=9, norm_eps=1e-30, init_std=0.08)  # fmt: skip
    switches = Switches(**weights, **(dict(positions=0.0) if family == "gpt2" else {}))
    branch = weights.get("alpha", 1.0)
    skip = weights.get("residual", 1 - branch)
    rng = np.random.default_rng(1)
    squares = np.concatenate([single_position(config, rng, 250, skip, branch, source, output) for _ in range(seeds // 250)])
    squares /= kernel.predict(config, 1, switches, source=source, output=output).influence_L[0] ** 2
    bias, variance = kernel.finite_width(config, switches, source=source, output=output)
    # Four standard errors, and what first order in 1/D leaves out: variance² of the mean, some of it of the scatter.
    allowed = 4 * np.std(squares) / math.sqrt(seeds) + variance**2
    assert allowed < bias, "a network without a bias would pass"
    assert abs(np.mean(squares) - 1 - bias) < allowed
    assert abs(np.std(np.log(squares)) / math.sqrt(variance) - 1) < 4 / math.sqrt(2 * seeds) + variance / 10


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_finite_width_of_a_stream_of_a_hundred_decades(family):
    """MLPs that read next to nothing are linear (gelu) or square (SwiGLU), so that what they add no longer depends on how little it is."""
    config = PRESETS[dict(qwen2="qwen2-0.5b", gpt2="gpt2")[family]]
    small, smaller = (kernel._mlp_unit(config)(k) for k in (1e-20, 1e-120))
    for name in ("radial", "kappa", "kappa_c", "nu", "nu_slope"):
        assert getattr(smaller, name) == pytest.approx(getattr(small, name), rel=1e-9), name
    power = 2 if family == "qwen2" else 1
    assert smaller.output / small.output == pytest.approx(1e-100**power, rel=1e-9)
    deep = kernel.predict(lim.Config.preset("small").replace(layers=24), 16, Switches(norm=0.0, residual=0.1))
    assert deep.bias == pytest.approx(0, abs=1e-6) and 0 <= deep.cv < 1e-3  # there attention alone adds, linearly


def test_finite_width_of_the_published_sizes():
    # Qwen2-0.5B, and widths of 224 and 64 at the same D·σ² with unshared heads: bias .041, .084, .15, scatter .25, .36.
    qwen2 = PRESETS["qwen2-0.5b"]
    half = dict(width=224, kv_heads=14, head_dim=16, inner=1216, init_std=0.04)
    tiny = dict(layers=4, width=64, heads=4, kv_heads=4, head_dim=16, inner=256, init_std=0.02 * math.sqrt(14))
    wide, middle, narrow = (kernel.finite_width(dataclasses.replace(qwen2, **sizes)) for sizes in ({}, half, tiny))
    np.testing.assert_allclose([wide[0], middle[0], narrow[0]], [0.041, 0.084, 0.151], atol=6e-4)
    np.testing.assert_allclose([wide[1] ** 0.5, middle[1] ** 0.5], [0.250, 0.359], atol=6e-4)
    found = kernel.predict(dataclasses.replace(qwen2, layers=2), 4)
    bias, variance = kernel.finite_width(dataclasses.replace(qwen2, layers=2))
    assert (found.bias, found.cv) == (bias, math.sqrt(variance))


# ---- strengths ----


def test_strengths_of_the_standard_block_fall_as_one_over_depth():
    # First position, no MLP: every attention adds g to q, so a_l = g/(q_l + g) = g/(q0 + l g).
    config = dataclasses.replace(QWEN, layers=8, norm_eps=1e-30)
    g, q0 = (40 * 0.09**2) * (24 * 0.09**2), 0.09**2
    found = kernel.effective_strengths(config, 5, Switches(mlp=0.0), read=0)
    np.testing.assert_allclose(found, g / (q0 + g * np.arange(1, 9)), rtol=1e-12)


def test_strengths_under_alpha_settle_at_the_squared_strength():
    config = dataclasses.replace(QWEN, layers=40, norm_eps=1e-30)
    found = kernel.effective_strengths(config, 3, Switches(mlp=0.0, alpha=0.3), read=0)
    np.testing.assert_allclose(found[-5:], 0.3 * (2 - 0.3), rtol=1e-5)


def test_strengths_at_the_ends():
    assert np.all(kernel.effective_strengths(QWEN, 4, Switches(residual=0.0)) == 1.0)
    assert np.all(kernel.effective_strengths(QWEN, 4, Switches(alpha=0.0)) == 0.0)
    free = kernel.effective_strengths(QWEN, 4, Switches(norm=0.0, residual=(1.0, 2.0, 0.5)))
    g = (40 * 0.09**2) * (24 * 0.09**2)
    np.testing.assert_allclose(free, [g / (1 + g), g / (4 + g), g / (0.25 + g)], rtol=1e-14)


def test_strengths_of_qwen2():
    found = kernel.effective_strengths(PRESETS["qwen2-0.5b"], 256)
    scaled = np.arange(1, 25) * found
    np.testing.assert_allclose([scaled.min(), scaled.max(), found.sum()], [0.97, 1.25, 4.14], atol=6e-3)


# ---- refusals ----


@pytest.mark.parametrize("config, switches, options, message", [
    (QWEN, {}, dict(output="logits"), "output='logits': the theory predicts hidden and stream only"),
    (QWEN, {}, dict(output="loss"), "hidden and stream only"),
    (QWEN, {}, dict(length=0), "length=0: must be a positive integer"),
    (QWEN, {}, dict(length=True), "length=True"),
    (GPT2, {}, dict(length=65), "length=65: gpt2's table holds 64 positions"),
    (QWEN, {}, dict(source=3), "source=3: must be an integer from 0 to 2"),
    (QWEN, {}, dict(source=-1), "source=-1"),
    (QWEN, {}, dict(read=6), "read=6: must be an integer from -6 to 5"),
    (QWEN, {}, dict(tokens=[1, 2]), r"tokens of shape \(2,\)"),
    (QWEN, {}, dict(tokens=[1.0] * 6), "must be 6 integers"),
    (QWEN, dict(residual=1.0, alpha=0.5), {}, "residual and alpha"),
    (QWEN, dict(mlp=1.5), {}, "mlp=1.5"),
    (QWEN, dict(norm=0.0, residual=9.0), dict(corrections=False), "preactivations of variance .* above the 20"),
    (QWEN, dict(norm=0.0, mlp=0.0, residual=1e30, uniform_attention=1.0), {}, "beyond float64's reach"),
    (dataclasses.replace(QWEN, init_std=0.3), {}, {}, "variance: it is 12.*, and must be at most 4"),
    (Config("qwen2", layers=3, width=64, heads=4, kv_heads=2, head_dim=16, inner=64, vocab=64, max_length=64, init_std=0.164), dict(residual=0.0),
     dict(length=6, tokens=np.array([1, 0, 0, 0, 1, 1])), "a correlation above 1"),
])  # fmt: skip
def test_refuses_in_one_sentence(config, switches, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        kernel.predict(config, switches=Switches(**switches), **{"length": LENGTH, **options})
    assert "\n" not in str(caught.value)


def test_the_other_entries_refuse_too():
    with pytest.raises(ValueError, match="alpha=2"):
        kernel.finite_width(QWEN, Switches(alpha=2.0))
    with pytest.raises(ValueError, match="length=0"):
        kernel.effective_strengths(QWEN, 0)


def test_rounding_does_not_grow_with_depth():
    """Without a skip streams align, and what is antisymmetric in their overlaps would grow by half a layer, past correlation 1 at 50."""
    log_3L = np.log([kernel.predict(ladder.shape(64, layers, 64), 64, Switches(residual=0.0)).influence_L for layers in (78, 79, 80)])
    assert np.abs(np.diff(log_3L, 2, axis=0)).max() < 0.01  # each layer changes the profile as the last one did
