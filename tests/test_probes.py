"""Probe environments: whether values and policy get to where they are known to belong."""

import pytest
import torch

import ppo_continuous as ppo

GAMMA = 0.5
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
def test_probe_values_and_actions_are_the_known_ones(name, seed, tmp_path):
    steps = 8192 if name in OPTIMA else 2048
    args = ppo.Args(
        env_id=f"{name}-v0",
        seed=seed,
        total_timesteps=steps,
        num_steps=256,
        num_minibatches=4,
        learning_rate=3e-3,
        gamma=GAMMA,
        norm_obs=False,
        reward_scaling="none",
        clip_vloss=False,
        runs_dir=str(tmp_path),
    )
    directory = ppo.train(args)
    agent = ppo.Agent(1, 1, args)
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
