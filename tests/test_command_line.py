"""What can't be used ends in one line and status 2, what goes wrong in a run in one and 1."""

import importlib
import json
import math
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

SCRIPTS = ["ppo_continuous", "ppo_minimal_no_tricks", "trpo_continuous", "ppo_multidiscrete"]
ALL = [*SCRIPTS, "ppo_atari", "ppo_atari_lstm"]  # where the environment doesn't matter
GRADIENTS = {  # the function whose losses end with the norm of its gradients
    "ppo_continuous": "policy_and_value_gradients",
    "trpo_continuous": "value_gradient",
    "ppo_multidiscrete": "multidiscrete_gradient",
}
TINY = "--num-steps 32 --num-minibatches 2 --update-epochs 2 --total-timesteps 64".split()

OBSERVATIONS = {
    "box": gym.spaces.Box(-1, 1, (3,)),
    "matrix": gym.spaces.Box(-1, 1, (2, 3)),
    "integer": gym.spaces.Box(0, 255, (4,), np.uint8),
    "dict": gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Discrete(3)}),
    "text": gym.spaces.Text(5),
    "graph": gym.spaces.Graph(gym.spaces.Discrete(2), None),
    "sequence": gym.spaces.Sequence(gym.spaces.Discrete(3)),
}
ACTIONS = {"box": gym.spaces.Box(-1, 1, (2,)), "integer": gym.spaces.Box(0, 5, (2,), np.int64)}


class Toy(gym.Env):
    """Random observations, reward 1, episodes of 10 steps; `bad` happens at step `at`."""

    def __init__(self, observation="box", action="box", bad=None, at=0):
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self.bad, self.at, self.steps = bad, at, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed % 2**32)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        obs, reward, bad = self.observation_space.sample(), 1.0, self.steps == self.at and self.bad
        if bad == "raise":
            raise ZeroDivisionError("the wheel came off")
        if bad in ("nan", "inf"):
            obs[1] = float(bad)
        reward = {"reward-nan": math.nan, "reward-inf": math.inf, "huge": 1e90}.get(bad, reward)
        return obs, reward, False, self.steps % 10 == 0, {}


gym.register("CommandLineToy-v0", lambda **kwargs: Toy(**kwargs))


def toy(**kwargs):
    return ["--env-id", "CommandLineToy-v0", "--env-kwargs", json.dumps(kwargs)]


def usable(script):
    """A command line of the script that would train."""
    if hasattr(script.Args, "env_kwargs"):
        return [*toy(), *TINY]
    return ["--env-id", "PongNoFrameskip-v4", *TINY, "--total-timesteps", "512"]


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture
def command(script, tmp_path, capsys):
    """Run the script with this command line -> status, text on stderr, run directories"""

    def run(*argv):
        try:
            status = script.main([*argv, "--runs-dir", str(tmp_path / "runs")])
        except SystemExit as error:
            status = error.code
        return status, capsys.readouterr().err, sorted(tmp_path.glob("runs/*"))

    return run


@pytest.fixture
def finished(command):
    """The directory of a run of 64 steps."""
    status, _, runs = command(*toy(), *TINY)
    assert status == 0
    return runs[0]


def assert_refused(result, *words):
    status, error, runs = result
    assert status == 2 and not runs
    assert len(error.splitlines()) == 1, error
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--env-id", "Nope-v0"], ["Nope"]),
        (["--env-id", "no_such_module:Nope-v0"], ["no_such_module"]),
        (toy(observation="graph"), ["Graph", "Dict"]),
        (toy(observation="sequence"), ["Sequence", "Dict"]),
        (toy(action="integer"), ["int64", "Box of floats"]),
        (["--env-id", "CommandLineToy-v0", "--env-kwargs", "{"], ["{"]),
        (["--env-id", "CommandLineToy-v0", "--env-kwargs", "[1]"], ["[1]"]),
        (toy(nonsense=1), ["nonsense"]),
        (["--num-steps", "64", "--total-timesteps", "63"], ["63", "64"]),
        (["--num-steps", "64", "--num-minibatches", "3"], ["64", "3"]),
        (["--num-steps", "64", "--num-minibatches", "64"], ["64", "at least 2"]),
    ],
)
def test_unusable_command_is_one_line(command, argv, words):
    if argv[0] != "--num-steps":
        argv = [*argv, *TINY]
    assert_refused(command(*argv), *words)


