"""Plays a trained run: mean return and length, and videos if asked for.

    python evaluate.py RUN [--episodes 3] [--video videos]

Or in one's own code: load_policy(RUN) is a function from a raw observation to an action.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
import tyro


@dataclasses.dataclass
class Options:
    """Play episodes (whole games) with the policy of a run, as its last checkpoint has it."""

    run: tyro.conf.Positional[str]  # directory of the run
    episodes: int = 10  # how many are played
    stochastic: bool = False  # draw actions as in training; off: the mean or likeliest action
    video: str | None = None  # folder that gets one mp4 per episode
    seed: int = 1  # of environments and drawn actions; never those of a training


class BadInput(Exception):
    """What was given can't be used: one line, exit status 2."""


def one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def no_video(error):
    needs = "pip install moviepy, and pygame for Taxi; without a display apt-get install libegl1"
    print(f"evaluate.py: no video ({needs}): {one_line(error)}", file=sys.stderr)


def script_of(run):
    """Import the script that config.json names, if it is one of those beside this file."""
    try:
        name = json.loads(Path(run, "config.json").read_text())["script"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        reason = "no config.json that names a script; type one of those below runs/"
        raise BadInput(f"{run} is no run directory: {reason}") from None
    path = Path(__file__).parent / f"{name}.py"
    if not re.fullmatch(r"(ppo|trpo)_\w+", str(name)) or not path.is_file():
        raise BadInput(f"{run}/config.json names {name!r}, no ppo_*.py or trpo_*.py beside this")
    spec = importlib.util.spec_from_file_location(name, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def environment_class(script):
    """The class of the environments that a script's policy plays."""
    names = "WholeGames", "DiscreteEnvironment", "Environment"
    return next(getattr(script, name) for name in names if hasattr(script, name))


class Policy:
    """The policy of a run, statistics frozen: call it with what `reset` and `step` return."""

    def __init__(self, run, seed=1):
        self.script = script = script_of(run)
        try:
            self.args = args = script.load_config(script.Args, run)
            self.is_atari = hasattr(script, "WholeGames")
            self.is_discrete = hasattr(script, "DiscreteEnvironment")
            self.Environment = environment_class(script)
            self.environment = env = self.Environment(args)
        except script.BadInput as error:
            raise BadInput(str(error)) from None
        sizes = (env.num_actions,) if self.is_atari else (env.observation_size, env.action_size)
        self.agent = script.Agent(*sizes, args)
        self.generator = torch.Generator().manual_seed(seed)
        try:
            parts = script.load_checkpoint(run)["parts"]
            self.agent.load_state_dict(parts["agent"])
            if not all(x.isfinite().all() for x in self.agent.state_dict().values()):
                raise ValueError("its weights aren't finite")
            self.normalize = lambda obs: obs.astype(np.float32)  # a script without statistics
            if hasattr(script, "normalize_obs"):
                statistics = script.RunningMeanStd(env.observation_size)
                script.load_part(statistics, parts["obs_statistics"])
                self.normalize = lambda obs: script.normalize_obs(obs, statistics, args.clip_obs)
        except Exception as error:
            raise BadInput(f"{run}/checkpoint.pt can't be used: {one_line(error)}") from None
        self.begin()

    def begin(self):
        """Forget the last episode, before a new one; only a policy with an LSTM needs it."""
        if hasattr(self.agent, "initial_state"):
            self.state = self.agent.initial_state(1)

    def make_env(self, **kwargs):
        """The gymnasium environment of the run; with render_mode="human" one watches it."""
        self.environment = self.Environment(self.args, **kwargs)
        return self.environment.env

    def __call__(self, raw_obs, stochastic=False, info=None):
        """Observation (and info, if masks count) of the environment -> action for its `step`"""
        env = self.environment
        if self.is_atari:
            return self.act(raw_obs, stochastic)
        env.obs, env.info = raw_obs, info or {}
        return env.sent(self.act(env.observe(raw_obs), stochastic))

    @torch.inference_mode()
    def act(self, obs, stochastic=False):
        """Observation of the script's own environment, not yet normalized -> action

        A flat one (O,) -> (A,), or a game's frames (C, 84, 84) -> the index of an action. Masks are
        those of what self.environment returned last.
        """
        if self.is_atari:
            if hasattr(self.agent, "initial_state"):
                begins = torch.tensor([self.environment.lost_life])
                logits, _, self.state = self.agent.step(obs[None], self.state, begins)
            else:
                logits = self.agent(torch.from_numpy(obs[None]))[0]
            probabilities = logits.softmax(-1)
            drawn = probabilities.multinomial(1, generator=self.generator)
            return drawn.item() if stochastic else probabilities.argmax().item()
        action = self.agent.policy(torch.from_numpy(self.normalize(obs[None])))[0]
        if self.is_discrete:
            logits = action.view(self.environment.choices.shape)
            noise = torch.empty_like(logits).exponential_(generator=self.generator).log().neg()
            noise = (noise if stochastic else torch.zeros_like(logits)).numpy()
            return self.script.choose(logits.numpy(), noise, self.environment.mask())
        if stochastic:
            noise = torch.randn(len(action), generator=self.generator)
            action = action + self.agent.log_std.exp() * noise
        clips = getattr(self.args, "clip_actions", True)
        bounds = (self.environment.low, self.environment.high) if clips else (-np.inf, np.inf)
        return action.numpy().clip(*bounds)


load_policy = Policy  # `seed` is that of stochastic actions


def choose_renderer(folder):
    """Without a display MuJoCo draws through EGL, if told so before it is imported. -> folder"""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        with contextlib.suppress(ImportError):  # other environments need no mujoco
            import mujoco  # noqa: F401
    except Exception as error:
        os.environ.pop("MUJOCO_GL", None)  # with it the episodes couldn't even be played
        return no_video(error)
    return folder


def write_frame(writer, env, path):
    """Append what the environment shows to a video, begun at its first frame. -> writer"""
    frame = env.render()
    height, width = (side // 2 * 2 for side in frame.shape[:2])  # H.264 takes even sides
    if writer is None:
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        os.makedirs(os.path.dirname(path), exist_ok=True)
        writer = FFMPEG_VideoWriter(path, (width, height), env.metadata.get("render_fps", 30))
    writer.write_frame(np.ascontiguousarray(frame[:height, :width]))
    return writer


def play(policy, options):
    """Play the episodes, yielding return and length of each. A video that fails is one line."""
    folder, name = options.video, Path(options.run).resolve().name
    rendering = {} if folder is None else {"render_mode": "rgb_array"}
    try:
        env = policy.environment = policy.Environment(policy.args, **rendering)
    except policy.script.BadInput as error:  # it can't be drawn, but it was made before
        env, folder = policy.environment, no_video(error)
    for episode in range(options.episodes):
        # A training's spawn keys are 0 and 1, so no episode of it ever starts with this seed.
        sequence = np.random.SeedSequence((options.seed, episode, 0), spawn_key=(2,))
        seed = int.from_bytes(sequence.generate_state(4).tobytes(), "little")  # 128 bits
        obs, ends, episodic_return, length, writer = env.reset(seed=seed), [False], 0.0, 0, None
        obs = obs[0] if policy.is_atari else obs
        policy.begin()
        while not any(ends):
            if folder is not None:
                try:
                    writer = write_frame(writer, env.env, f"{folder}/{name}-{episode + 1}.mp4")
                except Exception as error:
                    folder = no_video(error)
            obs, reward, *ends = env.step(policy.act(obs, options.stochastic))[:4]
            episodic_return, length = episodic_return + float(reward), length + 1
        if writer is not None:
            with contextlib.suppress(OSError):  # a broken pipe, told of when it broke
                writer.close()
        yield episodic_return, length


def main(argv=None):
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # where it can't show a ±
    options, played, status = tyro.cli(Options, args=argv), [], 0
    try:
        for name, least in ("episodes", 1), ("seed", 0):
            if not least <= getattr(options, name) <= 1e18:
                raise BadInput(f"--{name} is {getattr(options, name)}; allowed is [{least}, 1e18]")
        if options.video == "":
            raise BadInput("--video is ''; type the name of a folder")
        if options.video is not None:
            options.video = choose_renderer(options.video)
        policy = load_policy(options.run, options.seed)
    except BadInput as error:
        print("evaluate.py:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # more are slower for networks this small
    try:
        played.extend(play(policy, options))
    except (policy.script.RunFailed, KeyboardInterrupt) as error:
        print(f"evaluate.py: {str(error) or 'stopped'}", file=sys.stderr)
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    for name, x in zip(("return", "length"), zip(*played)):
        print(
            f"{name} {np.mean(x):.1f} ± {np.std(x):.1f} over {len(x)} episode{'s' * (len(x) > 1)}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
