"""A byte-level tokenizer with some merges that JSON has: several tokens may begin at most places."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdist.sampling.constraints.matcher import Grammars, grammars_of

PAIRS = 't r|tr u|tru e|a m|am e|n ame|" :|e "|i n|1 2|o n|e r|" ,|{ "|" }|[ "'
MERGES = [(first, second) for first, second in (pair.split() for pair in PAIRS.split("|"))]
BYTES_END = 0


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [
        "<end>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(first + second for first, second in MERGES),
    ]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@cache
def byte_grammars() -> Grammars:
    return grammars_of(byte_tokenizer(), vocab_size=len(byte_tokenizer()), stop_token_ids=[BYTES_END])
