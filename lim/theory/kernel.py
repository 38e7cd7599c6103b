"""Kernel theory: the influence profile of a decoder at birth, predicted from its Config with no free parameter.

Two L×L matrices are carried through the layers, the overlaps of the stream going up and of the adjoints coming down;
they hold averages over the random weights that are exact as the width grows and, in the softmax, to first order in the
variance of its logits. The averaging operator of a causal layer is the Cesàro matrix of Chowdhury, Lost in the Middle
at Birth, arXiv:2603.10123; where that theory follows single paths, this one follows their sum.

Notation: stream x_i at position i, adjoint γ_i = ∂(a unit read-out direction)/∂x_i, D width, C_ij = E⟨x_i, x_j⟩/D,
Γ_ij = E⟨γ_i, γ_j⟩ summed over the D read-out directions and divided by D, σ the initial standard deviation of weights,
σ_o that of the two projections that write to the stream, s = Dσ², M the mean over what the mask admits, ∘ elementwise.

Going up. A branch reads h_i = p_i x_i, with p_i = 1/√(q_i + ε), q_i = C_ii, under a norm and p_i = 1 without. Its
input has the overlaps K_ij = p_i p_j C_ij. Fresh zero-mean weights add no cross term to x ← skip·x + branch·f(h):

    C ← skip² C + branch² A,    A_ij = E⟨f_i, f_j⟩/D.

* Attention, uniform: f_i = W_O W_V Σ_j M_ij h_j, so A = g M K Mᵀ, g = s·(heads·head_dim)·σ_o². Sharing value heads
  changes nothing: their blocks of W_O are independent.
* SwiGLU: gate u and up u' are independent Gaussians of covariance sK, so A = inner·σ_o²·sK∘E[silu(u_i) silu(u_j)].
* GELU: A = inner·σ_o²·E[gelu(u_i) gelu(u_j)].

Coming down. The adjoint of h_i is p_i times away from x_i (the norm's projection is 1/D of this), and forward and
backward weights decorrelate as D grows, so a branch adds p_i p_j times

* attention, uniform: g MᵀΓM;
* MLP: B∘Γ, with B = inner·σ_o²·s·(sK∘E[silu' silu'] + E[silu silu]) or inner·σ_o²·s·E[gelu' gelu'].

Γ starts as e_n e_nᵀ at the read-out n, times p_n² where the output is the final norm's. influence_j = √(D Γ_jj).

Softmax that is nearly uniform. Logits l_ij have mean 0 and E[l_ij l_i'j'] = z K_ii' K_jj', z = s². To second order in
the deviation d_ij = l_ij - Σ_k M_ik l_ik a softmax weight is M_ij(1 + d_ij + ½(d_ij² - Σ_k M_ik d_ik²)). With m = MK,
b = MKMᵀ, c = diag b, κ = diag K:

    E[d_ij d_i'j'] = z K_ii' (K_jj' - m_i'j - m_ij' + b_ii'),
    ½E[d_ij² - Σ_k M_ik d_ik²] = z w_ij,    w_ij = κ_i (c_i - m_ij + ½(κ_j - (Mκ)_i)).

The mean over pairs of weights, put between values (K) or adjoints (Γ), turns MKMᵀ into b + z(K∘T + S + Sᵀ) and MᵀΓM
into MᵀΓM + z(R + V + Vᵀ), with X = Γ∘K and

    T = M(K∘K)Mᵀ - U - Uᵀ + b∘b,   U = (m∘m)Mᵀ,   S = (M∘w) mᵀ,   V = (M∘w)ᵀ Γ M,
    R = (MᵀXM)∘K - Mᵀ((XM)∘m) - ((MᵀX)∘mᵀ)M + Mᵀ(X∘b)M.

Gradients through the weights add (the score path) z R from the keys and z Γ∘T from the queries: the gradient of l_ij
is M_ij⟨γ_i, W_O W_V(h_j - Σ_k M_ik h_k)⟩, its pair means are g Γ_ii' M_ij M_i'j' (K_jj' - m_i'j - m_ij' + b_ii'), and
it multiplies a query or a key. They meet the value path at order 1/D only. In T, where a logit's overlap meets a
value's, K∘K is a mean of squares: unrelated tokens overlap by chance, ⟨x_j, x_j'⟩² = q_j q_j' D, so K∘K is raised by
κ_j κ_j' (1-ρ²)²/D, ρ the correlation. The products with M are running sums, S and V one product of L×L matrices each.

RoPE rotates pairs of query and key dimensions by θ_f per position, so E[l_ij l_i'j'] gains the mean over frequencies of
cos θ_f((i-i') - (j-j')). Each frequency is the real part of the same formulas with φ_ii' = e^{iθ(i-i')}, K^f = K∘φ*,
m^f = MK^f, b^f = MK^fMᵀ: T = ⟨Re φ∘[M(K^f∘K)Mᵀ - (m^f∘m)Mᵀ - its adjoint + b^f∘b]⟩; w with m, c from the mean over
f; R takes X∘φ for X with K^f, m^f, b^f where weights fluctuate, and is φ*∘R of X∘φ with the plain K, m, b for the keys.

Axes: L position, N layer.
"""

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from lim.config import Config
from lim.switches import Switches
from lim.theory import gaussian
from lim.theory.averaging import empty, in_blocks, masks, matrix, recycled

