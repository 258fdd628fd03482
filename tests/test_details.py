"""DETAILS.md is what benchmark/details.py writes, and no entry of the catalogue lacks anything."""

import re
import sys
from pathlib import Path

from test_tags import SIZES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))
import details

ENTRIES = [f"{group} {i + 1}" for group, size in SIZES.items() for i in range(size)]


def test_page_is_up_to_date():
    assert (ROOT / "DETAILS.md").read_text() == details.page(), "run python benchmark/details.py"


def test_every_entry_has_a_row_code_and_a_test():
    assert list(details.ENTRIES) == ENTRIES
    lines, tests = details.tagged_lines(), details.named_tests()
    assert [x for x in ENTRIES if not lines[x]] == []
    assert [x for x in ENTRIES if not tests[x]] == []


def test_every_option_that_is_named_is_one_of_a_script_that_holds_the_entry():
    for entry, (_, _, off) in details.ENTRIES.items():
        texts = [script.read_text() for script in details.scripts()]
        holders = [text for text in texts if f"[{entry}]" in text]
        for option in re.findall(r"`--(?:no-)?([a-z-]+)", off):
            field = rf"^    {option.replace('-', '_')}: "
            assert any(re.search(field, text, re.M) for text in holders), (entry, option)


def test_effects_are_differences_to_the_defaults(tmp_path, monkeypatch):
    path = tmp_path / "runs.csv"
    path.write_text(
        "algorithm,task,seed,last_100\ndefaults,Hopper-v5,1,100\ndefaults,Hopper-v5,2,200\n"
        "without core 7,Hopper-v5,1,80\nwithout core 7,Hopper-v5,2,90\n"
    )
    monkeypatch.setattr(details, "ABLATION", path)
    assert details.measured_effects() == {"core 7": "Hopper-v5: -65 (2 seeds)"}
