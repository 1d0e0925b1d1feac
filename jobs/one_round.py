"""Speculative decoding of one sequence, from the prompt to the last token, to be read in one sitting.

    python jobs/one_round.py --target TARGET --draft DRAFT --prompt "Once upon a time"

A small draft model proposes K tokens, one by one; the large target model looks at all of them in a single
forward; a prefix of them is accepted, and one more token comes from the target itself. So every round yields
1 to K + 1 tokens for one forward of the target, and whatever the draft proposes, the tokens follow the
target's own distribution (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, Algorithm 1).

It needs torch and transformers alone. jobs/generate.py gives the same tokens where a seed fixes them, and
adds what makes it fast: many sequences in a forward, a draft that goes on while the target works, files,
restarts.

Shapes: V vocabulary, K drafted tokens of a round, N = K + 1 distributions of the target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

GREEDY, GUMBEL, REJECTION = "greedy", "gumbel", "rejection"


class CachedModel:
    """A model with the keys and values of the tokens that it has seen."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache()
        self._seen: list[int] = []

    @torch.inference_mode()
    def logits(self, token_ids: list[int], num_wanted: int) -> Tensor:
        """[num_wanted, V]: of what follows each of the last ``num_wanted`` tokens. Only tokens that are not
        in the cache are computed. Rejected ones are taken out of it, which is all that rolling back is."""
        most = min(len(self._seen), len(token_ids) - num_wanted)
        num_kept = next((i for i in range(most) if self._seen[i] != token_ids[i]), most)
        if num_kept < len(self._seen):
            self._cache.crop(num_kept - len(self._seen))
        new_ids = torch.tensor([token_ids[num_kept:]], device=self._model.device)
        output = self._model(new_ids, past_key_values=self._cache, logits_to_keep=num_wanted)
        self._seen = list(token_ids)
        return output.logits[0]


# Random numbers. Each is a hash of what it decides: seed and row, the position of the token, how often a
# candidate of this sequence was rejected before, and a purpose. So it does not matter in which order or
# beside which others sequences are decoded; and no number serves twice, which would bias tokens silently.

WORD, GOLDEN_GAMMA = 2**64, 0x9E3779B97F4A7C15
DRAFT, ACCEPT, NEXT_TOKEN, COUPLE = range(4)


def mix(word: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), to 64 well-mixed bits."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


@dataclass
class RandomStream:
    """The random numbers of one sequence. What is drafted anew after a rejection gets new ones."""

    key: int
    num_rejections: int = 0

    @staticmethod
    def of_row(seed: int, row_id: int) -> RandomStream:
        key = mix(seed + GOLDEN_GAMMA)
        for part in (row_id, 0):  # 0: the first sample of the row
            key = mix((key ^ part) + GOLDEN_GAMMA)
        return RandomStream(key)

    def uniform(self, position: int, purpose: int) -> float:
        """In [0, 1), for the token at this position."""
        return (self._word(position, self.num_rejections, purpose) >> 12) * 2.0**-52

    def waiting_times(self, position: int, vocab_size: int) -> Tensor:
        """[V] float64, exponentially distributed; the same however often the position is decided."""
        word = self._word(position, 0, COUPLE)
        words = (mix((word + n * GOLDEN_GAMMA) % WORD) >> 12 for n in range(1, vocab_size + 1))
        return -torch.log(torch.tensor([(word + 0.5) * 2.0**-52 for word in words], dtype=torch.float64))

    def _word(self, position: int, num_rejections: int, purpose: int) -> int:
        counter = position << 32 | num_rejections << 2 | purpose
        return mix(mix((counter * GOLDEN_GAMMA + self.key) % WORD) ^ self.key)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """From logits to the distribution that a token is drawn from. Top-k 0 and top-p 1 keep all tokens."""

    acceptance: str = REJECTION
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def distribution(self, logits_V: Tensor, position: int, stream: RandomStream) -> Tensor:
        """[V]: the same way for target and draft, and once. What is certain is a distribution, too, with all
        its mass on one token, so that greedy decoding and shared noise need no rules of their own below."""
        if self.acceptance == GREEDY:
            return one_hot(logits_V)
        scores_1V = logits_V[None].float() / self.temperature
        if 0 < self.top_k < len(logits_V):
            scores_1V = TopKLogitsWarper(self.top_k)(None, scores_1V)
        if self.top_p < 1:
            scores_1V = TopPLogitsWarper(self.top_p)(None, scores_1V)
        probabilities_V = scores_1V.softmax(dim=1)[0]
        if self.acceptance == REJECTION:
            return probabilities_V
        # Target and draft race with the same waiting times (Daliri, Musco, Suresh 2024): each draws from its
        # own distribution, mostly the same token, and the target's draw does not depend on the draft.
        waiting_V = stream.waiting_times(position, len(logits_V)).to(logits_V.device)
        return one_hot(probabilities_V / waiting_V)


