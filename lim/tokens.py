"""What goes in: token ids drawn at random, or read from a text and cut into windows.

Everything here is numpy and int32, reproducible from its arguments, and refuses ids that the model has no row for.
"""

import os
import pathlib

import numpy as np


def random_tokens(vocab: int, length: int, seed: int = 0):
    """Token ids drawn uniformly, int32 [length]: all distinct when the vocabulary has that many, else with repeats.

    Distinct tokens make the embeddings at birth independent, so that no position resembles another by chance.

    Args:
      vocab: number of tokens of the model.
      length: how many to draw.
      seed: a non-negative integer; the same seed draws the same tokens.

    Raises:
      ValueError: an argument is not such an integer.
    """
    for name, value, least in (("vocab", vocab, 1), ("length", length, 1), ("seed", seed, 0)):
        _check_integer(name, value, least)
    return np.random.default_rng(seed).choice(vocab, length, replace=length > vocab).astype(np.int32)


def read_text(path) -> str:
    """The content of a UTF-8 text file, line ends as "\\n".

    Raises:
      ValueError: the file cannot be read, is not UTF-8 or holds nothing but blanks.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")  # -sig: without a byte-order mark
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise ValueError(f"{path}: holds no text")
    return text


def standard_text() -> str:
    """English technical prose that every Python brings along (pydoc's help topics), some 700,000 characters.

    It differs a little from one Python version to the next: for trials, and for results that name the version.
    """
    from pydoc_data.topics import topics  # 700 kB that only this function needs

    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(text: str, tokenizer, vocab: int):
    """A text as token ids, int32 [tokens], without special tokens such as a begin-of-text mark.

    Args:
      text: not empty.
      tokenizer: the checkpoint folder or hub id that holds the tokenizer, read by transformers (a folder never
        leads to the network); or None for the text's UTF-8 bytes, ids 0 to 255.
      vocab: number of tokens of the model.

    Raises:
      ValueError: the text is empty, the tokenizer cannot be had, or an id is not below `vocab`.
    """
    _check_integer("vocab", vocab, 1)
    if tokenizer is None:
        ids = np.frombuffer(text.encode("utf-8"), np.uint8)
    else:
        ids = np.asarray(_tokenizer(tokenizer)(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
    if not ids.size:
        raise ValueError("text: holds no tokens")
    if ids.max() >= vocab:
        source = "bytes" if tokenizer is None else f"the tokenizer of {tokenizer}"
        raise ValueError(f"vocab={vocab}: too small for the text, whose ids reach {ids.max()} ({source})")
    return ids.astype(np.int32)


def _tokenizer(source):
    folder = os.path.expanduser(source)
    try:
        from transformers import AutoTokenizer  # takes seconds to import
    except ImportError:
        raise ValueError(f"tokenizer={source}: needs transformers: pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=os.path.isdir(folder))
    except Exception as error:  # the errors of several libraries, and of the network
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"tokenizer={source}: gives no tokenizer that transformers can read: {reason}") from None


def windows(ids, length: int, count: int = 1):
    """Evenly spaced windows of a text, int32 [count, length]: the first at its start, the last of several at its end.

    They do not overlap where the text has count·length tokens, and never coincide.

    Args:
      ids: token ids, [tokens].
      length, count: the windows' length, and how many.

    Raises:
      ValueError: the text has fewer tokens than `length`, or fewer than `count` different windows.
    """
    ids = np.asarray(ids, np.int32)
    _check_integer("length", length, 1)
    _check_integer("count", count, 1)
    if len(ids) < length:
        raise ValueError(f"length={length}: the text has only {len(ids)} tokens")
    last = len(ids) - length
    if count > last + 1:
        raise ValueError(f"count={count}: a text of {len(ids)} tokens has {last + 1} windows of length {length}")
    starts = np.arange(count) * last // max(count - 1, 1)
    return ids[starts[:, None] + np.arange(length)]


def _check_integer(name, value, least):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
