"""What a user may type and what an environment may do: it trains, or it ends in one line."""

import importlib
import math
import os
from fractions import Fraction

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from test_run_directory import ATARI

VECTORS = ["ppo_continuous", "ppo_minimal_no_tricks", "trpo_continuous", "ppo_multidiscrete"]
TINY = "--num-steps 8 --update-epochs 1 --total-timesteps 8"
TINY = dict.fromkeys(VECTORS, f"{TINY} --num-minibatches 2") | dict.fromkeys(
    ATARI, f"{TINY} --num-minibatches 1 --num-envs 1 --threads 1"
)
TRAINS, FAILS, REFUSED = 0, 1, 2

UNBOUNDED, HALF = (
    Box(-math.inf, math.inf, (2,)),
    Box(np.float32([-1, -math.inf]), np.float32([math.inf, 1])),
)
ONE = Box(-1, 1, (1,))
OBSERVATIONS = {
    "unbounded": UNBOUNDED,
    "half bounded": HALF,
    "asymmetric": Box(-1, 50, (3,)),
    "zero width": Box(2, 2, (3,)),
    "float64": Box(-1, 1, (3,), np.float64),
    "float16": Box(-1, 1, (3,), np.float16),
    "integer": Box(-9, 9, (3,), np.int64),
    "one number": Box(-1, 1, ()),
    "matrix": Box(-1, 1, (2, 2, 2)),
    "image": Box(0, 255, (16, 16, 3), np.uint8),
    "discrete": Discrete(5, start=-2),
    "multi-discrete": MultiDiscrete([2, 3]),
    "multi-binary": MultiBinary(4),
    "tuple": Tuple([Box(-1, 1, (2,)), Discrete(3)]),
    "nested": Dict({"a": Tuple([Discrete(2), Dict({"b": Box(-1, 1, (2, 2))})])}),
    "empty": Box(-1, 1, (0,)),
    "empty matrix": Box(-1, 1, (3, 0)),
    "empty dict": Dict({}),
    "empty tuple": Tuple([]),
}
ACTIONS = {
    "unbounded": UNBOUNDED,
    "half bounded": HALF,
    "asymmetric": Box(-1, 50, (2,)),
    "zero width": Box(2, 2, (2,)),
    "float64": Box(-1, 1, (2,), np.float64),
    "float16": Box(-1, 1, (2,), np.float16),
    "one number": Box(-1, 1, ()),
    "matrix": Box(-1, 1, (2, 3)),
    "integer": Box(0, 255, (2,), np.uint8),
    "empty": Box(-1, 1, (0,)),
    "discrete": Discrete(3),
    "multi-discrete": MultiDiscrete([2, 3]),
    "multi-binary": MultiBinary(4),
    "dict": Dict({"a": Box(-1, 1, (2,))}),
    "tuple": Tuple([Box(-1, 1, (2,))]),
}
REFUSED_ACTIONS = {"integer", "empty", "multi-binary", "dict", "tuple"}
REFUSED_ACTIONS = dict.fromkeys(VECTORS, REFUSED_ACTIONS | {"discrete", "multi-discrete"}) | {
    "ppo_multidiscrete": REFUSED_ACTIONS | {"unbounded", "half bounded"}
}


def exits(*_, **__):
    raise SystemExit(0)


class Odd(gym.Env):
    """A plain environment, but for what it is made with."""

    def __init__(self, length=3, observation=UNBOUNDED, action=ONE, **odd):
        self.length, self.observation_space, self.action_space = length, observation, action
        self.get = odd.get

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(0)
        self.steps = 0
        return self.get("first", (self.observation_space.sample(), {}))

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        obs = self.get("obs", self.observation_space.sample())
        ends = self.get("terminated", self.steps == self.length), False
        return self.get("result", (obs, self.get("reward", 1.0), *ends, {}))


def register(name, entry_point=Odd, **odd):
    gym.registry.pop(f"{name}-v0", None)  # of another script
    gym.register(f"{name}-v0", lambda **kwargs: entry_point(**odd, **kwargs))
    return f"{name}-v0"


