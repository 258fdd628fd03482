"""Faults that a hostile user found: each ends in one readable line, or trains."""

import importlib
import json
import math
import os

import gymnasium as gym
import numpy as np
import pytest
import torch

SCRIPTS = ["ppo_continuous", "ppo_minimal_no_tricks", "trpo_continuous", "ppo_multidiscrete"]
TINY = "--num-steps 16 --num-minibatches 2 --update-epochs 1 --total-timesteps 32".split()


class Returns(gym.Env):
    """Hands over what it was made with."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))
    reward, obs, terminated = 1.0, np.zeros(2), False

    def reset(self, **_):
        return np.zeros(2), {}

    def step(self, _):
        return self.obs, self.reward, self.terminated, False, {}


class Exits(Returns):
    def step(self, _):
        raise SystemExit(0)


def register(name, base=Returns, **attributes):
    kind = type(name, (base,), attributes)
    gym.register(f"{name}-v0", entry_point=lambda: kind(), max_episode_steps=5)
    return f"{name}-v0"


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture
def train(script, tmp_path):
    """Train on this environment with these options -> status"""

    def train(env_id, *options):
        return script.main(["--env-id", env_id, *TINY, "--runs-dir", str(tmp_path), *options])

    return train


def test_reward_array_of_one_is_a_number(train, tmp_path):
    assert train(register("RewardOfOne", reward=np.array([1.0]))) == 0
    (run,) = tmp_path.iterdir()
    assert "5.0,5\n" in (run / "episodes.csv").read_text()


HOSTILE = {
    "reward": [np.ones(2), None, "one", 1j, 10**400, math.nan],
    "obs": ["text", [[1], [1, 2]], np.zeros(3), np.full(2, math.inf)],
    "terminated": [np.zeros(2, bool)],
}


@pytest.mark.parametrize("what, value", [(k, x) for k, values in HOSTILE.items() for x in values])
def test_what_is_no_number_ends_in_one_line(train, what, value, tmp_path, capfd):
    assert train(register("Hostile", **{what: value})) == 1
    assert "Traceback" not in capfd.readouterr().err
    (run,) = tmp_path.iterdir()
    torch.load(run / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize("missing", ["observation_space", "action_space"])
def test_environment_without_a_space_is_refused(train, missing, capfd):
    kind = type("Spaceless", (gym.Env,), {k: x for k, x in vars(Returns).items() if k != missing})
    gym.register("Spaceless-v0", entry_point=lambda: kind(), disable_env_checker=True)
    assert train("Spaceless-v0") == 2
    error = capfd.readouterr().err
    assert missing in error and "Traceback" not in error


@pytest.mark.parametrize("name", ["ppo_atari", "ppo_atari_lstm"])
@pytest.mark.parametrize("value", ["2", "x", "0", "-1"])
def test_world_size_without_torchrun_is_refused(name, value, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("WORLD_SIZE", value)
    assert importlib.import_module(name).main(["--runs-dir", str(tmp_path)]) == 2
    error = capfd.readouterr().err
    assert (
        f"WORLD_SIZE {value!r}" in error or f"WORLD_SIZE is {value}, but there is no RANK" in error
    )
    assert "start with torchrun" in error


def test_environment_that_exits_is_a_failure(train):
    assert train(register("Exits", Exits)) == 1


@pytest.fixture
def run(train, tmp_path):
    assert train(register("Plain")) == 0
    return next(tmp_path.iterdir())


@pytest.fixture
def resume(script, run):
    """Go on with the run -> status"""
    return lambda: script.main(["--resume", str(run), "--total-timesteps", "48"])


def test_resume_leaves_files_of_others_alone(run, resume):
    (run / "notes.csv").write_text("a,b\n999999,1\n")
    assert resume() == 0
    assert (run / "notes.csv").read_text() == "a,b\n999999,1\n"


def test_resume_drops_rows_that_are_none(run, resume):
    with open(run / "episodes.csv", "ab") as file:
        file.write(b"junk\xff,1\n99")
    assert resume() == 0
    assert b"junk" not in (run / "episodes.csv").read_bytes()


@pytest.mark.parametrize("value", ["x", 1.5, -5, None, 1])
def test_damaged_counters_are_refused(run, resume, value):
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    state["counters"]["update"] = value
    torch.save(state, run / "checkpoint.pt")
    assert resume() == 2


def test_a_flipped_bit_is_noticed(run, resume, capfd):
    """The checkpoint is a zip file, whose checksums torch.load doesn't compare."""
    path = run / "checkpoint.pt"

    def weight():
        return torch.load(path, weights_only=True)["parts"]["agent"]["policy.0.weight"][0, :2]

    before, content = weight(), bytearray(path.read_bytes())
    content[content.index(before.numpy().tobytes()) + 3] ^= 64  # of the exponent
    path.write_bytes(content)
    assert weight()[0] != before[0]
    assert resume() == 2
    error = capfd.readouterr().err
    assert "can't be used, train anew" in error and "is damaged" in error


