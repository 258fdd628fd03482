"""The file of an experiment, TOML, and the runs that it names.

    script = "ppo_continuous.py"             # of the algorithms that name no other
    tasks = ["Hopper-v5", "Walker2d-v5"]
    seeds = "1:5"                            # both ends are included
    columns = ["global_step", "mean_return"] # of updates.csv; left out: all; []: no such file
    last_updates = 20                        # rows of a run in updates.csv; left out or 0: all
    reach = 6                                # after how many steps do 100 episodes have this mean?
    settings.total_timesteps = 1_000_000     # of all runs, under their names in the script's Args
    [algorithms.PPO]
    settings.clip_coef = 0.2                 # of this algorithm
    tasks.Walker2d-v5.learning_rate = 4e-4   # of this algorithm on this task
    grid.init = ["orthogonal", "xavier"]     # a variant, named "PPO init=xavier", for each value

Only script, columns, last_updates, reach, settings and what stands in an algorithm may be left out.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import io
import itertools
import json
import math
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from jobs import REPOSITORY, progress, shown

KINDS = {str: "text", list: "list", dict: "table", int: "whole number", float: "number"}
FREE = {"runs_dir", "resume", "checkpoint_every"}  # settings that don't change what is learned
sys.path.insert(0, str(REPOSITORY))


class BadInput(Exception):
    """What was given can't be used: one line, exit status 2."""


@dataclasses.dataclass(eq=False)
class Cell:
    """One run: an algorithm on a task with a seed."""

    algorithm: str
    task: str
    seed: int
    script: ModuleType
    args: object  # of the script's class Args
    options: list[str]  # its command line, but for task, seed and folder
    folder: Path  # its --runs-dir

    def __str__(self):
        return f"{self.algorithm} {self.task} s{self.seed}"

    def command(self, runs_dir, run=None):
        """The script and its arguments: into runs_dir, or to go on with a run."""
        script = f"{self.script.__name__}.py"
        if run:
            return [script, "--resume", str(run)]
        named = ["--env-id", self.task, "--seed", str(self.seed)]
        return [script, *named, *self.options, "--runs-dir", str(runs_dir)]

    def settings(self):
        fields = [field.name for field in dataclasses.fields(self.args) if field.init]
        return {name: getattr(self.args, name) for name in fields if name not in FREE}

    def total(self):
        return self.args.num_updates * self.args.batch_size

    def run(self):
        """The directory of its run that is furthest, or None."""
        runs = [path.parent for path in self.folder.glob("*/checkpoint.pt")]
        return max(runs, key=lambda run: progress(run)[0], default=None)

    def is_complete(self):
        run = self.run()
        return run is not None and progress(run)[0] >= self.total() and self.is_trained(run)

    def is_trained(self, run):
        """Whether its checkpoint is that of the last update."""
        try:
            state = self.script.load_checkpoint(run)
            return state["counters"]["update"] >= self.args.num_updates
        except Exception:
            return False  # the script will say why it can't go on from it

    def check_unchanged(self):
        """Raise BadInput if its run was made with other settings than the experiment's of now."""
        run = self.run()
        if run is None:
            return
        try:
            saved = self.script.load_config(self.script.Args, run)
        except self.script.BadInput as error:
            raise BadInput(f"{error} Move {shown(self.folder)} away.") from None
        for name, now in self.settings().items():
            if getattr(saved, name) != now:
                was = f"{name} was {getattr(saved, name)} in {shown(self.folder)}"
                raise BadInput(f"{was}, but is {now} now; move that folder away.")
        if progress(run)[0] < self.total() and self.is_trained(run):
            raise BadInput(f"{shown(run)}/updates.csv lacks its last rows; move that folder away.")


def check_keys(table, allowed, where):
    """Raise BadInput unless table is one and has only these keys; allowed: name -> type."""
    if not isinstance(table, dict):
        raise BadInput(f"{where} is {table!r}; it has to be a table.")
    for key, x in table.items():
        if key not in allowed:
            raise BadInput(f"{where} has no key {key!r}; allowed are {', '.join(allowed)}.")
        kind = allowed[key]
        whole = kind is float and type(x) is int
        if not (type(x) is kind or whole) or (kind is float and not math.isfinite(x)):
            raise BadInput(f"{where}: {key} is {x!r}; it has to be a {KINDS[kind]}.")


def read_experiment(path):
    """The tables of an experiment file, with every key there."""
    try:
        experiment = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}.") from None
    kinds = {"script": str, "tasks": list, "seeds": str, "columns": list, "settings": dict}
    check_keys(experiment, kinds | {"algorithms": dict, "last_updates": int, "reach": float}, path)
    optional = {"settings": {}, "columns": None, "script": None, "last_updates": 0, "reach": None}
    experiment = optional | experiment
    for key in "tasks", "seeds", "algorithms":
        if not experiment.get(key):
            raise BadInput(f"{path}: {key} is missing.")
    if experiment["last_updates"] < 0:
        raise BadInput(f"{path}: last_updates is {experiment['last_updates']}; type 0 for all.")
    for x in [*experiment["tasks"], *(experiment["columns"] or [])]:
        if not isinstance(x, str):
            raise BadInput(f"{path}: {x!r} is no text.")
    for name, algorithm in experiment["algorithms"].items():
        if not name.strip() or not name.isprintable() or "|" in name:
            raise BadInput(f"{path}: an algorithm is named {name!r}; type letters, no | in it.")
        where, kinds = f"{path}: {name}", {"script": str, "settings": dict, "tasks": dict}
        check_keys(algorithm, kinds | {"grid": dict}, where)
        kinds = dict.fromkeys(experiment["tasks"], dict)
        check_keys(algorithm.get("tasks", {}), kinds, f"{where}, tasks")
        grid = algorithm.get("grid", {})
        check_keys(grid, dict.fromkeys(grid, list), f"{where}, grid")
        if [] in grid.values():
            raise BadInput(f"{where}, grid: a list is empty.")
    return experiment