@pytest.mark.parametrize("script", SCRIPTS[:3], indirect=True)
def test_discrete_actions_are_refused_where_continuous_ones_are_wanted(command):
    argv = ["--env-id", "CartPole-v1", *TINY]
    assert_refused(command(*argv), "CartPole-v1", "Discrete(2)", "Box of floats")


MAY_BE_INFINITE = "max_grad_norm clip_coef clip_value_coef clip_obs clip_reward"
MAY_BE_ZERO = "seed gamma gae_lambda kl_coef vf_coef ent_coef cg_damping max_halvings min_gain"
MAY_BE_ZERO += " noop_max sticky_actions"


@pytest.mark.parametrize("script", ALL, indirect=True)
@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "-inf"])
def test_number_out_of_range_is_one_line(script, command, value):
    for field in script.dataclasses.fields(script.Args):
        numeric = any(kind in str(field.type) for kind in ("int", "float"))
        if not field.init or not numeric or (field.name == "ent_coef" and value == "-1"):
            continue
        if value == "0" and field.name in MAY_BE_ZERO.split():
            continue
        if value == "inf" and field.name in MAY_BE_INFINITE.split():
            continue
        option = "--" + field.name.replace("_", "-")
        result = status, error, runs = command(*usable(script), f"{option}={value}")
        if "float" in str(field.type) or value in ("-1", "0"):
            assert_refused(result, option)
        else:  # tyro's own box
            assert status == 2 and not runs and option in error


@pytest.mark.parametrize("script", ["trpo_continuous"], indirect=True)
def test_value_rate_of_trpo_is_a_number(command):
    option = "--value-learning-rate"
    assert_refused(command(*toy(), *TINY, option, "None"), option, "type a number")


@pytest.mark.parametrize("script", ALL, indirect=True)
@pytest.mark.parametrize("option", ["--init=zeros", "--activation=gelu", "--nonsense", "--seed=x"])
def test_unknown_option_or_choice_has_status_2(script, command, option):
    status, error, runs = command(*usable(script), option)
    assert status == 2 and not runs and option.split("=")[0] in error


@pytest.mark.parametrize("script", ALL, indirect=True)
@pytest.mark.parametrize(
    "option, answer",
    [
        (["--track"], "TensorBoard"),
        (["--no-track"], "TensorBoard"),
        (["--capture-video"], "evaluate.py"),
        (["--save-model"], "checkpoint.pt"),
        (["--upload-model"], "checkpoint.pt"),
        (["--wandb-project-name", "x"], "TensorBoard"),
        (["--wandb_entity=x"], "TensorBoard"),
    ],
)
def test_option_of_cleanrl_says_where_it_is(command, option, answer):
    assert_refused(command(*option), answer)


@pytest.mark.parametrize("script", ALL, indirect=True)
def test_resume_of_what_is_no_run(command, tmp_path):
    assert_refused(command("--resume", ""), "--resume is empty; type a directory")
    assert_refused(command("--resume", str(tmp_path / "nothing")), "nothing", "no run directory")
    (tmp_path / "config.json").write_text("{")
    assert_refused(command("--resume", str(tmp_path)), "no run directory")
    (tmp_path / "config.json").write_text('{"script": "x"}')
    assert_refused(command("--resume", str(tmp_path)), "no run directory")


