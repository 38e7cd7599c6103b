"""The kernel theory against the network's definitions: a second derivation, in loops over positions.

It shares no formula with the first beyond the network itself. Softmax enters through its Jacobian and Hessian at equal
logits and the logits' full covariance, four indices wide; activations through a square grid of Gauss-Hermite nodes.
Slow, and meant to be checked by eye.

The limit. x_i is the stream at position i, C_ij = E⟨x_i, x_j⟩/D. Weights are independent Gaussians of standard
deviation σ (σ_o in the two projections that write to the stream), s = Dσ². A norm divides by √(C_ii + ε), a constant
as D grows, so a branch reads h_i = p_i x_i, of overlaps K_ij = p_i p_j C_ij, and ∂h_i/∂x_i = p_i. Γ_ij is
⟨∂y/∂x_i, ∂y/∂x_j⟩ averaged over the D entries y of the output, so that ‖∂output/∂x_j‖² = DΓ_jj. The weights met on the
way down are as good as fresh, and Γ takes the factors p_i p_j of every branch.

Attention. With v_j = W_V h_j a head writes W_O Σ_j a_ij v_j, W_O its own block of E columns: heads add up without cross
terms, keys and values shared or not. Going up, overlaps are g Σ_jj' E[a_ij a_i'j'] K_jj', g = heads·E·sσ_o²; coming
down, the values' way gives g Σ_ii' E[a_ij a_i'j'] Γ_ii'. A logit l_ij = q_i·k_j/√E has

    E[l_ij l_i'j'] = z K_ii' K_jj' c_ii'jj',    z = s²,    c = mean over frequencies of cos θ((i - j) - (i' - j')),

c = 1 without RoPE. Say a_i = softmax(log M_i + l_i), M the mean over what is admitted, J^i_jk = M_ij(δ_jk - M_ik) the
Jacobian, H^ij the Hessian of a_ij. To first order in z

    E[a_ij a_i'j'] = M_ij M_i'j' + Σ_kk' J^i_jk J^i'_j'k' E[l_ik l_i'k'] + μ_ij M_i'j' + M_ij μ_i'j',
    μ_ij = ½ Σ_kk' H^ij_kk' E[l_ik l_ik'].

A logit's own gradient is G_ij = Σ_k J^i_jk ⟨W_Oᵀγ_i, v_k⟩, and E[G_ij G_i'j'] sums over heads to
g Γ_ii' (J^i K J^i'ᵀ)_jj'. A query's gradient, Σ_j G_ij W_Qᵀk_j/√E, adds the overlaps z Σ_jj' E[GG'] K_jj' c; a key's,
Σ_i G_ij W_Kᵀq_i/√E, adds z Σ_ii' E[GG'] K_ii' c. Cross terms between the three ways hold one entry where these hold a
trace over D: order 1/D.

Chance. The overlap of two vectors of correlation ρ varies by K_jj K_j'j' (1-ρ²)²/D about its mean. Where that adds 1/D
to something of order 1 it is dropped; but in Σ_jj' M_ij M_i'j' K_jj'² the n² pairs of unrelated positions amount to 1/D
beside the 1/n of the n pairs j = j'. This square arises twice: going up, where E[l_ij l_i'j'] meets ⟨v_j, v_j'⟩, and in
the queries' way down.

MLP. Pre-activations have the covariance sK. It writes overlaps inner·σ_o² E[f f'] and multiplies Γ by inner·σ_o² times
E of the gradients' overlap: s E[f' f'] with one input, s(E[silu' silu'] sK + E[silu silu]) for silu(u)·t with u, t
independent.

Axes: L position, P quadrature node.
"""

import dataclasses
import math

import numpy as np
import pytest

from lim import Config, Switches
from lim.theory import kernel

NODES_P, WEIGHTS_P = np.polynomial.hermite_e.hermegauss(40)
WEIGHTS_P = WEIGHTS_P / WEIGHTS_P.sum()


def silu(u):
    return u / (1 + np.exp(-u))


def silu_slope(u):
    gate = 1 / (1 + np.exp(-u))
    return gate + u * gate * (1 - gate)


