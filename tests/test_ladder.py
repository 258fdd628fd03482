"""The full script with every trick off is the minimal one bit for bit; with one on it is not."""

import csv

import numpy as np
import pytest
import torch

import ppo_continuous
import ppo_minimal_no_tricks

TASK = "--env-id Hopper-v5 --total-timesteps 768 --num-steps 256 --num-minibatches 8".split()
OFF = {
    "init": "--init default",
    "activation": "--activation relu",
    "adam epsilon": "--adam-eps 1e-8",
    "advantage normalization": "--no-norm-adv",
    "value clipping": "--no-clip-vloss",
    "reward scaling": "--reward-scaling none",
    "observation normalization": "--no-norm-obs",
    "annealing": "--no-anneal-lr",
    "gradient clipping": "--max-grad-norm inf",
}
# These two are idle until rewards and observations leave +-10, so they are switched on narrower.
NARROW = {"reward clipping": "--clip-reward 0.5", "observation clipping": "--clip-obs 0.5"}
INFINITE = "--clip-reward inf --clip-obs inf"


def weights(script, options, folder, total=768):
    argv = [*TASK, "--total-timesteps", str(total), "--runs-dir", str(folder), *options.split()]
    directory = script.train(script.parse_args(script.Args, argv))
    parts = torch.load(directory / "checkpoint.pt", weights_only=True)["parts"]
    return torch.cat([x.flatten() for x in parts["agent"].values()])


@pytest.fixture(scope="module")
def minimal(tmp_path_factory):
    return weights(ppo_minimal_no_tricks, "", tmp_path_factory.mktemp("minimal"))


def test_all_tricks_off_gives_identical_weights(minimal, tmp_path):
    full = weights(ppo_continuous, " ".join([*OFF.values(), INFINITE]), tmp_path)
    assert torch.equal(minimal, full)
    agent = ppo_minimal_no_tricks.Agent
    args = ppo_minimal_no_tricks.Args()
    torch.manual_seed(args.seed)
    start = torch.cat([x.flatten() for x in agent(11, 3, args).state_dict().values()])
    assert (minimal - start).abs().max() > 1e-3, "the weights have moved"


def test_identical_with_other_weights_of_the_losses_and_two_environments(tmp_path):
    other = "--ent-coef 0.1 --vf-coef 0.7 --clip-coef 0.02 --num-envs 2"
    minimal = weights(ppo_minimal_no_tricks, other, tmp_path / "minimal", total=1024)
    off = " ".join([*OFF.values(), INFINITE, other])
    assert torch.equal(minimal, weights(ppo_continuous, off, tmp_path / "full", total=1024))
    reports = []
    for path in sorted(tmp_path.glob("*/*/updates.csv")):
        with open(path) as file:
            rows = list(csv.DictReader(file))
        names = "global_step", "policy_loss", "value_loss", "entropy"
        reports.append([[float(row[name]) for name in names] for row in rows])
    assert len(reports) == 2 and np.allclose(*reports, rtol=1e-5)


@pytest.mark.parametrize("trick", [*OFF, *NARROW])
def test_any_one_trick_on_gives_others(trick, minimal, tmp_path):
    options = [option for name, option in OFF.items() if name != trick]
    options = " ".join([*options, INFINITE, NARROW.get(trick, "")])
    if trick in NARROW:
        options = options.replace(NARROW[trick].split()[0] + " inf", "")
    assert not torch.equal(minimal, weights(ppo_continuous, options, tmp_path))