OUTPUTS = ("hidden", "stream")
MAX_LOGIT_VARIANCE = 4.0
BAND = 256  # positions at a time in the products of L×L matrices, which skip what a causal mask leaves out


@dataclasses.dataclass(frozen=True)
class KernelTheory:
    """A predicted profile.

    Attributes:
      influence_L: root-mean-square over seeds of ‖∂ output / ∂ x_j‖_F, x_j the stream that enters block `source` at
        position j; in units of the output per unit of the stream.
      bias: what finite width adds to the mean of ‖J‖², relative to influence_L², from `finite_width`.
      cv: standard deviation of ‖J‖² from seed to seed, over its mean, from `finite_width`.
      attention_stream_NL, mlp_stream_NL: mean square q of the stream as each attention and each MLP reads it.
      final_stream_L: mean square of the stream that leaves the last block.
      logit_variance: largest variance z of a softmax logit in any layer; the corrections are the first order in it.
        Against a measured Llama of 4 layers and width 128 (length 32, 24 seeds) they leave about 2 % rms of a profile
        unexplained at z = 0.13 (as in Qwen2-0.5B), 8 % at 0.36, 14 % at 0.64, 20 % at 1 (SmolLM2-135M) and 30 % at 2
        (Qwen2-7B).
    """

    influence_L: np.ndarray
    bias: float
    cv: float
    attention_stream_NL: np.ndarray
    mlp_stream_NL: np.ndarray
    final_stream_L: np.ndarray
    logit_variance: float

    @property
    def finite_width_L(self) -> np.ndarray:
        """influence_L with its finite-width bias: what a root mean square over seeds is compared with."""
        return self.influence_L * math.sqrt(1 + self.bias)


@recycled()
def predict(config: Config, length: int, switches: Switches = Switches(), *, output: str = "hidden", source: int = 0, read: int = -1,
            tokens: ArrayLike | None = None, corrections: bool = True, rope: bool = False) -> KernelTheory:  # fmt: skip
    """The influence profile of a decoder at birth, in ensemble mean over seeds.

    Takes every family and every switch, fractional ones too: `causal` between 0 and 1 weighs the future 1 - causal, `window`,
    `prefix` and `alibi` change M (with `alibi` that of each head: sums of M become means over heads),
    `uniform_attention` u scales the softmax's part by 1-u, `score_path` scales the score path's amplitude (its terms in
    Γ by the square), `norm` n makes p = n/√(q+ε) + 1-n, `mlp` n makes the skip n·skip + 1-n and the branch n·branch.
    Learned positions add (positions·init_std)² to each token's own q.

    Memory is about (layers + 16)·8·length² bytes: 1.4 GB for 24 layers at length 2048.

    Args:
      config: a `lim.Config`.
      length: L.
      switches: numbers, one or one per layer.
      output: "hidden" (after the final norm) or "stream" (before it).
      source: the block whose input is perturbed; 0 is the embedding.
      read: the position read out; negative counts from the end.
      tokens: token ids, [L], of which only the repetitions matter; None means all distinct.
      corrections: False takes attention as exactly uniform.
      rope: True lets the corrections see RoPE's rotations, at the cost of a pass per frequency that turns by more than
        0.01 over the sequence. It moves profiles little: attention at birth is nearly uniform with RoPE as without.

    Raises:
      ValueError: names the argument, its value and what is allowed; or the stream, or what an MLP reads of it without a
        norm, grows out of range; or the logits vary so much that the first-order corrections predict the impossible, a
        correlation above 1 or a negative square.
    """
    layers, read, start_LL = _checked(config, length, switches, output, source, read, tokens, corrections, rope)
    streams_LL, attention_NL, mlp_NL, final_L = _climb(config, layers, start_LL)
    adjoint_LL = np.zeros_like(start_LL)
    adjoint_LL[read, read] = _scale(final_L[read], layers[-1].norm, config) ** 2 if output == "hidden" else 1.0
    mlp = _MLP(config, layers[-1], streams_LL.pop())
    for n in reversed(range(source, len(layers))):
        adjoint_LL = mlp.down(adjoint_LL)  # type: ignore[union-attr]  # there is none after the last round alone
        mlp = _MLP(config, layers[n - 1], streams_LL.pop()) if n else None
        adjoint_LL = _attention(config, layers[n], mlp.up() if mlp else start_LL).down(adjoint_LL)
    square_L = np.diag(adjoint_LL)
    if np.any(square_L < 0):
        raise _too_far("it predicts a negative square")
    bias, variance = finite_width(config, switches, output=output, source=source)
    return KernelTheory(
        influence_L=np.sqrt(config.width * square_L),
        bias=bias,
        cv=math.sqrt(max(variance, 0.0)),
        attention_stream_NL=attention_NL,
        mlp_stream_NL=mlp_NL,
        final_stream_L=final_L,
        logit_variance=max(float(np.max(_preactivation(config) * _scale(q_L, layer.norm, config) ** 2 * q_L)) ** 2 for layer, q_L in zip(layers, attention_NL)),
    )