def gelu(u):
    return u / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def gelu_slope(u):
    tanh = np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))
    return (1 + tanh) / 2 + u / 2 * (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * u**2)


def pair_mean(f, cov_LL):
    """E[f(u_i) f(u_j)] of Gaussians of mean 0 by a square grid of nodes."""
    length = len(cov_LL)
    mean_LL = np.zeros((length, length))
    for i in range(length):
        for j in range(i + 1):
            a, b = math.sqrt(cov_LL[i, i]), math.sqrt(cov_LL[j, j])
            rho = np.clip(cov_LL[i, j] / (a * b), -1, 1)
            first_PP = a * NODES_P[:, None] + 0 * NODES_P[None, :]
            second_PP = b * (rho * NODES_P[:, None] + math.sqrt(1 - rho**2) * NODES_P[None, :])
            mean_LL[i, j] = mean_LL[j, i] = WEIGHTS_P @ (f(first_PP) * f(second_PP)) @ WEIGHTS_P
    return mean_LL


def averages(length, causal=1.0, window=99, prefix=0, fall=0.0):
    """M: the future weighs 1 - causal, nothing weighs beyond the window, the prefix 1; all fall with distance; rows sum to 1."""
    mean_LL = np.zeros((length, length))
    for i in range(length):
        for j in range(length):
            mean_LL[i, j] = 1.0 if j <= i else 1 - causal
            if abs(i - j) >= window:
                mean_LL[i, j] = 0.0
            if j < prefix:
                mean_LL[i, j] = 1.0
            mean_LL[i, j] *= math.exp(-fall * abs(i - j))
        mean_LL[i] /= mean_LL[i].sum()
    return mean_LL


def rotation_means(config, length, scale):
    """c_ii'jj', the mean over frequencies of cos θ((i - j) - (i' - j')), as [i, i', j, j']; scale 0 rotates nothing."""
    half = config.head_dim // 2
    mean_LLLL = np.zeros((length,) * 4)
    for f in range(half):
        angle = scale * config.rope_theta ** (-f / half)
        for i, ii, j, jj in np.ndindex(*mean_LLLL.shape):
            mean_LLLL[i, ii, j, jj] += math.cos(angle * ((i - j) - (ii - jj))) / half
    return mean_LLLL


def jacobian(mean_L):
    """∂a_j/∂l_k of a softmax whose weights are mean_L, [j, k]."""
    return np.diag(mean_L) - np.outer(mean_L, mean_L)


def weight_shift(mean_L, cov_LL):
    """½ Σ_kk' ∂²a_j/∂l_k∂l_k' E[l_k l_k'] of one softmax."""
    length = len(mean_L)
    shift_L = np.zeros(length)
    for j in range(length):
        for k in range(length):
            for kk in range(length):
                hessian = (j == k) * (j == kk) - (j == k) * mean_L[kk] - (j == kk) * mean_L[k]
                hessian += 2 * mean_L[k] * mean_L[kk] - (k == kk) * mean_L[k]
                shift_L[j] += mean_L[j] * hessian * cov_LL[k, kk] / 2
    return shift_L


