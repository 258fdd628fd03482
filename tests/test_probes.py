"""Probe environments: whether values and policy get to where they are known to belong."""

import importlib
import json

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


def trained(script, args, action_size):
    """The agent of a run with these settings."""
    agent = script.Agent(1, action_size, args)
    checkpoint = torch.load(script.train(args) / "checkpoint.pt", weights_only=True)
    agent.load_state_dict(checkpoint["parts"]["agent"])
    return agent


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
    agent = trained(script, args, 1)
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


# Tasks of Choices: nvec, what info's mask is, and for each observation the right choices (there is
# a point for each) that aren't masked.
MASKS = {"-1": [1, 1, 1, 1, 1], "1": [1, 1, 0, 0, 1]}
CHOICES = {
    "one": (3, None, {-1: [0], 1: [2]}),
    "two": ([3, 2], None, {-1: [0, 0], 1: [2, 1]}),
    "masked": ([3, 2], MASKS, {-1: [0, 0], 1: [None, 1]}),
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["DelayedReward", *CHOICES])
def test_probe_choices_and_values_are_the_known_ones(name, seed, tmp_path):
    import ppo_multidiscrete as script

    nvec, masks, right = CHOICES.get(name, (None, None, {}))
    args = script.Args(
        env_id="Choices-v0" if right else f"{name}-v0",
        env_kwargs=json.dumps({"nvec": nvec, "masks": masks}) if right else "{}",
        mask_actions=masks is not None,
        seed=seed,
        total_timesteps=2048,
        update_epochs=5,
        num_steps=128,
        num_minibatches=4,
        gamma=GAMMA,
        runs_dir=str(tmp_path),
        learning_rate=3e-3,
        **PLAIN,
    )
    env = script.DiscreteEnvironment(args)
    agent = trained(script, args, env.action_size)
    for observation, known in VALUES.get(name, right).items():
        obs = torch.tensor([[float(observation)]])
        if right:
            env.info = {"action_mask": masks and masks[str(observation)]}
            mask = torch.from_numpy(env.mask())[None]
            with torch.no_grad():
                p = script.masked_logits(agent.policy(obs), mask).softmax(-1)[0]
            chances = [p[i, k].item() for i, k in enumerate(known) if k is not None]
            assert min(chances) > 0.9
            known = sum(chances)
        assert agent.value(obs).item() == pytest.approx(known, abs=0.1)
