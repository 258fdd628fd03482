"""Finished runs -> runs.csv and updates.csv of an experiment, small enough to be committed.

    python benchmark/collect.py benchmark/results/taxi

prints the table of scores again.
"""

import argparse
import contextlib
import csv
import fcntl
import itertools
import json
import math
import os
import statistics
import sys
from pathlib import Path

from experiment import BadInput, Cell
from jobs import shown

KEY = "algorithm", "task", "seed"
RUNS = dict.fromkeys(("algorithm", "task", "script", "settings"), str)
RUNS |= {"seed": int, "steps": int, "last_100": float}  # what is read back of runs.csv
UPDATES = {name: RUNS[name] for name in KEY} | {"global_step": int}  # and of updates.csv


def rows_of(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def holds(text, kind):
    """Whether a field of a CSV is a str, int or float; an empty one is none of them."""
    try:
        return bool(text) and kind(text) is not None
    except ValueError:
        return False


def committed(folder):
    """The rows of runs.csv and of updates.csv in a results folder, or BadInput."""
    tables = []
    for path, kinds in (folder / "runs.csv", RUNS), (folder / "updates.csv", UPDATES):
        try:
            rows = rows_of(path)
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadInput(f"{shown(path)} cannot be read as a CSV: {error}") from None
        for line, row in enumerate(rows, start=2):
            if None in row:
                raise BadInput(f"{shown(path)}, line {line}: too many fields; mend or delete it.")
            for column, kind in kinds.items():
                if column == "global_step" and column not in row:
                    continue  # `columns` may leave it out
                if not holds(row.get(column), kind):
                    wrong = f"{column} is {row.get(column)!r}"
                    raise BadInput(f"{shown(path)}, line {line}: {wrong}; mend or delete it.")
        tables.append(rows)
    return tables


def write_rows(path, rows):
    """Write a CSV with the columns of all rows, in one go."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".tmp"), "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path.with_suffix(".tmp"), path)


def rounded(text):
    """A number's text with 5 significant digits; a whole number's as it is."""
    return text if text.lstrip("-").isdecimal() else f"{float(text):.5g}"


def final_reward(updates):
    """Mean of mean_return over the last 5 updates in which an episode ended (Engstrom et al.)."""
    ended = [float(row["mean_return"]) for row in updates if int(row["episodes"]) > 0]
    return statistics.fmean(ended[-5:]) if ended else math.nan


def steps_to_reach(level, episodes):
    """Steps after which 100 episodes in a row first had a mean of this level, or "never"."""
    returns = [float(row["episodic_return"]) for row in episodes]
    for end in range(100, len(returns) + 1):
        if statistics.fmean(returns[end - 100 : end]) >= level:
            return episodes[end - 1]["global_step"]
    return "never"


def changed_settings(cell):
    """The settings that differ from the script's defaults, as JSON."""
    defaults = cell.script.Args()
    changed = {
        name: "inf" if x == math.inf else x
        for name, x in cell.settings().items()
        if name not in ("env_id", "seed") and x != getattr(defaults, name)
    }
    return json.dumps(changed)


def mean(returns):
    """Their mean's text, with 5 significant digits; nan without any."""
    return f"{statistics.fmean(returns) if returns else math.nan:.5g}"


def summary(cell, reach=None):
    """The row of a finished run in runs.csv, and its rows in updates.csv."""
    run = cell.run()
    config = json.loads((run / "config.json").read_text())
    for name in "updates.csv", "episodes.csv":
        if not (run / name).exists():
            raise LookupError(f"{name} is missing")
    updates, episodes = rows_of(run / "updates.csv"), rows_of(run / "episodes.csv")
    if [int(row["update"]) for row in updates] != list(range(1, cell.args.num_updates + 1)):
        raise ValueError("updates.csv hasn't one row for each update")
    if len(episodes) != sum(int(row["episodes"]) for row in updates):
        raise ValueError("episodes.csv and updates.csv count different numbers of episodes")
    returns = [float(row["episodic_return"]) for row in episodes]
    key = {"algorithm": cell.algorithm, "task": cell.task, "seed": str(cell.seed)}
    versions = " ".join(f"{name} {version}" for name, version in config["versions"].items())
    row = key | {
        "script": cell.script.__name__,
        "settings": changed_settings(cell),
        "steps": updates[-1]["global_step"],
        "minutes": f"{float(updates[-1]['seconds']) / 60:.2f}",
        "first_100": mean(returns[:100]),
        "last_100": mean(returns[-100:]),
        "last_20": mean(returns[-20:]),
        "longest_episode": max((int(row["episodic_length"]) for row in episodes), default=""),
        "final_reward": f"{final_reward(updates):.5g}",
        "versions": versions,
        "git_commit": config["git_commit"],
    }
    if reach is not None:
        row["steps_to_reach"] = steps_to_reach(reach, episodes)
    return row, [key | {name: rounded(x) for name, x in update.items()} for update in updates]


def table(runs):
    """Markdown: rows of runs.csv, the seeds of an algorithm on a task in one line."""
    reach = any("steps_to_reach" in row for row in runs)
    header = ["algorithm", "task", "steps", "last 100 episodes, per seed", "mean"]
    header += ["steps to reach, per seed"] * reach
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for key, rows in itertools.groupby(runs, lambda row: (row["algorithm"], row["task"])):
        rows = list(rows)
        returns = [float(row["last_100"]) for row in rows]
        texts = [f"{max(int(row['steps']) for row in rows):,}"]
        texts += [", ".join(f"{x:.4g}" for x in returns), f"{statistics.fmean(returns):.4g}"]
        if reach:
            steps = [row.get("steps_to_reach") or "unknown" for row in rows]
            texts.append(", ".join(f"{int(x):,}" if x.isdecimal() else x for x in steps))
        lines.append(f"| {' | '.join([*key, *texts])} |")
    return "\n".join(lines)


@contextlib.contextmanager
def locked(folder):
    """A results folder that no other sweep may change meanwhile."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def collect(cells, columns, last_updates, reach, folder):
    """Write runs.csv and updates.csv of the finished runs; keep others of the same settings.

    -> the rows of runs.csv
    """
    finished, wrong = [], []
    for cell in filter(Cell.is_complete, cells):
        try:
            finished.append(summary(cell, reach))
        except (LookupError, TypeError, ValueError, AttributeError, csv.Error) as error:
            wrong.append(f"{shown(cell.run())} is damaged: {type(error).__name__} {error}")
    runs = [row for row, _ in finished]
    updates = [row for _, rows in finished for row in rows[-last_updates:]]
    here = {tuple(row[x] for x in KEY) for row in runs}
    wanted = {(x.algorithm, x.task, x.script.__name__, changed_settings(x)) for x in cells}
    same = ("algorithm", "task", "script", "settings")
    old_runs, old_updates = committed(folder)
    kept = [row for row in old_runs if tuple(row[x] for x in same) in wanted]
    kept = [row for row in kept if tuple(row[x] for x in KEY) not in here]
    elsewhere = {tuple(row[x] for x in KEY) for row in kept}
    updates += [row for row in old_updates if tuple(row[x] for x in KEY) in elsewhere]
    lacking = [x for x in columns or [] if updates and not any(x in row for row in updates)]
    if columns is not None:
        names = {*KEY, *columns}
        updates = [{name: x for name, x in row.items() if name in names} for row in updates]

    def order(row):
        return row["algorithm"], row["task"], int(row["seed"]), int(row.get("global_step", 0))

    if runs:
        write_rows(folder / "runs.csv", sorted(runs + kept, key=order))
        if columns != []:
            write_rows(folder / "updates.csv", sorted(updates, key=order))
    if lacking:  # said last, so that nothing is lost
        wrong.append(f"columns: none of these runs has logged {lacking[0]!r}.")
    if wrong:
        raise BadInput("; ".join(wrong))
    return sorted(runs + kept, key=order)


def main():
    """-> exit status"""
    parser = argparse.ArgumentParser(prog="collect.py", description="Print tables of scores again.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of benchmark/results")
    for folder in parser.parse_args().folders:
        try:
            runs, _ = committed(folder)
            if not runs:
                raise BadInput(f"{folder} is no results folder: it has no runs.csv.")
        except (BadInput, OSError) as error:
            print(f"collect.py: {error}", file=sys.stderr)
            return 2
        print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
