"""A file is there whole, or as it was."""

import pytest

from lim import files


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    with files.whole(path) as partial:
        partial.write_text("one")
        assert partial.suffix == ".txt" and not path.exists()
    with pytest.raises(KeyboardInterrupt), files.whole(path) as partial:
        partial.write_text("half of tw")
        assert path.read_text() == "one"
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"] and path.read_text() == "one"