def _too_far(consequence):
    return ValueError(
        f"corrections=True: the logits vary too much for a theory of first order in their variance: {consequence}; corrections=False takes attention as uniform"
    )


# ---- what the recursions read: one plain number per layer and switch ----


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One block's numbers: weights of skip and branch in each sub-block, and the switches that act inside."""

    skip: float
    branch: float
    mlp_skip: float
    mlp_branch: float
    norm: float
    causal: float
    window: float
    prefix: float
    alibi: float
    uniform: float
    score: float
    frequencies: tuple  # RoPE's angles per position, 0 where it is left out

    @property
    def still(self):
        """Share of the frequencies that do not turn."""
        return self.frequencies.count(0.0) / len(self.frequencies)


def _layers(config, switches, corrections=True, rope=False, length=1) -> list[_Layer]:
    switches.check(config)
    defaults = {field.name: field.metadata["default"] for field in dataclasses.fields(switches)}

    def numbers(name):
        value = getattr(switches, name)
        value = np.asarray(defaults[name] if value is None else value, np.float64)
        return np.broadcast_to(value, config.layers).tolist()

    names = ("residual", "mlp", "norm", "causal", "window", "prefix", "alibi", "uniform_attention", "score_path", "rope")
    branches = [1.0] * config.layers if switches.alpha is None else numbers("alpha")
    layers = []
    for branch, skip, mlp, norm, causal, window, prefix, alibi, uniform, score, turn in zip(branches, *map(numbers, names)):
        if switches.alpha is not None:
            skip = 1 - branch
        if not corrections:
            uniform = 1.0
        frequencies = np.zeros(1)
        if rope and config.has_rope:
            half = config.head_dim // 2
            frequencies = turn * config.rope_theta ** (-np.arange(half) / half)
            frequencies[frequencies * length < 0.01] = 0.0  # cos differs from 1 by less than 5e-5
        layers.append(_Layer(skip, branch, mlp * skip + 1 - mlp, mlp * branch, norm, causal, window, prefix, alibi, uniform, score,
                             tuple(frequencies.tolist())))  # fmt: skip
    return layers


def _checked(config, length, switches, output, source, read, tokens, corrections, rope):
    """The layers' numbers, the read-out position counted from 0, and C of the embedding."""
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
        raise ValueError(f"length={length!r}: must be a positive integer")
    if not config.has_rope and length > config.max_length:
        raise ValueError(f"length={length}: {config.family}'s table holds {config.max_length} positions (max_length)")
    if output not in OUTPUTS:
        raise ValueError(f"output={output!r}: the theory predicts {' and '.join(OUTPUTS)} only")
    if isinstance(source, bool) or not isinstance(source, (int, np.integer)) or not 0 <= source < config.layers:
        raise ValueError(f"source={source!r}: must be an integer from 0 to {config.layers - 1}")
    if isinstance(read, bool) or not isinstance(read, (int, np.integer)) or not -length <= read < length:
        raise ValueError(f"read={read!r}: must be an integer from {-length} to {length - 1}")
    if tokens is None:
        tokens = np.arange(length)
    tokens = np.asarray(tokens)
    if tokens.shape != (length,) or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens of shape {tokens.shape} and type {tokens.dtype}: must be {length} integers (length)")
    layers = _layers(config, switches, corrections, rope, length)
    token, position = _embedding(config, switches)
    start_LL = token * (tokens[:, None] == tokens) + position * np.eye(len(tokens))
    return layers, read % length, start_LL


def _embedding(config, switches):
    """Mean square of the token embedding and of the learned position that is added to it."""
    token = config.init_std**2
    if config.has_rope:
        return token, 0.0
    return token, token * (1.0 if switches.positions is None else float(switches.positions)) ** 2


def _preactivation(config) -> float:
    """s = Dσ²: variance of a projection of an input of mean square 1."""
    return config.width * config.init_std**2


def _attention_gain(config) -> float:
    """g = (Dσ²)(heads·head_dim·σ_o²): mean square of what attention writes per mean square of the average it takes."""
    return _preactivation(config) * config.heads * config.head_dim * config.residual_std**2


def _scale(q, norm, config):
    """p, the factor from the stream to what a branch reads."""
    return norm / np.sqrt(q + config.norm_eps) + (1 - norm)


# ---- the two recursions ----


def _climb(config, layers, stream_LL):
    """C as each MLP reads it (one per layer), q as each attention and each MLP reads it, and q at the end."""
    streams_LL, attention_NL, mlp_NL = [], [], []
    for layer in layers:
        attention_NL.append(_mean_square(stream_LL))
        stream_LL = _attention(config, layer, stream_LL).up()
        _symmetrise(stream_LL)  # rounding's antisymmetric part grows by half a layer where there is no skip
        mlp_NL.append(_mean_square(stream_LL))
        if layer.uniform != 1 and _largest_correlation(stream_LL, mlp_NL[-1]) > 1 + 1e-9:
            raise _too_far("it predicts a correlation above 1")
        streams_LL.append(stream_LL)
        stream_LL = _MLP(config, layer, stream_LL).up()
    return streams_LL, np.array(attention_NL), np.array(mlp_NL), _mean_square(stream_LL)


