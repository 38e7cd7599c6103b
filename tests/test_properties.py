"""What holds of every network under every switch, of every mask, every theory and every store: hypothesis looks for an exception.

Switches and tokens are drawn as traced numbers, so that what is measured is compiled once; theories take two configs.
"""

import functools
import pathlib
import tempfile

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import HealthCheck, assume, example, given, settings

import lim
from lim import store
from lim.config import Config
from lim.influence import influence
from lim.model import Decoder, graphdef, params_of
from lim.switches import WHOLE, Switches
from lim.theory import averaging, kernel, paper

LENGTH = 7
QWEN2 = Config("qwen2", layers=2, width=12, heads=2, kv_heads=1, head_dim=6, inner=10, vocab=23, max_length=8, norm_eps=1e-12, init_std=0.3)
GPT2 = Config("gpt2", layers=2, width=12, heads=3, kv_heads=3, head_dim=4, inner=10, vocab=23, max_length=8, init_std=0.3)
unit = st.floats(0, 1, width=32) | st.sampled_from([0.0, 1.0])
scale = st.floats(0, 2, width=32)
tokens = st.lists(st.integers(0, 22), min_size=LENGTH, max_size=LENGTH).map(np.array)
reads = st.integers(0, LENGTH - 1)
few = functools.partial(settings, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def masks(length):
    """Numbers of a mask, as `Switches` and `averaging.masks` take them."""
    return st.fixed_dictionaries(dict(causal=unit, window=st.integers(1, length + 1).map(float) | st.just(WHOLE),
                                      prefix=st.integers(0, length).map(float), alibi=scale | st.just(0.0)))  # fmt: skip


def numbers(config, **fixed):
    """A number for every switch, so that one compilation serves all; `fixed` are not drawn."""
    drawn = dict(residual=scale, mlp=unit, norm=unit, uniform_attention=unit, score_path=unit, **{"rope" if config.has_rope else "positions": scale})
    return st.builds(lambda mask, rest: Switches(**mask | rest | fixed), masks(LENGTH), st.fixed_dictionaries(drawn))


@functools.cache
def birth(config):
    return Decoder.at_birth(config, 0)


def admitted(length, causal, window, prefix, **_):
    """Which position j a row i attends to, [L, L]."""
    i, j = np.indices((length, length))
    return ((j <= i) | (causal < 1)) & (abs(i - j) < window) | (j < prefix)


@functools.partial(jax.jit, static_argnums=0)
def _jacobian(structure, params, tokens_L, switches, read):
    decoder = nnx.merge(structure, params)

    def hidden(x_LD):
        return decoder.hidden(decoder.stream(x_LD, switches)[read], switches)

    return jax.jacrev(hidden)(decoder.embed(tokens_L, switches))


@few(max_examples=25)
@given(switches=numbers(QWEN2), tokens_L=tokens, read=reads)
def test_influence_is_the_literal_jacobians_norm_and_exactly_zero_where_no_path_leads(switches, tokens_L, read):
    measured_L = influence(birth(QWEN2), tokens_L, switches, read=read, chunk=5).influence_L  # 12 rows: the last chunk is padded
    jacobian_DLD = _jacobian(graphdef(QWEN2), params_of(birth(QWEN2)), jnp.asarray(tokens_L), switches.check(QWEN2), read)
    expected_L = np.linalg.norm(np.asarray(jacobian_DLD, np.float64), axis=(0, 2))
    np.testing.assert_allclose(measured_L, expected_L, rtol=1e-4, atol=1e-4 * expected_L.max())
    assert np.all(measured_L >= 0)
    one_LL = admitted(LENGTH, switches.causal, switches.window, switches.prefix)
    reached_LL = np.linalg.matrix_power(one_LL + np.eye(LENGTH, dtype=int), QWEN2.layers) > 0
    assert np.all(measured_L[~reached_LL[read]] == 0)


@few(max_examples=20)
@given(data=st.data(), tokens_L=tokens, read=reads)
def test_without_order_influence_goes_with_its_token(data, tokens_L, read):
    """No mask, no positions: the others may change places."""
    switches = data.draw(numbers(QWEN2, rope=0.0, causal=0.0, window=WHOLE, prefix=0.0, alibi=0.0))
    order_L = np.insert(data.draw(st.permutations([j for j in range(LENGTH) if j != read])), read, read)
    one_L, other_L = (influence(birth(QWEN2), ids, switches, read=read).influence_L for ids in (tokens_L, tokens_L[order_L]))
    np.testing.assert_allclose(other_L, one_L[order_L], rtol=1e-4, atol=1e-4 * one_L.max())


@few(max_examples=20)
@given(data=st.data(), tokens_L=tokens, read=reads, factor=st.floats(0.125, 8))
def test_under_a_norm_influence_falls_as_the_embedding_grows(data, tokens_L, read, factor):
    """Without a skip the network sees its input through RMSNorm alone, whose output does not change."""
    switches = data.draw(numbers(QWEN2, residual=0.0, norm=1.0))
    larger = nnx.clone(birth(QWEN2))
    larger.embedding.embedding[...] = factor * larger.embedding.embedding[...]
    one_L, other_L = (influence(decoder, tokens_L, switches, read=read).influence_L for decoder in (birth(QWEN2), larger))
    np.testing.assert_allclose(factor * other_L, one_L, rtol=1e-3, atol=1e-4 * one_L.max())


@few(max_examples=200)
@given(st.integers(1, 12).flatmap(lambda length: st.tuples(st.just(length), masks(length))), st.integers(1, 6))
def test_rows_of_every_mask_are_averages_over_what_it_admits(drawn, heads):
    length, mask = drawn
    each = averaging.masks(length, heads=heads, **mask)
    assert len(each) == (heads if mask["alibi"] else 1)
    for one in each:
        m_LL = np.ones((length, length))
        one.weigh(m_LL, slice(0, length), slice(0, length))
        np.testing.assert_allclose(m_LL.sum(1), 1, rtol=1e-13)
        assert np.all(m_LL >= 0) and np.all(m_LL[~admitted(length, **mask)] == 0)


@few(max_examples=60)
@given(st.sampled_from([QWEN2, GPT2]).flatmap(lambda c: st.tuples(st.just(c), numbers(c))), st.integers(1, 8), st.data())
def test_the_operator_is_an_average(drawn, length, data):
    config, switches = drawn
    assume(switches.residual > 1e-3 or not config.has_rope)
    operator_L = paper.predict(config, length, switches, source=data.draw(st.integers(0, 1)), read=data.draw(st.integers(0, length - 1)))
    assert np.all(operator_L >= 0)
    np.testing.assert_allclose(operator_L.sum(), 1, rtol=1e-12)


@few(max_examples=60)
@given(st.sampled_from([QWEN2, GPT2]).flatmap(lambda c: st.tuples(st.just(c), numbers(c, norm=1.0))), tokens, st.permutations(range(23)), reads)
def test_theory_is_finite_and_knows_tokens_by_their_repetitions_alone(drawn, tokens_L, names, read):
    config, switches = drawn
    try:
        one, other = (kernel.predict(config, LENGTH, switches, tokens=ids, read=read).influence_L for ids in (tokens_L, np.array(names)[tokens_L]))
    except ValueError:  # too far from uniform attention, and it says so
        assume(False)
    assert np.all(np.isfinite(one)) and np.all(one >= 0)
    np.testing.assert_array_equal(one, other)


label = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@few(max_examples=12)
@given(st.lists(label, min_size=1, max_size=3, unique=True), hnp.arrays(np.float64, 5, elements=st.floats(width=64)),
       st.text(st.characters(codec="utf-8")))  # fmt: skip
@example(["\0"], np.zeros(5), "\0")
@example(["a", "a\0", " "], np.array([np.nan, -np.inf, -0.0, 5e-324, 1 / 3]), " e\0\n")
def test_a_store_gives_back_every_bit_under_every_label(labels, profile_L, error):
    with tempfile.TemporaryDirectory() as folder:
        into = store.Store(pathlib.Path(folder), axes={"rope": (labels, [1.0] * len(labels))}, seeds=(3,), length=5, metrics=("a",), theory_metrics=("b",),
                           grid=dict(axes={"rope": labels}), attributes=dict(flags=dict(rope=labels)))  # fmt: skip
        into.write((len(labels) - 1, 0), "failed", influence=profile_L, error=error)
        ds = lim.open(folder).load()
    cell = ds.isel(rope=-1).sel(seed=3)  # xarray takes a NUL off the end of a label that it is asked for
    np.testing.assert_array_equal(cell.influence.values.view(np.uint64), profile_L.view(np.uint64))
    assert list(ds.rope.values) == labels and ds.attrs["flags"]["rope"] == labels and cell.error.item() == error
