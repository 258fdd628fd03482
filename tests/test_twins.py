"""What bears the same name in two scripts is the same to the letter, and so is the plumbing."""

import ast
import itertools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("ppo_*.py"), *ROOT.glob("trpo_*.py")])
EXEMPT = {"Agent", "Args", "train", "main"}  # of Args only the defaults: see below
PAIRS = list(itertools.combinations(SCRIPTS, 2))
print("exempt from being twins:", ", ".join(sorted(EXEMPT)))


def plumbing(script):
    return re.split("# ==== .* ====|\ndef main", script.read_text())[1]


def definitions(script):
    text = script.read_text()
    nodes = (ast.FunctionDef, ast.ClassDef)
    body = [node for node in ast.parse(text).body if isinstance(node, nodes)]
    return {node.name: ast.get_source_segment(text, node) for node in body}


def fields(script):
    """Name -> (type, comment) of the fields of Args."""
    found = {}
    for line in definitions(script)["Args"].splitlines():
        declaration, _, comment = line.partition("  # ")
        name, colon, rest = declaration.strip().partition(": ")
        if colon and name.isidentifier() and "=" in rest:
            found[name] = rest.partition(" = ")[0], comment
    return found


@pytest.mark.parametrize("one, other", PAIRS, ids=lambda script: script.stem)
def test_twins(one, other):
    assert plumbing(one) == plumbing(other)
    ours, theirs = definitions(one), definitions(other)
    for name in (ours.keys() & theirs.keys()) - EXEMPT:
        assert ours[name] == theirs[name], name
    ours, theirs = fields(one), fields(other)
    for name in ours.keys() & theirs.keys():
        assert ours[name] == theirs[name], name


def test_trpo_plays_and_values_as_ppo_does():
    """The sections Rollout and Advantages of the two full scripts are twins too."""
    texts = [(ROOT / f"{name}_continuous.py").read_text() for name in ("ppo", "trpo")]
    ours, theirs = (x.split("# ---- Rollout ----")[1].split("# ---- Update ----")[0] for x in texts)
    assert ours == theirs and "# ---- Advantages ----" in ours


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_field_has_a_comment_and_is_read(script):
    text = script.read_text()
    for name, (_, comment) in fields(script).items():
        assert comment, name
        assert f"args.{name}" in text or f"self.{name}" in text or name == "resume", name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_metadata_agrees_with_requirements(script):
    block = script.read_text().split("# /// script\n")[1].split("# ///")[0]
    metadata = tomllib.loads("".join(line[2:] + "\n" for line in block.splitlines()))
    requirements = (ROOT / "requirements.txt").read_text().splitlines()
    assert set(metadata["dependencies"]) <= set(requirements)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["requires-python"] == project["requires-python"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_readme_counts_its_lines(script):
    text = script.read_text()
    lesson = text.split("# ==== Plumbing ====")[0].count("\n")
    counts = f"| {lesson}, {text.count(chr(10)) - lesson} |"
    (row,) = re.findall(rf"^\| `{script.name}` .*", (ROOT / "README.md").read_text(), re.M)
    assert counts in row
