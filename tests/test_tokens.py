"""Token ids are reproducible, in range and distinct where the vocabulary allows; texts are cut into windows as told."""

import ast
import dataclasses
import inspect
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from stand_ins import write_byte_tokenizer, write_tokenizer

from lim import tokens
from lim.tokens import encode, random_tokens, read_text, standard_text, windows


@pytest.mark.parametrize("vocab, length", [(1, 1), (7, 7), (50, 49), (151936, 2048), (4096, 4096)])
def test_random_tokens_are_distinct_while_they_last(vocab, length):
    ids = random_tokens(vocab, length, seed=3)
    assert ids.dtype == np.int32 and ids.shape == (length,)
    assert len(set(ids.tolist())) == length and ids.min() >= 0 and ids.max() < vocab


def test_random_tokens_repeat_when_the_vocabulary_is_short():
    ids = random_tokens(5, 1000)
    assert ids.shape == (1000,) and set(ids.tolist()) == set(range(5))


@pytest.mark.parametrize("length", [8, 40])
def test_random_tokens_are_uniform_at_every_position(length):
    """χ² over 4,000 seeds at the first and the last position, with and without repeats, at 1e-4."""
    draws = np.stack([random_tokens(10, length, seed) for seed in range(4000)])
    for position in (0, -1):
        assert stats.chisquare(np.bincount(draws[:, position], minlength=10)).pvalue > 1e-4


def test_random_tokens_follow_the_seed():
    np.testing.assert_array_equal(random_tokens(100, 50, 1), random_tokens(100, 50, 1))
    assert np.any(random_tokens(100, 50, 1) != random_tokens(100, 50, 2))


@pytest.mark.parametrize("name, value", [("vocab", 0), ("vocab", 2.0), ("length", 0), ("length", True), ("seed", -1),
                                         ("seed", "x"), ("seed", None)])  # fmt: skip
def test_random_tokens_refuses(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value!r}: must be an integer of at least"):
        random_tokens(**dict(vocab=9, length=3, seed=0) | {name: value})


def test_read_text(tmp_path):
    file = tmp_path / "text.txt"
    for content, text in ((b"a\r\nb\xc3\xa9\n", "a\nbé\n"), (b"\xef\xbb\xbfmarked", "marked")):
        file.write_bytes(content)
        assert read_text(file) == read_text(str(file)) == text
    for content, word in ((b"ab\xff", "is not UTF-8 text .* at byte 2"), (b"", "no text"), (b" \n\t", "no text")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=word):
            read_text(file)
    for path, word in ((tmp_path / "absent", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ValueError, match=f"cannot be read: .*{word}"):
            read_text(path)


def test_standard_text_is_long_prose():
    text = standard_text()
    assert len(text) > 300_000 and text == standard_text()
    assert "assignment" in text and len(set(text.split())) > 5000


def test_bytes_without_a_tokenizer():
    ids = encode("aé", None, 256)
    assert ids.dtype == np.int32 and ids.tolist() == [97, 0xC3, 0xA9]
    assert encode("abc", None, 100).tolist() == [97, 98, 99]
    with pytest.raises(ValueError, match=r"^vocab=99: too small for the text, whose ids reach 99 \(bytes\)$"):
        encode("abc", None, 99)
    with pytest.raises(ValueError, match="holds no tokens"):
        encode("", None, 256)
    with pytest.raises(ValueError, match="^vocab=0"):
        encode("abc", None, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_tokenizer_of_a_folder(folder):
    """The text's own tokens, without the mark."""
    assert encode("lost in the middle at", folder, 8).tolist() == [2, 3, 7, 4, 0]
    assert encode("lost", str(folder), 8).dtype == np.int32
    with pytest.raises(ValueError, match="vocab=7: too small for the text, whose ids reach 7"):
        encode("lost in the middle", folder, 7)
    with pytest.raises(ValueError, match="holds no tokens"):
        encode(" ", folder, 8)


def test_no_tokenizer_to_be_had(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama")))
    for source in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="^tokenizer=.*: gives no tokenizer that transformers can read: ") as error:
            encode("text", source, 9)
        assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 12))
