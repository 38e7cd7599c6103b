"""What several test modules share: a tiny scale of the claims, and a lab of it that was filled without running a network."""

import numpy as np
import pytest

from lim import claims, ladder, sweep
from lim.theory import cesaro, kernel


@pytest.fixture(scope="session")
def tiny():
    """Sizes at which theory takes milliseconds."""
    return claims.Scale("tiny", qwen2=ladder.shape(64, 3, 24), gpt2=claims.small_gpt2(64, 3, 24), length=24, swept=ladder.shape(64, 3, 24),
                        swept_length=24, depths=(1, 2, 3), skips=(0.0, 0.75, 1.0), target=ladder.shape(64, 3, 24), target_length=24,
                        seeds=4, probes=4, extra_seeds=3)  # fmt: skip


@pytest.fixture(scope="session")
def fill(tiny):
    """Fills a lab in a folder with what theory says, and a little noise."""
    return lambda folder: synthetic_lab(folder, tiny)


def synthetic_lab(folder, scale, noise=0.02, seed=0):
    """A lab whose every measurement is the kernel theory's profile times a little noise, and whose operator is exact."""
    lab, rng = claims.Lab(scale, seed, folder), np.random.default_rng(seed)
    for name, grid in lab.grids.items():
        into = lab.stored(name)
        for c in grid.configurations:
            predicted = sweep.predict(grid, c)
            for s in range(len(grid.seeds)):
                profile_L = predicted["theory"] * np.exp(noise * rng.normal(size=c.length))
                values = dict(influence=profile_L, stderr=0 * profile_L, metrics=np.zeros(len(sweep.METRICS)))
                into.write((*c.place, s), "done", **values, **(predicted if s == 0 else {}))
    n, length, seeds = scale.qwen2.layers, scale.length, scale.extra_seeds
    averaging = np.mean(1 / np.arange(length // 2 + 1, length + 1))
    rows = [cesaro.profile(scale.swept_length, a) for a in claims.identity_strengths(scale.swept.layers)]
    predicted_L = {key: kernel.predict(config, length).influence_L for key, config in (("qwen2", scale.qwen2), ("gpt2", scale.gpt2))}
    extra = {
        "identity": dict(profiles=np.array(rows)),
        "attention": dict(first=averaging * np.exp(0.01 * rng.normal(size=(seeds, n))),
                          rollout=np.tile(cesaro.profile(length, 0.5, layers=n), (seeds, 1)) * np.exp(0.01 * rng.normal(size=(seeds, 1)))),
        "one-pass": {key: p_L * np.exp(0.3 * rng.normal(size=(seeds, length))) for key, p_L in predicted_L.items()},
        "target": {str(L): kernel.predict(scale.target, L).influence_L for L in claims.target_lengths(scale)},
    }  # fmt: skip
    for name, arrays in extra.items():
        np.savez(lab.folder / f"{name}.npz", **arrays)
    return lab
