"""Tasks as the code of Engstrom et al. (2020) saw them, beside its settings.

    python trpo_continuous.py --env-id benchmark.batch_reset:BatchReset/Humanoid-v5
    python trpo_continuous.py --env-id benchmark.batch_reset:Release/Humanoid-v5

BatchReset: an episode is cut off after every 2048 steps, as at the start of each of its batches.
Release: the same, and Humanoid as in gym's -v2 with mujoco-py 2.0: contact forces are 0 in the
observation and cost nothing, the reward for staying upright is paid at the fall too, and zeros fill
the observation up to 376 numbers.
"""

import gymnasium
import numpy as np

TASKS = "Hopper-v5", "Walker2d-v5", "Humanoid-v5"


class BatchReset(gymnasium.Wrapper):
    """Truncates at every `every`-th step since it was made, besides where its environment does."""

    def __init__(self, env, every):
        super().__init__(env)
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {every!r}; type a whole number from 1 on")
        self.every, self.steps = every, 0

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        return obs, reward, terminated, truncated or self.steps % self.every == 0, info


class OldHumanoid(gymnasium.Wrapper):
    """Humanoid-v5 without contact forces -> that of -v2."""

    def __init__(self, env):
        super().__init__(env)
        self.zeros = np.zeros(376 - env.observation_space.shape[0])
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (376,), np.float64)

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return np.concatenate([obs, self.zeros]), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        reward += 5.0 * terminated
        return np.concatenate([obs, self.zeros]), reward, terminated, truncated, info


def make(task, every=2048, **kwargs):
    return BatchReset(gymnasium.make(task, **kwargs), every)


def make_humanoid(every=2048, **kwargs):
    kwargs |= {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.0}
    return BatchReset(OldHumanoid(gymnasium.make("Humanoid-v5", **kwargs)), every)


for task in TASKS:
    entry_point = "benchmark.batch_reset:make"
    gymnasium.register(f"BatchReset/{task}", entry_point, kwargs={"task": task})
gymnasium.register("Release/Humanoid-v5", "benchmark.batch_reset:make_humanoid")