def _mean_square(stream_LL):
    q_L = np.diag(stream_LL).copy()
    if not (np.all(np.isfinite(q_L)) and q_L.min() > 1e-150 and q_L.max() < 1e150):
        raise ValueError(f"switches: the stream's mean square runs from {q_L.min():.3g} to {q_L.max():.3g}, beyond float64's reach")
    return q_L


def _symmetrise(x_LL):
    def work(rows):  # what is left of the diagonal, and its mirror image
        start, stop = rows.start, rows.stop
        mean = (x_LL[rows, :stop] + x_LL[:stop, rows].T) / 2
        x_LL[rows, :stop] = mean
        x_LL[:start, rows] = mean[:, :start].T

    in_blocks(work, len(x_LL))


def _largest_correlation(stream_LL, q_L):
    root_L = np.sqrt(q_L)
    return max(in_blocks(lambda rows: np.max(stream_LL[rows] / (root_L[rows, None] * root_L)), len(q_L)))


class _MLP:
    """One MLP sub-block at the stream it reads: activations are u/2 + even(u), their slopes ½ + odd(u)."""

    def __init__(self, config, layer, stream_LL):
        self.stream_LL, self.length = stream_LL, len(stream_LL)
        self.skip, self.branch = layer.mlp_skip**2, layer.mlp_branch**2
        if not self.branch:
            return
        self.gain, self.preactivation = self.branch * config.inner * config.residual_std**2, _preactivation(config)
        self.gated = config.family != "gpt2"
        self.act = gaussian.SILU if self.gated else gaussian.GELU
        q_L = np.diag(stream_LL)
        self.p_L = _scale(q_L, layer.norm, config)
        self.variance_L = self.preactivation * self.p_L**2 * q_L
        if self.variance_L.max() > gaussian.MAX_VARIANCE:
            raise ValueError(
                f"switches: an MLP reads preactivations of variance {self.variance_L.max():.3g}, above the "
                f"{gaussian.MAX_VARIANCE:g} that this theory integrates over"
            )
        root_L, self.deviation_L = np.sqrt(q_L), np.sqrt(self.variance_L)
        self.correlation_LL = matrix(lambda rows: stream_LL[rows] / (root_L[rows, None] * root_L), self.length)
        self.even_LL = gaussian.pair_mean(self.act.even, False, self.variance_L, self.correlation_LL)

    def _covariance(self, rows):
        return self.correlation_LL[rows] * (self.deviation_L[rows, None] * self.deviation_L)

    def up(self):
        """skip² C + branch² A."""
        if not self.branch:
            return self.skip * self.stream_LL

        def rows_of(rows):
            covariance_RL = self._covariance(rows)
            a_RL = covariance_RL / 4
            a_RL += self.even_LL[rows]
            if self.gated:
                a_RL *= covariance_RL
            a_RL *= self.gain
            a_RL += self.skip * self.stream_LL[rows]
            return a_RL

        return matrix(rows_of, self.length)

    def down(self, adjoint_LL):
        """skip² Γ + branch² P(B∘Γ)P."""
        if not self.branch:
            return self.skip * adjoint_LL
        odd_LL = gaussian.pair_mean(self.act.odd, True, self.variance_L, self.correlation_LL)

        def rows_of(rows):
            slopes_RL = 0.25 + odd_LL[rows]
            if self.gated:
                covariance_RL = self._covariance(rows)
                slopes_RL += 0.25  # with the ¼ of E[silu silu'] = covariance/4 + even
                slopes_RL *= covariance_RL
                slopes_RL += self.even_LL[rows]
            slopes_RL *= self.gain * self.preactivation * self.p_L[rows, None]
            slopes_RL *= self.p_L
            slopes_RL += self.skip
            slopes_RL *= adjoint_LL[rows]
            return slopes_RL

        return matrix(rows_of, self.length)


def _attention(config, layer, stream_LL):
    """The attention of a layer. Heads that average differently add up without cross terms, their W_O being independent."""
    each = masks(len(stream_LL), causal=layer.causal, window=layer.window, prefix=layer.prefix, alibi=layer.alibi, heads=config.heads)
    return _Attention(config, layer, stream_LL, each[0]) if len(each) == 1 else _Heads(config, layer, stream_LL, each)


class _Heads:
    """Attention whose heads average over different masks: the mean of what each alone would do, one at a time."""

    def __init__(self, config, layer, stream_LL, each):
        self.alone = [functools.partial(_Attention, config, layer, stream_LL, mask) for mask in each]

    def up(self):
        return sum(attention().up() for attention in self.alone) / len(self.alone)

    def down(self, adjoint_LL):
        return sum(attention().down(adjoint_LL) for attention in self.alone) / len(self.alone)


