"""Our updates, losses and embedding gradients are PyTorch's, on the Hugging Face model of the same weights."""

import jax
import numpy as np
import pytest
from flax import nnx

from lim import checkpoint, train
from lim.model import params_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

RECIPE = train.Recipe(steps=8, batch=4, accumulate=2, learning_rate=3e-3, warmup=0.5, weight_decay=0.3, clip=0.5)
CONFIG = transformers.Qwen2Config(num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=29, num_attention_heads=4,
                                  num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2, max_position_embeddings=32,
                                  rope_parameters=dict(rope_type="default", rope_theta=100.0), attn_implementation="eager")  # fmt: skip


@pytest.fixture(scope="module")
def batches():
    """Three batches of tokens [3, B, L + 1] and of weights, some of them 0, [3, B, L]."""
    rng = np.random.default_rng(0)
    return rng.integers(29, size=(3, 4, 12)).astype(np.int32), (rng.random((3, 4, 11)) * (rng.random((3, 4, 11)) > 0.2)).astype(np.float32)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A torch model, and our Decoder of its weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    folder = tmp_path_factory.mktemp("start")
    model.save_pretrained(folder)
    return model, checkpoint.load(folder)


def torch_losses(model, tokens_BT, **how):
    tokens_BT = torch.as_tensor(tokens_BT).long()
    how = how or dict(input_ids=tokens_BT[:, :-1])
    logits = model(**how).logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens_BT[:, 1:], reduction="none")


def test_losses_and_embedding_gradients(start, batches):
    model, decoder = start
    tokens_BT = batches[0][0]
    np.testing.assert_allclose(train.losses(decoder, tokens_BT), torch_losses(model, tokens_BT).detach(), rtol=2e-5)
    inputs = model.get_input_embeddings()(torch.as_tensor(tokens_BT[:, :-1]).long()).detach().requires_grad_()
    torch_losses(model, tokens_BT, inputs_embeds=inputs).mean(1).sum().backward()
    ours = train.embedding_gradients(nnx.split(decoder)[0], params_of(decoder), train.Switches(), tokens_BT)
    np.testing.assert_allclose(ours, inputs.grad.norm(dim=-1), rtol=1e-4)


def test_three_updates(start, batches, tmp_path):
    model, decoder = start
    trainer = train.Trainer(decoder.config, RECIPE, decoder=decoder)
    seen = [trainer.update(*batch) for batch in zip(*batches)]

    decayed = [p for name, p in model.named_parameters() if "proj.weight" in name or "embed" in name]
    rest = [p for name, p in model.named_parameters() if not ("proj.weight" in name or "embed" in name)]
    groups = [dict(params=decayed, weight_decay=RECIPE.weight_decay), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    for number, (tokens_BT, weights_BL) in enumerate(zip(*batches), 1):
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.learning_rate * number / 4  # the linear warm-up takes half of the 8 steps
        optimizer.zero_grad()
        weights_BL = torch.as_tensor(weights_BL)
        loss = (torch_losses(model, tokens_BT) * weights_BL).sum() / weights_BL.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip)
        assert norm > RECIPE.clip  # or clipping would not be tested
        optimizer.step()
        ours = seen[number - 1]
        np.testing.assert_allclose([ours.loss, ours.gradient_norm, ours.learning_rate], [loss.item(), norm.item(), group["lr"]], rtol=2e-4)
    model.save_pretrained(tmp_path)
    theirs = checkpoint.load(tmp_path)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(params_of(trainer.decoder)), jax.tree.leaves(params_of(theirs))):
        # an update is up to the rate (6.75e-3 in all) whatever the gradient's size: where a gradient is nearly nothing, its rounding shows
        close = np.abs(np.asarray(a) - np.asarray(b)) < 2e-5
        assert close.mean() > 0.995 and np.abs(np.asarray(a) - np.asarray(b)).max() < 2e-3, (path, close.mean())
