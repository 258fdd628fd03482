"""benchmark/throughput.py: what it refuses. (What it measures takes 20 minutes.)"""

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).resolve().parent.parent / "benchmark/throughput.py"


@pytest.mark.parametrize(
    "options, words",
    [
        (["--tables"], "type some of PPO, TRPO, Atari"),
        (["--out", __file__], "is no folder"),
        (["--repeats", "0"], "starts at 1"),
        (["--core", "9999"], "cores 9999"),
    ],
)
def test_bad_input_is_one_line(options, words):
    done = subprocess.run([sys.executable, COMMAND, *options], capture_output=True, text=True)
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1
