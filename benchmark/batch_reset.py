"""Tasks in which an episode is cut off after every 2048 steps, as at the start of each batch in the
code of Engstrom et al. (2020).

    python trpo_continuous.py --env-id benchmark.batch_reset:BatchReset/Humanoid-v5
"""

import gymnasium

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


def make(task, every=2048, **kwargs):
    return BatchReset(gymnasium.make(task, **kwargs), every)


for task in TASKS:
    entry_point = "benchmark.batch_reset:make"
    gymnasium.register(f"BatchReset/{task}", entry_point, kwargs={"task": task})
