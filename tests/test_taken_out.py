"""Whether the test of every catalogue entry notices that the entry is gone (taken_out.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from taken_out import TAKEN_OUT, TESTS
from test_tags import tags_of

FOLDER = Path(__file__).resolve().parent
SCRIPTS = Path(os.environ.get("PPO_SCRIPTS_DIR", FOLDER.parent))
ROWS = [
    (script, entry, *row)
    for script, entries in TAKEN_OUT.items()
    for entry, rows in entries.items()
    for row in rows
]


def source(script):
    return (SCRIPTS / f"{script}.py").read_text()


def test_every_text_stands_once_in_its_script_and_every_held_entry_in_the_table():
    counts = {(script, text): source(script).count(text) for script, _, text, _ in ROWS}
    assert {key: n for key, n in counts.items() if n != 1} == {}
    entries = {
        script: {(group, int(digits)) for group, digits in map(str.split, rows)}
        for script, rows in TAKEN_OUT.items()
    }
    for script in "ppo_continuous", "ppo_atari":
        assert entries[script] == tags_of(source(script))[0]
    for script in "trpo_continuous", "ppo_multidiscrete":  # their own text, the rest is PPO's
        assert entries[script] <= tags_of(source(script))[0]
    assert entries["ppo_atari_lstm"] <= tags_of(source("ppo_atari_lstm"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("script, entry, text, replacement", ROWS)
def test_taking_an_entry_out_makes_its_test_fail(script, entry, text, replacement, tmp_path):
    changed = source(script).replace(text, replacement)
    compile(changed, script, "exec")  # what fails must be the test, not the syntax
    (tmp_path / f"{script}.py").write_text(changed)
    group, digits = entry.split()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider"]
        + ["-k", f"test_{group}_{int(digits):02}_", FOLDER / f"{TESTS[script]}.py"],
        env=os.environ | {"PPO_SCRIPTS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr  # 1: tests ran, and one failed
