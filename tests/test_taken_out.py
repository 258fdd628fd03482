"""Whether the test of every catalogue entry notices that the entry is gone (taken_out.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from taken_out import TAKEN_OUT
from test_tags import tags_of

TESTS = Path(__file__).resolve().parent
SCRIPT = Path(os.environ.get("PPO_SCRIPTS_DIR", TESTS.parent), "ppo_continuous.py")


ROWS = [(entry, *row) for entry, rows in TAKEN_OUT.items() for row in rows]


def test_every_held_entry_is_in_the_table_and_its_texts_stand_once_in_the_script():
    source = SCRIPT.read_text()
    counts = {text: source.count(text) for _, text, _ in ROWS}
    assert {text: n for text, n in counts.items() if n != 1} == {}
    entries = {(group, int(digits)) for group, digits in map(str.split, TAKEN_OUT)}
    assert entries == tags_of(source)[0]


@pytest.mark.slow
@pytest.mark.parametrize("entry, text, replacement", ROWS)
def test_taking_an_entry_out_makes_its_test_fail(entry, text, replacement, tmp_path):
    changed = SCRIPT.read_text().replace(text, replacement)
    compile(changed, SCRIPT.name, "exec")  # what fails must be the test, not the syntax
    (tmp_path / SCRIPT.name).write_text(changed)
    group, digits = entry.split()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        + ["-k", f"test_{group}_{int(digits):02}_", TESTS / "test_catalogue_continuous.py"],
        env=os.environ | {"PPO_SCRIPTS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr  # 1: tests ran, and one failed