class _Attention:
    """One attention at the stream it reads: K, m, b and, unless it is exactly uniform, what T and w are made of.

    Of a symmetric matrix that ends in Z + Zᵀ only Z is kept (named lean), so that one pass at the end transposes.
    """

    def __init__(self, config, layer, stream_LL, mask):
        self.mask, self.layer, self.stream_LL, self.length, self.width = mask, layer, stream_LL, len(stream_LL), config.width
        self.skip, self.gain = layer.skip**2, layer.branch**2 * _attention_gain(config)
        if not self.gain:
            return
        p_L = self.p_L = _scale(np.diag(stream_LL), layer.norm, config)
        self.k_LL = matrix(lambda rows: stream_LL[rows] * (p_L[rows, None] * p_L), self.length)
        self.m_LL, self.b_LL = self._averages(self.k_LL)
        self.uniform = layer.uniform == 1
        if self.uniform:
            return
        z = _preactivation(config) ** 2
        self.shift, self.pair = z * (1 - layer.uniform), z * (1 - layer.uniform) ** 2  # factors of w and of d d'
        self.kappa_L = np.diag(self.k_LL).copy()
        if (variance := z * self.kappa_L.max() ** 2) > MAX_LOGIT_VARIANCE:
            raise _too_far(f"it is {variance:.3g}, and must be at most {MAX_LOGIT_VARIANCE:g}")
        self.t_lean_LL, self.logit_m_LL, self.logit_b_LL = self._logits()
        self.level_L = np.diag(self.logit_b_LL) - self.mask.average_along(self.kappa_L) / 2

    def up(self):
        """skip² C + branch² g (b + z(K∘T + S + Sᵀ))."""
        if not self.gain:
            return self.skip * self.stream_LL
        if self.uniform:
            return matrix(lambda rows: self.skip * self.stream_LL[rows] + self.gain * self.b_LL[rows], self.length)
        lean_LL = self._shift_of_output()

        def add_t(rows):
            lean_LL[rows] += self.pair * self.k_LL[rows] * self.t_lean_LL[rows]

        def rows_of(rows):
            a_RL = self.k_LL[rows] * self.logit_b_LL[rows]
            a_RL *= self.pair
            a_RL += 1
            a_RL *= self.b_LL[rows]
            a_RL += lean_LL[rows]
            a_RL += lean_LL[:, rows].T
            a_RL *= self.gain
            a_RL += self.skip * self.stream_LL[rows]
            return a_RL

        in_blocks(add_t, self.length)
        return matrix(rows_of, self.length)

    def down(self, adjoint_LL):
        """skip² Γ + branch² g P(MᵀΓM + z(R + V + Vᵀ) + score² z(R + Γ∘T))P, symmetric to the last bit.

        Where entries fall by many decades (no skip) an antisymmetric error would outgrow the smallest squares.
        """
        if not self.gain:
            return self.skip * adjoint_LL
        lean_LL = self._uniform_down(adjoint_LL) if self.uniform else self._softmax_down(adjoint_LL)

        def rows_of(rows):
            a_RL = lean_LL[rows] + lean_LL[:, rows].T
            a_RL *= self.gain * (self.p_L[rows, None] * self.p_L)
            a_RL += self.skip * adjoint_LL[rows]
            return a_RL

        return matrix(rows_of, self.length)

    def _averages(self, k_LL):
        """M K and M K Mᵀ."""
        m_LL = self.mask.average_down(k_LL)
        return m_LL, matrix(lambda rows: self.mask.average_along(m_LL[rows]), self.length, k_LL.dtype)

    def _turns(self):
        """RoPE's frequencies that turn: the share of each, φ_ij = e^{iθ(i-j)}, m^f, b^f."""
        angles, counts = np.unique(self.layer.frequencies, return_counts=True)
        for angle, count in zip(angles, counts):
            if angle:
                turn_L = np.exp(1j * angle * np.arange(self.length))
                phase_LL = np.outer(turn_L, turn_L.conj())
                yield count / counts.sum(), phase_LL, *self._averages(self.k_LL * phase_LL.conj())

    def _logits(self):
        """T, as lean + leanᵀ + b∘logit_b, and m^f and φ∘b^f averaged over RoPE's frequencies."""

        def squares(rows):
            squares_RL, products_RL = self.k_LL[rows] ** 2, self.kappa_L[rows, None] * self.kappa_L
            return squares_RL + (products_RL - squares_RL) ** 2 / (self.width * products_RL)  # by chance overlap

        def lean(squares_LL, m_LL):
            average_LL = self.mask.average_down(squares_LL)

            def rows_of(rows):
                return self.mask.average_along(average_LL[rows] / 2 - m_LL[rows] * self.m_LL[rows])

            return matrix(rows_of, self.length, m_LL.dtype)

        squares_LL = matrix(squares, self.length)
        sums = lean(squares_LL, self.m_LL), self.m_LL, self.b_LL
        if (still := self.layer.still) != 1:
            sums = tuple(still * x_LL for x_LL in sums)
            for share, phase_LL, m_LL, b_LL in self._turns():
                turned = phase_LL * lean(squares_LL * phase_LL.conj(), m_LL), m_LL, phase_LL * b_LL
                for sum_LL, x_LL in zip(sums, turned):
                    sum_LL += share * x_LL.real
        return sums

    def _weighted_shift(self, rows, columns):
        """A block of M∘w, times z."""
        w_RC = self.kappa_L[columns] / 2 - self.logit_m_LL[rows, columns]
        w_RC += self.level_L[rows, None]
        w_RC *= self.shift * self.kappa_L[rows, None]
        self.mask.weigh(w_RC, rows, columns)
        return w_RC

    def _shift_of_output(self):
        """z S = z (M∘w) mᵀ, where a causal mask leaves out the columns beyond the rows."""
        s_LL = empty(self.m_LL.shape)

        def work(band):
            admitted = slice(0, band.stop if self.mask.causal == 1 else None)
            np.matmul(self._weighted_shift(band, admitted), self.m_LL[:, admitted].T, out=s_LL[band])

        in_blocks(work, self.length, BAND)
        return s_LL

    def _shift_of_input(self, spread_LL):
        """z V = z (M∘w)ᵀ ΓM, from ΓM."""
        v_LL = empty(self.m_LL.shape)

        def work(band):
            admitting = slice(band.start if self.mask.causal == 1 else 0, None)
            np.matmul(self._weighted_shift(admitting, band).T, spread_LL[admitting], out=v_LL[band])

        in_blocks(work, self.length, BAND)
        return v_LL

    def _uniform_down(self, adjoint_LL):
        """½MᵀΓM."""
        lean_LL = matrix(lambda rows: self.mask.spread_along(adjoint_LL[rows]) / 2, self.length)
        self.mask.spread_down(lean_LL[None])
        return lean_LL

    def _softmax_down(self, adjoint_LL):
        """The adjoint of the input, as the Z of Z + Zᵀ."""
        score, still = self.layer.score**2, self.layer.still
        stack_SLL = empty((3, *adjoint_LL.shape))

        def along(rows):
            stack_SLL[0, rows] = self.mask.spread_along(adjoint_LL[rows])
            x_RL = adjoint_LL[rows] * self.k_LL[rows]
            stack_SLL[1:, rows] = self._pulled_along(x_RL, self.m_LL[rows], self.b_LL[rows])

        in_blocks(along, self.length)
        lean_LL = self._shift_of_input(stack_SLL[0])

        self.mask.spread_down(stack_SLL)

        def add(rows):
            values_RL, first_RL, rest_RL = stack_SLL[:, rows]
            r_RL = first_RL * self.k_LL[rows] / 2
            r_RL += rest_RL
            r_RL *= self.pair * still * (1 + score)
            t_RL = self.b_LL[rows] * self.logit_b_LL[rows] / 2
            t_RL += self.t_lean_LL[rows]
            t_RL *= adjoint_LL[rows]
            t_RL *= self.pair * score
            r_RL += t_RL
            r_RL += values_RL / 2
            lean_LL[rows] += r_RL

        in_blocks(add, self.length)
        if still != 1:
            self._add_turned(adjoint_LL, lean_LL)
        return lean_LL

    def _pulled_along(self, x_RL, m_RL, b_RL):
        """Rows of XM and of what half of R but its first term is Mᵀ times: ½(X∘b)M - (XM)∘m."""
        xm_RL = self.mask.spread_along(x_RL)
        return xm_RL, self.mask.spread_along(x_RL * b_RL) / 2 - xm_RL * m_RL

    def _add_turned(self, adjoint_LL, lean_LL):
        """Adds R of the weights' fluctuation and of the keys, for the frequencies that turn."""
        score = self.layer.score**2
        for share, phase_LL, m_LL, b_LL in self._turns():
            x_LL = adjoint_LL * self.k_LL * phase_LL
            fluctuation = self._pulled_along(x_LL, m_LL, b_LL)
            keys = self._pulled_along(x_LL, self.m_LL, self.b_LL)
            stack_SLL = np.stack([*fluctuation, keys[1]])
            self.mask.spread_down(stack_SLL)
            first_LL, fluctuation_LL, keys_LL = stack_SLL
            first_LL *= (1 + score) / 2 * self.k_LL * phase_LL.conj()
            lean_LL += self.pair * share * (first_LL + fluctuation_LL + score * keys_LL * phase_LL.conj()).real


