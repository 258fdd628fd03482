"""Faults of machines and of others: kill -9, a full disk, a second process, a stranger's run."""

import contextlib
import importlib
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_run_directory import ATARI, SMALL, check_resumed, rows, wait_for

import evaluate

SCRIPTS = [*SMALL]
# The plumbing is the same to the letter in all, so that the first one will do for CI.
PARAMS = [SCRIPTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS[1:])]
TINY = {name: [*options, "--total-timesteps", "192"] for name, options in SMALL.items()}

# Processes that have the scripts imported already: forks of one that did nothing else.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(SCRIPTS)


def run_script(name, argv, largest_file=None):
    with open(os.devnull, "w") as sys.stdout, open(argv.pop(), "w") as sys.stderr:
        if largest_file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        sys.exit(importlib.import_module(name).main(argv))


@pytest.fixture(scope="module", params=PARAMS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture
def start(script, tmp_path):
    """Begin the script with this command line in a process of its own -> process, its stderr"""
    begun = []

    def start(*argv, **limits):
        error = tmp_path / f"stderr-{len(begun)}"
        argv = [*map(str, argv), str(error)]
        begun.append(
            processes.Process(target=run_script, args=(script.__name__, argv), kwargs=limits)
        )
        begun[-1].start()
        return begun[-1], error

    yield start
    for process in begun:
        process.kill()


@pytest.fixture(scope="module")
def original(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    assert script.main([*TINY[script.__name__], "--runs-dir", str(folder)]) == 0
    return next(folder.iterdir())


@pytest.fixture
def finished(original, tmp_path):
    """The directory of a run of 192 steps."""
    return Path(shutil.copytree(original, tmp_path / "runs" / "run"))


# ---- Faults of the machine ----


def check_killed(script, start, folder, kills, updates):
    """Kill a run at random moments, some while it starts and some in mid-update; then finish it."""
    draw, total = random.Random(1), str(64 * updates)
    options = [*SMALL[script.__name__], "--total-timesteps", total, "--checkpoint-every", "2"]
    process, error = start(*options, "--runs-dir", folder)
    run, done = wait_for(lambda: next(folder.glob("*/checkpoint.pt"), None), 120).parent, 0
    for _ in range(kills):
        if more := draw.choice([0, 0, 1, 2, 5]):
            wait_for(lambda x=process, n=done + more: not x.is_alive() or updates_in(run) >= n, 120)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, error.read_text()
        counters = torch.load(run / "checkpoint.pt", weights_only=True)["counters"]
        assert counters["update"] >= done and counters["global_step"] == 64 * counters["update"]
        done = counters["update"]
        process, error = start("--resume", run)
    process.join()
    assert process.exitcode == 0, error.read_text()
    check_resumed(script, run, 64 * updates)  # steps, schedule, order
    for name in "episodes", "updates":
        head, *lines = (run / f"{name}.csv").read_text().splitlines()
        assert {line.count(",") for line in lines} == {head.count(",")}


def updates_in(run):
    path = run / "updates.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def test_run_killed_at_3_random_moments_goes_on(script, start, tmp_path):
    check_killed(script, start, tmp_path, kills=3, updates=20)


@pytest.mark.slow
def test_run_killed_at_20_random_moments_goes_on(script, start, tmp_path):
    check_killed(script, start, tmp_path, kills=20, updates=150)


def test_no_point_of_tensorboard_is_lost_or_doubled_by_a_resume(script, finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert script.main(["--resume", str(finished), "--total-timesteps", "384"]) == 0
    events = EventAccumulator(str(finished), size_guidance={"scalars": 0}).Reload()
    assert [x.step for x in events.Scalars("losses/value_loss")] == list(range(64, 385, 64))
    episodes = [int(x["global_step"]) for x in rows(finished, "episodes")]
    assert [x.step for x in events.Scalars("charts/episodic_return")] == episodes


def resumed(script, start, run, **limits):
    """Go on with the run in a process -> status, its lines on stderr"""
    process, error = start("--resume", run, "--total-timesteps", "384", **limits)
    process.join()
    return process.exitcode, error.read_text().splitlines()


def test_file_too_large_is_one_line_and_leaves_the_checkpoint_as_it_was(script, start, finished):
    before = (finished / "checkpoint.pt").read_bytes()
    status, lines = resumed(script, start, finished, largest_file=len(before) - 1)
    assert status == 1 and "checkpoint.pt can't be written: File too large" in lines[-1]
    assert "Traceback" not in "".join(lines)
    assert (finished / "checkpoint.pt").read_bytes() == before
    assert resumed(script, start, finished)[0] == 0


@pytest.fixture
def small_disk(tmp_path, finished):
    """A small disk of its own, where one may be mounted."""
    size = 2**20 + 4 * (finished / "checkpoint.pt").stat().st_size
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 0.01, 0.2, 0.4, 0.8])  # of what a checkpoint takes
def test_full_disk_is_one_line_and_leaves_the_checkpoint_as_it_was(
    script, start, finished, small_disk, free
):
    run = Path(shutil.copytree(finished, small_disk / "run"))
    before = (run / "checkpoint.pt").read_bytes()
    left = shutil.disk_usage(small_disk).free - free * len(before)
    (small_disk / "filler").write_bytes(bytes(int(left)))
    status, lines = resumed(script, start, run)
    assert status == 1 and "No space left on device" in lines[-1], lines
    assert "Traceback" not in "".join(lines) and "Exception ignored" not in "".join(lines)
    assert (run / "checkpoint.pt").read_bytes() == before and not list(run.glob("*.tmp"))
    (small_disk / "filler").unlink()
    assert resumed(script, start, run)[0] == 0
    assert [int(x["global_step"]) for x in rows(run, "updates")] == list(range(64, 385, 64))


def test_of_two_processes_that_resume_a_run_one_is_refused(start, finished):
    begun = [start("--resume", finished, "--total-timesteps", "64000000") for _ in range(2)]
    wait_for(lambda: any(process.exitcode is not None for process, _ in begun), 120)
    (refused,) = (x for x in begun if x[0].exitcode is not None)
    (trains,) = (x for x in begun if x is not refused)
    assert refused[0].exitcode == 2
    (line,) = refused[1].read_text().splitlines()
    assert "trained by another process" in line
    wait_for(lambda: updates_in(finished) > 3, 120)
    trains[0].terminate()
    trains[0].join()
    assert trains[0].exitcode == 143
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    assert state["counters"]["update"] == updates_in(finished)


def test_checkpoint_of_another_run_is_refused(script, finished, tmp_path, capfd):
    own = (finished / "checkpoint.pt").read_bytes()
    another = "BreakoutNoFrameskip-v4" if script.__name__ in ATARI else "InvertedPendulum-v5"
    cases = {"environment": ["--env-id", another], "batch": ["--num-steps", "96"], "script": []}
    for case, options in cases.items():
        name = next(x for x in SCRIPTS if (x != script.__name__) == (case == "script"))
        other = importlib.import_module(name)
        argv = [*TINY[name], *options, "--runs-dir", str(tmp_path / case)]
        assert other.main(argv) == 0
        (run,) = (tmp_path / case).iterdir()
        shutil.copy(run / "checkpoint.pt", finished)
        capfd.readouterr()
        assert script.main(["--resume", str(finished), "--total-timesteps", "384"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "checkpoint.pt can't be used" in line, case
    for size in range(0, len(own), len(own) // 7):
        (finished / "checkpoint.pt").write_bytes(own[:size])
        assert script.main(["--resume", str(finished), "--total-timesteps", "384"]) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1
    (finished / "checkpoint.pt").write_bytes(own)
    assert script.main(["--resume", str(finished), "--total-timesteps", "384"]) == 0


# ---- Runs of a stranger ----


class Bomb:
    """Unpickled, it makes a file: what a stranger's checkpoint would like to do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def resume_and_evaluate(script, run, capfd):
    """-> the one line that each says"""
    capfd.readouterr()
    lines = []
    for main, argv in (
        (script.main, ["--resume", str(run), "--total-timesteps", "384"]),
        (
            evaluate.main,
            [str(run), "--episodes", "1"],
        ),
    ):
        assert main(argv) == 2
        (line,) = capfd.readouterr().err.splitlines()
        lines.append(line)
    return lines


@pytest.mark.parametrize("form", ["pickle", "torch", "part"])
def test_checkpoint_of_a_stranger_executes_nothing(script, finished, tmp_path, capfd, form):
    path, bomb = finished / "checkpoint.pt", Bomb(tmp_path / "executed")
    if form == "pickle":
        path.write_bytes(pickle.dumps(bomb))
    elif form == "torch":
        torch.save(bomb, path)
    else:
        state = torch.load(path, weights_only=True)
        state["parts"]["agent"][next(iter(state["parts"]["agent"]))] = bomb
        torch.save(state, path)
    assert all("can't be used" in line for line in resume_and_evaluate(script, finished, capfd))
    assert not (tmp_path / "executed").exists()
    with contextlib.suppress(RuntimeError):  # a mere pickle is no checkpoint, but it's read
        torch.load(path, weights_only=False)
    assert (tmp_path / "executed").exists()  # so the bomb was a real one


@pytest.mark.parametrize(
    "name", ["../evil", "{}/ppo_evil", "{}/ppo_evil.py", "ppo_x\nppo_evil", ["a"]]
)
def test_config_names_no_script_but_those_beside(script, finished, tmp_path, capfd, name):
    name = name.format(tmp_path) if isinstance(name, str) else name
    for folder in tmp_path, finished, finished.parent:
        for evil in "evil", "ppo_evil":
            (folder / f"{evil}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    config = json.loads((finished / "config.json").read_text())
    (finished / "config.json").write_text(json.dumps(config | {"script": name}))
    resume_and_evaluate(script, finished, capfd)
    assert not (tmp_path / "executed").exists()


def test_environment_of_a_config_is_no_module_of_its_folder(script, finished, capfd, monkeypatch):
    monkeypatch.chdir(finished)
    (finished / "evil.py").write_text("open('executed', 'w')")
    config = json.loads((finished / "config.json").read_text())
    config["settings"]["env_id"] = "evil:Env-v0"
    (finished / "config.json").write_text(json.dumps(config))
    resume_and_evaluate(script, finished, capfd)
    assert not (finished / "executed").exists()


@pytest.mark.parametrize("change", ["more", "fewer", "other"])
def test_config_of_another_version_is_one_line(script, finished, capfd, change):
    config = json.loads((finished / "config.json").read_text())
    settings = config["settings"]
    if change != "more":
        del settings["gae_lambda"]
    if change != "fewer":
        settings["lam"] = 0.95
    (finished / "config.json").write_text(json.dumps(config))
    lines = resume_and_evaluate(script, finished, capfd)
    assert all("not the settings of this version" in line for line in lines)
