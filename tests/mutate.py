"""Whether the tests notice a wrong sign: the scripts changed in one place at a time. By hand.

    python tests/mutate.py --out benchmark/results/mutants.csv  # all of mutants.toml: hours
    python tests/mutate.py --function compute_gae --jobs 4
    python tests/mutate.py --script trpo_continuous --sample 50 --seed 1

mutants.toml says what is changed, in which functions, and which tests should fail then. A function
that several scripts hold to the letter is changed in all of them at once: the test that they are
twins would notice any other way, and say nothing about the maths.

With --out the fates are kept as they come. Typed again, it goes on, and tries the survivors again.
"""

import ast
import collections
import copy
import csv
import dataclasses
import functools
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro

FOLDER = Path(__file__).resolve().parent
SETTINGS = tomllib.loads((FOLDER / "mutants.toml").read_text())
SOURCES = {name: (FOLDER.parent / f"{name}.py").read_text() for name in SETTINGS["scripts"]}
SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SWAPS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
SWAPS |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
SWAPS |= {ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.Mod: ast.Mult, ast.FloorDiv: ast.Mult}
SWAPS |= {ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
PAIRS = "min max, zeros ones, zeros_like ones_like, sum mean, any all, ceil floor".split(", ")
NAMES = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}


@dataclasses.dataclass
class Options:
    """Change the scripts in one place at a time, and see whether a test fails."""

    script: str | None = None  # only what this script holds
    function: tuple[str, ...] = ()  # only in these functions, classes, sections ("train.Update")
    sample: int | None = None  # so many changes, drawn by chance
    seed: int = 1  # of the sample
    jobs: int = 1  # how many are tried at once
    out: Path | None = None  # a CSV of all fates; those that were killed in it are not tried again


@dataclasses.dataclass
class Mutant:
    function: str
    before: str  # of the whole function
    after: str
    offset: int  # where in it
    change: str
    name: str = ""  # of the change, alike for the same one elsewhere in the line
    reason: str | None = None  # why no test can notice it

    @functools.cached_property
    def scripts(self):
        return [name for name, source in SOURCES.items() if self.before in source]

    @property
    def line(self):
        """The line that is changed, as it stands in the script."""
        start, end = (
            self.before.rfind("\n", 0, self.offset) + 1,
            self.before.find("\n", self.offset),
        )
        return self.before[start : end if end >= 0 else None].strip()

    @functools.cached_property
    def key(self):
        return " ".join(self.scripts), self.function, self.line, self.change

    def where(self, script):
        source = SOURCES[script]
        number = source.count("\n", 0, source.index(self.before) + self.offset) + 1
        return f"{script}.py:{number} {self.function}: {self.line}\n    {self.change}"


def changes(node, bound):
    """Yield (operator, what stands in for the node): another node, or None for `pass`."""

    def changed(**fields):
        other = copy.deepcopy(node)
        for name, x in fields.items():
            setattr(other, name, x)
        return other

    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield "comparison", changed(ops=[SWAPS[type(op)]()])
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()) | ast.BoolOp():
            yield "logic", changed(op=SWAPS[type(node.op)]())
        case ast.BinOp() if type(node.op) in SWAPS:
            yield "arithmetic", changed(op=SWAPS[type(node.op)]())
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", node.operand
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            yield "logic", node.operand
        case ast.IfExp():
            yield "logic", changed(test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Constant(value=bool()):
            yield "constant", changed(value=not node.value)
        case ast.Constant(value=int() | float()):
            more = node.value + 1 if node.value + 1 != node.value else node.value * 2
            yield "constant", changed(value=more)
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield "name", changed(func=ast.Name(NAMES[name]))
        case ast.Call(func=ast.Attribute(attr=name, value=owner)) if name in NAMES:
            yield "name", changed(func=ast.Attribute(owner, NAMES[name]))
        case ast.AugAssign() | ast.Break() | ast.Expr(value=ast.Call() | ast.YieldFrom()):
            yield "drop", None
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "drop", None
        case ast.Assign(targets=[ast.Name(id=name)]) if name in bound:
            yield "drop", None
    match node:
        case ast.If(test=ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot()])):
            return  # the comparison itself is changed
        case ast.If(test=ast.UnaryOp(op=ast.Not())):
            return
        case ast.If():
            yield "logic", ast.UnaryOp(ast.Not(), node.test)


