"""Gaussian expectations against closed forms and against adaptive quadrature."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate
from scipy.special import expit

from lim.theory import averaging, gaussian

U = np.linspace(-6, 6, 49)


def correlations(size, seed=0):
    x = np.random.default_rng(seed).normal(size=(size, 3))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x @ x.T


def test_silu():
    np.testing.assert_allclose(gaussian.SILU(U), U * expit(U), rtol=1e-13, atol=1e-15)
    slope = expit(U) * (1 + U * (1 - expit(U)))
    np.testing.assert_allclose(gaussian.SILU.slope(U), slope, rtol=1e-12, atol=1e-14)


def test_tanh_gelu():
    # jax.nn.gelu in float32: values and slopes of order 1 to 6, so a few units of 1e-6 are its rounding.
    gelu = functools.partial(jax.nn.gelu, approximate=True)
    np.testing.assert_allclose(gaussian.GELU(U), gelu(jnp.asarray(U, jnp.float32)), atol=2e-6)
    np.testing.assert_allclose(gaussian.GELU.slope(U), jax.vmap(jax.grad(gelu))(jnp.asarray(U, jnp.float32)), atol=5e-6)
    step = 1e-5
    difference = (gaussian.GELU(U + step) - gaussian.GELU(U - step)) / (2 * step)
    np.testing.assert_allclose(gaussian.GELU.slope(U), difference, atol=1e-9)


@pytest.mark.parametrize("activation", [gaussian.SILU, gaussian.GELU])
def test_parities(activation):
    np.testing.assert_allclose(activation.even(U), activation.even(-U), rtol=1e-15)
    np.testing.assert_allclose(activation.odd(U), -activation.odd(-U), rtol=1e-15)


@pytest.mark.parametrize("activation", [gaussian.SILU, gaussian.GELU])
@pytest.mark.parametrize("variance", [1e-4, 0.36, 3.0, 10.0, 20.0])
def test_mean_against_adaptive_quadrature(activation, variance):
    for f in (lambda u: activation(u) ** 4, lambda u: (activation(u) * activation.slope(u)) ** 2):

        def density(x):
            return f(np.sqrt(variance) * x) * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)

        truth = sum(integrate.quad(density, a, b, epsabs=0, epsrel=1e-12)[0] for a, b in ((-14, 0), (0, 14)))
        np.testing.assert_allclose(gaussian.mean(f, variance), truth, rtol=5e-12)


def test_mean_keeps_shapes():
    variance = np.array([[0.5, 1.0], [2.0, 0.0]])
    np.testing.assert_allclose(gaussian.mean(np.cos, variance), np.exp(-variance / 2), rtol=1e-14)


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("scale", [1e-3, 0.4, 2.0, 10.0])
def test_pair_mean_of_sines_and_cosines(scale, rows, monkeypatch):
    # E[cos u cos u'] = e^{-(v+v')/2} cosh c and E[sin u sin u'] = e^{-(v+v')/2} sinh c, c the covariance.
    size = 9
    monkeypatch.setattr(averaging, "BLOCK_ENTRIES", rows * size)
    variance = scale * np.linspace(0.3, 1.0, size)
    correlation = correlations(size)
    covariance = correlation * np.sqrt(np.outer(variance, variance))
    damping = np.exp(-np.add.outer(variance, variance) / 2)
    # the series' promise: 2e-14 of the geometric mean of the two second moments, plus rounding
    even, odd = (np.cos, False, damping * np.cosh(covariance)), (np.sin, True, damping * np.sinh(covariance))
    for f, parity, truth in (even, odd):
        error = np.abs(gaussian.pair_mean(f, parity, variance, correlation) - truth)
        assert np.max(error / np.sqrt(np.outer(np.diag(truth), np.diag(truth)))) < 5e-14


@pytest.mark.parametrize("activation", [gaussian.SILU, gaussian.GELU])
def test_pair_mean_of_activations_against_two_dimensional_quadrature(activation):
    variance = np.array([0.2, 0.5, 1.1, 0.7])
    correlation = correlations(4)
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    for f, odd in ((activation.even, False), (activation.odd, True)):
        found = gaussian.pair_mean(f, odd, variance, correlation)
        for i in range(4):
            for j in range(4):
                rho = min(1.0, correlation[i, j])
                other = rho * nodes[:, None] + np.sqrt(1 - rho**2) * nodes
                values = f(np.sqrt(variance[i]) * nodes)[:, None] * f(np.sqrt(variance[j]) * other)
                np.testing.assert_allclose(found[i, j], weights @ values @ weights, rtol=1e-10, atol=1e-13)


def test_equal_tokens_are_fully_correlated():
    variance = np.full(5, 0.8)
    found = gaussian.pair_mean(gaussian.SILU.even, False, variance, np.ones((5, 5)))
    np.testing.assert_allclose(found, gaussian.mean(lambda u: gaussian.SILU.even(u) ** 2, 0.8), rtol=5e-14)


def test_coefficients_sum_to_the_second_moment():
    for variance in (0.01, 0.36, 3.0):
        coefficients, missing, second = gaussian.hermite_coefficients(gaussian.GELU.odd, True, np.array([variance]))
        np.testing.assert_allclose(np.sum(coefficients**2), second[0], rtol=5e-14)
        assert missing[-1] < 2e-14 < missing[0]


@pytest.mark.parametrize("variance", [-1.0, 21.0, np.nan])
def test_refuses_variances_out_of_range(variance):
    with pytest.raises(ValueError, match="preactivations need a variance from 0 to 20"):
        gaussian.mean(np.cos, variance)


def test_refuses_a_series_that_does_not_converge():
    with pytest.raises(ValueError, match="1024 orders"):
        gaussian.pair_mean(np.abs, False, np.ones(2), np.ones((2, 2)))
