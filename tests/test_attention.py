"""Attention tile by tile against the plain form in float64, whose weights stand there whole."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lim import attention
from lim.attention import attend, log_admitted, slopes

K, G, E = 2, 3, 8
# Scores reach some 20, and exp magnifies their rounding as much: 20·2^-24, a few times over along the way.
TOLERANCE = 5e-6


def inputs(length, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(length), 4)
    shapes = (length, K, G, E), (length, K, E), (length, K, E), (length, K, G, E)
    return [3 * jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]  # scores of several units


def pulled(attend_all, q, k, v, ct):
    y, pullback = jax.vjp(attend_all, q, k, v)
    return y, *pullback(ct)


def plain(**options):
    return lambda q, k, v: attend(q, k, v, jnp.arange(len(q)), **options)


def close(tiled, whole):
    tiled, whole = ([np.asarray(x, np.float64) for x in xs] for xs in (tiled, whole))
    largest = max(np.abs(b).max() for b in whole)
    for a, b in zip(tiled, whole):
        assert np.abs(a - b).max() <= TOLERANCE * largest


@functools.partial(jax.jit, static_argnames="tile")
def both(numbers, *arrays, tile):
    """Values and pullbacks tile by tile, or of the plain form where tile is None."""
    return pulled(plain(**numbers) if tile is None else lambda q, k, v: attend(q, k, v, tile=tile, **numbers), *arrays)


NUMBERS = [dict(causal=c, uniform=u, score_path=s) for c, u, s in
           [(1, 0, 1), (0, 0, 1), (0.3, 0, 1), (1, 1, 1), (1, 0.4, 1), (1, 0, 0), (0.6, 0.2, 0.7)]]  # fmt: skip
# without causal, which would visit every tile; of one structure, so that two compilations serve them all
REST = dict(window=2**24, prefix=0, alibi=0, uniform=0, score_path=1)
MASKS = [dict(window=9), *(REST | numbers for numbers in (
    dict(window=1, uniform=0.5), dict(window=21, score_path=0.3), {}, dict(prefix=13), dict(prefix=99), dict(window=7, prefix=10, uniform=0.4),
    dict(alibi=1, uniform=0.3), dict(window=12, alibi=0.5), dict(window=11, prefix=5, alibi=2, uniform=0.6, score_path=0.5))),
    dict(REST, causal=0.3, window=11, prefix=5, alibi=2, uniform=0.6, score_path=0.5)]  # fmt: skip


@pytest.mark.parametrize(
    "length, tile, numbers",
    [(50, 8, {}), *((50, 8, numbers) for numbers in NUMBERS + MASKS), (1, 4, NUMBERS[-1]), (16, 8, NUMBERS[-1]), (50, 64, NUMBERS[-1])],
)
def test_tiles_equal_the_whole(length, tile, numbers):
    numbers = {name: np.float32(number) for name, number in numbers.items()}
    tiled = both(numbers, *inputs(length), tile=tile)
    with jax.enable_x64(True):
        wide = {name: np.float64(number) for name, number in numbers.items()}
        whole = both(wide, *(np.asarray(x, np.float64) for x in inputs(length)), tile=None)
    close(tiled, whole)


@pytest.mark.parametrize("options", [{}, dict(causal=0.3, uniform=0.4)], ids=str)
def test_cotangents_side_by_side_equal_one_after_the_other(options, monkeypatch):
    """As on a CPU, where a tile takes them in turn, and as on an accelerator, where it takes them at once."""
    q, k, v, _ = inputs(50)
    ct_CQKGE = jax.random.normal(jax.random.key(1), (3, *q.shape))
    _, pullback = jax.vjp(plain(**options), q, k, v)
    one_by_one = [jnp.stack(parts) for parts in zip(*(pullback(ct) for ct in ct_CQKGE))]
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(attention.jax, "default_backend", lambda: backend)
        _, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, tile=16, **options), q, k, v)
        close(jax.vmap(pullback)(ct_CQKGE), [np.asarray(x, np.float64) for x in one_by_one])


def test_no_array_holds_every_pair():
    """Of 400 positions in tiles of 16 nothing is kept or made that has 400² entries."""
    q, k, v, ct = inputs(400)
    text = str(jax.make_jaxpr(lambda *a: pulled(lambda q, k, v: attend(q, k, v, tile=16), *a))(q, k, v, ct))
    whole = str(jax.make_jaxpr(lambda *a: pulled(plain(), *a))(q, k, v, ct))
    assert "400,400" in whole and "400,400" not in text


def literal(length, causal=1.0, window=math.inf, prefix=0, alibi=0.0, slope=0.0):
    """w of every row and source, from the words of `Switches`, in loops."""
    w_QS = np.zeros((length, length))
    for row in range(length):
        for source in range(length):
            distance = abs(row - source)
            weight = (1.0 if source <= row else 1 - causal) if distance < window else 0.0
            w_QS[row, source] = (1.0 if source < prefix else weight) * math.exp(-alibi * slope * distance)
    return w_QS


@pytest.mark.parametrize("numbers", [{}, dict(causal=0.0), dict(causal=0.25), dict(window=2), dict(causal=0.5, window=3), dict(prefix=4),
                                     dict(window=2, prefix=3), dict(alibi=1.5), dict(causal=0.0, window=4, prefix=1, alibi=0.5)], ids=str)  # fmt: skip
def test_what_is_admitted(numbers):
    positions_L = jnp.arange(7)
    log_w_QS = log_admitted(positions_L[:, None], positions_L, 0.5, **numbers)
    np.testing.assert_allclose(np.exp(log_w_QS), literal(7, slope=0.5, **numbers), rtol=1e-6)


def test_a_window_costs_what_it_shows():
    """Tiles behind the window are not visited: what stands there may be not a number."""
    q, k, v, _ = inputs(64)
    k, v = (x.at[:32].set(jnp.nan) for x in (k, v))
    mixed_QKGE = attend(q, k, v, tile=8, window=9)
    assert np.isfinite(mixed_QKGE[40:]).all() and np.isnan(mixed_QKGE[:33]).all()


def test_slopes_of_eight_and_of_twelve_heads():
    """The paper's: 1/2, 1/4 … 1/256 for 8 heads; its rule for 12 puts every other one of 16 heads behind those of 8."""
    np.testing.assert_allclose(slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_allclose(slopes(12), [*0.5 ** np.arange(1, 9), *0.5 ** np.array([0.5, 1.5, 2.5, 3.5])])
    np.testing.assert_allclose(slopes(1), [1 / 256])


def test_switches_have_no_derivative_tile_by_tile():
    q, k, v, _ = inputs(8)
    with pytest.raises(ValueError, match="causal: no derivative tile by tile; give rows_Q"):
        jax.grad(lambda causal: attend(q, k, v, causal=causal).sum())(0.5)
    assert jax.grad(lambda causal: attend(q, k, v, jnp.arange(8), causal=causal).sum())(0.5) != 0  # the cure
