"""Files that are there whole or not at all, whoever is killed while they are written."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path beside the file's own, of the same suffix, to write to; at the end of the block it becomes the file.

    Where the block fails, what it wrote is removed, and a file that was there before stays as it was.
    """
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
