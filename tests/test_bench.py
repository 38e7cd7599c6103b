"""The bench counts the operations that PyTorch counts."""

import pytest

import lim
from experiments import bench


@pytest.mark.parametrize("model", ["small", "gpt2"])
def test_needed_operations_are_those_that_torch_counts(model):
    """Of all blocks but the last, less the pairs that the mask excludes; of the last only keys and values."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    length, counts = 12, {}
    config = lim.Config.preset(model).replace(layers=3)
    for layers in (0, 1):  # of one block, so that what stands around the blocks drops out
        hf = bench.hf_config(config.replace(layers=layers + 1), transformers)
        hf._attn_implementation = "eager"
        network = transformers.AutoModel.from_config(hf).requires_grad_(False)
        x = torch.randn(1, length, config.width, requires_grad=True)
        with FlopCounterMode(display=False) as forward:
            y = network(inputs_embeds=x, use_cache=False).last_hidden_state
        with FlopCounterMode(display=False) as back:
            torch.autograd.grad(y, x, torch.ones_like(y))
        counts[layers] = forward.get_total_flops(), back.get_total_flops()
    forward, back = (after - before for before, after in zip(counts[0], counts[1]))
    heads, excluded = config.heads * config.head_dim, length * (length - 1) / 2
    last = 4 * length * config.width * config.kv_heads * config.head_dim
    expected = 2 * (forward - 2 * 2 * excluded * heads) + last
    assert bench.needed_flops(config, length, 0) == expected
    assert bench.needed_flops(config, length, 5) == expected + 5 * (2 * (back - 2 * 4 * excluded * heads) + last)


@pytest.mark.parametrize("model", ["small", "gpt2"])
def test_operations_of_an_update_are_those_that_torch_counts(model):
    """Less the pairs that the mask excludes, of which attention makes two products forward and four back."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    length, batch = 12, 2
    config = lim.Config.preset(model).replace(layers=3, vocab=50)
    hf = bench.hf_config(config, transformers)
    hf._attn_implementation, hf.tie_word_embeddings = "eager", config.tied
    network = transformers.AutoModelForCausalLM.from_config(hf)
    tokens_BL = torch.zeros((batch, length), dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        network(input_ids=tokens_BL, use_cache=False).logits.sum().backward()
    excluded = batch * config.layers * length * (length - 1) / 2 * config.heads * config.head_dim
    assert bench.training_flops(config, length, batch) == counted.get_total_flops() - 12 * excluded