def test_windows(tokens, length, count):
    """Contiguous, from the start to the end, evenly spaced, apart where they can be, refused where they cannot."""
    ids = np.arange(100, 100 + tokens)
    if length > tokens:
        with pytest.raises(ValueError, match=f"^length={length}: the text has only {tokens} tokens$"):
            windows(ids, length, count)
        return
    if count > tokens - length + 1:
        with pytest.raises(ValueError, match=f"^count={count}: a text of {tokens} tokens has"):
            windows(ids, length, count)
        return
    cut = windows(ids, length, count)
    assert cut.shape == (count, length) and cut.dtype == np.int32
    assert np.all(np.diff(cut, axis=1) == 1)
    starts = cut[:, 0] - 100
    assert starts[0] == 0 and (count == 1 or starts[-1] == tokens - length)
    steps = np.diff(starts)
    assert np.all(steps >= 1) and (count == 1 or steps.max() - steps.min() <= 1)
    if count * length <= tokens:
        assert np.all(steps >= length)


def test_windows_refuses():
    for name, value in (("length", 0), ("length", 1.5), ("count", 0), ("count", True)):
        with pytest.raises(ValueError, match=f"^{name}={value!r}: must be an integer of at least 1"):
            windows(np.arange(9), **dict(length=2, count=2) | {name: value})


def test_packed_documents_stand_behind_separators():
    packed = tokens.pack(["ab", "", "é!"], None, 257)
    assert packed.ids.tolist() == [256, 97, 98, 256, 0xC3, 0xA9, 33] and packed.ids.dtype == np.int32
    assert packed.starts.tolist() == [1, 4] and packed.text_bytes == 5
    with pytest.raises(ValueError, match="documents: must hold at least one"):
        tokens.pack([""], None, 257)
    with pytest.raises(ValueError, match="vocab=256: too small for the separator"):
        tokens.pack(["a"], None, 256)


def test_documents_are_parted_without_loss():
    documents = [str(i) for i in range(50)]
    trained, held_out = tokens.split(documents, share=0.1)
    assert len(held_out) == 5 and sorted(trained + held_out, key=int) == documents and trained != documents[5:]
    assert tokens.split(documents, share=0.1) == (trained, held_out)
    with pytest.raises(ValueError, match="1 cannot be parted"):
        tokens.split(["a"])


def test_standard_documents_are_many_and_real():
    documents = tokens.standard_documents()
    assert len(documents) > 1000 and sum(map(len, documents)) > 2e6
    source = pathlib.Path(inspect.getsourcefile(dataclasses)).read_text(encoding="utf-8")
    parts = [ast.get_source_segment(source, n) for n in ast.parse(source).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    assert "".join(parts) in "".join(documents) and len(parts) > 20
    assert any(text.startswith("def ") for text in documents) and tokens.standard_text()[:200] in "\n\n".join(documents[:99])


def test_an_epoch_reads_every_window_once_and_the_next_anew():
    reader = tokens.Reader(np.arange(1003), length=10, batch=3, seed=5)
    assert reader.per_epoch == 99
    epochs = [np.concatenate([reader(step) for step in range(33 * e, 33 * e + 33)]) for e in (0, 1)]
    for batch_WT in epochs:
        assert batch_WT.shape == (99, 11) and np.all(np.diff(batch_WT, axis=1) == 1)
        starts = np.sort(batch_WT[:, 0])
        assert np.all(np.diff(starts) == 10) and starts[0] < 10  # every position of these windows, none twice
    assert not np.array_equal(epochs[0][:, 0], epochs[1][:, 0])
    np.testing.assert_array_equal(tokens.Reader(np.arange(1003), 10, 3, 5)(40), reader(40))  # the step is all it knows
    assert not np.array_equal(tokens.Reader(np.arange(1003), 10, 3, 6)(40), reader(40))
    with pytest.raises(ValueError, match="length=10, batch=3: a text of 31 tokens has 2 windows"):
        tokens.Reader(np.arange(31), 10, 3)


def test_bits_without_a_network():
    train, ids = np.array([0, 0, 0, 1]), np.array([0, 1, 2])
    np.testing.assert_allclose(tokens.unigram_bits(train, ids, 3), -np.mean(np.log2(np.array([4, 2, 1]) / 7)))
    rng = np.random.default_rng(0)
    noise = rng.integers(256, size=5000, dtype=np.uint8).tobytes()
    assert 8 < tokens.zlib_bits([noise]) < 8.1 and tokens.zlib_bits([b"a" * 5000]) < 0.1
    assert tokens.zlib_bits([b"ab" * 50] * 3) == tokens.zlib_bits([b"ab" * 50])  # each by itself


def test_ids_become_their_text_again(tmp_path):
    assert tokens.decode(tokens.encode("übel\n\n1 2", None, 256), None) == "übel\n\n1 2"
    write_byte_tokenizer(tmp_path)
    assert tokens.decode(tokens.encode("a , b .\n", tmp_path, 300), tmp_path) == "a , b .\n"  # nothing is cleaned up
    assert tokens.vocabulary(tmp_path) == 256