class Attention:
    """One layer's softmax at first order in z: what it does to overlaps, going up and coming down."""

    def __init__(self, mean_LL, overlap_LL, rotation_LLLL, z, chance, soft, score):
        self.mean_LL, self.overlap_LL = mean_LL, overlap_LL
        self.length, self.soft, self.score = len(mean_LL), soft, score
        q_L = np.diag(overlap_LL)
        rho_LL = overlap_LL / np.sqrt(np.outer(q_L, q_L))
        chance_LL = chance * np.outer(q_L, q_L) * (1 - rho_LL**2) ** 2
        # E[l_ij l_i'j'] as [i, i', j, j'], and what is left of it without K_ii' or K_jj'
        self.cov_LLLL = z * rotation_LLLL * overlap_LL[:, :, None, None] * overlap_LL
        self.per_query_LLLL = z * rotation_LLLL * overlap_LL
        self.per_key_LLLL = z * rotation_LLLL * overlap_LL[:, :, None, None]
        shifts = [weight_shift(mean_LL[i], self.cov_LLLL[i, i]) for i in range(self.length)]
        self.shift_LL = soft * np.array(shifts)
        self.raised_LLLL = z * rotation_LLLL * chance_LL

    def pairs(self, i, ii):
        """E[a_ij a_i'j'], [j, j'], and apart from it the change of Σ_jj' E[a_ij a_i'j'] K_jj' by chance."""
        m_L, mm_L = self.mean_LL[i], self.mean_LL[ii]
        cov_LL = jacobian(m_L) @ self.cov_LLLL[i, ii] @ jacobian(mm_L).T
        shift_LL = np.outer(self.shift_LL[i], mm_L) + np.outer(m_L, self.shift_LL[ii])
        chance = self.overlap_LL[i, ii] * (np.outer(m_L, mm_L) * self.raised_LLLL[i, ii]).sum()
        return np.outer(m_L, mm_L) + self.soft**2 * cov_LL + shift_LL, self.soft**2 * chance

    def up(self):
        out_LL = np.zeros((self.length, self.length))
        for i, ii in np.ndindex(*out_LL.shape):
            pairs_LL, chance = self.pairs(i, ii)
            out_LL[i, ii] = (pairs_LL * self.overlap_LL).sum() + chance
        return out_LL

    def down(self, gamma_LL):
        out_LL = np.zeros((self.length, self.length))
        score = (self.soft * self.score) ** 2
        for i, ii in np.ndindex(*out_LL.shape):
            m_L, mm_L = self.mean_LL[i], self.mean_LL[ii]
            gradient_LL = gamma_LL[i, ii] * jacobian(m_L) @ self.overlap_LL @ jacobian(mm_L).T
            chance_LL = gamma_LL[i, ii] * np.outer(m_L, mm_L) * self.raised_LLLL[i, ii]
            out_LL += gamma_LL[i, ii] * self.pairs(i, ii)[0]
            out_LL += score * gradient_LL * self.per_key_LLLL[i, ii]
            out_LL[i, ii] += score * ((gradient_LL * self.per_query_LLLL[i, ii]).sum() + chance_LL.sum())
        return out_LL


def mlp(config, overlap_LL):
    """What the MLP writes, and what it multiplies Γ with, [L, L] each."""
    s = config.width * config.init_std**2
    size = config.inner * config.residual_std**2
    if config.family == "gpt2":
        return size * pair_mean(gelu, s * overlap_LL), size * s * pair_mean(gelu_slope, s * overlap_LL)
    gate_LL, slope_LL = pair_mean(silu, s * overlap_LL), pair_mean(silu_slope, s * overlap_LL)
    return size * gate_LL * s * overlap_LL, size * s * (slope_LL * s * overlap_LL + gate_LL)