@pytest.fixture(params=VECTORS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture
def task(script):
    """An id that trains, whatever the script."""
    return "PongNoFrameskip-v4" if script.__name__ in ATARI else register("Odd")


ALL = [*VECTORS, ATARI[0], pytest.param(ATARI[1], marks=pytest.mark.slow)]
of_all_scripts = pytest.mark.parametrize("script", ALL, indirect=True)


@pytest.fixture
def check(script, tmp_path, capfd):
    """Run the script with this command line, and look at its status and what it says and leaves."""

    def check(status, *argv, runs=tmp_path / "runs", words=""):
        try:
            returned = script.main([*TINY[script.__name__].split(), "--runs-dir", str(runs), *argv])
        except SystemExit as error:  # tyro's own box
            returned = error.code
            assert returned == REFUSED and capfd.readouterr().err.startswith("╭")
        else:
            error = capfd.readouterr().err
            assert returned == status, error
            assert "Traceback" not in error and words in error
            line = error.splitlines()[-1] if error else ""
            assert line.startswith(f"{script.__name__}.py: ") == (returned != TRAINS), error
            assert returned != REFUSED or error.count("\n") == 1, error
        assert returned == status
        found = sorted(os.listdir(runs)) if status != REFUSED else []
        for run in found:
            torch.load(os.path.join(runs, run, "checkpoint.pt"), weights_only=True)
        return found

    return check


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("space", OBSERVATIONS)
def test_observation_space(check, space):
    odd = register("Odd", observation=OBSERVATIONS[space])
    check(REFUSED if space.startswith("empty") else TRAINS, "--env-id", odd)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("space", ACTIONS)
def test_action_space(script, check, space):
    status = REFUSED if space in REFUSED_ACTIONS[script.__name__] else TRAINS
    check(status, "--env-id", register("Odd", action=ACTIONS[space]))


REWARDS = [2, np.int64(2), np.float32(2), True, [2.0], np.array([[2]]), Fraction(2)]
BAD_REWARDS = [1e100, -1e100, math.nan, math.inf, -math.inf, np.float32("nan"), [1, 2], [], {}, 2j]
KINDS = {"plain": REWARDS, "large": [1e30, -1e30], "bad": BAD_REWARDS}


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind, i", [(x, i) for x in KINDS for i in range(len(KINDS[x]))])
def test_reward(script, check, kind, i):
    status = FAILS if kind == "bad" else TRAINS
    if kind == "large" and script.__name__ == "ppo_minimal_no_tricks":
        status = FAILS  # nothing scales it, and its square is no float32
    check(status, "--env-id", register("Odd", reward=KINDS[kind][i]))


PLAIN = np.zeros(2)
STEPS = {  # what a step returns, or its observation
    "list": ({"obs": [0.0, 0.0]}, TRAINS),
    "integers": ({"obs": np.zeros(2, int)}, TRAINS),
    "nan": ({"obs": np.array([0, math.nan])}, FAILS),
    "minus infinity": ({"obs": np.array([-math.inf, 0])}, FAILS),
    "too large": ({"obs": np.array([1e100, 0])}, FAILS),
    "too long": ({"obs": np.zeros(3)}, FAILS),
    "matrix": ({"obs": np.zeros((1, 2))}, FAILS),
    "scalar": ({"obs": 0.0}, FAILS),
    "nothing": ({"obs": None}, FAILS),
    "objects": ({"obs": np.array([{}, []], object)}, FAILS),
    "dict": ({"obs": {"x": 0.0}}, FAILS),
    "four results": ({"result": (PLAIN, 1.0, False, {})}, FAILS),
    "no result": ({"result": None}, FAILS),
    "ends as array": ({"terminated": np.array([True])}, TRAINS),
    "ends unclear": ({"terminated": np.array([True, False])}, FAILS),
    "first nan": ({"first": (PLAIN * math.nan, {})}, FAILS),
    "first alone": ({"first": PLAIN}, FAILS),
    "no first": ({"first": None}, FAILS),
    "of one step": ({"length": 1}, TRAINS),
    "endless": ({"length": math.inf}, TRAINS),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", STEPS)
def test_step_and_reset(check, case):
    odd, status = STEPS[case]
    check(status, "--env-id", register("Odd", **odd))


def test_dict_without_a_key_fails(check):
    space = Dict({"a": Box(-1, 1, (2,)), "b": Discrete(2)})
    check(FAILS, "--env-id", register("Odd", observation=space, obs={"a": PLAIN}), words="'b'")


@pytest.mark.parametrize("entry_point", [exits, lambda: None, lambda: 1 / 0, lambda: object()])
def test_environment_that_cannot_be_made_is_refused(check, entry_point):
    check(REFUSED, "--env-id", register("Odd", entry_point))


BAD_IDS = ["", " ", "-v0", "Even", "a*b-v0", "[x]-v0", "Odd-v0-v0", "../Odd-v0", "/etc/passwd", ":"]
BAD_IDS += ["a:b:Odd-v0", ":Odd-v0", "os:Odd-v99", "CartPole-v1\nx", "x" * 300, "$(touch x)-v0"]
BAD_KWARGS = ["", "null", "3", '"x"', "{'a': 1}", "[" * 9999, '{"nonsense": 1}', '{"length": 1}}']


@of_all_scripts
@pytest.mark.parametrize("env_id", BAD_IDS)
def test_environment_that_is_none_is_refused(check, env_id):
    register("Odd")
    check(REFUSED, "--env-id", env_id)


@pytest.mark.parametrize("env_kwargs", BAD_KWARGS)
def test_keyword_arguments_that_are_none_are_refused(check, env_kwargs):
    env_id = "InvertedPendulum-v5" if "nonsense" in env_kwargs else register("Odd")
    check(REFUSED, "--env-id", env_id, "--env-kwargs", env_kwargs)


@pytest.mark.parametrize("name", ["ns/Odd", "Odd.1", "Ünï"])
def test_name_of_an_environment_makes_one_folder(check, name):
    (run,) = check(TRAINS, "--env-id", register(name))
    assert not set(run) & set("/:*[]")


NUMBERS = [
    ("--num-envs 1 --num-steps 8", TRAINS),
    ("--num-envs 64 --num-steps 1 --total-timesteps 64", TRAINS),
    ("--num-steps 4 --num-minibatches 1 --total-timesteps 11", TRAINS),
    ("--seed 0", TRAINS),
    ("--seed 4294967296", TRAINS),
    ("--seed 1000000000000000000", TRAINS),
    ("--seed 1000000000000000001", REFUSED),
    ("--seed -1", REFUSED),
    ("--seed 1.5", REFUSED),
    ("--num-envs 0", REFUSED),
    ("--num-envs 64 --num-steps 1", REFUSED),  # more than --total-timesteps
    ("--num-steps 1e3", REFUSED),
    ("--gamma 1.0000001", REFUSED),
    ("--gamma nan", REFUSED),
    ("--gamma 0 --gae-lambda 1", TRAINS),
    ("--total-timesteps 99999999999999999999", REFUSED),
    ("--resume", REFUSED),
    ("positional", REFUSED),
    ("--env-id", REFUSED),
    ("--seed 1 2", REFUSED),
]


@of_all_scripts
@pytest.mark.parametrize("options, status", NUMBERS)
def test_numbers(check, task, options, status):
    check(status, "--env-id", task, *options.split())


FOLDERS = [
    "with space",
    "ünï/日本",
    "a[1]*?",
    "quote'\"",
    "-x",
    "$HOME",
    "new\nline",
    ".",
]


@of_all_scripts
@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_with_an_odd_name_trains_and_resumes(script, check, task, folder, tmp_path):
    runs = tmp_path / folder
    (run,) = check(TRAINS, "--env-id", task, "--num-envs", "1", runs=runs)
    assert script.main(["--resume", str(runs / run), "--total-timesteps", "16"]) == 0


BAD_FOLDERS = ["file", "file/below", "x" * 300, "/proc/nope", "not UTF-8 \udcff", "read-only"]


@of_all_scripts
@pytest.mark.parametrize("folder", BAD_FOLDERS)
def test_folder_that_cannot_be_made_is_refused(check, task, folder, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "read-only").mkdir(mode=0o500)
    if folder == "read-only" and os.access(tmp_path / folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    check(REFUSED, "--env-id", task, runs=tmp_path / folder, words="--runs-dir")


def test_environment_is_drawn_if_asked_for(script):
    args = script.Args(env_id="InvertedPendulum-v5")
    modes = [script.Environment(args, mode).env.render_mode for mode in (None, "rgb_array")]
    assert modes == [None, "rgb_array"]


def test_there_are_enough_of_them():
    tables = OBSERVATIONS, ACTIONS, *KINDS.values(), STEPS, BAD_IDS, BAD_KWARGS, NUMBERS
    assert sum(map(len, [*tables, FOLDERS, BAD_FOLDERS])) > 100
