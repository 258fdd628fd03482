"""Faults that a hostile user found: each ends in one readable line, or trains."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_continuous as ppo

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


def train(folder, env_id, *options):
    return ppo.main(["--env-id", env_id, *TINY, "--runs-dir", str(folder), *options])


def test_reward_array_of_one_is_a_number(tmp_path):
    assert train(tmp_path, register("RewardOfOne", reward=np.array([1.0]))) == 0
    (run,) = tmp_path.iterdir()
    assert "5.0,5\n" in (run / "episodes.csv").read_text()


HOSTILE = {
    "reward": [np.ones(2), None, "one", 1j, 10**400, math.nan],
    "obs": ["text", [[1], [1, 2]], np.zeros(3), np.full(2, math.inf)],
    "terminated": [np.zeros(2, bool)],
}


@pytest.mark.parametrize("what, value", [(k, x) for k, values in HOSTILE.items() for x in values])
def test_what_is_no_number_ends_in_one_line(what, value, tmp_path, capfd):
    assert train(tmp_path, register("Hostile", **{what: value})) == 1
    assert "Traceback" not in capfd.readouterr().err
    (run,) = tmp_path.iterdir()
    torch.load(run / "checkpoint.pt", weights_only=True)


def test_environment_that_exits_is_a_failure(tmp_path):
    assert train(tmp_path, register("Exits", Exits)) == 1


@pytest.fixture
def run(tmp_path):
    assert train(tmp_path, register("Plain")) == 0
    return next(tmp_path.iterdir())


def resume(run, total=48):
    return ppo.main(["--resume", str(run), "--total-timesteps", str(total)])


def test_resume_leaves_files_of_others_alone(run):
    (run / "notes.csv").write_text("a,b\n999999,1\n")
    assert resume(run) == 0
    assert (run / "notes.csv").read_text() == "a,b\n999999,1\n"


def test_resume_drops_rows_that_are_none(run):
    with open(run / "episodes.csv", "ab") as file:
        file.write(b"junk\xff,1\n99")
    assert resume(run) == 0
    assert b"junk" not in (run / "episodes.csv").read_bytes()


@pytest.mark.parametrize("value", ["x", 1.5, -5, None, 1])
def test_damaged_counters_are_refused(run, value):
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    state["counters"]["update"] = value
    torch.save(state, run / "checkpoint.pt")
    assert resume(run) == 2


def test_moments_and_statistics_of_another_shape_are_refused(run, capfd):
    good = torch.load(run / "checkpoint.pt", weights_only=True)
    good["parts"]["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(good, run / "checkpoint.pt")
    assert resume(run) == 2 and "moments" in capfd.readouterr().err
    good["parts"]["obs_statistics"]["mean"] = torch.zeros(7)
    good["parts"]["optimizer"]["state"][0]["exp_avg"] = torch.zeros(1)
    torch.save(good, run / "checkpoint.pt")
    assert resume(run) == 2 and "statistics" in capfd.readouterr().err


WRONG = [("num_steps", 64.0), ("seed", 1.5), ("gamma", None), ("norm_obs", "yes")]
WRONG += [("cuda", None), ("clip_coef", True), ("env_id", None), ("learning_rate", "x")]


@pytest.mark.parametrize("name, value", WRONG)
def test_wrong_types_in_the_config_are_named(run, name, value, capfd):
    config = json.loads((run / "config.json").read_text())
    config["settings"][name] = value
    (run / "config.json").write_text(json.dumps(config))
    assert resume(run) == 2
    assert f"{name} is {value!r}" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--threads 1000000", "--num-steps 10000000000000000"])
def test_sizes_beyond_reason_are_refused(option, tmp_path):
    assert train(tmp_path, register("Plain2"), *option.split()) == 2
    assert not list(tmp_path.iterdir())