# ---- finite width, and strengths ----


def finite_width(config: Config, switches: Switches = Switches(), *, output: str = "hidden", source: int = 0) -> tuple[float, float]:
    """What a finite width does to ‖J‖² at a single position: the relative bias of its mean, its relative variance.

    First order in 1/D, 1/rank and 1/inner, by carrying small fluctuations through the layers. The stream's mean square
    is q(1 + δ), ln‖J‖² deviates by λ from its infinite-width value, and

        V = Var δ,    m = E δ,    S = -Cov(δ, λ),    w = E|x̂ᵀJ|²/‖J‖², the share of J along the stream.

    A branch writes a mean square μ(q) and adds β(q)‖J‖² to ‖J‖². Its shares are F = branch²μ/(skip²q + branch²μ) and
    f = branch²β/(skip² + branch²β); e_μ, e_β are elasticities d ln/d ln q (under a norm e_μ = 0 and e_β = -1), c_μ, c_β
    half curvatures q²β''/2β, and along x̂ the branch passes r times its mean over directions (r = 0 under a norm).

    * bias gains f(c_β V + e_β m - e_β S - (1 - r)w): ‖J‖² and β move together;
    * the variance gains f²e_β²V - 2f e_β S + f²ν', where ν' is the relative variance of the branch's slope over units;
    * with t = 1-F + F e_μ: m ← t m + F c_μ V, S ← t(S - f e_β V) - f F κ_c, V ← t²V + 4F(1-F)/D + F²(2/D + ν);
    * w ← ((skip² + branch² e_μ μ/q)² w + skip²branch²(μ/q + β)/D + branch⁴ μ/q β (1/D + κ)) / growth of q and ‖J‖²:
      what x̂ meets both before and after the branch, and the chance overlaps.

    Attention: rank = kv_heads·head_dim (heads that share values act as one), κ = 1/rank, ν = 2/rank, κ_c = ν' = 0 and
    r = e_μ². MLP, with a unit's output h and its gradient's square h'²: κ = E[h²h'²]/(E[h²]E[h'²])/inner,
    κ_c = κ - 1/inner, ν = (E[h⁴]/E[h²]² - 1)/inner, ν' the same of h'. The embedding has V = 2/D; at `source` J is the
    identity, w = 1/D and the rest 0. The final norm is a branch without a skip that writes nothing.

    With many positions hops average over them, so this is the size to expect, not a percent to correct by. Where it is
    not small (deep and narrow, a weak skip: width 64 with 24 layers, bias 0.6 at alpha 0.1 and 2.0 without residual) it is no
    correction at all: at 2.0, 200 drawn networks had squares of mean 3.0 ±0.7 and median 0.3 of infinite width. What a
    network without norms scatters is of second order and left out; it grows with depth: without residual and MLPs, at
    width 64 and rank 32, the relative standard deviation of ‖J‖² was 0.3 with 6 layers and 1.6 with 24.

    Args:
      config, switches, output, source: as `predict` takes them.

    Returns:
      bias and variance of ‖J‖², relative to its infinite-width mean.
    """
    state, layers = _Fluctuation(config, switches), _layers(config, switches)
    for n, layer in enumerate(layers):
        if n == source:
            state.start_jacobian()
        state.add(layer.skip, layer.branch, layer.norm, _attention_unit(config))
        if layer.mlp_branch:
            state.add(layer.mlp_skip, layer.mlp_branch, layer.norm, _mlp_unit(config))
    if output == "hidden":
        state.read_out(layers[-1].norm)
    return state.bias, state.variance


