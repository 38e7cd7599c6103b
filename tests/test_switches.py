"""Switches: what is parsed, what is refused, and by which line."""

import dataclasses

import numpy as np
import pytest

from lim.config import Config
from lim.switches import Switches

SMALL, GPT2 = Config.preset("small"), Config.preset("gpt2")


@pytest.mark.parametrize("name, text, value", [("rope", "on", 1), ("rope", "off", 0), ("residual", "0.5", 0.5),
                                               ("residual", "2", 2), ("alpha", "off", 0), ("causal", "1e-3", 0.001),
                                               ("window", "off", 2**24), ("window", "64", 64), ("prefix", "off", 0), ("alibi", "on", 1)])  # fmt: skip
def test_words_and_numbers_are_read(name, text, value):
    assert Switches.parse(name, text) == value


@pytest.mark.parametrize("name, text", [("rope", "maybe"), ("rope", ""), ("rope", "nan"), ("rope", "inf"), ("causal", "2"),
                                        ("causal", "-0.1"), ("alpha", "on"), ("mlp", "0,5"), ("window", "0"), ("window", "on"),
                                        ("window", "2.5"), ("prefix", "-1"), ("prefix", "0.5"), ("alibi", "-1")])  # fmt: skip
def test_other_words_are_refused(name, text):
    with pytest.raises(ValueError, match=f"{name}='{text}': allowed are .*off or a (whole )?number") as caught:
        Switches.parse(name, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config, switches, message",
    [
        (SMALL, dict(residual=1.0, alpha=0.5), "residual and alpha both set"),
        (SMALL, dict(causal=1.5), "causal=1.5: allowed are numbers from 0 to 1"),
        (SMALL, dict(residual=float("nan")), "residual=nan: allowed are numbers of at least 0"),
        (SMALL, dict(residual="off"), "residual='off': must be a number"),
        (SMALL, dict(residual=True), "residual=True: must be a number"),
        (SMALL, dict(residual=object()), "residual=.*: must be a number, or one per layer"),
        (SMALL, dict(window=2.5), "window=2.5: allowed are whole numbers of at least 1"),
        (SMALL, dict(prefix=[0, 1, 2, 3, 4, -5]), "prefix=.*: allowed are whole numbers of at least 0"),
        (SMALL, dict(mlp=[1.0]), r"mlp has shape \(1,\): give one number, or one for each of the 6 layers"),
        (SMALL, dict(positions=0.5), "positions=0.5: qwen2 has none, so only off"),
        (GPT2, dict(rope=1.0), "rope=1.0: gpt2 has none, so only off"),
        (GPT2, dict(positions=[1.0] * 12), r"positions has shape \(12,\): give one number$"),
    ],
)
def test_what_does_not_suit_the_model_is_refused(config, switches, message):
    with pytest.raises(ValueError, match=message):
        Switches(**switches).check(config)


def test_checked_switches_are_float32_and_absent_ones_stay_absent():
    checked = Switches(rope=0, residual=np.float64(0.5), mlp=[1, 0, 1, 0, 1, 0], positions=0).check(SMALL)
    present = {f.name for f in dataclasses.fields(checked) if getattr(checked, f.name) is not None}
    assert present == {"rope", "residual", "mlp"}  # off of what the family lacks is as good as left out
    assert all(getattr(checked, name).dtype == np.float32 for name in present)
    assert checked.per_layer(6).residual.shape == (6,)
