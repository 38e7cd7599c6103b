"""What goes in: token ids drawn at random, read from a text and cut into windows, or documents packed for training.

Everything here is numpy and int32, reproducible from its arguments, and refuses ids that the model has no row for.
"""

import ast
import dataclasses
import functools
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def random_tokens(vocab: int, length: int, seed: int = 0) -> np.ndarray:
    """Token ids drawn uniformly, int32 [length]: all distinct when the vocabulary has that many, else with repeats.

    Distinct tokens make the embeddings at birth independent, so that no position resembles another by chance.

    Args:
      vocab: number of tokens of the model.
      length: how many to draw.
      seed: a non-negative integer; the same seed draws the same tokens.

    Raises:
      ValueError: an argument is not such an integer.

    Example:
      >>> lim.random_tokens(vocab=4096, length=4, seed=0).tolist()
      [1105, 2093, 3481, 2607]
    """
    for name, value, least in (("vocab", vocab, 1), ("length", length, 1), ("seed", seed, 0)):
        _check_integer(name, value, least)
    return np.random.default_rng(seed).choice(vocab, length, replace=length > vocab).astype(np.int32)


def read_text(path: str | os.PathLike) -> str:
    """The content of a UTF-8 text file, line ends as "\\n".

    Raises:
      ValueError: the file cannot be read, is not UTF-8 or holds nothing but blanks.
    """
    try:
        text = pathlib.Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")  # -sig: without a byte-order mark
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


