"""Probe environments: whether values and policy get to where they are known to belong."""

import importlib

import pytest
import torch

GAMMA = 0.5
PLAIN = {"norm_obs": False, "reward_scaling": "none", "clip_vloss": False}
SETTINGS = {
    "ppo_continuous": {"learning_rate": 3e-3} | PLAIN,
    "ppo_minimal_no_tricks": {"learning_rate": 3e-3},
    "trpo_continuous": {"value_learning_rate": 3e-3} | PLAIN,
}
# observation -> value; None: what the policy's own spread costs, -E[(action - optimum)**2]
VALUES = {
    "ConstantReward": {0: 1.0},
    "ObservationReward": {-1: -1.0, 1: 1.0},
    "DelayedReward": {0: GAMMA, 1: 1.0},
    "ActionReward": {0: None},
    "ObservationActionReward": {-1: None, 1: None},
}
OPTIMA = {"ActionReward": {0: 0.5}, "ObservationActionReward": {-1: -0.5, 1: 0.5}}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("script", SETTINGS)
def test_probe_values_and_actions_are_the_known_ones(script, name, seed, tmp_path):
    settings, script = SETTINGS[script], importlib.import_module(script)
    args = script.Args(
        env_id=f"{name}-v0",
        seed=seed,
        total_timesteps=4096 if name in OPTIMA else 1024,
        num_steps=256,
        num_minibatches=4,
        gamma=GAMMA,
        runs_dir=str(tmp_path),
        **settings,
    )
    directory = script.train(args)
    agent = script.Agent(1, 1, args)
    checkpoint = torch.load(directory / "checkpoint.pt", weights_only=True)
    agent.load_state_dict(checkpoint["parts"]["agent"])
    for observation, known in VALUES[name].items():
        obs = torch.tensor([[float(observation)]])
        with torch.no_grad():
            value, mean = agent.value(obs).item(), agent.policy(obs).item()
        variance = (2 * agent.log_std).exp().item()
        if name in OPTIMA:
            optimum = OPTIMA[name][observation]
            assert mean == pytest.approx(optimum, abs=0.1)
            known = -((mean - optimum) ** 2) - variance
        assert value == pytest.approx(known, abs=0.1)
