"""Numbers and tables as every command prints them."""

import math

import pytest

from experiments import cli


@pytest.mark.parametrize(
    "value, error, text",
    [
        (826.3, 465.0, "826 ±465"), (1.183, 0.14, "1.18 ±0.14"), (0.048, 0.019, "0.048 ±0.019"), (15.3, 2.7, "15.3 ±2.7"),
        (13.5312, math.nan, "13.53"), (13.5312, 0.0, "13.53"), (-13.5312, math.nan, "-13.53"), (0.0, math.nan, "0"), (1e-9, math.nan, "1e-09"),
        (0.9994, 3e-4, "0.99940 ±3e-04"), (61234.0, 2100.0, "(6.12 ±0.21)e4"), (4.8e-7, 1e-8, "(4.80 ±0.10)e-7"),
        (0.0005, 0.03, "0.001 ±0.030"), (-0.0005, 0.03, "-0.001 ±0.030"), (5e-6, 3e-4, "(0.1 ±3.0)e-4"), (5.0, 3e5, "(0.0 ±3.0)e5"),
        (0.0, 1e-9, "(0.0 ±1.0)e-9"), (-61234.0, 2100.0, "(-6.12 ±0.21)e4"),
        (math.inf, math.nan, "∞"), (math.nan, math.nan, "–"), (2.0, math.inf, "2"),
    ],
)  # fmt: skip
def test_a_number_has_the_digits_that_its_error_bears(value, error, text):
    assert cli.number(value, error) == text


@pytest.mark.parametrize("header, rows, lines", [
    (["a", "long"], [[1, "x"]], ["a  long", "─  ────", "1     x"]),
    (["a"], [["wide"], [2]], ["   a", "────", "wide", "   2"]),
    (["a", "b"], [], ["a  b", "─  ─"]),
])  # fmt: skip
def test_a_table_is_aligned(header, rows, lines):
    assert cli.table(header, rows).splitlines() == lines
