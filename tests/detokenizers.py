"""Tokenizers of several kinds, with random ids and the plain definition of what tokens add to a text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

WORDS = ["a", "b", "the", "END", "sky", "is", ",", ".", "n't", "\n", "é", "你", "好", "🙂"]
SPECIAL = ["<s>", "</s>", "<|mark|>"]


def _finished(
    model: models.Model, decoder: decoders.Decoder | None, *, is_cleaned_up: bool = False
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=is_cleaned_up,
    )


def _numbered(texts: list[str]) -> dict[str, int]:
    return {text: index for index, text in enumerate(dict.fromkeys(texts))}


def llama() -> PreTrainedTokenizerFast:
    """As of Llama 2: marks for spaces, one of which is left out where a text begins, and bytes."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁", *WORDS[:10]]
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary = _numbered([*texts, *("▁" + word for word in WORDS[:8])])
    tokenizer = _finished(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True), decoder)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def byte_level() -> PreTrainedTokenizerFast:
    """As of GPT-2; some tokens are parts of characters, or end inside one."""
    letter = dict(zip(sorted(_bytes_of_letters().values()), sorted(_bytes_of_letters()), strict=True))
    letters = {value: key for key, value in _bytes_of_letters().items()}
    pieces = [word.encode() for word in (*WORDS, *(" " + word for word in WORDS))]
    pieces += [
        "好".encode()[:2],
        " 好".encode()[:3],
        "好".encode()[1:],
        b"\x99\x82",
        "🙂".encode()[:3],
        "🙂".encode()[2:] + b" a",
    ]
    texts = [*letter.values(), *("".join(letters[byte] for byte in piece) for piece in pieces)]
    tokenizer = _finished(models.BPE(_numbered(texts), []), decoders.ByteLevel())
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _bytes_of_letters() -> dict[str, int]:
    """GPT-2's letters for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def metaspace() -> PreTrainedTokenizerFast:
    """As of T5."""
    texts = ["<unk>", "▁", *WORDS, *("▁" + word for word in WORDS)]
    return _finished(models.Unigram([(text, -1.0) for text in texts], 0), decoders.Metaspace())


def word_piece() -> PreTrainedTokenizerFast:
    """As of BERT, which takes spaces away before punctuation, and asks for more of that."""
    texts = ["[UNK]", *WORDS, *("##" + word for word in WORDS)]
    model = models.WordPiece(_numbered(texts), unk_token="[UNK]")
    return _finished(model, decoders.WordPiece(cleanup=True), is_cleaned_up=True)


def word_ends() -> PreTrainedTokenizerFast:
    """As of GPT and CTRL: a mark for the space after a word."""
    texts = ["<unk>", *WORDS, *(word + "</w>" for word in WORDS)]
    return _finished(models.BPE(_numbered(texts), [], unk_token="<unk>"), decoders.BPEDecoder())


def words() -> PreTrainedTokenizerFast:
    """Words with a space between each two, for want of a decoder."""
    return _finished(models.WordLevel(_numbered(["<unk>", *WORDS]), unk_token="<unk>"), None)


KINDS: list[Callable[[], PreTrainedTokenizerFast]] = [
    llama, byte_level, metaspace, word_piece, word_ends, words,
]  # fmt: skip


class Sayings:
    """Random ids of a tokenizer: words, whole characters in several tokens (a share of them), single bytes,
    special tokens."""

    share_of_characters = 0.3

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        # In an order that is the same in every process.
        vocabulary = dict(sorted(tokenizer.get_vocab().items()))
        bytes_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
        if "<0x00>" not in vocabulary:
            bytes_of = _bytes_of_letters()
        ids = {byte: vocabulary[text] for text, byte in bytes_of.items() if text in vocabulary}
        self._bytes = [[ids[byte]] for byte in (*range(60, 70), *range(190, 256))] if len(ids) == 256 else []
        self._characters = (
            [[ids[byte] for byte in text.encode()] for text in WORDS[-4:]] if self._bytes else []
        )
        names = {*bytes_of} if self._bytes else set()
        self._special = [[token_id] for text, token_id in vocabulary.items() if text in (*SPECIAL, "<tool>")]
        others = {token_id for text, token_id in vocabulary.items() if text not in names}
        others -= {token_id for (token_id,) in self._special}
        self._words = [
            [token_id] for token_id in sorted(others) if "\ufffd" not in tokenizer.decode([token_id])
        ]
        self._bytes += [[token_id] for token_id in sorted(others) if [token_id] not in self._words]

    def tokens(self, num_sayings: int, *, has_bytes: bool = True) -> list[int]:
        """So many words, characters, bytes or special tokens."""
        found: list[int] = []
        for kind in self.random.random(num_sayings):
            kinds, times = self._words, 1
            if kind < self.share_of_characters and self._characters:
                kinds = self._characters
            elif kind > 0.97 and self._bytes and has_bytes:
                kinds, times = self._bytes, int(self.random.integers(1, 9))
            elif kind > 0.9:
                kinds = self._special
            for _ in range(times):
                found += kinds[self.random.integers(len(kinds))]
        return found

    def words(self, num_words: int) -> list[int]:
        return [self._words[self.random.integers(len(self._words))][0] for _ in range(num_words)]


def plain(
    tokenizer: PreTrainedTokenizerBase,
    before_ids: list[int],
    token_ids: list[int],
    *,
    skip_special: bool = True,
) -> str:
    """The text of all less what it has in common with that of ``before_ids``: everything is decoded."""
    first, second = (
        tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        for ids in (before_ids, before_ids + token_ids)
    )
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return str(second[same:])
