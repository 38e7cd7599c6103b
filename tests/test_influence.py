"""Influence against a literal Jacobian: every output, every switch, every source; probes unbiased, their error honest."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lim
from lim.config import Config
from lim.influence import OUTPUTS, default_chunk, influence
from lim.model import Decoder, graphdef, params_of
from lim.switches import Switches

LENGTH = 11
QWEN2 = Config("qwen2", layers=3, width=24, heads=4, kv_heads=2, head_dim=6, inner=40, vocab=37, max_length=32, init_std=0.2)
GPT2 = Config("gpt2", layers=2, width=20, heads=2, kv_heads=2, head_dim=10, inner=44, vocab=31, max_length=32, init_std=0.2)
LLAMA = dataclasses.replace(QWEN2, family="llama", tied=False)
TOKENS = np.random.default_rng(0).integers(0, 31, LENGTH)
# Reverse mode and reverse mode: both round once per product, sums over a few hundred terms, three layers.
RTOL = 2e-5


@functools.cache
def birth(config, seed):
    return Decoder.at_birth(config, seed)


def jacobian_norms(decoder, tokens_L, switches=Switches(), source=0, read=-1, target=5, outputs=("hidden",)):
    """The definition, for every output asked for: jax.jacrev of the whole forward pass, then the norm of one block."""
    structure, params = graphdef(decoder.config), params_of(decoder)
    switches = switches.check(decoder.config)
    jacobians = _jacobians(structure, params, jnp.asarray(tokens_L), switches, source, read, target, tuple(outputs))
    return {output: np.sqrt(np.sum(np.asarray(j, np.float64).reshape(-1, *j.shape[-2:]) ** 2, axis=(0, 2))) for output, j in jacobians.items()}


@functools.partial(jax.jit, static_argnums=(0, 4, 7))
def _jacobians(structure, params, tokens_L, switches, source, read, target, outputs):
    decoder = nnx.merge(structure, params)

    def readout(x_LD):
        stream_D = decoder.stream(x_LD, switches, source)[read]
        hidden_D = decoder.hidden(stream_D, switches)
        logits_V = decoder.logits(hidden_D)
        probability_V = jnp.exp(logits_V) / jnp.exp(logits_V).sum()
        every = {"stream": stream_D, "hidden": hidden_D, "logits": logits_V, "loss": -jnp.log(probability_V[target]),
                 "top_probability": probability_V.max()}  # fmt: skip
        return {output: every[output] for output in outputs}

    return jax.jacrev(readout)(decoder.stream(decoder.embed(tokens_L, switches), switches, 0, source))


@pytest.mark.parametrize("config, outputs", [(QWEN2, OUTPUTS), (GPT2, ["hidden", "logits"]), (LLAMA, ["logits"])], ids=lambda c: getattr(c, "family", None))
def test_every_output_equals_jacrev(config, outputs):
    for seed in (0, 1):
        decoder = birth(config, seed)
        expected = jacobian_norms(decoder, TOKENS, outputs=outputs)
        for output in outputs:
            measured = influence(decoder, TOKENS, output=output, target=5)
            assert measured.exact and np.all(measured.stderr_L == 0)
            np.testing.assert_allclose(measured.influence_L, expected[output], rtol=RTOL, err_msg=output)


DEFAULTS = dict(rope=1.0, causal=1.0, residual=1.0, mlp=1.0, norm=1.0, uniform_attention=0.0, score_path=1.0)
SWITCHED = [dict(), dict(rope=0.0), dict(rope=0.3), dict(causal=0.0), dict(causal=0.5), dict(residual=0.0),
            dict(residual=0.5), dict(mlp=0.0), dict(mlp=0.5), dict(norm=0.0), dict(norm=0.5), dict(uniform_attention=1.0),
            dict(uniform_attention=0.5), dict(score_path=0.0), dict(score_path=0.5), dict(alpha=0.25, residual=None),
            dict(rope=[1, 0, .5], residual=[0.1, 0.7, 1.3], mlp=[1, 0, 0.5], norm=[0.2, 0.5, 0.8], causal=[1, 0, 0.5],
                 uniform_attention=[0.3, 0, 1], score_path=[0, 1, 0.5])]  # fmt: skip


@pytest.mark.parametrize("switches", SWITCHED, ids=str)
def test_every_switch_equals_jacrev(switches):
    decoder, switches = birth(QWEN2, 2), Switches(**(DEFAULTS | switches))
    measured = influence(decoder, TOKENS, switches).influence_L
    np.testing.assert_allclose(measured, jacobian_norms(decoder, TOKENS, switches)["hidden"], rtol=RTOL, atol=1e-7)


@pytest.mark.parametrize("positions", [0.0, 0.5])
def test_learned_positions_equal_jacrev(positions):
    decoder, switches = birth(GPT2, 2), Switches(positions=positions)
    measured = influence(decoder, TOKENS, switches).influence_L
    np.testing.assert_allclose(measured, jacobian_norms(decoder, TOKENS, switches)["hidden"], rtol=RTOL)


@pytest.mark.parametrize("source, read", [(1, 0), (1, 4), (1, -1), (-1, 4), (-1, -1)])
def test_any_source_and_readout_equal_jacrev(source, read):
    decoder = birth(QWEN2, 0)
    measured = influence(decoder, TOKENS, source=source, read=read).influence_L
    reference = jacobian_norms(decoder, TOKENS, source=source % QWEN2.layers, read=read)["hidden"]
    np.testing.assert_allclose(measured, reference, rtol=RTOL)
    assert np.all(measured[read % LENGTH + 1 :] == 0)


def test_the_loss_is_of_the_token_that_follows():
    decoder = birth(QWEN2, 0)
    measured = influence(decoder, TOKENS, output="loss", read=4).influence_L
    expected = jacobian_norms(decoder, TOKENS, read=4, target=int(TOKENS[5]), outputs=["loss"])["loss"]
    np.testing.assert_allclose(measured, expected, rtol=RTOL)


def test_chunks_are_as_large_as_allowed_and_pad_little():
    """GPT-2 at length 256 likes at most 6 side by side: 8 go as 4 and 4, not as 6 and 6."""
    gpt2 = lim.Config.preset("gpt2")
    chunks = {cotangents: default_chunk(gpt2, 256, cotangents) for cotangents in range(1, 40)}
    assert all(min(cotangents, 4) <= chunk <= min(cotangents, 6) for cotangents, chunk in chunks.items())
    assert [chunks[n] for n in (1, 5, 6, 8, 16, 36)] == [1, 5, 6, 4, 4, 6]


def test_the_chunk_does_not_change_the_number():
    """Nor does padding of the last chunk."""
    decoder = birth(QWEN2, 0)
    whole, chunked = influence(decoder, TOKENS), influence(decoder, TOKENS, chunk=7)
    np.testing.assert_allclose(chunked.influence_L, whole.influence_L, rtol=1e-6)
    whole, chunked = (influence(decoder, TOKENS, probes=7, chunk=c) for c in (100, 5))
    np.testing.assert_allclose(chunked.influence_L, whole.influence_L, rtol=1e-6)
    np.testing.assert_allclose(chunked.stderr_L, whole.stderr_L, rtol=1e-4)


def test_as_many_probes_as_entries_are_exact():
    decoder = birth(QWEN2, 0)
    exact, probed = influence(decoder, TOKENS), influence(decoder, TOKENS, probes=QWEN2.width, seed=3)
    assert probed.exact and np.all(probed.stderr_L == 0)
    np.testing.assert_allclose(probed.influence_L, exact.influence_L, rtol=RTOL)


def test_probes_are_unbiased_and_their_error_is_honest():
    """400 draws of 4 probes against the exact influence, and against the estimator's own law, drawn in numpy.

    influence² averages to the exact one within 4 standard errors (11 correlated positions), its mean estimated variance
    to the variance seen, and Student intervals cover as often as they do for Haar frames applied to the literal Jacobian:
    some 89 % where they aim at 95, since the squares of 4 probes are skewed.
    """
    decoder = birth(QWEN2, 0)
    exact_L = influence(decoder, TOKENS).influence_L.astype(np.float64)
    draws = [influence(decoder, TOKENS, probes=4, seed=seed, chunk=4) for seed in range(400)]
    square_SL = np.stack([d.influence_L for d in draws]).astype(np.float64) ** 2
    error_SL = 2 * np.sqrt(square_SL) * np.stack([d.stderr_L for d in draws])  # the delta method undone
    spread_L = square_SL.std(0, ddof=1)
    z_L = (square_SL.mean(0) - exact_L**2) / (spread_L / np.sqrt(len(draws)))
    assert np.abs(z_L).max() < 4
    # A variance from 400 draws of excess kurtosis at most 12/4 (χ² squares of one direction, 4 probes): ±11 %, 3 sigma.
    np.testing.assert_allclose((error_SL**2).mean(0) / spread_L**2, 1, atol=0.33)
    student = 3.18  # 97.5 % quantile, 3 degrees of freedom
    covered = np.mean(np.abs(square_SL - exact_L**2) < student * error_SL)

    decoder_jacobian = _jacobians(graphdef(QWEN2), params_of(decoder), jnp.asarray(TOKENS), Switches(), 0, -1, 5, ("hidden",))["hidden"]
    jacobian_DLD, rng, hits = np.asarray(decoder_jacobian, np.float64), np.random.default_rng(0), []
    for _ in range(4000):
        frame_KD = np.linalg.qr(rng.normal(size=(24, 4)))[0].T
        square_KL = 24 * np.sum(np.einsum("KD,DLE->KLE", frame_KD, jacobian_DLD) ** 2, axis=2)
        error_L = square_KL.std(0, ddof=1) / 2 * np.sqrt(1 - 4 / 24)
        hits.append(np.abs(square_KL.mean(0) - exact_L**2) < student * error_L)
    assert abs(covered - np.mean(hits)) < 3 * np.sqrt(0.9 * 0.1 / 400)


def test_logits_take_probes_too():
    """Probes of the vocabulary: unbiased within 4 standard errors over 100 draws."""
    decoder = birth(QWEN2, 0)
    exact_L = influence(decoder, TOKENS, output="logits", chunk=8).influence_L.astype(np.float64)
    draws = [influence(decoder, TOKENS, output="logits", probes=4, seed=seed, chunk=4) for seed in range(100)]
    square_SL = np.stack([d.influence_L for d in draws]).astype(np.float64) ** 2
    assert np.all(np.abs(square_SL.mean(0) - exact_L**2) < 4 * square_SL.std(0, ddof=1) / 10)


def test_a_network_that_grows_beyond_the_enlarged_cotangent_is_measured_all_the_same():
    """A skip of 3e4 six times over: 7e26, times 2^64 no float32."""
    measured = influence(birth(QWEN2, 0), TOKENS, Switches(**DEFAULTS | dict(residual=3e4)), output="stream")
    np.testing.assert_allclose(measured.influence_L[-1], np.sqrt(24) * 3e4**6, rtol=1e-3)


def test_a_network_of_one_position_has_one_influence():
    measured = influence(birth(QWEN2, 0), TOKENS[:1])
    assert measured.influence_L.shape == (1,) and measured.influence_L[0] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(output="logit"), r"output='logit': allowed are hidden, stream"),
        (dict(source=3), r"source=3: allowed are 0 to 2"),
        (dict(read=11), r"read=11: allowed are 0 to 10"),
        (dict(probes=1), r"probes=1: allowed are 2 to 24"),
        (dict(probes=25), r"probes=25: allowed are 2 to 24"),
        (dict(chunk=0), r"chunk=0: must be a positive integer"),
        (dict(output="loss"), r"target=None: the loss at the last position needs"),
        (dict(output="loss", target=37), r"target=37: allowed are 0 to 36"),
        (dict(output="loss", target=-5), r"target=-5: allowed are 0 to 36"),
        (dict(probes=2, seed=2**32), r"seed=4294967296: must be an integer from 0 to 4294967295"),
        (dict(switches=Switches(residual=-1.0)), r"residual=-1.0: allowed are numbers of at least 0"),
        (dict(tokens_L=[37]), r"tokens hold the id 37: allowed are 0 to 36"),
        (dict(tokens_L=[]), r"tokens: must be one sequence"),
        (dict(tokens_L=[[1, 2]]), r"tokens: must be one sequence"),
        (dict(tokens_L=[0.5]), r"tokens: must be one sequence"),
    ],
)
def test_bad_arguments_are_refused_with_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        influence(birth(QWEN2, 0), **(dict(tokens_L=TOKENS) | arguments))
    assert "\n" not in str(caught.value)
