"""What takes each catalogue entry out of a script, for test_taken_out.py.

entry -> pairs of a text that stands exactly once in the script and what replaces it. Whichever is
replaced, a test whose name starts with the entry's (core 5: test_core_05_) must fail.
"""

# What several scripts have in the same words.
GRADIENT_CLIPPING = [
    ("gradient = gradient * (args.max", "(args.max"),
    ("norm = gradient.norm()\n", "norm = gradient.abs().max()\n"),
]

PPO = {
    "core 1": [
        (
            "envs = [Environment(args) for _ in range(N)]\n    O",
            "envs = N * [Environment(args)]\n    O",
        ),
        (
            "            for t in range(T):\n                run.global_step += N\n",
            "            raw_obs[:] = [env.reset() for env in envs]\n"
            "            for t in range(T):\n                run.global_step += N\n",
        ),
    ],
    "core 2": [
        ("nn.init.orthogonal_(layer.weight, gain)", "pass"),
        ("nn.Linear(64, action_size), 0.01,", "nn.Linear(64, action_size), 1.0,"),
        ("nn.init.zeros_(layer.bias)", "pass"),
    ],
    "core 3": [
        ("Adam(groups, eps=args.adam_eps,", "Adam(groups,"),
        ("adam_eps: float = 1e-5", "adam_eps: float = 1e-8"),
    ],
    "core 4": [
        ("rate * remaining if args.anneal_lr else rate", "rate"),
        ("1.0 - (update - 1) / args.num_updates", "1.0 - update / args.num_updates"),
    ],
    "core 5": [
        ("delta[t] + decay[t] * following", "delta[t]"),
        ("decay = gamma * gae_lambda * ~ended", "decay = gamma * gae_lambda * ~terminated"),
        (
            "gamma * next_value * ~terminated - value\n    decay",
            "gamma * next_value - value\n    decay",
        ),
        ("next_obs[t, n] = last", "pass"),
        ("b_target = b_advantage + b_value", "b_target = b_advantage"),
        (
            "no_bootstrap = terminated if args.bootstrap_on_truncation else ended",
            "no_bootstrap = ended",
        ),
    ],
    "core 6": [
        ("torch.randperm(len(batch[0]), generator=generator)", "torch.arange(len(batch[0]))"),
        (
            "torch.randperm(len(batch[0]), generator=generator)",
            "torch.randint(len(batch[0]), batch[0].shape[:1])",
        ),
    ],
    "core 7": [
        ("mb_advantage = (mb_advantage - center) / (std + 1e-8)", "pass"),
    ],
    "core 8": [
        ("torch.min(ratio * mb_advantage, clipped_ratio * mb_advantage)", "ratio * mb_advantage"),
        (
            "torch.min(ratio * mb_advantage, clipped_ratio * mb_advantage)",
            "clipped_ratio * mb_advantage",
        ),
    ],
    "core 9": [
        ("square = torch.max(square, clipped_error * clipped_error)", "pass"),
        ("torch.max(square, clipped_error * clipped_error)", "clipped_error * clipped_error"),
    ],
    "core 10": [
        ("loss = loss - args.ent_coef * entropy", "pass"),
        ("args.vf_coef * value_loss", "value_loss"),
    ],
    "core 11": [
        ("[x * scale for x, scale in zip(parts, scales)]", "parts"),
        ("(x.norm() + 1e-6)", "(x.abs().max() + 1e-6)"),
        ("parts = gradient.split(agent.groups(args))", "parts = [gradient]"),
    ],
    "core 12": [
        ("losses.mean(0).tolist()", "losses[-1].tolist()"),
        (
            "approximate_kl(log_ratio)\n            clipped",
            "approximate_kl(log_ratio[-1])\n            clipped",
        ),
        ("(log_ratio.exp() - 1).abs() > limits[0]", "(log_ratio[-1].exp() - 1).abs() > limits[0]"),
        ("1 - unexplained.item()", "unexplained.item()"),
    ],
    "core 13": [
        ("policy_hidden if args.share_network else hidden()", "hidden()"),
        ("policy_hidden if args.share_network else hidden()", "policy_hidden"),
    ],
    "continuous 1": [
        ("action[t] += policy(next_obs", "action[t] = policy(next_obs"),
        ("torch.randn(T, N, A, generator=generator)", "torch.randn(T, N, A).sign()"),
    ],
    "continuous 2": [
        ("torch.zeros(action_size)", "torch.full((action_size,), -0.5)"),
        ("nn.Parameter(torch.zeros(action_size))", "torch.zeros(action_size)"),
    ],
    "continuous 3": [
        ("deviation * deviation + log_std).sum(-1)", "deviation * deviation + log_std).mean(-1)"),
        (
            "log_std.sum() + 0.5 * math.log(2 * math.pi * math.e)",
            "log_std.mean() + 0.5 * math.log(2 * math.pi * math.e)",
        ),
    ],
    "continuous 4": [
        ("[first, activation(), second, activation()]", "[first, activation()]"),
        ('"tanh": nn.Tanh', '"tanh": nn.ReLU'),
    ],
    "continuous 5": [
        (
            "action[t].clip(*bounds)):\n                    outcome",
            "action[t]):\n                    outcome",
        ),
        (
            "action[t] += policy(next_observation)",
            "action[t] = (action[t] + policy(next_observation)).clip(*bounds)",
        ),
    ],
    "continuous 6": [
        ("(raw_obs - statistics.mean) / statistics.std", "raw_obs"),
        ("                    obs_statistics.update(raw_obs)\n", "                    pass\n"),
    ],
    "continuous 7": [
        (".clip(-clip_obs, clip_obs)", ""),
    ],
    "continuous 8": [
        ("(reward - center) / std\n", "(reward - center)\n"),
        ("decay = self.args.gamma * ~ended", "decay = self.args.gamma * np.ones_like(reward)"),
        ("self.carried_sum + reward[t]", "reward[t]"),
        ("np.zeros_like(reward), np.ones", "np.full_like(reward, reward.mean()), np.ones"),
    ],
    "continuous 9": [
        ("scaled.clip(-self.args.clip_reward, self.args.clip_reward)", "scaled"),
    ],
    "aux 1": [
        ("remaining if args.anneal_clip else 1.0", "1.0"),
    ],
    "aux 3": [
        ("approximate_kl(log_ratio)[1] > args.target_kl", "False"),
    ],
}

