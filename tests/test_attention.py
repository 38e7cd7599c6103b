"""Attention tile by tile against the plain form in float64, whose weights stand there whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lim import attention
from lim.attention import admitted, attend

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


@functools.partial(jax.jit, static_argnames=("tile", "window"))
def both(numbers, *arrays, tile, window=None):
    """Values and pullbacks tile by tile, or of the plain form where tile is None."""
    options = dict(window=window, **numbers)
    return pulled(plain(**options) if tile is None else lambda q, k, v: attend(q, k, v, tile=tile, **options), *arrays)


NUMBERS = [dict(causal=c, uniform=u, score_path=s) for c, u, s in
           [(1, 0, 1), (0, 0, 1), (0.3, 0, 1), (1, 1, 1), (1, 0.4, 1), (1, 0, 0), (0.6, 0.2, 0.7)]]  # fmt: skip


@pytest.mark.parametrize(
    "length, tile, window, numbers",
    [(50, 8, None, {}), *((50, 8, None, numbers) for numbers in NUMBERS), (50, 8, 9, {}), (50, 8, 1, dict(uniform=0.5)),
     (50, 8, 21, dict(score_path=0.3)), (1, 4, None, NUMBERS[-1]), (16, 8, None, NUMBERS[-1]), (50, 64, None, NUMBERS[-1])],
)  # fmt: skip
def test_tiles_equal_the_whole(length, tile, window, numbers):
    numbers = {name: np.float32(number) for name, number in numbers.items()}
    tiled = both(numbers, *inputs(length), tile=tile, window=window)
    with jax.enable_x64(True):
        wide = {name: np.float64(number) for name, number in numbers.items()}
        whole = both(wide, *(np.asarray(x, np.float64) for x in inputs(length)), tile=None, window=window)
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


def test_weights_outside_the_window_are_zero():
    w_QS = admitted(jnp.arange(6), 6, window=2)
    np.testing.assert_array_equal(w_QS, np.eye(6) + np.eye(6, k=-1))


def test_switches_have_no_derivative_tile_by_tile():
    q, k, v, _ = inputs(8)
    with pytest.raises(ValueError, match="causal: no derivative tile by tile; give rows_Q"):
        jax.grad(lambda causal: attend(q, k, v, causal=causal).sum())(0.5)
    assert jax.grad(lambda causal: attend(q, k, v, jnp.arange(8), causal=causal).sum())(0.5) != 0  # the cure


def test_a_window_goes_with_the_mask_alone():
    q, k, v, _ = inputs(8)
    with pytest.raises(ValueError, match="window=3"):
        attend(q, k, v, causal=0.5, window=3)