def influence_square(config, length, output="hidden", source=0, read=-1, tokens=None, rope=0.0, z=None, chance=None,
                     **switches):  # fmt: skip
    """D Γ_jj of every position. `rope` scales the angles that logits see, z is s² and chance 1/D unless given."""

    def switch(name, layer, default):
        return np.broadcast_to(switches.get(name, default), (config.layers,))[layer]

    def scale(layer, q_L):
        norm = switch("norm", layer, 1.0)
        return norm / np.sqrt(q_L + config.norm_eps) + 1 - norm

    s = config.width * config.init_std**2
    z = s**2 if z is None else z
    chance = 1 / config.width if chance is None else chance
    gain = config.heads * config.head_dim * s * config.residual_std**2
    tokens = range(length) if tokens is None else tokens
    c_LL = np.array([[config.init_std**2 * float(a == b) for a in tokens] for b in tokens])
    if config.family == "gpt2":
        c_LL = c_LL + (switches.get("positions", 1.0) * config.init_std) ** 2 * np.eye(length)

    steps = []  # of each sub-block, going up: skip weight, branch weight, scale of its input, pullback
    for layer in range(config.layers):
        alpha = switches.get("alpha")
        if alpha is None:
            skip, branch = switch("residual", layer, 1.0), 1.0
        else:
            branch = switch("alpha", layer, None)
            skip = 1 - branch

        p_L = scale(layer, np.diag(c_LL))
        rotation_LLLL = rotation_means(config, length, np.broadcast_to(rope, (config.layers,))[layer])
        mask = [switch("causal", layer, 1.0), switch("window", layer, 99), switch("prefix", layer, 0)]
        heads = [Attention(averages(length, *mask, switch("alibi", layer, 0.0) * slope), np.outer(p_L, p_L) * c_LL, rotation_LLLL,
                           z, chance, soft=1 - switch("uniform_attention", layer, 0.0),
                           score=switch("score_path", layer, 1.0)) for slope in SLOPES]  # fmt: skip
        c_LL = skip**2 * c_LL + branch**2 * gain * sum(head.up() for head in heads) / len(heads)
        if layer >= source:
            steps.append((skip, branch, p_L, lambda gamma_LL, heads=heads: gain * sum(head.down(gamma_LL) for head in heads) / len(heads)))

        on = switch("mlp", layer, 1.0)
        skip, branch = on * skip + 1 - on, on * branch
        p_L = scale(layer, np.diag(c_LL))
        written_LL, factor_LL = mlp(config, np.outer(p_L, p_L) * c_LL)
        c_LL = skip**2 * c_LL + branch**2 * written_LL
        if layer >= source:
            steps.append((skip, branch, p_L, lambda gamma_LL, factor_LL=factor_LL: factor_LL * gamma_LL))

    gamma_LL = np.zeros((length, length))
    gamma_LL[read, read] = scale(config.layers - 1, c_LL[read, read]) ** 2 if output == "hidden" else 1.0
    for skip, branch, p_L, pullback in reversed(steps):
        gamma_LL = skip**2 * gamma_LL + branch**2 * np.outer(p_L, p_L) * pullback(gamma_LL)
    return config.width * np.diag(gamma_LL)


# ALiBi's slopes of 6 heads: those of 4, and every other one of 8.
SLOPES = [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]

# three blocks: the read-out has no off-diagonal in the last, and only the diagonal of the first is looked at
QWEN2 = Config("qwen2", layers=3, width=96, heads=6, kv_heads=3, head_dim=8, inner=160, vocab=64, max_length=64,
               rope_theta=50.0, init_std=0.07)  # fmt: skip
GPT2 = Config("gpt2", layers=3, width=96, heads=6, kv_heads=6, head_dim=16, inner=224, vocab=64, max_length=64,
              norm_eps=1e-5, init_std=0.06)  # fmt: skip

# Both sides compute the same sums in float64, some thousand terms deep, and the nodes' error for these spreads
# (variances up to 0.5, poles at a distance of at least 2) is far below that.
CLOSE = dict(rtol=1e-11, atol=0)