def parse_seeds(text):
    """ "1:5" -> [1, 2, 3, 4, 5]; "7" -> [7]"""
    match = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last < first + 10_000:
        raise BadInput(f"seeds are {text!r}; type 3, or 1:5 for 1, 2, 3, 4 and 5.")
    return list(range(first, last + 1))


def variants(experiment):
    """Yield name, script, settings and settings by task of each algorithm, its grid multiplied."""
    for name, algorithm in experiment["algorithms"].items():
        grid = algorithm.get("grid", {})
        for values in itertools.product(*grid.values()):
            point = dict(zip(grid, values))
            texts = [f"{key}={str(x).lower()}" for key, x in point.items()]
            settings = experiment["settings"] | algorithm.get("settings", {})
            script = algorithm.get("script", experiment["script"])
            full_name = " ".join([name, *texts])
            by_task = {task: x | point for task, x in algorithm.get("tasks", {}).items()}
            yield full_name, script, settings | point, by_task


@functools.cache
def load_script(name):
    """The module of a script of this repository."""
    paths = sorted(REPOSITORY.glob("*.py"))
    scripts = [path.name for path in paths if "def parse_args(" in path.read_text()]
    if name not in scripts:
        raise BadInput(f"script is {name!r}; allowed is one of {', '.join(scripts)}.")
    return importlib.import_module(name.removesuffix(".py"))


def command_options(settings):
    """Settings -> options of a command line."""
    options = []
    for name, x in settings.items():
        option = name.replace("_", "-")
        if isinstance(x, bool):
            options.append(f"--{option}" if x else f"--no-{option}")
        else:
            options += [f"--{option}", json.dumps(x) if isinstance(x, dict) else str(x)]
    return options


def parse_settings(script, settings, task, where):
    """The script's own Args of these settings, or BadInput in the script's words."""
    names = [field.name for field in dataclasses.fields(script.Args) if field.init]
    for name in settings:
        if name not in names or name in ("env_id", "seed", "runs_dir", "resume"):
            raise BadInput(f"{where}: {script.__name__}.py has no setting {name} to be set here.")
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            argv = ["--env-id", task, *command_options(settings)]
            args = script.parse_args(script.Args, argv)
            importlib.import_module("evaluate").environment_class(script)(args)
    except (script.BadInput, TypeError) as error:  # TypeError: of json, of a date
        raise BadInput(f"{where}: {error}") from None
    except SystemExit:
        text = re.sub("\x1b\\[[0-9;]*m|[\u2500-\u257f]", " ", output.getvalue())
        raise BadInput(f"{where}: {' '.join(text.split())}") from None
    return args


def cells_of(experiment, name, seeds, runs_dir):
    """Every run with these seeds or on disk; what can't be used is found here."""
    cells, folders = [], set()
    for algorithm, script_name, settings, by_task in variants(experiment):
        script = load_script(script_name)
        for task in experiment["tasks"]:
            where = f"{name}: {algorithm} on {task}"
            own = settings | by_task.get(task, {})
            args = parse_settings(script, own, task, where)
            prefix = re.sub(r"[^\w.=+-]+", "-", f"{algorithm}__{task}") + "__s"
            if len(prefix) > 200:
                raise BadInput(f"{where}: that is too long for the name of a folder.")
            if prefix in folders:
                raise BadInput(f"{where} would share the folder {prefix}1 with another.")
            folders.add(prefix)
            names = [path.name.removeprefix(prefix) for path in (runs_dir / name).glob("*__s*")]
            for seed in sorted({*seeds, *(int(x) for x in names if x.isdecimal())}):
                folder = runs_dir / name / f"{prefix}{seed}"
                try:
                    own_args = dataclasses.replace(args, seed=seed)
                except script.BadInput as error:
                    raise BadInput(f"{error} Move {shown(folder)} away.") from None
                options = command_options(own)
                cells.append(Cell(algorithm, task, seed, script, own_args, options, folder))
    return cells


def named(values, pieces):
    """The values that a list names, split at its commas; empty if one of its names is unknown.

    A name may hold commas itself: the longest that is one counts.
    """
    for end in range(len(pieces), 0, -1):
        name = ",".join(pieces[:end]).strip()
        found = [name] if name in values else [x for x in values if fnmatch.fnmatchcase(x, name)]
        rest = named(values, pieces[end:]) if found else []
        if found and (rest or end == len(pieces)):
            return found + rest
    return []


def selected(cells, seeds, only):
    """The cells with these seeds that match "algorithm=NAME,NAME" and "env=NAME" (* and ? too)."""
    cells = [cell for cell in cells if cell.seed in seeds]
    for condition in only:
        key, _, patterns = condition.partition("=")
        attribute = {"algorithm": "algorithm", "env": "task"}.get(key)
        if attribute is None:
            raise BadInput(f"--only {condition}: type algorithm=NAME or env=NAME.")
        values = sorted({getattr(cell, attribute) for cell in cells})
        kept = named(values, patterns.split(","))
        if not kept:
            unknown = f"--only {condition} names what isn't there"
            raise BadInput(f"{unknown}; there are {'; '.join(values)}.")
        cells = [cell for cell in cells if getattr(cell, attribute) in kept]
    return sorted(cells, key=lambda cell: cell.seed)  # all algorithms early
