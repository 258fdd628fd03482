"""Environments whose right answers are known: Toy, and five probes with continuous actions."""

import gymnasium as gym
import numpy as np


class Toy(gym.Env):
    """The observation is the step number, the reward is 1, and step 3 ends the episode.

    `Toy.sent` holds every action that any Toy got, until a test clears it.
    """

    sent: list = []

    def __init__(self, end="truncated", low=(-1.0,), high=(1.0,)):
        self.end = end
        self.observation_space = gym.spaces.Box(0, 3, (1,), np.float32)
        self.action_space = gym.spaces.Box(np.float32(low), np.float32(high))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        Toy.sent.append(np.array(action))
        self.steps += 1
        over = self.steps == 3
        terminated, truncated = over and self.end == "terminated", over and self.end == "truncated"
        return np.full(1, self.steps, np.float32), 1.0, terminated, truncated, {}


class Probe(gym.Env):
    """An episode of `length` steps that terminates; subclasses say observation and reward."""

    length = 1
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-10, 10, (1,), np.float32)

    def observe(self):
        return 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.obs = self.observe()
        return np.float32([self.obs]), {}

    def step(self, action):
        reward = self.reward(self.obs, float(action[0]))
        self.steps += 1
        self.obs = self.observe()
        return np.float32([self.obs]), reward, self.steps == self.length, False, {}


class ConstantReward(Probe):
    def reward(self, obs, action):
        return 1.0


class ObservationReward(Probe):
    def observe(self):
        return float(self.np_random.choice([-1, 1]))

    def reward(self, obs, action):
        return obs


class DelayedReward(Probe):
    length = 2

    def observe(self):
        return float(self.steps == 1)

    def reward(self, obs, action):
        return obs


class ActionReward(Probe):
    def reward(self, obs, action):
        return -((action - 0.5) ** 2)


class ObservationActionReward(ObservationReward):
    def reward(self, obs, action):
        return -((action - 0.5 * obs) ** 2)


def register():
    """Register all of them as ClassName-v0, and Bounds-v0, a Toy with four kinds of bounds."""
    for cls in (Toy, ConstantReward, ObservationReward, DelayedReward, ActionReward):
        gym.register(f"{cls.__name__}-v0", cls, disable_env_checker=True)
    gym.register("ObservationActionReward-v0", ObservationActionReward, disable_env_checker=True)
    bounds = {"low": (0, 0, -np.inf, 2), "high": (5, 5, np.inf, 2)}
    gym.register("Bounds-v0", Toy, disable_env_checker=True, kwargs=bounds)
