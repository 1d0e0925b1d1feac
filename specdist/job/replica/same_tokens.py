"""The check that target and draft have the same tokens."""

from __future__ import annotations

from specdist.job.texts.tokens import load_tokenizer
from specdist.models.files.checkpoint import Checkpoint
from specdist.utils.errors import UserError


def check_same_tokens(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises :class:`UserError` unless the same ids are the same tokens in both.

    Either may have more at the end, as a chat model has that is drafted for by its base model. Which tokens
    begin and end a text is the target's tokenizer's to say.
    """
    target_tokens, draft_tokens = (
        {token_id: token for token, token_id in load_tokenizer(model).get_vocab().items()}
        for model in (target, draft)
    )
    common = range(min(max(target_tokens), max(draft_tokens)) + 1)
    first = next((each for each in common if target_tokens.get(each) != draft_tokens.get(each)), None)
    if first is not None:
        raise UserError(
            f"--target {target.name} and --draft {draft.name} have different tokenizers: token {first} is "
            f"{target_tokens.get(first)!r} for the target and {draft_tokens.get(first)!r} for the draft; "
            "choose a draft of the target's family"
        )


def common_vocab_size(target: Checkpoint, draft: Checkpoint | None) -> int:
    """Number of ids with logits in both models, whose logits may be padded to different widths.

    A token that the tokenizer has and the target has not cannot be generated, and makes a prompt unusable.
    Raises :class:`UserError` if the target can generate one that the draft has no logits for.
    """
    if draft is None or draft.vocab_width >= target.vocab_width:
        return target.vocab_width
    last = max(
        token_id for token_id in load_tokenizer(target).get_vocab().values() if token_id < target.vocab_width
    )
    if last >= draft.vocab_width:
        raise UserError(
            f"--target {target.name} has token {last}, but --draft {draft.name} has logits of only "
            f"{draft.vocab_width} ids: choose a draft of the target's family that has as many"
        )
    return draft.vocab_width
