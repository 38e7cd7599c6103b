"""A short run of the fuzzer: nothing that is held wrong may end in anything but a clear line."""

import pathlib
import subprocess
import sys


def test_a_hundred_tries_without_a_fault():
    fuzz = pathlib.Path(__file__).parent / "fuzz.py"
    done = subprocess.run([sys.executable, str(fuzz), "--tries=100", "--seed=0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
