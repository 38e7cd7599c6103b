# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # A first profile
#
# Which positions does a transformer hear before it is trained? We draw four small networks, measure each, and lay two predictions
# beside them: the kernel theory, in absolute units, and the paper's averaging operator, which has a shape only.

# %%
import numpy as np

import lim
from lim import plot

config = lim.Config.preset("small").replace(layers=4, width=64)
length, seeds = 96, 4
print(f"{config.family}, {config.layers} layers, width {config.width}")

# %% [markdown]
# Influence of position j: the Frobenius norm of the Jacobian from the stream at j, as it enters the first block, to the last
# position after the final norm. At this width every direction is pulled back, so each seed's profile is exact.

# %%
profiles_SL = np.array([lim.influence(lim.Decoder.at_birth(config, seed), lim.random_tokens(config.vocab, length, seed)).influence_L for seed in range(seeds)])
value_L, error_L = lim.jackknife(lambda profile_L: profile_L, profiles_SL)  # root mean square over seeds
print(profiles_SL.shape, value_L[[0, length // 2, -2, -1]].round(1))

# %% [markdown]
# The start is loud because every layer averages over the past, again and again; the end because the skips carry the last position
# past all layers. Between them lies the valley.

# %%
summary = lim.summarize(value_L, lim.jackknife(lim.profile.ratios, profiles_SL)[1])
print(f"{summary.shape}: first/middle {summary.primacy:.1f} ± {summary.primacy_se:.1f}, last/middle {summary.recency:.1f} ± {summary.recency_se:.1f}")
print(f"lowest at token {summary.valley + 1} of {length}")

# %% [markdown]
# Now the predictions. The theory knows the Config and nothing of these four draws.

# %%
theory = lim.theory.kernel.predict(config, length)
strength, operator_L = lim.theory.paper.fit(value_L, config)
for name, predicted_L in {"kernel theory": theory.finite_width_L, f"operator, a fitted: {strength:.2f}": operator_L}.items():
    distance, error = lim.jackknife(lambda profile_L: lim.compare(profile_L, predicted_L), profiles_SL)
    print(f"{name}: measured/predicted {distance['ratio']:.2f} ± {error['ratio']:.2f}, shape off by {distance['shape_log_median']:.3f}")

# %% [markdown]
# The axis magnifies both ends, since that is where things happen. The band of the theory is one seed's scatter.

# %%
curves = {"kernel theory": (theory.finite_width_L, theory.cv / 2), f"operator, a fitted: {strength:.2f}": operator_L}
plot.save(plot.influence_figure(value_L, stderr_L=error_L, curves=curves, summary=summary, title="A network at birth"), "first_profile.png")
