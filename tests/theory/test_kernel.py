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
    "no norm, full attention, rope": (dataclasses.replace(QWEN, layers=2, init_std=0.22), dict(norm=0.0, causal=0.0), dict(rope=True)),
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
    "everything": (LLAMA, dict(alpha=(0.3, 0.6, 0.9), causal=(0.2, 1.0, 0.9), uniform_attention=0.3, score_path=0.7,
                               mlp=(0.5, 1.0, 0.8), norm=(0.9, 0.6, 0.8), rope=1.5),
                   dict(rope=True, output="stream", source=1, read=3, tokens=(7, 1, 7, 7, 2, 1))),
}  # fmt: skip


@pytest.fixture(params=[1, 4, 1000], ids="{}-row blocks".format)
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
