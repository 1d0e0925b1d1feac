"""A tokenizer of seven tokens, as many as a Markov pair has: an end token, letters, and two pairs of letters.

So a text can be cut into tokens in several ways, of which one is the tokenizer's own, and a grammar forces
tokens where it leaves no choice of the text.
"""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdist.sampling.constraints.masker import RowMasker, ThinkingMarkers
from specdist.sampling.constraints.matcher import Grammars, grammars_of

TOKENS = ["<end>", "a", "b", "c", "d", "ab", "bc"]
END = 0


@cache
def letters_tokenizer() -> PreTrainedTokenizerFast:
    ids = {token: token_id for token_id, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[("a", "b"), ("b", "c")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@cache
def letters_grammars() -> Grammars:
    return grammars_of(letters_tokenizer(), vocab_size=len(TOKENS), stop_token_ids=[END])


def letters_masker(markers: ThinkingMarkers | None = None) -> RowMasker:
    return RowMasker(letters_grammars(), vocab_size=len(TOKENS), stop_token_ids=[END], markers=markers)


def text_of(token_ids: list[int]) -> str:
    """Without the end token."""
    return "".join(TOKENS[token_id] for token_id in token_ids if token_id != END)
