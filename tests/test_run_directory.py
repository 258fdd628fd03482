"""The directory of a run: its files, resume, lock, names, and what the same seed gives."""

import contextlib
import csv
import fcntl
import importlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

CONTINUOUS = ["ppo_continuous", "ppo_minimal_no_tricks", "trpo_continuous"]
ATARI = ["ppo_atari", "ppo_atari_lstm"]
SCRIPTS = [*CONTINUOUS, "ppo_multidiscrete", "ppo_atari"]
SMALL = dict.fromkeys(SCRIPTS, "--env-id Hopper-v5 --num-steps 64 --num-minibatches 2")
# Games of 20 steps.
GAMES = "--env-id PongNoFrameskip-v4 --max-frames 100 --noop-max 1 --num-steps 64 --threads 1"
SMALL |= dict.fromkeys(ATARI, f"{GAMES} --num-envs 1 --num-minibatches 1")
SMALL = {name: f"{options} --update-epochs 1".split() for name, options in SMALL.items()}
FULL = ["ppo_continuous", "trpo_continuous"]  # with --heldout
COMPILED = [*FULL, "ppo_multidiscrete", "ppo_atari"]  # with --compile
RATES = dict.fromkeys(("ppo_continuous", "ppo_multidiscrete", *ATARI), "learning_rate")
RATES |= {"trpo_continuous": "value_learning_rate"}
TAGS = {  # beside the episodes' and SPS; the names of CleanRL where it has one
    "ppo_continuous": """losses/policy_loss losses/value_loss losses/entropy losses/approx_kl
    losses/old_approx_kl losses/clipfrac losses/explained_variance charts/learning_rate
    trust_region/mean_kl trust_region/max_ratio""",
    "ppo_minimal_no_tricks": "losses/policy_loss losses/value_loss losses/entropy",
    "trpo_continuous": """losses/surrogate_before losses/surrogate_after losses/value_loss
    losses/entropy losses/explained_variance charts/value_learning_rate trust_region/accepted
    trust_region/curvature trust_region/max_kl trust_region/mean_kl trust_region/max_ratio""",
}
CATEGORICAL = """losses/policy_loss losses/value_loss losses/entropy losses/approx_kl
    losses/old_approx_kl losses/clipfrac losses/explained_variance charts/learning_rate"""
TAGS |= dict.fromkeys(["ppo_multidiscrete", *ATARI], CATEGORICAL)

gym.register("ns/Env-v0", entry_point=HopperEnv)


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture
def start(script, tmp_path):
    """Train for these updates with these options -> the run's directory"""

    def start(*argv, updates=3):
        before = set(tmp_path.glob("*"))
        total = ["--total-timesteps", str(64 * updates)]
        argv = [*SMALL[script.__name__], *total, *argv, "--runs-dir", str(tmp_path)]
        assert script.main(argv) == 0
        (run,) = set(tmp_path.glob("*")) - before
        return run

    return start


