"""Trains what an experiment names, algorithms x tasks x seeds, by running the scripts as commands.

    python benchmark/run.py benchmark/experiments/hopper_quick.toml    # 2 runs, 3 minutes
    python benchmark/run.py EXPERIMENT.toml --dry-run                  # print the commands, no more
    python benchmark/run.py EXPERIMENT.toml --seeds 1:2 --only 'algorithm=PPO*' env=Hopper-v5
    python benchmark/run.py EXPERIMENT.toml --ray ADDRESS              # a Ray cluster, or "local"

Type it again to go on: finished runs stay, interrupted ones resume from their checkpoints. Each run
has a folder, runs/benchmark/<experiment>/<algorithm>__<task>__s<seed>, with its log. Finished runs
are collected into benchmark/results/<experiment>/: runs.csv, a row a run, whose `final_reward` is
the mean over the last 5 updates in which an episode ended of their mean returns; and updates.csv, a
row a run and update. Rows of finished runs with the same settings that were trained elsewhere stay.
The file of an experiment is described in benchmark/experiment.py.
"""

import dataclasses
import fcntl
import math
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import tyro
from collect import collect, committed, locked, table
from experiment import BadInput, cells_of, parse_seeds, read_experiment, selected
from jobs import REPOSITORY, LocalJob, NoCluster, RayJobs, cores, progress, shown

# ---- Training ----


class Signals:
    """Ctrl-C or SIGTERM asks the sweep to stop; a second one stops it at once."""

    number = 0

    def __init__(self):
        for number in signal.SIGINT, signal.SIGTERM:
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        if self.number:
            raise KeyboardInterrupt
        self.number = number


class Screen:
    """A table that is drawn anew in a terminal; elsewhere a line now and then."""

    def __init__(self):
        self.live, self.height, self.next = sys.stdout.isatty(), 0, 0.0

    def show(self, table):
        if time.monotonic() < self.next:
            return
        lines = table()
        self.next = time.monotonic() + (0.5 if self.live else 30)
        if not self.live:
            self.print("; ".join(lines))
            return
        columns, rows = shutil.get_terminal_size()
        lines = [line[: columns - 1] for line in lines[: rows - 2]]
        self.erase()
        self.height = len(lines)
        self.print("\n".join(lines))

    def erase(self):
        if self.height:
            self.print(f"\x1b[{self.height}F\x1b[J", end="")
        self.height = 0

    def say(self, text):
        self.erase()
        self.print(text)

    def print(self, text, end="\n"):
        try:
            print(text, end=end, flush=True)
        except BrokenPipeError:  # of "| head": the training goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def hours(seconds):
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{math.ceil(seconds / 60)} min"


class Sweep:
    """Trains what isn't complete yet, `workers` cells at once."""

    def __init__(self, cells, start, workers):
        self.cells, self.start, self.workers = cells, start, workers
        self.screen, self.signals = Screen(), Signals()
        self.done = [cell for cell in cells if cell.is_complete()]
        self.waiting = [cell for cell in cells if cell not in self.done]
        self.running, self.failed = {}, {}  # cell -> job; cell -> exit status
        self.began = time.monotonic()
        self.before = {cell: progress(cell.run())[0] for cell in cells}  # steps

    def train(self):
        stopping = False
        while self.running or (self.waiting and not stopping):
            while self.waiting and len(self.running) < self.workers and not stopping:
                cell = self.waiting.pop(0)
                try:
                    self.running[cell] = self.start(cell)
                except OSError as error:
                    self.failed[cell] = error
                    self.screen.say(f"failed: {cell}")
            time.sleep(0.1)
            for cell, job in list(self.running.items()):
                status = job.poll()
                if status is not None:
                    del self.running[cell]
                    self.end(cell, status)
            if self.signals.number and not stopping:
                stopping = True
                self.screen.say(f"stopping after their update: {len(self.running)} running")
                for job in self.running.values():
                    job.stop()
            self.screen.show(self.table)

    def end(self, cell, status):
        if cell.is_complete():
            self.done.append(cell)
            self.screen.say(f"done: {cell}")
        elif self.signals.number:
            self.screen.say(f"stopped: {cell}")
        else:
            self.failed[cell] = status
            self.screen.say(f"failed: {cell}")

    def table(self):
        """A line for all, then one for each run in training."""
        now = {cell: job.progress() for cell, job in self.running.items()}
        now = {cell: x for cell, x in now.items() if x}  # those that a node has taken
        counts = f"{len(self.done)} of {len(self.cells)} done, {len(now)} running"
        counts += f", {len(self.failed)} failed"
        steps = self.before | {cell: x[0] for cell, x in now.items()}
        steps |= {cell: cell.total() for cell in self.done}
        speed = sum(steps.values()) - sum(self.before.values())
        speed /= time.monotonic() - self.began
        if speed > 0:
            left = sum(cell.total() - steps[cell] for cell in [*self.waiting, *self.running])
            counts += f", {hours(left / speed)} left"
        lines = [counts]
        for cell, (done, mean_return) in now.items():
            line = f"  {cell}: {done:,} of {cell.total():,} steps"
            lines.append(f"{line}, return {mean_return:.0f}" if done else line)
        return lines

    def report(self):
        """Say what failed, and why."""
        for cell, status in self.failed.items():
            if isinstance(status, OSError):
                print(f"\n{cell} could not be started: {status}")
                continue
            path = cell.folder / "log.txt"
            log = path.read_text(errors="replace").replace("\r", "\n").split("\n")
            print(f"\n{cell} failed with status {status}; the end of {shown(path)}:")
            print("\n".join(f"    {line}" for line in [x for x in log if x.strip()][-8:]))