# Where trpo_continuous.py has its own text; what it shares with PPO to the letter stands above.
TRPO = {
    "core 3": [
        ("lr=rate, eps=args.adam_eps,", "lr=rate,"),
        ("[value_vector], lr", "[vector], lr"),
    ],
    "core 4": [
        ("rate * remaining if args.anneal_lr else rate", "rate"),
        ("1.0 - (update - 1) / args.num_updates", "1.0 - update / args.num_updates"),
    ],
    "core 5": [
        ("b_target = b_advantage + b_value", "b_target = b_advantage"),
    ],
    "core 6": [
        ("torch.randperm(len(batch[0]), generator=generator)", "torch.arange(len(batch[0]))"),
    ],
    "core 7": [
        ("b_advantage = (b_advantage - center) / (std + 1e-8)", "pass"),
    ],
    "core 9": [
        ("square = torch.max(square, clipped_error * clipped_error)", "pass"),
        ("torch.max(square, clipped_error * clipped_error)", "clipped_error * clipped_error"),
    ],
    "core 11": GRADIENT_CLIPPING,
    "core 12": [
        ("losses.mean(0).tolist()", "losses[-1].tolist()"),
        ("1 - unexplained.item()", "unexplained.item()"),
    ],
    "core 13": [
        ("nn.Sequential(*hidden(), value_head", "nn.Sequential(*policy_hidden, value_head"),
    ],
}
ATARI = {
    "core 1": [
        ("run.env_seed(rank * N + n) % 2**31", "0"),
        (
            "            # One context for all steps",
            "            next_obs[:] = [game.reset() for game in games]\n            # One context",
        ),
    ],
    "core 2": [
        ("nn.init.orthogonal_(layer.weight, gain)", "pass"),
        ("nn.Linear(512, num_actions), 0.01,", "nn.Linear(512, num_actions), 1.0,"),
    ],
    "core 3": [
        ("lr=args.learning_rate, eps=args.adam_eps,", "lr=args.learning_rate,"),
    ],
    "core 4": [
        ("rate * remaining if args.anneal_lr else rate", "rate"),
        ("1.0 - (update - 1) / args.num_updates", "1.0 - update / args.num_updates"),
    ],
    "core 5": [
        ("next_value[t, n] = agent(", "agent("),
        ("next_value = values[1:].copy()", "next_value = values[:-1].copy()"),
        ("b_target = b_advantage + b_value", "b_target = b_advantage"),
        (
            "no_bootstrap = terminated if args.bootstrap_on_truncation else ended",
            "no_bootstrap = ended",
        ),
    ],
    "core 6": [
        ("torch.randperm(len(batch[0]), generator=generator)", "torch.arange(len(batch[0]))"),
    ],
    "core 7": [
        ("mb_advantage = (mb_advantage - center) / (std + 1e-8)", "pass"),
    ],
    "core 8": [
        ("torch.min(ratio * mb_advantage, clipped_ratio * mb_advantage)", "ratio * mb_advantage"),
    ],
    "core 9": [
        ("square = torch.max(square, clipped_error * clipped_error)", "pass"),
    ],
    "core 10": [
        ("policy_loss - args.ent_coef * entropy + args", "policy_loss + args"),
        ("args.vf_coef * value_loss", "value_loss"),
    ],
    "core 11": GRADIENT_CLIPPING,
    "core 12": [
        ("losses.mean(0).tolist()", "losses[-1].tolist()"),
        ("1 - unexplained.item()", "unexplained.item()"),
    ],
    "core 13": [
        ("self.value_head(hidden)", "self.value_head(hidden.detach())"),
    ],
    "atari 1": [
        ("self.random.integers(self.args.noop_max) + 1", "self.random.integers(2) + 1"),
        ("self.random.integers(self.args.noop_max) + 1", "self.args.noop_max"),
    ],
    "atari 2": [
        ("reward += self.ale.act(action)", "reward = self.ale.act(action)"),
        ("screen = self.screens.max(0)", "screen = self.screens[1]"),
        ("self.actions[action], self.args.frame_skip", "self.actions[action], 1"),
    ],
    "atari 3": [
        ("self.is_over or (lost_life and self.args.episodic_life)", "self.is_over"),
        ("[game.is_over for game in games] | truncated[t]", "terminated[t] | truncated[t]"),
    ],
    "atari 4": [
        ("if lost_life and not self.is_over:\n            self.fire()", "pass"),
        ("        self.fire()\n        self.lives", "        self.lives"),
    ],
    "atari 5": [
        ("self.ale.getScreenGrayscale(self.screens[1])", "self.screens[1] = self.ale.getScreen()"),
        ("cv2.INTER_AREA", "cv2.INTER_NEAREST"),
    ],
    "atari 6": [
        ("np.sign(reward) if self.args.clip_rewards else reward", "reward"),
    ],
    "atari 7": [
        (
            "self.obs[:-1], self.obs[-1] = self.obs[1:], self.frame()",
            "self.obs[1:], self.obs[0] = self.obs[:-1].copy(), self.frame()",
        ),
        ("self.obs[:] = self.frame()", "self.obs[-1] = self.frame()"),
    ],
    "atari 8": [
        ("nn.Linear(64 * 7 * 7, 512)),\n            nn.ReLU(),", "nn.Linear(64 * 7 * 7, 512)),"),
    ],
    "atari 9": [
        (" / 255.0", " / 1.0"),
    ],
    "aux 1": [
        ("remaining if args.anneal_clip else 1.0", "1.0"),
    ],
    "aux 2": [
        ("gradient = averaged(gradient)", "pass"),
        ("manual_seed(args.seed + rank)", "manual_seed(args.seed)"),
        ("run.env_seed(rank * N + n)", "run.env_seed(n)"),
        ("args.num_envs // W", "args.num_envs"),
    ],
    "aux 3": [
        ("approx_kl > args.target_kl", "False"),
    ],
}
# Where ppo_multidiscrete.py has its own text.
MULTIDISCRETE = {
    "multidiscrete 1": [
        ("action[..., None])[..., 0].sum(-1)", "action[..., None])[..., 0].mean(-1)"),
        ("logits.log_softmax(-1)).sum((-2, -1))", "logits.log_softmax(-1)).sum(-1).mean(-1)"),
        ("torch.empty(T, N, A, C)", "torch.empty(T, N, 1, C)"),
    ],
    "aux 4": [
        ("torch.where(mask, logits.view(mask.shape), -1e8)", "logits.view(mask.shape)"),
        ("logits.view(mask.shape), -1e8)", "logits.view(mask.shape), -math.inf)"),
        ("np.where(mask, logits + noise, -np.inf)", "(logits + noise)"),
        ("masked_logits(agent.policy(b_obs), b_mask)", "agent.policy(b_obs).view(b_mask.shape)"),
        ("mask[self.valid] = np.ravel(given)", "mask[self.valid] = True"),
        ("if not mask.any(-1).all():", "if False:"),
    ],
}
# Where ppo_atari_lstm.py has its own text; without a memory its loop is ppo_atari.py's.
LSTM = {
    "core 5": [
        (
            "value.append(agent.step(next_obs, state, next",
            "value.append(agent.step(next_obs, 0 * state, next",
        ),
        ("agent.step(last[None], before, goes_on)", "agent.step(last[None], 0 * before, goes_on)"),
    ],
    "core 6": [
        (
            "torch.randperm(batch[0].shape[1], generator=generator)",
            "torch.arange(batch[0].shape[1])",
        ),
    ],
    "lstm 1": [
        ("nn.Linear(512, 4 * 128), 1.0,", "nn.Linear(512, 4 * 128), math.sqrt(2),"),
        ("nn.Linear(128, 4 * 128), 1.0,", "nn.Linear(128, 4 * 128), math.sqrt(2),"),
        ("initialized(nn.Linear(128, 4 * 128), 1.0, args.init)", "nn.Linear(128, 4 * 128)"),
    ],
    "lstm 2": [
        ("torch.zeros(2, num_games, 128)", "torch.ones(2, num_games, 128)"),
    ],
    "lstm 3": [
        ("output * ~begin, cell * ~begin", "output, cell"),
        ("output * ~begin, cell * ~begin", "output, cell * ~begin"),
        ("torch.from_numpy(terminated[t] | truncated[t])", "torch.from_numpy(terminated[t])"),
        (
            "torch.from_numpy(terminated[t] | truncated[t])",
            "torch.tensor([x.is_over for x in games])",
        ),
    ],
    "lstm 4": [
        (
            "yield [x[:, games] for x in batch]",
            "yield [x[torch.randperm(len(x))][:, games] for x in batch]",
        ),
        (
            "yield [x[:, games] for x in batch]",
            "yield [x[:, games] for x in batch[:-2]] + [x[:, -len(games) :] for x in batch[-2:]]",
        ),
    ],
    "lstm 5": [
        ("first_state = state\n", "first_state = torch.zeros_like(state)\n"),
        ("*batch, first_state, torch", "*batch, state, torch"),
        (
            "            first_state = state\n",
            "            first_state = state = torch.zeros_like(state)\n",
        ),
    ],
}
TAKEN_OUT = {
    "ppo_continuous": PPO,
    "trpo_continuous": TRPO,
    "ppo_atari": ATARI,
    "ppo_multidiscrete": MULTIDISCRETE,
    "ppo_atari_lstm": LSTM,
}
TESTS = {
    "ppo_continuous": "test_catalogue_continuous",
    "trpo_continuous": "test_catalogue_trpo",
    "ppo_atari": "test_catalogue_atari",
    "ppo_multidiscrete": "test_catalogue_multidiscrete",
    "ppo_atari_lstm": "test_catalogue_lstm",
}
