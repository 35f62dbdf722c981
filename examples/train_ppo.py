"""PPO with a VLM critic on the pictures of `train_sft.py`, at CP=1 and at CP=2, and both runs' curves on one picture.

    python examples/train_ppo.py --out examples/results

A policy that a short SFT has taught to answer, often wrongly, samples an answer to each picture and is rewarded for every token
that is right. Under context parallelism run: the sampling, the old log-probabilities, the critic's values, both updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import arms
import curves
import ppo
import torch
import train_sft
from hf_learner import HFLearner, small_model
from learner import Learner, trained_tokens
from torch import Tensor, nn

from vlm_cp.chat import EncodedSample
from vlm_cp.metrics import Metric
from vlm_cp.values import make_value_head

LOOK = curves.Look(
    title="PPO with a VLM critic: read the digits, count the shapes",
    panels={"reward": "mean reward", "policy_loss": "policy loss", "critic_loss": "value loss"},
    compared="policy_loss",
)


@dataclass(frozen=True, kw_only=True)
class Settings(arms.Settings):
    """One PPO run. warm_steps, warm_batch_size: of the SFT that all arms start from. clip: of ratios and of values.

    epochs, minibatches: how often a step's samples are gone through, and in how many updates each time.
    """

    steps: int = 60
    resume_at: int = 30
    batch_size: int = 64
    capacity: int = 4096
    learning_rate: float = 4e-4
    warmup: int = 5
    validate_every: int = 10
    warm_steps: int = 350
    warm_batch_size: int = 32
    critic_rate: float = 2.0  # times the policy's learning rate
    epochs: int = 2
    minibatches: int = 2
    clip: float = 0.2
    entropy_weight: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    max_tokens: int = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Experience:
    """A step's samples with their responses, and per sample what the losses read, under the names of `token_extras`."""

    samples: Sequence[EncodedSample]
    extras: Mapping[str, Sequence[Tensor]]
    metrics: Mapping[str, Metric]

    def part(self, first: int, step: int) -> Experience:
        return Experience(
            samples=self.samples[first::step],
            extras={name: x[first::step] for name, x in self.extras.items()},
            metrics={},
        )


class Trainer(arms.Trainer):
    """One rank of one arm."""

    settings: Settings

    def __init__(self, settings: Settings, data: train_sft.Data, policy: Learner, critic: Learner) -> None:
        super().__init__(settings)
        self.data, self.policy, self.critic = data, policy, critic

    def train_step(self) -> dict[str, float]:
        settings, step = self.settings, self.settings.rate(self.step)
        every = self.collect()
        logged: list[dict[str, Metric]] = []
        losses = {
            "policy": ppo.policy_loss(self.policy, clip=settings.clip, entropy_weight=settings.entropy_weight),
            "critic": ppo.critic_loss(self.critic, clip=settings.clip),
        }
        for _ in range(settings.epochs):
            for i in range(settings.minibatches):
                part = every.part(i, settings.minibatches)
                for name, learner, rate in (
                    ("policy", self.policy, step),
                    ("critic", self.critic, step * settings.critic_rate),
                ):
                    found = learner.update(
                        learner.pack(part.samples, part.extras),
                        losses[name],
                        count=trained_tokens(part.samples),
                        learning_rate=rate,
                    )
                    logged.append({f"{name}_{key}": metric for key, metric in found.items()})
        return self.policy.reduced([every.metrics, *logged])

    @torch.no_grad()
    def collect(self) -> Experience:
        """Samples answers to this step's questions; old log-probabilities, values, advantages and returns."""
        settings = self.settings
        chosen = train_sft.picked(settings, self.step, self.data.train)
        prompts, answers = zip(*map(ppo.split_answer, chosen), strict=True)
        turn_end = int(answers[0][-1])
        seed = settings.seed * 10**6 + self.step
        responses = ppo.respond(self.policy, prompts, turn_end=turn_end, max_tokens=settings.max_tokens, seed=seed)
        samples = [ppo.with_response(p, r) for p, r in zip(prompts, responses, strict=True)]
        rewards = [ppo.token_rewards(r, a) for r, a in zip(responses, answers, strict=True)]
        values = ppo.old_values(self.critic, samples)
        own = [v[len(v) - len(r) :] for v, r in zip(values, rewards, strict=True)]
        advantages = [
            ppo.advantages_of(r, v, gamma=settings.gamma, lam=settings.lam) for r, v in zip(rewards, own, strict=True)
        ]
        scale = torch.cat(advantages)
        extras = {
            "old_logprobs": ppo.old_logprobs(self.policy, samples),
            "old_values": values,
            "advantages": [
                _padded((a - scale.mean()) / (scale.std() + 1e-8), s) for a, s in zip(advantages, samples, strict=True)
            ],
            "returns": [_padded(a + v, s) for a, v, s in zip(advantages, own, samples, strict=True)],
            "sampled": [_padded(torch.ones_like(r), s).bool() for r, s in zip(rewards, samples, strict=True)],
        }
        totals = torch.stack([r.sum() for r in rewards])
        exact = torch.tensor([torch.equal(r, a) for r, a in zip(responses, answers, strict=True)]).double()
        metrics = {"reward": Metric(totals.mean(), "mean"), "exact": Metric(exact.mean(), "mean")}
        return Experience(samples=samples, extras=extras, metrics=metrics)

    def validate(self) -> dict[str, float]:
        return train_sft.exact(self.policy, self.data.validation)

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict(), "critic": self.critic.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])


def _padded(x: Tensor, sample: EncodedSample) -> Tensor:
    """Of a response's tokens -> [L_i], of the whole sample's, 0 in the prompt."""
    return torch.cat([x.new_zeros(sample.length - len(x)), x])


def warm_settings(settings: Settings) -> train_sft.Settings:
    """Of the SFT that all arms start from."""
    return replace(
        train_sft.Settings(),
        seed=settings.seed,
        steps=settings.warm_steps,
        batch_size=settings.warm_batch_size,
        validate_every=settings.warm_steps,
    )


def warm_start(settings: Settings, data: train_sft.Data, processor: Any) -> dict[str, Tensor]:
    """Weights after that SFT."""
    trainer = train_sft.makers(data, processor)(warm_settings(settings))(None)
    trainer.run(settings.warm_steps)
    return trainer.learner.model.state_dict()


def models(settings: Settings, weights: Mapping[str, Tensor], tokenizer: Any) -> tuple[nn.Module, nn.Module]:
    """(policy, critic); the critic is the policy with a new scalar head."""
    found: list[Any] = [small_model(settings.seed, tokenizer) for _ in range(2)]
    for model in found:
        model.load_state_dict(weights)
    found[1].value_head = make_value_head(found[1].config.text_config.hidden_size, dtype=torch.float64)
    return found[0], found[1]


def makers(settings: Settings, data: train_sft.Data, processor: Any) -> Any:
    """How each arm makes its trainer."""
    weights = warm_start(settings, data, processor)

    def make(own: Settings, group: Any) -> Trainer:
        learners = [HFLearner(m, processor, own.capacity, group) for m in models(own, weights, processor.tokenizer)]
        return Trainer(own, data, *learners)

    return lambda own: lambda group: make(own, group)


if __name__ == "__main__":
    arms.main(__doc__ or "", "ppo", Settings(), lambda settings: makers(settings, *train_sft.load_data(settings)), LOOK)
