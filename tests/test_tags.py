"""The catalogue tags of every script: known, above their code, as the legend says, and tested."""

import ast
import io
import os
import re
import tokenize
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("PPO_SCRIPTS_DIR", TESTS.parent))
SCRIPTS = sorted([*ROOT.glob("ppo_*.py"), *ROOT.glob("trpo_*.py")])
SIZES = {"core": 13, "atari": 9, "continuous": 9, "lstm": 5, "multidiscrete": 1, "aux": 4}
STRINGS = tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)  # Python 3.12 splits f-strings
TAG = re.compile(r"\[(no )?(core|atari|continuous|lstm|multidiscrete|aux) (\d+)\]")


def tags_of(source):
    """(held, left out, complaints) of a script's comments; an entry is ("core", 5)."""
    held, left_out, complaints = set(), set(), []
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in STRINGS:
            if TAG.search(token.string):
                complaints.append(f"line {token.start[0]}: a tag in a string")
        if token.type != tokenize.COMMENT:
            continue
        number, found = token.start[0], TAG.findall(token.string)
        bracketed = re.findall(r"\[[a-z ]+ \d+\]", token.string)
        if len(bracketed) != len(found):
            complaints.append(f"line {number}: an unknown tag among {bracketed}")
        for no, group, digits in found:
            if not 1 <= int(digits) <= SIZES[group] or digits != str(int(digits)):
                complaints.append(f"line {number}: there is no {group} {digits}")
            (left_out if no else held).add((group, int(digits)))
        if not found:
            continue
        if lines[number - 1].strip() != token.string:
            complaints.append(f"line {number}: a tag beside code, not above it")
            continue
        below = next((x.strip() for x in lines[number:] if not x.strip().startswith("#")), "")
        if not below or below.startswith(('"', "'")):
            complaints.append(f"line {number}: no code directly below the comment")
    return held, left_out, complaints


def legend(source, title):
    """The entries after "Holds:" or "Leaves out:" in a script's docstring."""
    found = re.search(rf"^{title}: (.*(?:\n .*)*)$", ast.get_docstring(ast.parse(source)), re.M)
    entries = set()
    for item in found[1].split(",") if found else []:
        group, first, last = re.fullmatch(r"(\w+) (\d+)(?:-(\d+))?", item.strip()).groups()
        entries |= {(group, i) for i in range(int(first), int(last or first) + 1)}
    return entries


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.name)
def source(request):
    return request.param.read_text()


def test_tags_are_known_entries_directly_above_code(source):
    assert tags_of(source)[2] == []


def test_tags_agree_with_the_legend(source):
    held, left_out, _ = tags_of(source)
    holds, leaves_out = legend(source, "Holds"), legend(source, "Leaves out")
    assert held == holds and not holds & leaves_out
    assert holds | leaves_out == {(group, i + 1) for group in SIZES for i in range(SIZES[group])}
    # Of the groups that a script is about, what it leaves out is tagged too.
    groups = {group for group, _ in held} - {"aux"}
    assert left_out == {entry for entry in leaves_out if entry[0] in groups}


def test_every_held_entry_has_a_test_named_after_it(source):
    tests = "\n".join(path.read_text() for path in TESTS.glob("test_catalogue*.py"))
    names = re.findall(r"^def test_([a-z]+)_(\d\d)_\w+\(", tests, re.M)
    assert tags_of(source)[0] <= {(group, int(digits)) for group, digits in names}


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("# [core 14] Too many.\nx = 1\n", "no core 14"),
        ("# [core 05] GAE.\nx = 1\n", "no core 05"),
        ("# [cores 5] GAE.\nx = 1\n", "unknown"),
        ("# [core 5] GAE.\n\nx = 1\n", "no code"),
        ("# [core 5] GAE.\n", "no code"),
        ("x = 1  # [core 5] GAE.\n", "beside"),
        ("x = '[core 5]'\n", "string"),
        ("x = 1\ny = f'{x} [core 5]'\n", "string"),
        ("# [core 5] GAE.\n# Two lines.\nx = 1\n", None),
        ("# [core 13] [no continuous 4] Two.\nx = 1\n", None),
    ],
)
def test_wrong_tags_are_noticed(text, complaint):
    complaints = tags_of(text)[2]
    assert len(complaints) == bool(complaint)
    assert complaint is None or complaint in complaints[0]