@pytest.mark.parametrize(
    "case, words",
    [
        ("script", ["other_script.py --resume"]),
        ("settings", ["not the settings of this version"]),
        ("value", ["config.json"]),
        ("garbage", ["checkpoint.pt"]),
        ("empty", ["checkpoint.pt"]),
        ("missing", ["checkpoint.pt"]),
        ("network", ["checkpoint.pt"]),
        ("complete", ["has done 64 of 64 steps", "--total-timesteps"]),
        ("differs", ["--gamma", "0.99"]),
    ],
)
def test_resume_that_cannot_work_changes_nothing(command, finished, tmp_path, case, words):
    run = shutil.move(finished, tmp_path / "run")
    config = json.loads(Path(run, "config.json").read_text())
    if case == "script":
        config["script"] = "other_script"
    elif case == "settings":
        del config["settings"]["gamma"]
    elif case == "value":
        config["settings"]["num_steps"] = "many"
    elif case == "network":
        state = torch.load(Path(run, "checkpoint.pt"), weights_only=True)
        state["parts"]["agent"]["log_std"] = torch.zeros(7)
        torch.save(state, Path(run, "checkpoint.pt"))
    elif case == "missing":
        Path(run, "checkpoint.pt").unlink()
    elif case in ("garbage", "empty"):
        Path(run, "checkpoint.pt").write_bytes(b"junk" * 99 * (case == "garbage"))
    Path(run, "config.json").write_text(json.dumps(config))
    before = {path: path.read_bytes() for path in Path(run).iterdir()}
    total = [] if case == "complete" else ["--total-timesteps", "128"]
    other = ["--gamma", "0.5"] if case == "differs" else []
    assert_refused(command("--resume", str(run), *total, *other), *words)
    assert before == {path: path.read_bytes() for path in Path(run).iterdir()}


@pytest.mark.parametrize(
    "bad, words",
    [
        ("nan", ["observation", "nan"]),
        ("inf", ["observation", "inf"]),
        ("reward-nan", ["reward", "nan"]),
        ("reward-inf", ["reward", "inf"]),
        ("raise", ["ZeroDivisionError", "the wheel came off", "test_command_line.py"]),
    ],
)
def test_bad_environment_ends_in_one_line_that_names_the_step(command, bad, words):
    status, error, runs = command(*toy(bad=bad, at=40), *TINY)
    line = error.splitlines()[-1]
    assert status == 1 and "Traceback" not in error
    assert all(word in line for word in [*words, "global step 40,", "update 2"]), line
    state = torch.load(runs[0] / "checkpoint.pt", weights_only=True)
    assert state["counters"]["update"] == 1 and state["counters"]["global_step"] == 32


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_non_finite_loss_names_update_epoch_and_minibatch(script, command):
    scales = hasattr(script.Args, "reward_scaling")
    huge = ["--reward-scaling", "none", "--clip-reward", "inf"] if scales else []
    status, error, runs = command(*toy(bad="huge", at=40), *TINY, *huge)
    line = error.splitlines()[-1]
    assert status == 1 and "loss" in line
    assert all(word in line for word in ("update 2", "epoch 1", "minibatch ")), line
    state = torch.load(runs[0] / "checkpoint.pt", weights_only=True)
    assert state["counters"]["update"] == 1
    assert all(x.isfinite().all() for x in state["parts"]["agent"].values())


@pytest.mark.parametrize("script", GRADIENTS, indirect=True)
def test_non_finite_gradient_norm_names_epoch_and_minibatch(script, command, monkeypatch):
    name, calls = GRADIENTS[script.__name__], []
    original = getattr(script, name)

    def poisoned(*args):
        gradient, losses, *rest = original(*args)
        calls.append(1)
        if len(calls) == 4:
            losses[-1] = math.inf
        return gradient, losses, *rest

    monkeypatch.setattr(script, name, poisoned)
    status, error, _ = command(*toy(), *TINY)
    line = error.splitlines()[-1]
    assert status == 1
    assert all(word in line for word in ("grad_norm is inf", "epoch 2, minibatch 2", "update 1"))


@pytest.mark.parametrize("observation", ["dict", "integer", "matrix", "text"])
def test_observation_that_can_be_flattened_trains(command, observation):
    assert command(*toy(observation=observation), *TINY)[0] == 0


@pytest.mark.parametrize("script", ["ppo_atari", "ppo_atari_lstm"], indirect=True)
def test_max_frames_beyond_what_the_emulator_takes_is_one_line(command):
    argv = ["--env-id", "PongNoFrameskip-v4", "--max-frames", "3000000000"]
    assert_refused(command(*argv), "--max-frames is 3000000000; allowed is [1, 2147483647]")


def test_lock_that_is_a_link_leaves_its_target_as_it_is(command, finished, tmp_path):
    (finished / "lock").unlink()
    target = tmp_path / "precious"
    target.write_text("precious")
    (finished / "lock").symlink_to(target)
    command("--resume", str(finished), "--total-timesteps", "128")
    assert target.read_text() == "precious"