def walk(node):
    """The nodes of code: no docstrings, messages, checks, annotations or decorators."""
    yield node
    for name, x in ast.iter_fields(node):
        for child in x if isinstance(x, list) else [x]:
            skipped = isinstance(child, ast.JoinedStr | ast.Assert | ast.Raise | ast.arguments)
            if isinstance(child, ast.AST) and not skipped and "_list" not in name:
                yield from walk(child)


def mutants_of(script, function):
    """Every change of a function, class or section of `train` in this script."""
    source, (name, _, section) = SOURCES[script], function.partition(".")
    tops = {getattr(x, "name", None): x for x in ast.parse(source).body}
    if name not in tops:
        sys.exit(f"mutants.toml: {script}.py has no {name}")
    before = ast.get_source_segment(source, tops[name])
    start, end = 0, len(before)
    if section:
        start = before.index(f"# ---- {section} ----")
        end = min([x.start() for x in re.finditer("# ----", before[start + 6 :])], default=end)
        end = end if end == len(before) else start + 6 + end
    lines = [0]
    for line in before.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def offset(line, column):  # of ast, in bytes
        return len(before.encode()[: lines[line - 1] + column].decode())

    bound, found = set(), []
    for node in walk(ast.parse(before)):
        for operator, other in changes(node, bound):
            place = node.test if isinstance(node, ast.If) else node
            a = offset(place.lineno, place.col_offset)
            b = offset(place.end_lineno, place.end_col_offset)
            if operator not in SETTINGS["operators"] or not start <= a < end:
                continue
            old = " ".join(before[a:b].split())
            new = "pass" if other is None else ast.unparse(ast.fix_missing_locations(other))
            text = f"({new})" if isinstance(place, ast.expr) else new
            mutant = Mutant(function, before, before[:a] + text + before[b:], a, f"{old} -> {new}")
            compile(mutant.after, function, "exec")
            same = sum((x.line, x.name) == (mutant.line, mutant.change) for x in found)
            mutant.name, mutant.change = (
                mutant.change,
                mutant.change + f" (again {same})" * (same > 0),
            )
            for x in SETTINGS.get("equivalent", []):
                if (x["function"], x["line"], x["change"]) == (name, mutant.line, mutant.change):
                    mutant.reason = x["reason"]
            found.append(mutant)
        targets = node.targets if isinstance(node, ast.Assign) else []
        bound |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    return sorted(found, key=lambda mutant: mutant.offset)


def tests_of(script, function):
    """Arguments of pytest for a function: those of this script, or of all."""
    tests = SETTINGS["tests"]
    files, _, names = tests.get(f"{script}.{function}", tests.get(function, "")).partition(" -k ")
    if not files:
        sys.exit(f"mutants.toml has no tests for {function} of {script}.py")
    return (*files.split(), "-k", names) if names else tuple(files.split())


def run_tests(folder, tests):
    """In a process of its own: pytest until the first failure, on the scripts of this folder."""
    for stream in 1, 2:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ["PPO_SCRIPTS_DIR"] = folder
    os.chdir(FOLDER)
    import pytest

    os._exit(pytest.main(["-x", "-n0", "-p", "no:cacheprovider", *tests]))


def verdict(changed, tests, seconds):
    """Run tests on scripts of which some are changed -> pytest's status, or 1 at the time limit"""
    with tempfile.TemporaryDirectory() as folder:
        for name, source in changed.items():
            Path(folder, f"{name}.py").write_text(source)
        process = PROCESSES.Process(target=run_tests, args=(folder, tests))
        process.start()
        process.join(seconds)
        timed_out = process.is_alive()
        process.kill()
        process.join()
    return 1 if timed_out else process.exitcode


