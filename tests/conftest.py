"""What several test modules share: a tiny scale of the claims, and a lab of it that was filled without running a network."""

import dataclasses

import numpy as np
import pytest

from lim import claims, ladder, recall, sweep
from lim.claims import outside
from lim.claims.lab import Training, recalls, small_gpt2
from lim.theory import cesaro, kernel
from lim.train import Recipe


@pytest.fixture(scope="session")
def tiny():
    """Sizes at which theory takes milliseconds."""
    config = ladder.shape(64, 3, 24)
    return claims.Scale("tiny", qwen2=config, gpt2=small_gpt2(64, 3, 24), length=24, swept=config, swept_length=24, depths=(1, 2, 3),
                        skips=(0.0, 0.75, 1.0), target=config, target_length=24, seeds=4, probes=4, extra_seeds=3,
                        training=Training(ladder.shape(64, 2, 20).replace(vocab=257), Recipe(2, 2), length=20, seeds=2, windows=3,
                                          measurements=2, probes=2),
                        recall=dataclasses.replace(recalls(recall.Task(3, 3, 3, 3), 2, arms=("none", "curriculum"), seeds=2),
                                                   evaluations=2, count=4))  # fmt: skip


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
    rows = [cesaro.profile(scale.swept_length, a) for a in outside.identity_strengths(scale.swept.layers)]
    extra = {
        "identity-swept": dict(profiles=np.array(rows)),
        "attention-qwen2": dict(first=outside.averaged_attention(length) * np.exp(0.01 * rng.normal(size=(seeds, n))),
                                rollout=cesaro.profile(length, 0.5, layers=n) * np.exp(0.01 * rng.normal(size=(seeds, 1)))),
        "target-theory": {str(L): kernel.predict(scale.target, L).influence_L for L in outside.target_lengths(scale)},
    }  # fmt: skip
    for name in ("qwen2", "gpt2"):
        predicted_L = kernel.predict(getattr(scale, name), length).influence_L
        extra[f"one-pass-{name}"] = dict(profiles=predicted_L * np.exp(0.3 * rng.normal(size=(seeds, length))))
    for s in lab.block(scale.training.seeds):
        extra[f"training-{s}"] = trained(scale.training, rng)
    for s in lab.block(scale.recall.seeds):
        extra[f"recall-gradients-{s}"] = dict(gradient=np.array([2.0, 1.0, 3.0]) * np.exp(0.01 * rng.normal(size=3)))
        for arm in scale.recall.arms:
            accuracy = np.array([[0, 0, 0], [0.2, 0.1, 0.4], [0.7, 0.3, 0.9], [0.9, 0.6, 1.0]])
            extra[f"recall-{arm}-{s}"] = dict(step=np.arange(4), accuracy=accuracy)
    for name, arrays in extra.items():
        np.savez(lab.folder / f"{name}.npz", **arrays)
    return lab


def trained(sizes, rng):
    """What a training might have left: a U that gets deeper, a peak behind each boundary, a sink in the last layer."""
    steps, length, layers = np.array([0, sizes.recipe.steps]), sizes.length, sizes.config.layers
    u_L = 1 + np.abs(np.linspace(-1, 1, length)) ** 3
    boundary_WL = np.zeros((sizes.windows, length), bool)
    boundary_WL[np.arange(sizes.windows), length // 2 + 2 * np.arange(sizes.windows) - 2] = True
    influence_MWL = np.exp(0.02 * rng.normal(size=(2, sizes.windows, length))) * np.array([u_L, u_L**3])[:, None]
    influence_MWL[1] *= np.where(np.roll(boundary_WL, 1, axis=1), 2.0, 1.0)
    return dict(step=steps, influence=influence_MWL, boundary=boundary_WL, loss=np.array([np.full(length, 5.0), np.full(length, 3.0)]),
                gradient=np.ones((2, length)), rollout=np.full((2, length), 1 / length),
                first_token=outside.averaged_attention(length) * np.array([np.ones(layers), 1 + np.arange(layers)]))  # fmt: skip
