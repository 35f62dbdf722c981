"""PPO on answers of a few tokens: sampling, rewards, advantages, and the losses of policy and critic.

What is kept of a sample is one tensor [L_i], in one of two alignments: of tokens (rewards, values before a token, advantages,
returns), or of slots as `next_token_logprobs` gives them (slot j holds token j + 1's log-probability). `slot_targets`
brings the first to the second, on the full stream before the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from learner import Learner, LossFn
from torch import Tensor

from vlm_cp.batch import PackedBatch, unpack
from vlm_cp.chat import IGNORE, EncodedSample
from vlm_cp.logprobs import next_token_logprobs_and_entropy
from vlm_cp.losses import TokenLoss, token_loss
from vlm_cp.metrics import Metric, masked_max, masked_mean
from vlm_cp.values import shifted_values, slot_targets, value_loss


def split_answer(sample: EncodedSample) -> tuple[EncodedSample, Tensor]:
    """(the question alone, the tokens of its answer) of a chat sample."""
    ids, labels = sample.inputs["input_ids"], sample.inputs["labels"]
    start = int((labels != IGNORE).nonzero()[0, 0])
    prompt = {**sample.inputs, "input_ids": ids[:start], "labels": torch.full_like(ids[:start], IGNORE)}
    return replace(sample, inputs=prompt), labels[labels != IGNORE]


def with_response(prompt: EncodedSample, response: Tensor) -> EncodedSample:
    """The prompt and what was sampled after it. A media id that was sampled is text: no image belongs to it."""
    ids = prompt.inputs["input_ids"]
    joined = {
        "input_ids": torch.cat([ids, response]),
        "labels": torch.cat([prompt.inputs["labels"], response]),
        "placeholder_mask": torch.cat([torch.ones_like(ids), torch.zeros_like(response)]).bool(),
    }
    return replace(prompt, inputs={**prompt.inputs, **joined})


def respond(
    policy: Learner, prompts: Sequence[EncodedSample], *, turn_end: int, max_tokens: int, seed: int
) -> list[Tensor]:
    """A response [<= max_tokens] to each prompt, up to and with turn_end, sampled at temperature 1.

    Every token is drawn with a number that belongs to the sample and the position alone, so all layouts write the same.
    """
    draws = torch.rand(len(prompts), max_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def next_tokens(logits: Tensor, batch: PackedBatch) -> list[Tensor]:
        bounds = logits[0, :, : policy.vocab_size].double().softmax(-1).cumsum(-1)
        drawn = policy.local(batch.token_extras["draw"], batch)
        tokens = (bounds <= drawn[:, None]).sum(-1).clamp(max=policy.vocab_size - 1)
        return unpack(tokens, batch.plan, group=policy.cp_group)

    responses = [prompt.inputs["input_ids"][:0] for prompt in prompts]
    for position in range(max_tokens):
        going = [i for i, tokens in enumerate(responses) if turn_end not in tokens]
        if not going:
            break
        samples = [with_response(prompts[i], responses[i]) for i in going]
        extras = [draws[i, position].expand(sample.length) for i, sample in zip(going, samples, strict=True)]
        for i, tokens in zip(going, policy.per_sample(samples, next_tokens, {"draw": extras}), strict=True):
            responses[i] = torch.cat([responses[i], tokens[-1:]])
    return responses


def token_rewards(response: Tensor, answer: Tensor) -> Tensor:
    """[n] float64: of each token, its share of the answer where it is the answer's token at this place; 1 in all if exact."""
    found = torch.zeros(len(response), dtype=torch.float64)
    n = min(len(response), len(answer))
    found[:n] = (response[:n] == answer[:n]).double() / len(answer)
    return found


def advantages_of(rewards: Tensor, values: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[n]: generalised advantage estimates (Schulman et al. 2016). rewards, values [n]: of a token, and before it."""
    errors = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    found, running = torch.zeros_like(errors), errors.new_zeros(())
    for t in reversed(range(len(errors))):
        running = errors[t] + gamma * lam * running
        found[t] = running
    return found


def old_logprobs(policy: Learner, samples: Sequence[EncodedSample]) -> list[Tensor]:
    """[L_i] a sample, of slots."""
    return policy.per_sample(
        samples, lambda logits, batch: unpack(policy.logprobs(logits, batch), batch.plan, group=policy.cp_group)
    )


def old_values(critic: Learner, samples: Sequence[EncodedSample]) -> list[Tensor]:
    """[L_i] a sample, of tokens: the value before each."""
    return critic.per_sample(samples, lambda out, batch: shifted_values(out, batch.plan, group=critic.cp_group))


def policy_loss(policy: Learner, *, clip: float, entropy_weight: float) -> LossFn:
    """-min(r A, clip(r) A) - entropy_weight H, r the ratio of new to old probability, over the sampled tokens."""

    def loss(logits: Tensor, batch: PackedBatch) -> tuple[TokenLoss, dict[str, Metric]]:
        logprobs, entropy = next_token_logprobs_and_entropy(
            logits, batch.input_ids, batch.plan, cp_rank=policy.cp_rank, vocab_size=policy.vocab_size
        )
        old = policy.local(batch.token_extras["old_logprobs"], batch)
        advantages = slot_targets(batch.token_extras["advantages"], batch.plan, cp_rank=policy.cp_rank)
        ratio = (logprobs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        sampled = policy.local(batch.loss_mask, batch)
        metrics = {
            "entropy": masked_mean(entropy, sampled),
            "kl": masked_mean(old - logprobs, sampled),
            "clipped": masked_mean(((ratio - 1).abs() > clip).double(), sampled),
            "ratio_max": masked_max(ratio, sampled),
        }
        terms = -gain - entropy_weight * entropy
        return token_loss(terms, batch.plan, batch.loss_mask, cp_rank=policy.cp_rank), metrics

    return loss


def critic_loss(critic: Learner, *, clip: float | None) -> LossFn:
    """The clipped value loss of `vlm_cp.values`, over the sampled tokens; clip None: plain regression on the returns."""

    def loss(values: Tensor, batch: PackedBatch) -> tuple[TokenLoss, dict[str, Metric]]:
        extras = batch.token_extras
        found = value_loss(
            values,
            batch.plan,
            returns=extras["returns"],
            loss_mask=extras["sampled"],
            cp_rank=critic.cp_rank,
            old_values=None if clip is None else extras["old_values"],
            clip=clip,
        )
        return TokenLoss(*found), {}

    return loss
