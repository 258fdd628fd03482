"""Scripts as processes, on this machine or on the nodes of a Ray cluster.

A job trains a cell (experiment.py) and has poll, stop and progress.
"""

import contextlib
import ctypes
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def shown(path):
    """The path as seen from the repository, in which the commands run, if it lies in there."""
    path = Path(path).resolve()
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path


def cores():
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def progress(run):
    """Steps and mean return in the last whole line of the run's updates.csv; run may be None."""
    if run is None:
        return 0, math.nan
    try:
        with open(run / "updates.csv", "rb") as file:
            header = file.readline()
            file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - 4096))
            rows = [line for line in file.readlines() if line.endswith(b"\n")]
        last = dict(zip(header.decode().strip().split(","), rows[-1].decode().split(",")))
        return int(last["global_step"]), float(last["mean_return"])
    except (OSError, IndexError, KeyError, ValueError):
        return 0, math.nan


# Where the kernel can't tie a process to its parent, this one looks after it.
GUARD = """import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
parent, child = os.getppid(), subprocess.Popen(sys.argv[1:])
while child.poll() is None:
    time.sleep(0.2)
    if os.getppid() != parent:
        child.kill()
sys.exit(child.returncode % 256)"""


def start(command, folder, log):
    """Start a script in a folder, as a process that is killed when this one dies, however it does.

    Its session is its own, so that a Ctrl-C typed here doesn't reach it.
    """
    parent, command = os.getpid(), [sys.executable, *command]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    options = {"cwd": folder, "env": os.environ | threads, "start_new_session": True}
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl

        def tie():
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)

        options["preexec_fn"] = tie
    else:
        command = [sys.executable, "-c", GUARD, *command]
    with open(log, "ab") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        return subprocess.Popen(command, **streams, **options)


def stop(process, number=signal.SIGTERM):
    """Let the script finish its update and write its checkpoint; or, by SIGKILL, end it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


class LocalJob:
    """A cell in training on this machine."""

    def __init__(self, cell):
        self.cell, run = cell, cell.run()
        cell.folder.mkdir(parents=True, exist_ok=True)
        command = cell.command(shown(cell.folder), run and shown(run))
        self.process = start(command, REPOSITORY, cell.folder / "log.txt")

    def poll(self):
        """-> exit status, or None while it runs"""
        return self.process.poll()

    def stop(self):
        stop(self.process)

    def progress(self):
        """-> steps and mean return of now"""
        return progress(self.cell.run())


def pack(folder):
    """The files in a folder -> bytes"""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, ".")
    return buffer.getvalue()


def unpack(data, folder):
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")


def train_on_node(name, source, commands, run_name, data, board):
    """Train on a node of a Ray cluster, which needs no file of this repository.

    commands: a fresh start, going on. data: the run to go on with. -> exit status, packed folder
    """
    import ray

    if ray.get(board.report.remote(name, (0, math.nan))):
        return 128 + signal.SIGTERM, None
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        runs.mkdir()
        if data:
            unpack(data, runs / run_name)
        command = commands[1 if data else 0]
        Path(folder, command[0]).write_text(source)
        process, stopping = start(command, folder, runs / "log.txt"), False
        try:
            while process.poll() is None:
                run = next(runs.glob("*/"), runs)
                if ray.get(board.report.remote(name, progress(run))) and not stopping:
                    stopping = True
                    stop(process)
                time.sleep(0.5)
        finally:
            stop(process, signal.SIGKILL)
        return process.returncode, pack(runs)


class Board:
    """On the machine of the sweep: what the nodes report, and whether they shall stop."""

    def __init__(self):
        self.reports, self.stopping = {}, False

    def report(self, name, steps_and_return):
        self.reports[name] = steps_and_return
        return self.stopping

    def read(self, name):
        return self.reports.get(name)

    def stop(self):
        self.stopping = True


class NoCluster(Exception):
    """There is no Ray, or no cluster at that address."""


class RayJobs:
    """Makes jobs like LocalJob of a Ray cluster: a CPU each, anew on another node if one dies."""

    def __init__(self, address):
        try:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ImportError:
            raise NoCluster("pip install -r benchmark/requirements-ray.txt first.") from None
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except Exception as error:
            raise NoCluster(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(num_cpus=0)(Board).options(scheduling_strategy=here)
        self.ray, self.board = ray, board.remote()
        self.train = ray.remote(num_cpus=1, max_retries=10)(train_on_node)

    def __call__(self, cell):
        run = cell.run()
        source = Path(cell.script.__file__).read_text()
        name = run.name if run else None
        commands = cell.command("runs"), cell.command("runs", f"runs/{name}")
        data = pack(run) if run else None
        reference = self.train.remote(str(cell), source, commands, name, data, self.board)
        return RayJob(self, cell, reference)


class RayJob:
    """A cell in training on a cluster."""

    def __init__(self, jobs, cell, reference):
        self.jobs, self.cell, self.reference = jobs, cell, reference

    def poll(self):
        """-> exit status, or None while it waits for a node or runs"""
        ray = self.jobs.ray
        if not ray.wait([self.reference], timeout=0)[0]:
            return None
        self.cell.folder.mkdir(parents=True, exist_ok=True)
        try:
            status, data = ray.get(self.reference)
        except ray.exceptions.RayError as error:
            with open(self.cell.folder / "log.txt", "a") as file:
                file.write(f"{error}\n")
            return 1
        if data:
            arrive(data, self.cell)
        return status

    def stop(self):
        self.jobs.board.stop.remote()

    def progress(self):
        """-> steps and mean return of now, or None while it waits for a node"""
        return self.jobs.ray.get(self.jobs.board.read.remote(str(self.cell)))


def arrive(data, cell):
    """Put a packed folder beside what the cell's has; drop older runs once the new one is there."""
    older = list(cell.folder.glob("*/"))
    with tempfile.TemporaryDirectory(dir=cell.folder.parent) as folder:
        unpack(data, folder)
        with open(cell.folder / "log.txt", "ab") as log:
            log.write(Path(folder, "log.txt").read_bytes())
        for path in Path(folder).glob("*/config.json"):
            config = json.loads(path.read_text()) | {"git_commit": git_commit()}
            path.write_text(json.dumps(config, indent=1))
            target = cell.folder / path.parent.name
            while target.exists():
                target = target.with_name(target.name + "+")
            os.replace(path.parent, target)
    for path in older if cell.run() not in older else []:
        shutil.rmtree(path)


def git_commit():
    git = ["git", "-C", REPOSITORY, "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
