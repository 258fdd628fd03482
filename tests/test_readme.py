"""The README's tables are those of the committed results."""

import collections
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))

import collect
import paper
from collect import rows_of, table
from throughput import speed_table

RESULTS = ROOT / "benchmark/results"
TEXT = "".join((ROOT / name).read_text() for name in ("README.md", "benchmark/README.md"))
TABLES = re.findall(r"<!-- (\S+) -->\n(.*?)<!-- /\1 -->", TEXT, re.S)


def test_every_table_has_both_its_marks():
    names = "table2 table3 figure2 cleanrl humanoid_v4 time_limits mujoco_trpo minimal atari"
    names += (
        " atari_lstm multidiscrete taxi throughput/ppo throughput/trpo throughput/atari differences"
    )
    assert [name for name, _ in TABLES] == names.split()


@pytest.mark.parametrize("name, text", TABLES, ids=[name for name, _ in TABLES])
def test_table_is_that_of_the_results(name, text):
    if name in paper.ARTIFACTS:
        function, folder = paper.ARTIFACTS[name]
        expected = function(RESULTS / folder)[0]
    elif name.startswith("throughput/"):
        speeds = collections.defaultdict(list)
        for row in rows_of(RESULTS / f"{name}.csv"):
            speeds[row["name"]].append(float(row["steps_per_second"]))
        expected = speed_table(row["table"], speeds)
    else:
        expected = table(rows_of(RESULTS / name / "runs.csv"))
    lines = [line for line in expected.splitlines() if line.startswith("|")]
    assert text.strip().splitlines() == lines


def test_collect_prints_the_table_again(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["collect.py", str(RESULTS / "taxi")])
    assert collect.main() == 0 and capsys.readouterr().out == dict(TABLES)["taxi"]
    monkeypatch.setattr(sys, "argv", ["collect.py", str(tmp_path)])
    assert collect.main() == 2
    error = f"collect.py: {tmp_path} is no results folder: it has no runs.csv.\n"
    assert capsys.readouterr().err == error