SWITCHES = {
    "published": {},
    "uniform": dict(uniform_attention=1.0),
    "half uniform": dict(uniform_attention=0.4),
    "no score path": dict(score_path=0.0),
    "some score path": dict(score_path=[0.6, 0.3, 0.8]),
    "no mlp": dict(mlp=0.0),
    "some mlp": dict(mlp=[0.7, 0.2, 0.9]),
    "no norm": dict(norm=0.0),
    "some norm": dict(norm=[0.5, 0.8, 0.6]),
    "no skip": dict(residual=0.0),
    "residual": dict(residual=[0.6, 1.3, 0.9]),
    "alpha": dict(alpha=[0.3, 0.8, 0.5]),
    "no mask": dict(causal=0.0),
    "half a mask": dict(causal=[0.3, 0.9, 0.6]),
    "window": dict(window=[2, 3, 2]),
    "window without mask": dict(window=2, causal=[0.0, 0.4, 0.2]),
    "prefix": dict(prefix=[0, 2, 3]),
    "window and prefix": dict(window=2, prefix=1, residual=0.5),
    "alibi": dict(alibi=[1.0, 0.3, 2.0]),
    "everything about the mask": dict(alibi=1.0, window=3, prefix=1, causal=0.5, uniform_attention=0.3, score_path=0.8),
    "mixed": dict(alpha=0.4, causal=0.7, uniform_attention=[0.2, 0.5, 0.3], score_path=0.7, mlp=0.6, norm=0.7),
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
@pytest.mark.parametrize("config", [QWEN2, GPT2], ids=["qwen2", "gpt2"])
def test_switches(config, switches):
    theirs_L = kernel.predict(config, 5, Switches(**switches)).influence_L
    np.testing.assert_allclose(theirs_L**2, influence_square(config, 5, **switches), **CLOSE)


OPTIONS = {
    "repeated tokens": dict(tokens=[3, 1, 3, 3, 1]),
    "one token": dict(tokens=[2, 2, 2, 2, 2]),
    "stream": dict(output="stream"),
    "second block": dict(source=1),
    "read inside": dict(read=2),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("config", [QWEN2, GPT2], ids=["qwen2", "gpt2"])
def test_options(config, options):
    theirs_L = kernel.predict(config, 5, **options).influence_L
    np.testing.assert_allclose(theirs_L**2, influence_square(config, 5, **options), **CLOSE)


@pytest.mark.parametrize("config", [QWEN2, GPT2], ids=["qwen2", "gpt2"])
def test_without_corrections(config):
    theirs_L = kernel.predict(config, 5, corrections=False).influence_L
    np.testing.assert_allclose(theirs_L**2, influence_square(config, 5, z=0.0), **CLOSE)


def test_positions():
    theirs_L = kernel.predict(GPT2, 5, Switches(positions=0.5), tokens=[3, 1, 3, 3, 1]).influence_L
    np.testing.assert_allclose(theirs_L**2, influence_square(GPT2, 5, tokens=[3, 1, 3, 3, 1], positions=0.5), **CLOSE)


@pytest.mark.parametrize("angles", [None, 0.5, [2.0, 0.0, 1.5]])
@pytest.mark.parametrize("switches", [{}, dict(score_path=0.0), dict(causal=0.3, norm=0.8)], ids=str)
def test_rope(switches, angles):
    tokens, own = [0, 1, 2, 1, 3], 1.0 if angles is None else angles
    theirs_L = kernel.predict(QWEN2, 5, Switches(rope=angles, **switches), rope=True, tokens=tokens).influence_L
    np.testing.assert_allclose(theirs_L**2, influence_square(QWEN2, 5, rope=own, tokens=tokens, **switches), **CLOSE)


def test_infinite_width():
    """Chance fades as 1/D and nothing else depends on D but through s, g and the MLP's sizes."""
    wide = dataclasses.replace(QWEN2, width=10**9, heads=10**8, kv_heads=10**7, inner=10**9, init_std=2e-5)
    theirs_L = kernel.predict(wide, 5).influence_L
    np.testing.assert_allclose(theirs_L**2, influence_square(wide, 5, chance=0.0), rtol=1e-8, atol=0)


def test_gaussian_means():
    """The nodes against closed forms: E[silu'] is 1/2, E[u silu(u)] is v E[silu'], and gelu likewise."""
    cov_LL = np.array([[0.5, 0.2], [0.2, 0.3]])
    for f, slope in ((silu, silu_slope), (gelu, gelu_slope)):
        for variance in (0.1, 0.5):
            u_P = math.sqrt(variance) * NODES_P
            assert WEIGHTS_P @ slope(u_P) == pytest.approx(0.5, rel=1e-13)
            assert WEIGHTS_P @ (u_P * f(u_P)) == pytest.approx(variance / 2, rel=1e-12)
        # Price's theorem: the derivative of E[f f'] by the covariance is E of the product of slopes
        step_LL = 1e-4 * np.array([[0, 1], [1, 0]])
        change = (pair_mean(f, cov_LL + step_LL) - pair_mean(f, cov_LL - step_LL))[0, 1] / 2e-4
        assert change == pytest.approx(pair_mean(slope, cov_LL)[0, 1], rel=1e-7)
