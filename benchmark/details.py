"""DETAILS.md, the catalogue: each entry's code, switch, test and measured effect.

    python benchmark/details.py

Its words come from details.toml, lines from the scripts' tags, tests from their names, effects from
the results of ablation.toml. tests/test_details.py fails when the file isn't what this would write.
"""

import collections
import csv
import re
import statistics
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ABLATION = REPOSITORY / "benchmark/results/ablation/runs.csv"
ENTRIES = tomllib.loads((REPOSITORY / "benchmark/details.toml").read_text())
TAG = re.compile(r"\[(core|atari|continuous|lstm|multidiscrete|aux) (\d+)\]")
INTRODUCTION = """# The details

The 37 entries and 4 auxiliary ones of Huang et al. (2022), *The 37 Implementation Details of
Proximal Policy Optimization*. Written by `python benchmark/details.py`; don't edit. *Without it*:
mean return of the last 100 training episodes with the detail off, minus that of the defaults, mean
over seeds (`benchmark/experiments/ablation.toml`).

| entry | what it is | code | off by | test | without it |
|---|---|---|---|---|---|
"""


def scripts():
    return sorted([*REPOSITORY.glob("ppo_*.py"), *REPOSITORY.glob("trpo_*.py")])


def tagged_lines():
    """Entry -> (script, line number) of each comment that begins with its tag."""
    lines = collections.defaultdict(list)
    for script in scripts():
        for number, line in enumerate(script.read_text().splitlines(), start=1):
            if line.strip().startswith("#"):
                for group, digits in TAG.findall(line):
                    lines[f"{group} {digits}"].append((script.name, number))
    return lines


def named_tests():
    """Entry -> (file, test) of each test that is named after it."""
    tests = collections.defaultdict(list)
    for path in sorted(REPOSITORY.glob("tests/test_catalogue*.py")):
        found = re.findall(r"^def (test_([a-z]+)_(\d\d)_\w+)\(", path.read_text(), re.M)
        for test, group, digits in found:
            tests[f"{group} {int(digits)}"].append((path.name, test))
    return tests


def measured_effects():
    """Entry -> "task: difference, ..." of its row in ablation.toml, for those that were run."""
    if not ABLATION.exists():
        return {}
    returns = collections.defaultdict(list)
    with open(ABLATION, newline="") as file:
        for row in csv.DictReader(file):
            returns[row["algorithm"], row["task"]].append(float(row["last_100"]))
    effects = collections.defaultdict(list)
    for (algorithm, task), own in returns.items():
        if algorithm.startswith("without ") and (defaults := returns.get(("defaults", task))):
            difference = statistics.fmean(own) - statistics.fmean(defaults)
            seeds = min(len(own), len(defaults))
            effect = f"{task}: {difference:+.0f} ({seeds} seeds)"
            effects[algorithm.removeprefix("without ")].append(effect)
    return {entry: ", ".join(parts) for entry, parts in effects.items()}


def page():
    """The text of DETAILS.md."""
    lines, tests, effects = tagged_lines(), named_tests(), measured_effects()
    text = INTRODUCTION
    for entry, (name, meaning, off) in ENTRIES.items():
        code = "<br>".join(f"[{file}:{n}]({file}#L{n})" for file, n in lines[entry])
        guards = "<br>".join(f"[{file}](tests/{file}): `{test}`" for file, test in tests[entry])
        effect = effects.get(entry, "not measured yet")
        text += f"| **{entry}** | {name}: {meaning} | {code} | {off} | {guards} | {effect} |\n"
    return text


if __name__ == "__main__":
    (REPOSITORY / "DETAILS.md").write_text(page())