def wait_for(condition, seconds=60):
    """What the condition returns, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return result


def rows(run, name):
    with open(Path(run, f"{name}.csv")) as file:
        return list(csv.DictReader(file))


def weights(run):
    return torch.load(Path(run, "checkpoint.pt"), weights_only=True)["parts"]["agent"]


def assert_same_training(one, other):
    episodes = [[x | {"seconds": None} for x in rows(run, "episodes")] for run in (one, other)]
    assert episodes[0] == episodes[1] and episodes[0]
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("script", [*SCRIPTS, "ppo_atari_lstm"], indirect=True)
def test_files_and_columns(script, start):
    run = start()
    names = {re.sub(r"events\.out\..*", "events", path.name) for path in run.iterdir()}
    assert names == {
        "checkpoint.pt",
        "config.json",
        "episodes.csv",
        "updates.csv",
        "events",
        "lock",
    }
    episodes, updates = rows(run, "episodes"), rows(run, "updates")
    assert list(episodes[0]) == ["global_step", "seconds", "episodic_return", "episodic_length"]
    ends = [int(x["global_step"]) for x in episodes]
    assert [int(x["episodic_length"]) for x in episodes[1:]] == [
        end - begin for begin, end in zip(ends, ends[1:])
    ]
    assert [int(x["global_step"]) for x in updates] == [64, 128, 192]
    tags = TAGS[script.__name__].split()
    assert all(math.isfinite(float(x[tag.split("/")[1]])) for x in updates for tag in tags)
    if "trust_region/mean_kl" in tags:
        assert all(float(x["mean_kl"]) >= 0 and float(x["max_ratio"]) > 0 for x in updates)
    assert re.fullmatch(rf"[\w-]+__{script.__name__}__s1__\d{{8}}-\d{{6}}-\w+", run.name)


def test_config_is_strict_json_with_infinity_as_a_string(script, start):
    infinite = [x for x in ("clip_coef", "max_grad_norm") if hasattr(script.Args, x)]
    run = start(*(f"--{name.replace('_', '-')}=inf" for name in infinite))

    def refuse(constant):
        raise AssertionError(constant)

    config = json.loads((run / "config.json").read_text(), parse_constant=refuse)
    assert infinite and all(config["settings"][name] == "inf" for name in infinite)
    assert {"python", "torch", "gymnasium", "mujoco", "numpy"} <= set(config["versions"])
    assert config["script"] == script.__name__ and "command" in config and "git_commit" in config
    fields = {field.name for field in script.dataclasses.fields(script.Args) if field.init}
    assert set(config["settings"]) == fields
    args = script.load_config(script.Args, run)
    assert all(getattr(args, name) == math.inf for name in infinite)


def test_tensorboard_has_the_promised_names(script, start):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = start()
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    charts = {"charts/episodic_return", "charts/episodic_length", "charts/SPS"}
    assert charts | set(TAGS[script.__name__].split()) <= set(events.Tags()["scalars"])
    assert [x.step for x in events.Scalars("losses/value_loss")] == [64, 128, 192]
    returns = [x.value for x in events.Scalars("charts/episodic_return")]
    assert returns == pytest.approx([float(x["episodic_return"]) for x in rows(run, "episodes")])


def test_names_are_safe_and_never_shared(script, start, monkeypatch, tmp_path):
    monkeypatch.setattr(script.time, "strftime", lambda form: "20260101-000000")
    env_id = "ALE/Pong-v5" if script.__name__ in ATARI else "ns/Env-v0"
    runs = [start("--env-id", env_id) for _ in range(2)]
    assert runs[0] != runs[1] and runs[0].parent == runs[1].parent == tmp_path
    assert all((run / "checkpoint.pt").is_file() and "/" not in run.name for run in runs)


def test_same_seed_same_training_and_another_seed_another(start):
    one, other = start(), start()
    assert_same_training(one, other)
    third = start("--seed", "2")
    pairs = zip(weights(one).values(), weights(third).values())
    assert not all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("script", FULL, indirect=True)
def test_heldout_batch_changes_nothing(start):
    one, other = start(), start("--heldout")
    assert_same_training(one, other)
    columns = {"heldout_mean_kl", "heldout_max_ratio"}
    assert columns <= set(rows(other, "updates")[0]) and not columns & set(rows(one, "updates")[0])
    assert all(float(x["heldout_mean_kl"]) > 0 for x in rows(other, "updates"))


@pytest.mark.slow
@pytest.mark.parametrize("script", COMPILED, indirect=True)
def test_compiled_update_equals_eager_and_itself(start):
    eager, *compiled = start(updates=1), *(start("--compile", updates=1) for _ in range(2))
    assert_same_training(*compiled)
    for x, y in zip(weights(eager).values(), weights(compiled[0]).values()):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


@pytest.mark.parametrize("script", COMPILED, indirect=True)
def test_without_a_gpu_cuda_is_a_line_and_trains_on_the_processor(start, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one = start(updates=1)
    capsys.readouterr()
    other = start("--cuda", updates=1)
    assert "--cuda: there is no CUDA device" in capsys.readouterr().out
    assert_same_training(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("script", COMPILED, indirect=True)
def test_a_gpu_trains_like_the_processor(start):
    one, other = start(updates=1), start("--cuda", updates=1)
    for x, y in zip(weights(one).values(), weights(other).values()):
        torch.testing.assert_close(x, y.cpu(), atol=1e-3, rtol=0)


# ---- Interrupted runs ----

LONG = dict.fromkeys(SCRIPTS, 100) | dict.fromkeys(ATARI, 20)  # updates


@pytest.fixture
def interrupted(script, tmp_path):
    """Start a long run in a process, send it a signal after some updates -> run, status, stderr"""

    def interrupted(number, updates, *argv):
        total = str(64 * LONG[script.__name__])
        command = [sys.executable, script.__file__, *SMALL[script.__name__], *argv]
        command += ["--total-timesteps", total, "--runs-dir", str(tmp_path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                run = next(tmp_path.glob("*/updates.csv"), None)
                if run and run.read_text().count("\n") > updates:
                    break
                time.sleep(0.01)
            process.send_signal(number)
            error = process.communicate(timeout=60)[1]
        finally:
            process.kill()
        return run.parent, process.returncode, error

    return interrupted


def check_rates(script, run, factors):
    if script.__name__ in RATES:
        rates = [float(x[RATES[script.__name__]]) for x in rows(run, "updates")]
        rate = getattr(script.Args, RATES[script.__name__])
        assert rates == pytest.approx([rate * factor for factor in factors])


def check_resumed(script, run, total=None):
    total = total or 64 * LONG[script.__name__]
    updates, episodes = rows(run, "updates"), rows(run, "episodes")
    assert [int(x["global_step"]) for x in updates] == list(range(64, total + 1, 64))
    # The schedule goes on as if nothing had been.
    check_rates(script, run, [1 - (int(x["update"]) - 1) * 64 / total for x in updates])
    steps, seconds = ([float(x[name]) for x in episodes] for name in ("global_step", "seconds"))
    assert steps == sorted(steps) and seconds == sorted(seconds)
    assert all(None not in x.values() and None not in x for x in [*episodes, *updates])
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    assert state["counters"]["global_step"] == total


@pytest.mark.parametrize("script", [*CONTINUOUS, "ppo_atari"], indirect=True)
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_writes_the_checkpoint_and_says_how_to_go_on(script, interrupted, number, status):
    run, returned, error = interrupted(number, 3)
    assert returned == status
    assert f"python {script.__name__}.py --resume {run}" in error and "Traceback" not in error
    updates = rows(run, "updates")
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    assert state["counters"]["update"] == len(updates) < LONG[script.__name__]
    last = int(updates[-1]["global_step"])
    assert all(int(x["global_step"]) <= last for x in rows(run, "episodes"))
    assert script.main(["--resume", str(run)]) == 0
    check_resumed(script, run)


@pytest.mark.parametrize("script", [*CONTINUOUS, "ppo_atari"], indirect=True)
def test_killed_run_goes_on_from_its_checkpoint(script, interrupted):
    run, returned, _ = interrupted(signal.SIGKILL, 8, "--checkpoint-every", "3")
    assert returned == -signal.SIGKILL
    kept = torch.load(run / "checkpoint.pt", weights_only=True)["counters"]
    assert kept["update"] % 3 == 0 and 6 <= kept["update"] < LONG[script.__name__]
    before = [x for x in rows(run, "episodes") if int(x["global_step"]) <= kept["global_step"]]
    for name in "episodes", "updates":  # as if the disk had been full in the middle of a row
        with open(run / f"{name}.csv", "a") as file:
            file.write("64,1.2")
    assert script.main(["--resume", str(run)]) == 0
    check_resumed(script, run)
    episodes = rows(run, "episodes")
    assert episodes[: len(before)] == before
    if script.__name__ not in ATARI:  # whose short games all return 0
        # The episodes after the restart are no replay of the first ones.
        assert episodes[len(before)]["episodic_return"] != episodes[0]["episodic_return"]


def test_kill_before_the_first_update_can_be_resumed(script, start):
    run = start()
    fresh = run.parent / "fresh"
    fresh.mkdir()
    args = script.load_config(script.Args, run)
    args.runs_dir = str(fresh)
    with pytest.raises(ZeroDivisionError), script.Run(args, {}) as begun:
        raise ZeroDivisionError
    for name in "episodes", "updates":  # a header that was torn
        (begun.directory / f"{name}.csv").write_text("global_st")
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    counters = {"update": 0, "global_step": 0, "seconds": 0.0, "last_returns": []}
    torch.save(state | {"counters": counters}, begun.directory / "checkpoint.pt")
    assert script.main(["--resume", str(begun.directory)]) == 0
    assert list(rows(begun.directory, "updates")[0])[:2] == ["global_step", "update"]
    assert len(rows(begun.directory, "updates")) == 3


@pytest.mark.parametrize("script", [*SCRIPTS, "ppo_atari_lstm"], indirect=True)
def test_resumed_run_draws_on_and_seeds_its_episodes_by_the_updates_done(
    script, start, tmp_path, monkeypatch
):
    run, whole = start(updates=2), start(updates=3)
    again = Path(shutil.copytree(run, tmp_path / "again"))
    env_seed, seeds = script.Run.env_seed, []

    def watched(self, *args, **kwargs):
        seeds.append(env_seed(self, *args, **kwargs))
        return seeds[-1]

    monkeypatch.setattr(script.Run, "env_seed", watched)
    for resumed in run, again:
        seeds.clear()
        assert script.main(["--resume", str(resumed), "--total-timesteps", "192"]) == 0
        entropy = 1, 0, 2  # seed, environment, updates done
        words = np.random.SeedSequence(entropy, spawn_key=(0,)).generate_state(4)
        assert seeds[0] == int.from_bytes(words.tobytes(), "little")
    assert_same_training(run, again)
    # Noise and shuffling go on as if nothing had been.
    generators = [
        torch.load(x / "checkpoint.pt", weights_only=True)["parts"]["generator"]
        for x in (run, whole)
    ]
    assert torch.equal(*generators)


def test_longer_total_recomputes_the_schedule(script, start):
    run = start()
    assert script.main(["--resume", str(run), "--total-timesteps", "384"]) == 0
    assert [int(x["update"]) for x in rows(run, "updates")] == [1, 2, 3, 4, 5, 6]
    check_rates(script, run, [1, 2 / 3, 1 / 3, 1 / 2, 1 / 3, 1 / 6])
    config = json.loads((run / "config.json").read_text())
    assert config["settings"]["total_timesteps"] == 384


def test_second_process_is_locked_out(script, start, capsys):
    run = start()
    capsys.readouterr()
    before = {path: path.read_bytes() for path in run.iterdir()}
    with open(run / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert script.main(["--resume", str(run), "--total-timesteps", "384"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "trained by another process" in line
    assert before == {path: path.read_bytes() for path in run.iterdir()}
    assert script.main(["--resume", str(run), "--total-timesteps", "384"]) == 0


# ---- Long runs ----


def memory(process):
    """Resident memory of a process in MB"""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into /proc")
@pytest.mark.parametrize("script", [*CONTINUOUS, "ppo_multidiscrete"], indirect=True)
def test_memory_of_2_million_steps_stays_as_it_is_after_a_tenth(script, tmp_path):
    command = [sys.executable, script.__file__, "--env-id", "Hopper-v5", "--seed", "1"]
    command += ["--total-timesteps", "2000000", "--update-epochs", "1", "--runs-dir", str(tmp_path)]
    command += ["--compile"] * (script.__name__ in COMPILED)
    process, used = subprocess.Popen(command), {}
    while process.poll() is None:
        time.sleep(2)
        for path in tmp_path.glob("*/updates.csv"):
            with contextlib.suppress(IndexError, ValueError, TypeError, OSError):  # begins, ended
                used[int(path.read_text().splitlines()[-1].split(",")[0])] = memory(process)
    assert process.returncode == 0
    begin = max(x for step, x in used.items() if step <= 200_000)
    assert max(used.values()) < 1.05 * begin, used
