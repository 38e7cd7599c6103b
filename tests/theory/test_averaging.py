"""The averaging operator by running sums against the same operator as a dense matrix."""

import numpy as np
import pytest

from lim.theory import averaging

LENGTH = 13


def dense(causal):
    w = np.where(np.tri(LENGTH) > 0, 1.0, 1 - causal)
    return w / w.sum(1, keepdims=True)


@pytest.fixture(params=[1, 2, 5, 1000])
def rows_per_block(request, monkeypatch):
    monkeypatch.setattr(averaging, "BLOCK_ENTRIES", request.param * LENGTH)
    return request.param


def masks():
    for causal in (1.0, 0.3, 0.0):
        yield averaging.Mask(LENGTH, causal), dense(causal)
    m_LL = np.random.default_rng(2).random((LENGTH, LENGTH))
    yield averaging.Dense(m_LL), m_LL / m_LL.sum(1, keepdims=True)


@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("mask, m_LL", list(masks()), ids=["causal", "blend", "full", "any"])
def test_products_with_the_operator(mask, m_LL, dtype):
    rng = np.random.default_rng(0)
    x_SLL = rng.normal(size=(2, LENGTH, LENGTH)).astype(dtype)
    if dtype is complex:
        x_SLL = x_SLL * np.exp(1j * x_SLL)
    for rows, columns in ((slice(2, 9), slice(1, 7)), (slice(0, 4), slice(2, None)), (slice(5, None), slice(0, 5)), (slice(0, 3), slice(8, 11))):
        block = x_SLL[0].real[rows, columns].copy()
        mask.weigh(block, rows, columns)
        np.testing.assert_allclose(block, (m_LL * x_SLL[0].real)[rows, columns], rtol=1e-15)
    np.testing.assert_allclose(mask.average_along(x_SLL), x_SLL @ m_LL.T, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(mask.spread_along(x_SLL), x_SLL @ m_LL, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(mask.average_down(x_SLL[0]), m_LL @ x_SLL[0], rtol=1e-12, atol=1e-14)
    spread_SLL = m_LL.T @ x_SLL
    mask.spread_down(x_SLL)
    np.testing.assert_allclose(x_SLL, spread_SLL, rtol=1e-12, atol=1e-14)


def test_small_entries_are_not_drowned_by_large_ones():
    # Without a skip adjoints fall by tens of decades; each entry must keep its own relative precision.
    x_LL = np.outer(10.0 ** -np.arange(0.0, 3 * LENGTH, 3), np.ones(LENGTH))
    tails = [sum(x_LL[i, 0] / (i + 1) for i in reversed(range(j, LENGTH))) for j in range(LENGTH)]
    mask = averaging.Mask(LENGTH, 1.0)
    np.testing.assert_allclose(mask.spread_along(x_LL.T)[0] * np.ones(LENGTH), tails, rtol=1e-14)
    mask.spread_down(x_LL[None])
    np.testing.assert_allclose(x_LL[:, 0], tails, rtol=1e-14)


def test_matrix_is_filled_by_rows(rows_per_block):
    expected = np.add.outer(np.arange(LENGTH) * 100.0, np.arange(LENGTH))
    np.testing.assert_array_equal(averaging.matrix(lambda rows: expected[rows], LENGTH), expected)
    blocks = averaging.in_blocks(lambda rows: rows, LENGTH)
    assert [i for rows in blocks for i in range(rows.start, rows.stop)] == list(range(LENGTH))


def test_memory_of_arrays_that_are_gone_is_used_again_and_of_living_ones_never():
    with averaging.recycled():
        first = averaging.empty((3, LENGTH))
        view, place = first[1:], first.__array_interface__["data"][0]
        first[:] = 1.0
        del first
        other = averaging.empty((3, LENGTH))  # the view still holds the first one's memory
        other[:] = 2.0
        assert np.all(view == 1.0)
        del view
        assert averaging.empty((LENGTH, 3)).__array_interface__["data"][0] == place  # of the same size
        assert averaging.empty((3, LENGTH), complex).dtype == complex
        kept = averaging.empty((3, LENGTH))
        kept[:] = 3.0
    averaging.matrix(lambda rows: np.zeros((len(range(*rows.indices(LENGTH))), LENGTH)), LENGTH)
    assert np.all(kept == 3.0) and np.all(other == 2.0)


def test_errors_in_a_block_are_raised(rows_per_block):
    with pytest.raises(ZeroDivisionError):
        averaging.in_blocks(lambda rows: 1 // 0, LENGTH)