def test_moments_and_statistics_of_another_shape_are_refused(run, resume, capfd):
    good = torch.load(run / "checkpoint.pt", weights_only=True)
    moments = good["parts"]["optimizer"]["state"][0]
    misfit, seven = "the optimizer's moments don't fit the network", torch.zeros(7)
    wrong = [(moments, "exp_avg", seven, misfit), (moments, "exp_avg", None, misfit)]
    wrong.append((good["counters"], "update", -1, "update -1"))
    if "obs_statistics" in good["parts"]:
        statistics = good["parts"]["obs_statistics"]
        wrong.append((statistics, "mean", seven, "the statistics don't fit the environment"))
        infinite = torch.full_like(statistics["std"], math.inf)
        wrong.append((statistics, "std", infinite, "the statistics aren't finite"))
    for part, name, x, words in wrong:
        right = part.pop(name)
        if x is not None:
            part[name] = x
        torch.save(good, run / "checkpoint.pt")
        part[name] = right
        assert resume() == 2 and words in capfd.readouterr().err


WRONG = {"num_steps": 64.0, "seed": 1.5, "gamma": None, "norm_obs": "yes", "cuda": None}
WRONG |= {"clip_coef": True, "max_kl": True, "env_id": None, "update_epochs": "x"}
WRONG |= {"learning_rate": "x", "value_learning_rate": "x"}


def test_wrong_types_in_the_config_are_named(run, resume, capfd):
    config = json.loads((run / "config.json").read_text())
    settings = config["settings"]
    for name in WRONG.keys() & settings:
        changed = config | {"settings": settings | {name: WRONG[name]}}
        (run / "config.json").write_text(json.dumps(changed))
        assert resume() == 2
        assert f"{name} is {WRONG[name]!r}" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--threads 1000000", "--num-steps 10000000000000000"])
def test_sizes_beyond_reason_are_refused(train, option, tmp_path):
    assert train(register("Plain2"), *option.split()) == 2
    assert not list(tmp_path.iterdir())


def test_rewards_and_observations_whose_squares_would_overflow_are_named(train, capfd):
    assert train(register("Huge1", reward=1e120)) == 1
    assert "reward is 1e+120" in capfd.readouterr().err
    assert train(register("Huge2", obs=np.array([0.0, -1e120]))) == 1
    assert "observation has -1e+120 in it" in capfd.readouterr().err


def test_trains_without_git(train, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert train(register("NoGit")) == 0


def test_rows_are_on_the_disk_before_the_checkpoint_that_covers_them(script, run, resume):
    synced, fsync = [], script.os.fsync

    def record(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.os, "fsync", record)
        assert resume() == 0
    last = max(i for i, name in enumerate(synced) if name == "checkpoint.tmp")
    assert synced[last - 2 : last] == ["episodes.csv", "updates.csv"]


def test_full_disk_is_one_line_and_leaves_the_checkpoint_as_it_was(script, run, resume, capfd):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    before = (run / "checkpoint.pt").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.os, "fsync", full)
        assert resume() == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert "can't be written: No space left on device" in line
    assert (run / "checkpoint.pt").read_bytes() == before and not list(run.glob("*.tmp"))
    assert resume() == 0