@dataclasses.dataclass
class _Unit:
    """A branch as `finite_width` sees it, at an input p x of mean square p²q, in its letters."""

    output: float  # μ
    slope: float  # β/p²
    radial: float = 1.0  # r, for an input that follows x
    kappa: float = 0.0
    kappa_c: float = 0.0
    nu: float = 0.0
    nu_slope: float = 0.0


def _attention_unit(config):
    rank, gain = config.kv_heads * config.head_dim, _attention_gain(config)
    return lambda k: _Unit(output=gain * k, slope=gain, kappa=1 / rank, nu=2 / rank)


def _mlp_unit(config):
    s, gain, inner = _preactivation(config), config.inner * config.residual_std**2, config.inner

    def unit(k):
        """With r = √v and α = act/r, moments of α and act' at u = rξ: none of them falls with v, so that none underflows."""
        v = s * k
        r = math.sqrt(v)

        def mean(f):
            return float(gaussian.mean(f, v))

        act = gaussian.GELU if config.family == "gpt2" else gaussian.SILU
        a2, a4 = mean(lambda u: (act(u) / r) ** 2), mean(lambda u: (act(u) / r) ** 4)
        s2, s4 = mean(lambda u: act.slope(u) ** 2), mean(lambda u: act.slope(u) ** 4)
        a2s2 = mean(lambda u: (act(u) / r * act.slope(u)) ** 2)
        if config.family == "gpt2":  # h = act(u)
            h2, h4, d2, d4, both, scale = a2, a4, s2, s4, a2s2, v
            along = mean(lambda u: (u / r * act.slope(u)) ** 2)
        else:  # h = act(u)·u' and h'² = (act'(u)·u')² + act(u)², u' as u: in units of v² and v
            h2, h4, scale = a2, 3 * a4, v**2
            d2, d4 = s2 + a2, 3 * s4 + 2 * a2s2 + a4
            both = 3 * a2s2 + a4
            along = mean(lambda u: (u / r * act.slope(u) + act(u) / r) ** 2)
        kappa = both / (h2 * d2) / inner
        return _Unit(output=gain * scale * h2, slope=gain * s * scale / v * d2, radial=along / d2, kappa=kappa, kappa_c=kappa - 1 / inner,
                     nu=(h4 / h2**2 - 1) / inner, nu_slope=(d4 / d2**2 - 1) / inner)  # fmt: skip

    return unit


