"""Every tensor of a checkpoint goes to its one place, and a checkpoint that is not exactly right is refused in full."""

import json
import pathlib
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from stand_ins import GPT2, LLAMA, QWEN2, D, E, F, N, P, V, tensors, written

from lim import checkpoint
from lim.model import Decoder, params_of


def faults(folder):
    """The lines of the refusal, the first (which names the folder) apart."""
    with pytest.raises(ValueError) as refusal:
        checkpoint.load(folder)
    first, *lines = str(refusal.value).split("\n  ")
    assert str(folder) in first
    assert f"({len(lines)} fault" in first if lines else True
    return lines or [first]


def leaves(decoder):
    paths = jax.tree_util.tree_leaves_with_path(params_of(decoder))
    return {".".join(key.key for key in path): np.asarray(leaf) for path, leaf in paths}


@pytest.mark.parametrize("config", [GPT2, QWEN2, LLAMA], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_number_lands_once(config, prefixed, shards, tmp_path):
    weights = tensors(config)
    if not prefixed:
        weights = {name.removeprefix("transformer.").removeprefix("model."): v for name, v in weights.items()}
    decoder = checkpoint.load(written(tmp_path, config, weights, shards))
    landed = np.concatenate([leaf.ravel() for leaf in leaves(decoder).values()])
    there = np.concatenate([weight.ravel() for weight in weights.values()])
    np.testing.assert_array_equal(np.sort(landed), np.sort(there))
    assert decoder.config.family == config["model_type"]


def test_places_of_gpt2(tmp_path):
    """Conv1D keeps [in, out], the fused projection is query, key, value, and layers stack in order."""
    weights = tensors(GPT2)
    got = leaves(checkpoint.load(written(tmp_path, GPT2, weights)))
    for layer in (0, 1):
        fused = weights[f"transformer.h.{layer}.attn.c_attn.weight"]
        np.testing.assert_array_equal(got["blocks.attention.query.kernel"][layer], fused[:, :D])
        np.testing.assert_array_equal(got["blocks.attention.key.kernel"][layer], fused[:, D : 2 * D])
        np.testing.assert_array_equal(got["blocks.attention.value.kernel"][layer], fused[:, 2 * D :])
        down = weights[f"transformer.h.{layer}.mlp.c_proj.weight"]
        np.testing.assert_array_equal(got["blocks.mlp.down.kernel"][layer], down)
    np.testing.assert_array_equal(got["positions.embedding"], weights["transformer.wpe.weight"])


def test_places_of_llama(tmp_path):
    """torch's Linear is [out, in], the square one too; the head is one, the embedding is not."""
    weights = tensors(LLAMA)
    got = leaves(checkpoint.load(written(tmp_path, LLAMA, weights)))
    for layer in (0, 1):
        for ours, theirs in (("query", "q_proj"), ("out", "o_proj"), ("key", "k_proj")):
            weight = weights[f"model.layers.{layer}.self_attn.{theirs}.weight"]
            np.testing.assert_array_equal(got[f"blocks.attention.{ours}.kernel"][layer], weight.T)
        norm = weights[f"model.layers.{layer}.post_attention_layernorm.weight"]
        np.testing.assert_array_equal(got["blocks.mlp_norm.scale"][layer], norm)
    np.testing.assert_array_equal(got["head.kernel"], weights["lm_head.weight"].T)
    np.testing.assert_array_equal(got["embedding.embedding"], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("file", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("ours", [jnp.float32, jnp.float16, jnp.bfloat16], ids=lambda d: np.dtype(d).name)
def test_dtypes(file, ours, tmp_path):
    weights = tensors(QWEN2, file)
    got = leaves(checkpoint.load(written(tmp_path, QWEN2, weights), ours))
    assert {leaf.dtype for leaf in got.values()} == {np.dtype(ours)}
    np.testing.assert_array_equal(got["embedding.embedding"], weights["model.embed_tokens.weight"].astype(ours))


def test_weights_kept_narrow_give_the_same_numbers(tmp_path):
    """The arithmetic is float32 either way."""
    folder = written(tmp_path, QWEN2, tensors(QWEN2, ml_dtypes.bfloat16))
    narrow, wide = (checkpoint.load(folder, dtype)(np.arange(5)) for dtype in (jnp.bfloat16, jnp.float32))
    assert narrow.dtype == wide.dtype == jnp.float32
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=1e-5 * np.max(np.abs(wide)))


def test_from_pretrained(tmp_path):
    folder = written(tmp_path, GPT2, tensors(GPT2))
    got, same = leaves(Decoder.from_pretrained(str(folder))), leaves(checkpoint.load(folder))
    assert all(np.array_equal(got[name], same[name]) for name in same)


class Other(Decoder):
    """A Decoder of one's own, of the published weights."""


class More(Decoder):
    """One with a weight that no checkpoint holds."""

    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.gain = nnx.Param(jnp.ones(3))


def test_a_subclass_reads_a_checkpoint_as_itself(tmp_path):
    folder = written(tmp_path, LLAMA, tensors(LLAMA))
    got, same = Other.from_pretrained(folder), leaves(checkpoint.load(folder))
    assert type(got) is Other and all(np.array_equal(leaves(got)[name], same[name]) for name in same)
    with pytest.raises(ValueError, match=r"\(1 fault\):\n  gain of the Decoder has no tensor in checkpoints of llama$"):
        More.from_pretrained(folder)


def test_buffers_of_old_releases_are_no_weights(tmp_path):
    extra = {f"transformer.h.{i}.attn.{name}": np.ones((1, 1, P, P), np.uint8) for i in (0, 1)
             for name in ("bias", "masked_bias")}  # fmt: skip
    checkpoint.load(written(tmp_path / "gpt2", GPT2, tensors(GPT2) | extra))
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(E // 2, np.float32) for i in (0, 1)}
    checkpoint.load(written(tmp_path / "llama", LLAMA, tensors(LLAMA) | extra))


def test_a_tied_head_must_be_the_embedding(tmp_path):
    weights = tensors(GPT2)
    head = weights["transformer.wte.weight"].copy()
    checkpoint.load(written(tmp_path, GPT2, weights | {"lm_head.weight": head}))
    head[3, 4] = np.nextafter(head[3, 4], 9, dtype=np.float32)
    lines = faults(written(tmp_path, GPT2, weights | {"lm_head.weight": head}))
    assert len(lines) == 1 and "lm_head.weight differs from transformer.wte.weight" in lines[0]


def test_an_untied_head_must_be_there(tmp_path):
    weights = tensors(LLAMA)
    del weights["lm_head.weight"]
    assert faults(written(tmp_path, LLAMA, weights)) == ["lm_head.weight is missing"]


def test_all_faults_are_listed(tmp_path):
    """Seven things wrong in one checkpoint make seven lines."""
    weights = tensors(QWEN2)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.2.mlp.up_proj.weight"] = np.ones((F, D), np.float32)
    weights["model.layers.0.mlp.down_proj.weight"] = np.ones((F, D), np.float32)
    weights["model.layers.0.self_attn.q_proj.weight"] = np.ones((N * E, D), np.int8)
    weights["model.norm.weight"][2] = np.nan
    weights["model.layers.1.self_attn.v_proj.bias"][0] = -np.inf
    weights["norm.weight"] = np.ones(D, np.float32)
    lines = faults(written(tmp_path, QWEN2, weights))
    for line in (
        "model.layers.0.mlp.down_proj.weight has shape [10, 6]: this config needs [6, 10]",
        "model.layers.0.self_attn.q_proj.weight holds I8: allowed are F32, BF16, F16",
        "model.layers.1.self_attn.v_proj.bias holds NaN or infinite values (1 of 2)",
        "model.layers.2.mlp.up_proj.weight is extra",
        "model.norm.weight holds NaN or infinite values (1 of 6)",
        "norm.weight is there twice, also as model.norm.weight",
        "layers.1.mlp.up_proj.weight is missing",
    ):
        assert line in lines
        lines.remove(line)
    assert not lines


def test_other_sizes_are_refused(tmp_path):
    """A layer fewer, a token more, heads of llama in qwen2: the config decides."""
    weights = tensors(LLAMA)
    lines = faults(written(tmp_path, {**LLAMA, "num_hidden_layers": 1}, weights))
    assert len(lines) == 9 and all(line.startswith("model.layers.1.") and "extra" in line for line in lines)
    lines = faults(written(tmp_path, {**LLAMA, "vocab_size": V + 1}, weights))
    assert [line.split()[0] for line in lines] == ["lm_head.weight", "model.embed_tokens.weight"]
    lines = faults(written(tmp_path, {**LLAMA, "model_type": "qwen2"}, weights))
    assert len(lines) == 6 and all("proj.bias is missing" in line for line in lines)
    lines = faults(written(tmp_path, {**QWEN2, "model_type": "llama"}, tensors(QWEN2)))
    assert len(lines) == 6 and all("proj.bias is extra" in line for line in lines)


def test_overflow_of_a_narrow_dtype_is_refused(tmp_path):
    weights = tensors(LLAMA)
    weights["model.norm.weight"][1] = 1e6  # beyond float16
    folder = written(tmp_path, LLAMA, weights)
    checkpoint.load(folder)
    with pytest.raises(ValueError, match="model.norm.weight holds NaN or infinite values .1 of 6."):
        checkpoint.load(folder, jnp.float16)
    with pytest.raises(ValueError, match="dtype=int8: allowed are float32"):
        checkpoint.load(folder, jnp.int8)


@pytest.mark.parametrize("damage", ["half", "header only", "empty", "no header", "huge header", "bad json", "overlap"])
def test_a_damaged_file_is_refused(damage, tmp_path):
    file = written(tmp_path, LLAMA, tensors(LLAMA)) / "model.safetensors"
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header["model.norm.weight"]["data_offsets"] = header["lm_head.weight"]["data_offsets"]
    overlap = json.dumps(header).encode().ljust(size)
    file.write_bytes({
        "half": content[: len(content) // 2],
        "header only": content[: 8 + size],
        "empty": b"",
        "no header": content[:5],
        "huge header": struct.pack("<Q", 1 << 60) + content[8:],
        "bad json": content[:8] + b"x" + content[9:],
        "overlap": struct.pack("<Q", len(overlap)) + overlap + content[8 + size :],
    }[damage])  # fmt: skip
    assert "model.safetensors cannot be read: " in faults(tmp_path)[0]


def test_a_damaged_shard_leaves_the_others_checked(tmp_path):
    weights = tensors(LLAMA)
    weights["model.norm.weight"][0] = np.nan
    folder = written(tmp_path, LLAMA, weights, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    good = index["model.norm.weight"]
    for file in set(index.values()) - {good}:
        (folder / file).write_bytes(b"")
    lines = faults(folder)
    assert len(lines) == 3 and sum("cannot be read" in line for line in lines) == 2
    assert any("model.norm.weight holds NaN" in line for line in lines)


def test_an_index_that_lies_is_refused(tmp_path):
    folder = written(tmp_path / "model", LLAMA, tensors(LLAMA), shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    outside = written(tmp_path / "outside", LLAMA, tensors(LLAMA)) / "model.safetensors"
    for evil in ("../outside/model.safetensors", str(outside), "sub/x.safetensors", "..", "weights.bin", 7, None):
        path.write_text(json.dumps(dict(weight_map={**index, "model.norm.weight": evil})))
        lines = faults(folder)
        assert any(f"puts model.norm.weight into {evil!r}: must be" in line for line in lines)

    first, second = sorted(set(index.values()))
    moved = {**index, "model.norm.weight": first if index["model.norm.weight"] == second else second}
    path.write_text(json.dumps(dict(weight_map=moved)))
    lines = faults(folder)
    assert len(lines) == 2 and any("lacks model.norm.weight" in line for line in lines)
    assert any("holds model.norm.weight, which the index does not put there" in line for line in lines)

    path.write_text(json.dumps(dict(weight_map={**index, "model.norm.weight": "model-9.safetensors"})))
    assert any("model-9.safetensors cannot be read" in line for line in faults(folder))
    pairs = [*index.items(), ("model.norm.weight", index["model.norm.weight"])]
    pairs = ", ".join(f"{json.dumps(name)}: {json.dumps(file)}" for name, file in pairs)
    path.write_text(f'{{"weight_map": {{{pairs}}}}}')
    assert faults(folder) == ["model.safetensors.index.json names model.norm.weight 2 times"]
    for broken in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": null}', "[" * 100_000):
        path.write_text(broken)
        assert "cannot be read as an index of shards" in faults(folder)[0]


@pytest.mark.parametrize("sizes, message", [
    (dict(vocab_size=10**12), ""),  # no room, or, where the system promises more than it has, other shapes
    (dict(hidden_size=2**62), "config.json asks for weights that do not fit into memory: "),
    (dict(num_hidden_layers=1000), "config.json has 1000 layers, and the files hold 21 tensors"),
])  # fmt: skip
def test_sizes_beyond_all_measure_are_refused(sizes, message, tmp_path):
    line = faults(written(tmp_path, {**LLAMA, **sizes}, tensors(LLAMA)))[0]
    assert message in line and "\n" not in line


def test_names_that_a_terminal_would_obey_are_spelled_out(tmp_path):
    odd = {"a\nb": np.ones(1, np.float32), "\x1b[31mred": np.ones(1, np.float32)}
    assert faults(written(tmp_path, LLAMA, tensors(LLAMA) | odd)) == [r"\x1b[31mred is extra", r"a\nb is extra"]


def test_a_pickle_is_never_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04not read")
    line = faults(tmp_path)[0]
    assert "pickle, never read" in line and "save_pretrained" in line and "\n" not in line


def test_a_source_that_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "absent", "./absent", "~/absent/model", "/absent", "a/b/c", "../x", tmp_path / "file"):
        with pytest.raises(ValueError, match="no such folder"):
            checkpoint.load(path)
    with pytest.raises(ValueError, match="config.json: cannot be read"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match="no model.safetensors and no model.safetensors.index.json"):
        checkpoint.load(tmp_path)


def test_an_unsupported_config_is_refused(tmp_path):
    folder = written(tmp_path, {**LLAMA, "model_type": "mamba"}, tensors(LLAMA))
    assert "model_type='mamba'" in faults(folder)[0]


def test_a_hub_id_is_fetched_without_pickles(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def snapshot_download(repo_id, allow_patterns):
        asked.update(repo_id=repo_id, allow_patterns=allow_patterns)
        return str(written(tmp_path, LLAMA, tensors(LLAMA)))

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    checkpoint.load("some-body/a.model-1B")
    assert asked["repo_id"] == "some-body/a.model-1B"
    there = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors", "model.safetensors.index.json",
             "tokenizer.json", "tokenizer.model", "merges.txt", "pytorch_model.bin", "onnx/model.onnx", "code.py",
             "original/consolidated.safetensors", "tf_model.h5"]  # fmt: skip
    fetched = list(hub.utils.filter_repo_objects(there, allow_patterns=asked["allow_patterns"]))
    assert fetched == there[:7]

    def offline(repo_id, allow_patterns):
        raise OSError("Name or service not known\nmore\nlines")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="some/model: no such folder, and the Hugging Face hub did not") as refusal:
        checkpoint.load("some/model")
    assert "\n" not in str(refusal.value) and "download it elsewhere" in str(refusal.value)


def test_no_slow_library_is_imported(tmp_path):
    folder = written(tmp_path, QWEN2, tensors(QWEN2, ml_dtypes.bfloat16))
    code = f"""
import sys
from lim import checkpoint
family = checkpoint.load({str(folder)!r}).config.family
print(family, sys.modules.keys() & {{"torch", "transformers", "huggingface_hub"}})
"""
    root = pathlib.Path(checkpoint.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "qwen2 set()\n", done.stderr
