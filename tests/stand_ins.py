"""What tests put in place of things from outside: Hugging Face checkpoints, a tokenizer, an architecture of one's own."""

import json

import numpy as np
from safetensors.numpy import save_file

import lim
from lim.attention import attend
from lim.model import Block, attention_switches

D, F, V, P, N, E = 6, 10, 9, 7, 3, 2  # width, inner, vocabulary, positions, heads, head width
GPT2 = dict(model_type="gpt2", n_layer=2, n_embd=D, n_head=N, n_inner=F, vocab_size=V, n_positions=P,
            layer_norm_epsilon=1e-5)  # fmt: skip
LLAMA = dict(model_type="llama", num_hidden_layers=2, hidden_size=D, num_attention_heads=N, num_key_value_heads=1,
             head_dim=E, intermediate_size=F, vocab_size=V, max_position_embeddings=P, rms_norm_eps=1e-5,
             rope_theta=1e4, tie_word_embeddings=False)  # fmt: skip
QWEN2 = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}


def shapes(config):
    """The names and shapes that transformers writes, spelled out apart from the library's table."""
    if config["model_type"] == "gpt2":
        d, f, v, p = (config[name] for name in ("n_embd", "n_inner", "vocab_size", "n_positions"))
        block = {"ln_1.weight": [d], "ln_1.bias": [d], "attn.c_attn.weight": [d, 3 * d], "attn.c_attn.bias": [3 * d],
                 "attn.c_proj.weight": [d, d], "attn.c_proj.bias": [d], "ln_2.weight": [d], "ln_2.bias": [d],
                 "mlp.c_fc.weight": [d, f], "mlp.c_fc.bias": [f], "mlp.c_proj.weight": [f, d],
                 "mlp.c_proj.bias": [d]}  # fmt: skip
        named = {"transformer.wte.weight": [v, d], "transformer.wpe.weight": [p, d],
                 "transformer.ln_f.weight": [d], "transformer.ln_f.bias": [d]}  # fmt: skip
        return named | {f"transformer.h.{i}.{name}": shape for i in range(config["n_layer"]) for name, shape in block.items()}
    d, f, v = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    block = {"input_layernorm.weight": [d], "self_attn.q_proj.weight": [queries, d], "self_attn.k_proj.weight": [keys, d],
             "self_attn.v_proj.weight": [keys, d], "self_attn.o_proj.weight": [d, queries],
             "post_attention_layernorm.weight": [d], "mlp.gate_proj.weight": [f, d], "mlp.up_proj.weight": [f, d],
             "mlp.down_proj.weight": [d, f]}  # fmt: skip
    if config["model_type"] == "qwen2":
        block |= {"self_attn.q_proj.bias": [queries], "self_attn.k_proj.bias": [keys], "self_attn.v_proj.bias": [keys]}
    named = {"model.embed_tokens.weight": [v, d], "model.norm.weight": [d]}
    named |= {} if config["tie_word_embeddings"] else {"lm_head.weight": [v, d]}
    return named | {f"model.layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in block.items()}


def tensors(config, dtype=np.float32):
    """Every number of the checkpoint another one, small enough for bfloat16 to tell apart only roughly."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes(config).items()}


def written(folder, config, weights, shards=1):
    """The folder, with config.json and these weights in one file or in several."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names, index = sorted(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in names[i::shards]}, folder / file)
        index |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=index)))
    return folder


def write_tokenizer(folder):
    """The folder, with a tokenizer of five words and a begin-of-text mark that it puts before every text."""
    import tokenizers
    import transformers

    words = {"[UNK]": 0, "<s>": 1, "lost": 2, "in": 3, "middle": 4, "the": 7}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="[UNK]")
    fast.save_pretrained(folder)
    assert fast("lost")["input_ids"] == [1, 2]
    return folder


def write_byte_tokenizer(folder):
    """The folder, with a tokenizer of bytes: one that transformers reads beside a config.json of any family."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


class Quiet(Block):
    """Attention writes a tenth of what it does."""

    def __call__(self, x_LD, switches, rows_Q=None):
        q, k, v = self.attention.queries_keys_values(self.attention_input(x_LD, switches), switches, rows_Q)
        x_QD = x_LD if rows_Q is None else x_LD[rows_Q]
        mixed = attend(q, k, v, rows_Q, **attention_switches(switches))
        x_QD = (x_QD if switches.residual is None else switches.residual * x_QD) + 0.1 * self.attention.out(mixed.reshape(len(x_QD), -1))
        return x_QD + self.mlp(self.mlp_norm(x_QD))


class QuietDecoder(lim.Decoder):
    Block = Quiet