# ---- The command ----


@dataclasses.dataclass
class Args:
    """Train what an experiment names; type the same again to go on."""

    experiment: tyro.conf.Positional[Path]  # a file of benchmark/experiments
    seeds: str | None = None  # 3, or 1:5 for 1 to 5, instead of the file's
    workers: int | None = None  # runs at once; None: as many as there are cores (Ray: as CPUs)
    ray: str | None = None  # address of a Ray cluster, or "local"
    only: tuple[str, ...] = ()  # algorithm=NAME,NAME env=NAME; * and ? stand for any text
    dry_run: bool = False  # print every command and run nothing
    runs_dir: Path = REPOSITORY / "runs/benchmark"  # gets a folder per experiment
    results: Path = REPOSITORY / "benchmark/results"  # gets another, to be committed


def made(folder):
    """The folder, which is there then, or BadInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{shown(folder)} can't be made: {error.strerror}.") from None
    return folder


def run(args):
    """-> exit status: 0 only if everything is done"""
    if args.workers is not None and args.workers < 1:
        raise BadInput(f"--workers is {args.workers}; type 1 or more.")
    experiment, name = read_experiment(args.experiment), args.experiment.stem
    seeds = parse_seeds(args.seeds or experiment["seeds"])
    cells = cells_of(experiment, name, seeds, args.runs_dir.resolve())
    wanted = selected(cells, seeds, args.only)
    if args.dry_run:
        for cell in wanted:
            print(shlex.join(["python", *cell.command(shown(cell.folder))]))
        return 0
    results = made(args.results / name)
    committed(results)  # what is damaged there is said now, not after the training
    folder = made(args.runs_dir.resolve() / name)
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{shown(folder)} is being trained by another process.") from None
        for cell in cells:
            cell.check_unchanged()
        start, workers = LocalJob, args.workers or cores()
        if args.ray:  # Ray lets those wait that find no free CPU
            start, workers = RayJobs(args.ray), args.workers or len(cells)
        sweep = Sweep(wanted, start, workers)
        sweep.train()
        sweep.report()
        kept = [experiment[name] for name in ("columns", "last_updates", "reach")]
        with locked(results):
            rows = collect(cells, *kept, results)
    if rows:
        print(table(rows))
    print(f"{name}: {len(sweep.done)} of {len(wanted)} done; results: {shown(results)}")
    if len(sweep.done) == len(wanted):
        return 0
    print(f"go on with: {shlex.join(['python', *sys.argv])}", file=sys.stderr)
    number = sweep.signals.number
    return 128 + number if number else 1


def main():
    try:
        return run(tyro.cli(Args))
    except (BadInput, NoCluster) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("run.py: stopped at once; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