def one_hot(scores_V: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(scores_V.argmax(), len(scores_V)).float()


def draw(probabilities_V: Tensor, uniform: float) -> int:
    """The first token at which the cumulative distribution exceeds the number."""
    cumulative_V = probabilities_V.double().cumsum(dim=0)
    return int(torch.searchsorted(cumulative_V, uniform * cumulative_V[-1], right=True))


MEMORY = 0.95  # what older rounds count in each new one


@dataclass
class AdaptiveLength:
    """The K that promises most tokens per time (Leviathan et al. 2023, section 3.5).

    It is chosen before anything is drawn: to draft, look, and drop would bias the tokens that remain.

    Attributes:
        cost_ratio: the time of a draft's forward over that of the target's.
        max_tokens: the largest K.
        accepted, judged: drafted tokens so far, which begin with a guess.
    """

    cost_ratio: float
    max_tokens: int
    accepted: float = 3.0
    judged: float = 4.0

    def choose(self) -> int:
        """0 where plain decoding is faster."""
        rate = self.accepted / self.judged

        def tokens_per_time(num: int) -> float:
            expected = sum(rate**i for i in range(num + 1))  # Equation 1
            return expected / (1 + num * self.cost_ratio)

        return max(range(self.max_tokens + 1), key=tokens_per_time)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Of a round. Tokens after a rejected one were not judged."""
        self.accepted = MEMORY * self.accepted + num_accepted
        self.judged = MEMORY * self.judged + min(num_accepted + 1, num_drafted)


@dataclass(frozen=True)
class Round:
    """Drafted tokens, how many of them were accepted, and the recovered or bonus token after these."""

    candidate_ids: list[int]
    num_accepted: int
    next_id: int

    def token_ids(self, end_ids: set[int]) -> list[int]:
        """What it adds to the sequence: nothing after an end token, even if that was drafted."""
        found = [*self.candidate_ids[: self.num_accepted], self.next_id]
        return found[: next((i + 1 for i, token_id in enumerate(found) if token_id in end_ids), len(found))]


@dataclass(frozen=True)
class Pair:
    """Both models with what they have seen of one sequence, and its random numbers."""

    target: CachedModel
    draft: CachedModel
    vocab_size: int
    sampling: Sampling
    stream: RandomStream

    def run_round(self, token_ids: list[int], num_wanted: int) -> Round:
        """Draft, verify, accept, and the next token. ``token_ids``: of the sequence so far."""
        first, stream = len(token_ids), self.stream

        # 1. Draft, one forward for each token. What it was drawn from is kept.
        candidate_ids: list[int] = []
        draft_KV: list[Tensor] = []
        for position in range(first, first + num_wanted):
            draft_KV += self._distributions(self.draft, token_ids + candidate_ids, num=1)
            candidate_ids.append(draw(draft_KV[-1], stream.uniform(position, DRAFT)))

        # 2. Verify: one forward gives the target's distribution at every candidate, and after the last one.
        target_NV = self._distributions(self.target, token_ids + candidate_ids, num=num_wanted + 1)

        # 3. Accept each candidate with probability min(1, target / draft), up to the first rejection.
        num_accepted = 0
        for candidate_id, target_V, draft_V in zip(candidate_ids, target_NV, draft_KV, strict=False):
            uniform = stream.uniform(first + num_accepted, ACCEPT)
            if not uniform * float(draft_V[candidate_id]) < float(target_V[candidate_id]):
                break
            num_accepted += 1

        # 4. In the place of a rejected candidate comes the recovered token, drawn from what the target has
        #    more of than the draft; after a block without rejection comes the bonus token, from the target.
        next_V = target_NV[num_accepted]
        if num_accepted < num_wanted:
            more_V = (next_V - draft_KV[num_accepted]).clamp(min=0)
            next_V = more_V / more_V.sum() if more_V.sum() > 0 else next_V
        next_id = draw(next_V, stream.uniform(first + num_accepted, NEXT_TOKEN))
        stream.num_rejections += num_accepted < num_wanted
        return Round(candidate_ids, num_accepted, next_id)

    def _distributions(self, model: CachedModel, token_ids: list[int], num: int) -> list[Tensor]:
        """Of the tokens that follow each of the last ``num``."""
        logits_NV = model.logits(token_ids, num)[:, : self.vocab_size]
        positions = range(len(token_ids) - num + 1, len(token_ids) + 1)
        return [
            self.sampling.distribution(*found, self.stream)
            for found in zip(logits_NV, positions, strict=True)
        ]


def generate(
    target: PreTrainedModel, draft: PreTrainedModel, prompt_ids: list[int], end_ids: set[int], *,
    max_new_tokens: int, sampling: Sampling, length: AdaptiveLength, seed: int = 0, row_id: int = 0,
) -> Iterator[Round]:  # fmt: skip
    """The rounds until the sequence has an end token, or as many new tokens as it may have."""
    vocab_size = min(target.config.vocab_size, draft.config.vocab_size)
    stream = RandomStream.of_row(seed, row_id)
    pair = Pair(CachedModel(target), CachedModel(draft), vocab_size, sampling, stream)
    token_ids, most = list(prompt_ids), len(prompt_ids) + max_new_tokens
    num_wanted = 0  # the prompt's own forward yields the first token
    while len(token_ids) < most and token_ids[-1] not in end_ids:
        found = pair.run_round(token_ids, min(num_wanted, most - len(token_ids) - 1))
        token_ids += found.token_ids(end_ids)
        yield found
        length.learn(len(found.candidate_ids), found.num_accepted)
        num_wanted = length.choose()


def main() -> int:
    parser = argparse.ArgumentParser(description="Speculative decoding of one sequence, to be read.")
    parser.add_argument("--target", required=True, help="the large model: a folder, or a name on the Hub")
    parser.add_argument("--draft", required=True, help="the small model, with the same tokenizer")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--acceptance", choices=(REJECTION, GUMBEL), default=REJECTION)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--max_draft_tokens", type=int, default=8)
    parser.add_argument("--cost_ratio", type=float, default=0.05, help="time of a forward, draft over target")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)
        for name in (options.target, options.draft)
    )
    numbers = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    sampling = Sampling(acceptance=options.acceptance if options.temperature else GREEDY, **numbers)
    length = AdaptiveLength(options.cost_ratio, options.max_draft_tokens)
    ends = target.generation_config.eos_token_id
    end_ids = set(ends if isinstance(ends, list) else [ends])
    completion_ids, num_rounds = [], 0
    for found in generate(
        target, draft, tokenizer(options.prompt)["input_ids"], end_ids,
        max_new_tokens=options.max_new_tokens, sampling=sampling, length=length, seed=options.seed,
    ):  # fmt: skip
        num_rounds += 1
        completion_ids += found.token_ids(end_ids)
        drafted = [repr(tokenizer.decode(token_id)) for token_id in found.candidate_ids]
        accepted, rejected = " ".join(drafted[: found.num_accepted]), " ".join(drafted[found.num_accepted :])
        next_token = repr(tokenizer.decode(found.next_id))
        print(f"accepted: {accepted}  next: {next_token}  rejected: {rejected}", file=sys.stderr)
    completion = tokenizer.decode(completion_ids, skip_special_tokens=True)
    num_tokens = len(completion_ids)
    print(json.dumps({"completion": completion, "num_tokens": num_tokens, "num_target_forwards": num_rounds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