KEY = "scripts", "function", "line", "change"  # of a mutant, in a CSV
PROCESSES = multiprocessing.get_context("forkserver")  # each a fork of one that has these imported
PRELOAD = "pytest torch.utils.tensorboard gymnasium mujoco ale_py cv2 tyro tqdm scipy".split()


def fail(message):
    print(f"mutate.py: {message}", file=sys.stderr)
    sys.exit(2)


def all_mutants():
    """-> mutants, each once; tests: function, its text -> arguments of pytest"""
    mutants, tests = {}, {}
    for script, functions in SETTINGS["scripts"].items():
        for function in functions.split():
            for mutant in mutants_of(script, function):
                mutants.setdefault((function, mutant.after), mutant)
                tests.setdefault((function, mutant.before), tests_of(script, function))
    return list(mutants.values()), tests


def read_fates(path):
    """key -> killed or survived, of a CSV that --out made"""
    try:
        with open(path) as file:
            return {tuple(x[name] for name in KEY): x["fate"] for x in csv.DictReader(file)}
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, UnicodeDecodeError) as error:
        fail(f"--out {path} isn't a CSV of fates ({error!r}); type the name of a new file.")


def main():
    options = tyro.cli(Options)
    functions = dict.fromkeys(" ".join(SETTINGS["scripts"].values()).split())
    for name, given, allowed in (
        ("script", [options.script] if options.script else [], SOURCES),
        ("function", options.function, functions),
    ):
        for x in set(given) - set(allowed):
            fail(f"--{name} is {x}; allowed are {', '.join(allowed)}.")
    if options.jobs < 1 or (options.sample or 1) < 1:
        fail(f"--jobs {options.jobs} and --sample {options.sample} start at 1.")
    if options.out and not options.out.parent.is_dir():
        fail(f"--out {options.out}: there is no folder {options.out.parent}.")
    PROCESSES.set_forkserver_preload(PRELOAD)
    mutants, tests = all_mutants()
    known = read_fates(options.out) if options.out else {}
    fates = {x.key: "equivalent" if x.reason else known.get(x.key) for x in mutants}
    todo = [
        x
        for x in mutants
        if (not options.function or x.function in options.function)
        and (not options.script or options.script in x.scripts)
    ]
    if options.sample is not None:
        todo = random.Random(options.seed).sample(todo, min(options.sample, len(todo)))

    def keep():
        if options.out:
            with open(options.out.with_suffix(".tmp"), "w") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow([*KEY, "fate", "reason"])
                rows = [(*x.key, fates[x.key], x.reason) for x in mutants]
                writer.writerows(row for row in rows if row[4])
            os.replace(file.name, options.out)

    untried = [x for x in todo if fates[x.key] not in ("killed", "equivalent")]
    limits = {}
    for row in {tests[x.function, x.before] for x in untried}:
        begin = time.monotonic()
        if status := verdict({}, row, 3600):
            sys.exit(f"pytest {' '.join(row)}: status {status} before anything was changed")
        limits[row] = 30 + 5 * (time.monotonic() - begin)

    def fate_of(mutant):
        changed = {x: SOURCES[x].replace(mutant.before, mutant.after) for x in mutant.scripts}
        row = tests[mutant.function, mutant.before]
        status = verdict(changed, row, limits[row])
        said = "." if status else f"\n{mutant.where(mutant.scripts[0])}\n"
        print(said, end="", file=sys.stderr, flush=True)
        return "killed" if status else "survived"

    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, fate in zip(untried, pool.map(fate_of, untried)):
            fates[mutant.key] = fate
            keep()
    keep()
    print(f"\n{'script':24} mutants  killed survived equivalent kill rate")
    for script in SOURCES:
        found = collections.Counter(fates[x.key] for x in todo if script in x.scripts)
        if tried := found["killed"] + found["survived"]:
            counts = f"{found.total():8}{found['killed']:8}{found['survived']:9}"
            rate = found["killed"] / tried
            print(f"{script:24}{counts}{found['equivalent']:11}{rate:10.1%}")
    for mutant in todo:
        if fates[mutant.key] == "survived":
            print("\n" + mutant.where(mutant.scripts[0]))


if __name__ == "__main__":
    main()