class _Fluctuation:
    """The running state of `finite_width`, in its letters."""

    def __init__(self, config, switches):
        self.config, self.q = config, sum(_embedding(config, switches))
        self.V, self.m = 2 / config.width, 0.0
        self.start_jacobian()

    def start_jacobian(self):
        self.w, self.S, self.bias, self.variance = 1 / self.config.width, 0.0, 0.0, 0.0

    def read_out(self, norm):
        """A norm p·x, whose Jacobian is p across x and p·e_κ along it, e_κ = 1 + d ln p²/d ln q."""
        e, c = _elasticity(lambda q: _scale(q, norm, self.config) ** 2, self.q)
        self._gain(1.0, e, c, (1 + e) ** 2)

    def add(self, skip, branch, norm, unit):
        """skip·x + branch·f(p x)."""

        def at(q):
            return unit(_scale(q, norm, self.config) ** 2 * q)

        here, width = at(self.q), self.config.width
        e_p, _ = _elasticity(lambda q: _scale(q, norm, self.config) ** 2, self.q)
        e_mu, c_mu = _elasticity(lambda q: at(q).output, self.q)
        e_beta, c_beta = _elasticity(lambda q: at(q).slope * _scale(q, norm, self.config) ** 2, self.q)
        skip, branch, mu = skip**2, branch**2, here.output / self.q  # of squares, and per unit of q
        beta = here.slope * _scale(self.q, norm, self.config) ** 2
        f, share = branch * beta / (skip + branch * beta), branch * mu / (skip + branch * mu)
        t, covariance = 1 - share + share * e_mu, self.S
        self._gain(f, e_beta, c_beta, here.radial * (1 + e_p) ** 2)
        self.variance += f**2 * here.nu_slope
        crossings = skip * branch * (mu + beta) / width + branch**2 * mu * beta * (1 / width + here.kappa)
        self.w = (skip + branch * mu * e_mu) ** 2 * self.w + crossings
        self.w /= (skip + branch * mu) * (skip + branch * beta)
        self.S = t * (covariance - f * e_beta * self.V) - f * share * here.kappa_c
        self.m = t * self.m + share * c_mu * self.V
        self.V = t**2 * self.V + 4 * share * (1 - share) / width + share**2 * (2 / width + here.nu)
        self.q *= skip + branch * mu

    def _gain(self, f, e, c, passed):
        self.bias += f * (c * self.V + e * self.m - e * self.S - (1 - passed) * self.w)
        self.variance += f**2 * e**2 * self.V - 2 * f * e * self.S


def _elasticity(function, q, step=1e-3):
    """e = d ln f/d ln q and c = q²f''/2f, by central differences (relative error 1e-6)."""
    low, middle, high = (math.log(function(q * math.exp(k * step))) for k in (-1, 0, 1))
    e, curvature = (high - low) / (2 * step), (high - 2 * middle + low) / step**2
    return e, (curvature + e**2 - e) / 2


@recycled()
def effective_strengths(config: Config, length: int, switches: Switches = Switches(), *, read: int = -1, corrections: bool = True) -> np.ndarray:
    """The strength a_l of each attention that the kernel theory implies: the share of a hop in the squared adjoint.

    At position n attention turns Γ_nn into skip² Γ_nn plus, summed over where they land, hops of branch² g p² Γ_nn, so

        a_l = branch² g p_l² / (skip_l² + branch² g p_l²),    p_l² = 1/(q_l + ε) at the read-out under a norm.

    These are strengths of squares: a walk's hops number Poisson-binomially with them, and influence² is about
    Σ_k P(k hops) ((M^k)_nj)². For the standard block the stream grows by about the same with each layer, so a_l falls
    as 1/l (Qwen2-0.5B at length 256: l·a_l from 0.97 to 1.25, Σ a_l = 4.1), and hops number ln(layers). Under `alpha`
    the stream settles where what attention writes makes up for what the skip loses, and a_l = α(2-α) at the first
    position of a network without MLPs.

    Expect shapes of them, not numbers: MLPs keep the adjoint of one position better than those of pairs, so that hops
    beyond the first are fewer than a_l says, and q_l differs between positions. At length 256 the sum above misses
    `predict` by 0.16 rms in log for GPT-2 and by 0.6 for Qwen2-0.5B; as strengths of the paper's walk, whose
    probabilities are not squares, they miss by 0.35 and 1.1.

    Args:
      config, length, switches, read, corrections: as `predict` takes them.

    Returns:
      a_N, one per layer, from 0 to 1.

    Raises:
      ValueError: as `predict`.
    """
    layers, read, start_LL = _checked(config, length, switches, "stream", 0, read, None, corrections, False)
    q_N = _climb(config, layers, start_LL)[1][:, read]
    hop_N = np.array([layer.branch**2 * _scale(q, layer.norm, config) ** 2 for layer, q in zip(layers, q_N)])
    hop_N *= _attention_gain(config)
    return hop_N / (np.array([layer.skip**2 for layer in layers]) + hop_N)
