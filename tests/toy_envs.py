"""Environments whose right answers are known: Toy, five probes with continuous actions, Choices."""

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


class Choices(gym.Env):
    """The observation is -1 or 1, an episode is one step, and its reward the number of components
    with the right choice: the first one at -1, the last one at 1.

    `nvec` is a number for a Discrete space. `masks`: "-1" and "1" -> what info's mask is there.
    `Choices.sent` holds (observation, action) of every step of any Choices, until a test clears it.
    """

    sent: list = []
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, nvec=(3, 2), start=0, masks=None):
        self.masks, self.last, self.start = masks, np.array(nvec) - 1, start
        kind = gym.spaces.Discrete if isinstance(nvec, int) else gym.spaces.MultiDiscrete
        self.action_space = kind(nvec, start=np.full_like(nvec, start)[()])

    def observe(self):
        self.obs = int(self.np_random.choice([-1, 1]))
        mask = {} if self.masks is None else {"action_mask": np.int8(self.masks[str(self.obs)])}
        return np.float32([self.obs]), mask

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe()

    def step(self, action):
        assert self.action_space.contains(action), action
        Choices.sent.append((self.obs, action))
        right = action - self.start == (self.last if self.obs == 1 else 0)
        obs, info = self.observe()
        return obs, float(np.sum(right)), True, False, info


def register():
    """Register all of them as ClassName-v0, and Bounds-v0, a Toy with four kinds of bounds."""
    for cls in (Toy, ConstantReward, ObservationReward, DelayedReward, ActionReward, Choices):
        gym.register(f"{cls.__name__}-v0", cls, disable_env_checker=True)
    gym.register("ObservationActionReward-v0", ObservationActionReward, disable_env_checker=True)
    bounds = {"low": (0, 0, -np.inf, 2), "high": (5, 5, np.inf, 2)}
    gym.register("Bounds-v0", Toy, disable_env_checker=True, kwargs=bounds)
