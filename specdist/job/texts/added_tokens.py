"""What a tokenizer puts around every text prompt, where that is seldom meant."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from specdist.job.texts.tokens import TRIAL_TEXT

# Prompts that are looked at, since the input may be larger than what a start has time for.
MOST_PROMPTS = 2**16


def added_token_warnings(
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    num_beginning_with: Callable[[str, int], int],
    *,
    split_special_tokens: bool = False,
) -> list[str]:
    """For texts, which are encoded as transformers does it; a chat template writes its own special tokens.

    Args:
        num_beginning_with: how many of so many first prompts begin with a text.
    """
    if not num_prompts:
        return []
    ids, own_ids = (tokenizer(TRIAL_TEXT, add_special_tokens=adds)["input_ids"] for adds in (True, False))
    found = []
    begin_id, end_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin_id is not None and ids[0] == begin_id != own_ids[0]:
        text, num_seen = str(tokenizer.bos_token), min(num_prompts, MOST_PROMPTS)
        if num_double := num_beginning_with(text, num_seen):
            seen = f"the first {num_seen}" if num_seen < num_prompts else num_prompts
            how = "again, split into text" if split_special_tokens else "twice, as in transformers"
            found.append(
                f"{num_double} of {seen} prompts begin with {text}, which the tokenizer puts before every "
                f"text itself, so that the model sees it {how}: leave it out of the texts, or give the chats "
                "themselves with --messages_column"
            )
    if end_id is not None and ids[-1] == end_id != own_ids[-1]:
        found.append(
            f"the tokenizer puts {tokenizer.eos_token} after every text, so that all {num_prompts} prompts "
            "end with it, as in transformers: if completions should go on with the text, set add_eos_token "
            "to false in tokenizer_config.json, or take it out of the post_processor in tokenizer.json"
        )
    return found