def encode(text: str, tokenizer: str | os.PathLike | None, vocab: int) -> np.ndarray:
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
        ids = np.asarray(_tokenizer(os.fspath(tokenizer))(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
    if not ids.size:
        raise ValueError("text: holds no tokens")
    if ids.max() >= vocab:
        source = "bytes" if tokenizer is None else f"the tokenizer of {tokenizer}"
        raise ValueError(f"vocab={vocab}: too small for the text, whose ids reach {ids.max()} ({source})")
    return ids.astype(np.int32)


def decode(ids: ArrayLike, tokenizer: str | os.PathLike | None) -> str:
    """The text of token ids, as they stand, special tokens and blanks included; arguments and errors as `encode`."""
    ids = np.asarray(ids)
    if tokenizer is None:
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
    return _tokenizer(os.fspath(tokenizer)).decode(ids.tolist(), clean_up_tokenization_spaces=False)


def vocabulary(tokenizer: str | os.PathLike) -> int:
    """How many ids a tokenizer gives, special ones included; argument and errors as `encode`."""
    return len(_tokenizer(os.fspath(tokenizer)))


@functools.lru_cache(1)  # whoever encodes piece by piece loads it once
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


def windows(ids: ArrayLike, length: int, count: int = 1) -> np.ndarray:
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


BYTES = 256  # byte-level ids go to 255; this one separates documents


@functools.cache
def standard_documents() -> tuple[str, ...]:
    """Documents that every Python brings along: pydoc's help topics, and each top-level function and class of the modules
    of the standard library; some 2,400, 4 million bytes, half of them shorter than 500 bytes.

    They differ a little from one Python version to the next: results should name the version.
    """
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        lines = source.split("\n")  # once: ast.get_source_segment would do it for every part
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                *most, last = lines[node.lineno - 1 : node.end_lineno]
                documents.append("\n".join([*most, last.encode()[: node.end_col_offset].decode()]))
    return tuple(documents)


def separator(tokenizer: str | os.PathLike | None) -> int:
    """The id that stands before every packed document: 256 for bytes, else the tokenizer's end-of-text.

    Raises:
      ValueError: the tokenizer cannot be had or names no such token.
    """
    if tokenizer is None:
        return BYTES
    if (end := _tokenizer(os.fspath(tokenizer)).eos_token_id) is None:
        raise ValueError(f"tokenizer={tokenizer}: names no end-of-text token, which is to separate documents")
    return int(end)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Documents one after the other, a separator before each.

    Attributes:
      ids: int32 [tokens], separators included.
      starts: index of each document's first token, the one behind its separator.
      text_bytes: length of the documents in UTF-8, for bits per byte.
    """

    ids: np.ndarray
    starts: np.ndarray
    text_bytes: int


def pack(documents: Iterable[str], tokenizer: str | os.PathLike | None, vocab: int) -> Packed:
    """Packs documents in their order.

    Args:
      documents: texts; empty ones are left out.
      tokenizer, vocab: as for `encode`; the separator must be below `vocab`, too.

    Raises:
      ValueError: there is no document, or as `encode`.
    """
    documents = [text for text in documents if text]
    if not documents:
        raise ValueError("documents: must hold at least one that is not empty")
    between = separator(tokenizer)
    if between >= vocab:
        raise ValueError(f"vocab={vocab}: too small for the separator of documents, {between}")
    parts = [np.append(np.int32(between), encode(text, tokenizer, vocab)) for text in documents]
    starts = np.cumsum([0, *map(len, parts[:-1])]) + 1
    return Packed(np.concatenate(parts).astype(np.int32), starts, sum(len(text.encode("utf-8")) for text in documents))


def split(documents: Sequence[str], share: float = 0.05, seed: int = 0) -> tuple[list[str], list[str]]:
    """Documents shuffled and parted: those to train on, and a share (by number, at least one) held out."""
    if len(documents) < 2:
        raise ValueError(f"documents: {len(documents)} cannot be parted; give at least 2, or one file split at blank lines")
    order = np.random.default_rng(seed).permutation(len(documents))
    held_out = max(1, round(share * len(documents)))
    return [documents[i] for i in order[held_out:]], [documents[i] for i in order[:held_out]]


class Reader:
    """Batches of a packed text, as a function of the step alone: its position is the step, in a checkpoint as in a log.

    Every epoch cuts the text into windows anew, from another offset, and shuffles them.
    """

    def __init__(self, ids: ArrayLike, length: int, batch: int, seed: int = 0):
        """Args:
          ids: token ids, [tokens].
          length, batch: predicted tokens of a window, windows of a batch.

        Raises:
          ValueError: the text is too short for one batch.
        """
        _check_integer("length", length, 1)
        _check_integer("batch", batch, 1)
        self.ids, self.length, self.batch, self.seed = np.asarray(ids, np.int32), length, batch, seed
        self.per_epoch = (len(self.ids) - length) // length  # whatever the offset
        if self.per_epoch < batch:
            raise ValueError(f"length={length}, batch={batch}: a text of {len(self.ids)} tokens has {max(self.per_epoch, 0)} windows")
        self._epoch = functools.lru_cache(2)(self._epoch_starts)

    def _epoch_starts(self, epoch):
        rng = np.random.default_rng([self.seed, epoch])
        return rng.integers(self.length) + self.length * rng.permutation(self.per_epoch)

    def __call__(self, step: int) -> np.ndarray:
        """The batch of one step, int32 [batch, length + 1]; consecutive steps go through an epoch without repeats."""
        numbers = step * self.batch + np.arange(self.batch)
        starts = np.array([self._epoch(n // self.per_epoch)[n % self.per_epoch] for n in numbers])
        return self.ids[starts[:, None] + np.arange(self.length + 1)]


def unigram_bits(train_ids: np.ndarray, ids: np.ndarray, vocab: int) -> float:
    """Bits per token of `ids` under the token frequencies of `train_ids` (one added to each): the least a model must beat."""
    counts = np.bincount(train_ids, minlength=vocab) + 1
    return float(-np.mean(np.log2(counts[ids] / counts.sum())))


def zlib_bits(texts: Sequence[bytes]) -> float:
    """Bits per byte that zlib at its best (gzip's method) needs for each of these bytes objects by itself."""
    return 8 * sum(len(zlib.compress(text, 9)) for text in texts) / sum(map(len, texts))


def _check_integer(name, value, least):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
