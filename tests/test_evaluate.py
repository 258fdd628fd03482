"""evaluate.py plays what was trained: same statistics, same policy, and videos that decode."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate

CONTINUOUS = ["ppo_continuous", "ppo_minimal_no_tricks", "trpo_continuous"]
SCRIPTS = [*CONTINUOUS, "ppo_multidiscrete", "ppo_atari"]
TINY = dict.fromkeys(
    SCRIPTS, ["--env-id", "Hopper-v5", "--env-kwargs", '{"max_episode_steps": 40}']
)
TINY["ppo_atari"] = "--env-id BreakoutNoFrameskip-v4 --max-frames 400 --threads 1".split()
STEPS = "--num-envs 1 --num-steps 64 --num-minibatches 2 --update-epochs 1 --total-timesteps 192"
COMMAND = [sys.executable, evaluate.__file__]


@pytest.fixture(scope="module", params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="module")
def run(script, tmp_path_factory):
    """A run of episodes of at most 40 steps, or games of at most 100."""
    folder = tmp_path_factory.mktemp("runs")
    argv = [*TINY[script.__name__], *STEPS.split(), "--runs-dir", str(folder)]
    assert script.main(argv) == 0
    return next(folder.iterdir())


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "copy"))


def output(capsys, *argv):
    capsys.readouterr()
    status = evaluate.main([str(x) for x in argv])
    return status, *capsys.readouterr()


def test_same_seed_same_result(run, capsys):
    for options in ["--episodes=3"], ["--episodes=3", "--stochastic"]:
        first, again = output(capsys, run, *options), output(capsys, run, *options)
        other = output(capsys, run, *options, "--seed=2")
        assert first == again != other and first[0] == 0
        assert first[1].startswith("return ") and "length " in first[1] and " ± " in first[1]
    greedy = output(capsys, run, "--episodes=3")[1]
    assert greedy != output(capsys, run, "--episodes=3", "--stochastic")[1]


@pytest.mark.parametrize("script", CONTINUOUS, indirect=True)
def test_statistics_are_frozen_and_actions_are_the_scripts_own(script, run):
    policy = evaluate.load_policy(run)
    env = policy.make_env()
    raw_obs, _ = env.reset(seed=0)
    first = policy(raw_obs)
    obs = raw_obs
    for _ in range(30):
        obs, _, terminated, truncated, _ = env.step(policy(obs, stochastic=True))
        if terminated or truncated:
            obs, _ = env.reset()
    assert np.array_equal(policy(raw_obs), first)
    assert env.action_space.contains(first)

    args = script.load_config(script.Args, run)
    parts = torch.load(run / "checkpoint.pt", weights_only=True)["parts"]
    agent = script.Agent(11, 3, args)
    agent.load_state_dict(parts["agent"])
    seen = raw_obs[None].astype(np.float32)
    if hasattr(args, "norm_obs"):
        statistics = script.RunningMeanStd(11)
        script.load_part(statistics, parts["obs_statistics"])
        normalized = script.normalize_obs(raw_obs[None], statistics, args.clip_obs)
        assert not np.array_equal(normalized, seen)
        seen = normalized
    with torch.no_grad():
        mean = agent.policy(torch.from_numpy(seen))[0].numpy()
    assert np.array_equal(first, mean.clip(-1, 1))


def test_ones_own_code_plays_the_runs_environment(script, run):
    policy = evaluate.load_policy(run)
    env = policy.make_env()
    obs, info = env.reset(seed=0)
    for _ in range(5):
        action = policy(obs, info=info)
        assert env.action_space.contains(action)
        obs, reward, terminated, truncated, info = env.step(action)
    assert env.observation_space.contains(obs) and not (terminated or truncated)


@pytest.mark.parametrize("script", CONTINUOUS, indirect=True)
@pytest.mark.parametrize("clips", [True, False])
def test_actions_are_clipped_as_in_training(script, copy, clips):
    if hasattr(script.Args, "clip_actions"):
        config = json.loads((copy / "config.json").read_text())
        config["settings"]["clip_actions"] = clips
        (copy / "config.json").write_text(json.dumps(config))
    clips = clips or not hasattr(script.Args, "clip_actions")  # always, without a setting
    state = torch.load(copy / "checkpoint.pt", weights_only=True)
    state["parts"]["agent"]["policy.4.bias"] += 5.0
    torch.save(state, copy / "checkpoint.pt")
    action = evaluate.load_policy(copy)(np.zeros(11))
    assert (action == 1.0).all() if clips else (action > 4.0).all()


@pytest.mark.parametrize("script", [*CONTINUOUS, "ppo_multidiscrete"], indirect=True)
def test_seeds_are_not_those_of_a_training(script, run, monkeypatch):
    seeds = []

    name = type(evaluate.load_policy(run).environment).__name__

    class Environment(getattr(script, name)):
        def reset(self, seed=None):
            seeds.append(seed)
            return super().reset(seed)

    monkeypatch.setattr(script, name, Environment)
    args = script.load_config(script.Args, run)
    args.runs_dir, environments = str(run.parent.parent), 1
    if hasattr(args, "heldout"):
        args.heldout, environments = True, 2
    script.train(args)
    training = {seed for seed in seeds if seed is not None}
    policy, options = evaluate.load_policy(run), evaluate.Options(str(run), episodes=5)
    policy.environment = Environment(args)
    policy.Environment = Environment
    seeds.clear()
    list(evaluate.play(policy, options))
    assert len(training) == environments
    assert len(set(seeds)) == 5 and not training & set(seeds)
    assert max(seeds) > 2**100


def has_egl():
    code = "import mujoco; mujoco.GLContext(64, 64).make_current()"
    environment = os.environ | {"MUJOCO_GL": "egl"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_atari"], indirect=True)
def test_video_plays(run, tmp_path):
    if not has_egl():
        pytest.skip("no EGL here")
    imageio = pytest.importorskip("imageio.v3")
    environment = {x: y for x, y in os.environ.items() if x not in ("DISPLAY", "MUJOCO_GL")}
    command = [*COMMAND, run, "--episodes", "2", "--video", tmp_path / "videos"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    plain = subprocess.run(command[:-2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == plain.stdout, done.stderr
    videos = sorted(Path(tmp_path, "videos").iterdir())
    assert len(videos) == 2 and all(path.suffix == ".mp4" for path in videos)
    for path in videos:
        frames = imageio.imread(path, plugin="FFMPEG")
        assert len(frames) >= 10 and frames.mean() > 10
        assert np.abs(frames[0].astype(int) - frames[-1]).max() > 50  # it moves


@pytest.mark.parametrize("script", SCRIPTS[:1], indirect=True)  # all draw alike
def test_missing_renderer_is_one_line_and_loses_nothing(run, tmp_path):
    plain = subprocess.run([*COMMAND, run, "--episodes=1"], capture_output=True, text=True)
    environment = os.environ | {"MUJOCO_GL": "no-such-renderer"}
    command = [*COMMAND, run, "--episodes=1", "--video", tmp_path / "videos"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == plain.stdout
    (line,) = done.stderr.splitlines()
    assert "no video" in line and "apt-get install" in line


def test_folder_that_cannot_be_made_loses_nothing(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "egl"))
    (tmp_path / "file").write_text("")
    status, text, error = output(capsys, run, "--episodes=1", "--video", tmp_path / "file")
    assert status == 0 and "return " in text and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "case",
    ["missing", "config", "deep", "script", "path", "settings", "environment"]
    + ["no-checkpoint", "garbage", "empty", "network", "episodes", "seed", "seed-of-1e19"]
    + ["bit", "video"],
)
def test_bad_input_is_one_line_and_status_2(copy, capsys, case):
    config, checkpoint, options = copy / "config.json", copy / "checkpoint.pt", []
    saved = json.loads(config.read_text())
    if case == "missing":
        shutil.rmtree(copy)
    elif case == "config":
        config.write_text("[1]")
    elif case == "deep":
        config.write_text("[" * 99999)
    elif case in ("script", "path"):
        name = {"script": "ppo_nothing", "path": "../main/ppo_continuous"}[case]
        config.write_text(json.dumps(saved | {"script": name}))
    elif case == "settings":
        config.write_text(json.dumps(saved | {"settings": {}}))
    elif case == "environment":
        saved["settings"]["env_id"] = "Nope-v0"
        config.write_text(json.dumps(saved))
    elif case == "no-checkpoint":
        checkpoint.unlink()
    elif case in ("garbage", "empty"):
        checkpoint.write_bytes(b"junk" * 99 * (case == "garbage"))
    elif case == "bit":
        agent = torch.load(checkpoint, weights_only=True)["parts"]["agent"]
        weight = next(x for x in agent.values() if x.dim() > 1).flatten()
        content = bytearray(checkpoint.read_bytes())
        content[content.index(weight[:2].numpy().tobytes()) + 3] ^= 1
        checkpoint.write_bytes(content)
    elif case == "video":
        options = ["--video", ""]
    elif case == "network":
        state = torch.load(checkpoint, weights_only=True)
        parameters = state["parts"]["agent"]
        parameters[list(parameters)[-1]] = torch.zeros(7)
        torch.save(state, checkpoint)
    elif case == "seed-of-1e19":
        options = ["--seed", "1" + "0" * 19]
    else:
        options = [f"--{case}=-1"]
    status, text, error = output(capsys, copy, *options)
    assert status == 2 and not text and len(error.splitlines()) == 1
    assert error.startswith("evaluate.py: ")
    assert not options or "allowed is [" in error or "type the name of a folder" in error


@pytest.mark.parametrize("script", [*CONTINUOUS, "ppo_multidiscrete"], indirect=True)
def test_environment_that_fails_has_status_1(run, capsys, monkeypatch):
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

    def fail(self, action):
        raise ZeroDivisionError("the wheel came off")

    monkeypatch.setattr(HopperEnv, "step", fail)
    status, _, error = output(capsys, run)
    assert status == 1 and "the wheel came off" in error and len(error.splitlines()) == 1


def test_checkpoint_of_another_script_is_refused(copy, capsys):
    state = torch.load(copy / "checkpoint.pt", weights_only=True)
    torch.save(state | {"script": "other"}, copy / "checkpoint.pt")
    status, _, error = output(capsys, copy)
    assert status == 2 and "it is of other.py" in error and error.count("\n") == 1


def test_a_terminal_without_utf_8_gets_its_numbers(run):
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [*COMMAND, str(run), "--episodes", "1"]
    done = subprocess.run(command, capture_output=True, env=ascii_only, check=False)
    assert done.returncode == 0 and done.stdout.startswith(b"return ")
