"""The index of a sequence's own n-grams, compiled and written out: against a search, and each other."""

import numpy as np
import pytest

from specdist.policies.ngrams.ngram_index import MAX_MATCH, MAX_PLACES, NgramIndex, Proposals
from specdist.policies.ngrams.text_store import TextSettings
from tests.policies.ngrams.plain_ngrams import PlainIndex

Kind = type[NgramIndex] | type[PlainIndex]
Index = NgramIndex | PlainIndex

both_kinds = pytest.mark.parametrize("kind", [NgramIndex, PlainIndex], ids=["compiled", "plain"])


def index_of(prompt: list[int], output: list[int], *, kind: Kind, slot: int = 1) -> Index:
    index = kind(num_slots=3, max_length=600)
    index.begin(np.array([slot]), np.array([len(prompt)]))
    append(index, slot, prompt)
    for token_id in output:
        append(index, slot, [token_id])
    return index


def append(index: Index, slot: int, token_ids: list[int]) -> None:
    index.append(np.array([slot]), np.array([len(token_ids)]), np.array(token_ids, np.int64))


def proposed(index: Index, *, limit: int = 6, least_chance: float = 0.0, slot: int = 1) -> list[int]:
    found = index.propose(np.array([slot]), np.array([limit]), least_chance=least_chance)
    assert found.lengths_R.tolist() == [len(found.token_ids_C)] == [len(found.chances_C)]
    return found.token_ids_C.tolist()


def continuation(token_ids: list[int], limit: int) -> list[int]:
    """By definition: after the longest match of the latest places, the latest of equal ones."""
    last = len(token_ids) - 1
    places = [place for place in range(1, last) if token_ids[place - 1 : place + 1] == token_ids[-2:]]
    lengths = {
        place: next(
            (n for n in range(min(MAX_MATCH, place + 1)) if token_ids[place - n] != token_ids[last - n]),
            min(MAX_MATCH, place + 1),
        )
        for place in places[-MAX_PLACES:]
    }
    if not lengths:
        return []
    best = max(lengths, key=lambda place: (lengths[place], place))
    text = list(token_ids)
    for step in range(limit):
        text.append(text[best + 1 + step])
    return text[len(token_ids) :]


@both_kinds
def test_the_longest_latest_match_is_continued(kind: Kind) -> None:
    """Short periods, many places with the same two tokens, and long repetitions."""
    rng = np.random.default_rng(3)
    for vocab_size, length in ((2, 300), (3, 120), (8, 200), (50, 400)):
        text = rng.integers(vocab_size, size=length).tolist()
        text = text + text[length // 3 : length // 2] + [1, 2] * 3
        index = kind(num_slots=3, max_length=600)
        index.begin(np.array([1]), np.array([5]))
        begin = 0
        while begin < len(text):
            end = begin + int(rng.integers(1, 9))
            append(index, 1, text[begin:end])
            begin = min(end, len(text))
            assert proposed(index, limit=9) == continuation(text[:begin], 9)


def test_both_kinds_give_the_same_bits() -> None:
    """Tokens, chances and lengths of several rows, with slots that begin again."""
    rng = np.random.default_rng(5)
    kinds = [kind(num_slots=4, max_length=600) for kind in (NgramIndex, PlainIndex)]
    for round_ in range(60):
        if round_ % 20 == 0:
            for index in kinds:
                index.begin(np.arange(4), np.array([7, 0, 30, 1]))
        slots = rng.permutation(4)[:3]
        counts = rng.integers(0, 12, size=3)
        token_ids = rng.integers(4, size=counts.sum())
        limits = rng.integers(0, 40, size=3)
        found: list[Proposals] = []
        for index in kinds:
            index.append(slots, counts, token_ids)
            found.append(index.propose(slots, limits, least_chance=0.05))
        for name in ("token_ids_C", "chances_C", "lengths_R"):
            np.testing.assert_array_equal(*(getattr(each, name) for each in found))
        assert (found[0].lengths_R <= limits).all()


@both_kinds
def test_nothing_is_known_of_what_comes_later_or_stood_in_the_slot_before(kind: Kind) -> None:
    index = index_of([1, 2, 3, 4, 1], [2], kind=kind)
    assert proposed(index, limit=3) == [3, 4, 1]
    index.begin(np.array([1]), np.array([2]))
    assert proposed(index) == []
    append(index, 1, [1, 2])
    assert proposed(index) == []  # the only place with 1, 2 is their own
    append(index, 1, [9, 1, 2])
    assert proposed(index, limit=4) == [9, 1, 2, 9]
    assert proposed(index, slot=0) == []


@both_kinds
def test_chances_are_learned_from_the_output_alone(kind: Kind) -> None:
    """A period in the prompt promises nothing; one in the output, more and more. What was wrong, less."""
    period = [5, 6, 7, 8]
    fresh = index_of(period * 6, [], kind=kind)
    once = index_of(period * 2, [], kind=kind)
    right = index_of(period * 6, period * 5, kind=kind)
    wrong = index_of(period * 6, [9, 9, *period * 2, 9, 9, *period * 2], kind=kind)

    def chances(index: Index, limit: int = 40) -> np.ndarray:
        return index.propose(np.array([1]), np.array([limit])).chances_C

    assert chances(once, 1) == 0.6  # four tokens before: the prior of their class
    assert chances(fresh, 1) == 0.95
    assert chances(right, 1) == (0.95 * 4 + 20) / (4 + 20)
    assert (np.diff(chances(right)) < 0).all()
    assert chances(wrong, 1) < 0.9
    rates = chances(fresh)[1:] / chances(fresh)[:-1]
    assert np.allclose(rates, 0.95)
    assert len(proposed(right, limit=40, least_chance=0.5)) == 40
    assert len(proposed(fresh, limit=40, least_chance=0.5)) == 13  # 0.95 ** 13 > 0.5 > 0.95 ** 14


def test_parts_of_proposals() -> None:
    """Nothing after a stop token."""
    chances = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    found = Proposals(np.array([1, 2, 3, 4, 5, 6, 7]), chances, np.array([3, 0, 2, 2]))
    until = found.until(np.isin(found.token_ids_C, [2, 5]))
    assert until.token_ids_C.tolist() == [1, 2, 4, 5, 6, 7] and until.lengths_R.tolist() == [2, 0, 2, 2]
    assert found.first(np.array([1, 4, 0, 5])).token_ids_C.tolist() == [1, 6, 7]


def test_sequences_may_learn_together() -> None:
    """A new sequence's chances begin with what others have found out, and only if they are asked to."""
    period = [5, 6, 7, 8]
    for learns in (True, False):
        index = NgramIndex(num_slots=2, max_length=2000, learns_together=learns)
        index.begin(np.arange(2), np.array([0, 24]))
        append(index, 1, period * 6)
        before = index.propose(np.array([1]), np.array([1])).chances_C
        for times in range(20):  # long matches that end
            append(index, 0, [*range(100, 120), 200 + times])
            index.learn(np.array([0]))
        after = index.propose(np.array([1]), np.array([1])).chances_C
        assert before == 0.95 and (after < 0.93 if learns else after == 0.95)


@pytest.mark.parametrize("num_tokens", [200, 2000])
@pytest.mark.parametrize("adds_sequences", [True, False])
def test_a_store_of_other_texts_gives_the_same_bits_in_both_kinds(
    num_tokens: int, adds_sequences: bool
) -> None:
    """With texts that are added between tokens, and a ring that is overwritten many times, or never."""
    rng = np.random.default_rng(6)
    texts = TextSettings(num_tokens=num_tokens, adds_sequences=adds_sequences)
    kinds = [kind(num_slots=3, max_length=600, texts=texts) for kind in (NgramIndex, PlainIndex)]
    passages = [rng.integers(5, size=40) for _ in range(3)]
    num_from_store = 0
    for round_ in range(80):
        for index in kinds:
            if round_ % 20 == 0:
                index.begin(np.arange(3), np.array([7, 0, 30]), np.arange(3) == round_ // 20)
        if round_ % 3 == 0:
            text = np.r_[rng.integers(5, size=3), passages[rng.integers(3)]][: rng.integers(1, 43)]
            for index in kinds:
                index.add_text(text)
        slots, counts = rng.permutation(3)[:2], rng.integers(0, 9, size=2)
        begin = rng.integers(30)
        token_ids = np.tile(passages[rng.integers(3)][begin : begin + 9], 2)[: counts.sum()]
        limits = rng.integers(0, 40, size=2)
        found: list[Proposals] = []
        for index in kinds:
            index.append(slots, counts, token_ids)
            found.append(index.propose(slots, limits, least_chance=0.02))
        for name in ("token_ids_C", "chances_C", "lengths_R"):
            np.testing.assert_array_equal(*(getattr(each, name) for each in found))
        num_from_store += len(found[0].token_ids_C)
    assert num_from_store > 200


@both_kinds
def test_other_texts_are_proposed_to_their_ends_and_forgotten_in_turn(kind: Kind) -> None:
    index = kind(num_slots=1, max_length=600, texts=TextSettings(num_tokens=100))
    index.begin(np.zeros(1, np.int64), np.array([4]))
    index.add_text(np.arange(10, 20))
    append(index, 0, [12, 13, 14, 15])
    assert proposed(index, limit=9, slot=0) == [16, 17, 18, 19]  # nothing of the next text
    append(index, 0, [16])
    assert proposed(index, limit=2, slot=0) == [17, 18]
    append(index, 0, [19, 1, 2])
    assert proposed(index, slot=0) == []  # three tokens alone are not looked up
    index.add_text(np.array([5, 19, 1, 2, 3, 4]))
    append(index, 0, [3])
    assert proposed(index, slot=0) == [4]
    for begin in range(200, 300, 20):
        index.add_text(np.arange(begin, begin + 20))
    index.begin(np.zeros(1, np.int64), np.array([4]))
    append(index, 0, [12, 13, 14, 15])
    assert proposed(index, slot=0) == []
    index.begin(np.zeros(1, np.int64), np.array([4]))
    append(index, 0, [280, 281, 282, 283])
    assert proposed(index, limit=2, slot=0) == [284, 285]


RUNNING = TextSettings(num_tokens=2000, adds_sequences=True)


@both_kinds
def test_what_another_sequence_has_said_so_far_is_proposed_at_once(kind: Kind) -> None:
    """Over the ends of its blocks, and to its last token; but nothing of the sequence itself."""
    index = kind(num_slots=3, max_length=600, texts=RUNNING)
    index.begin(np.arange(3), np.array([4, 4, 4]))
    said = np.arange(100, 300).tolist()
    append(index, 0, [1, 2, 3, 4])
    for begin in range(0, 200, 7):
        append(index, 0, said[begin : begin + 7])
    assert proposed(index, slot=0) == []
    append(index, 1, [9, 9, 3, 4, 100, 101])
    assert proposed(index, slot=1, limit=120) == said[2:122]
    append(index, 1, said[2:190])
    assert proposed(index, slot=1, limit=20) == said[190:]
    append(index, 0, [300])
    assert proposed(index, slot=1, limit=20) == [*said[190:], 300]
    append(index, 2, [1, 2, 3, 4])  # the same prompt
    assert proposed(index, slot=2, limit=3) == said[:3]


@both_kinds
def test_what_a_preempted_sequence_has_said_is_in_the_store_once(kind: Kind) -> None:
    index = kind(num_slots=2, max_length=600, texts=RUNNING)
    said = np.arange(10, 40).tolist()
    index.begin(np.zeros(1, np.int64), np.array([2]))
    append(index, 0, [1, 2, *said])
    index.begin(np.ones(1, np.int64), np.array([2]), are_resumed=True)
    append(index, 1, [1, 2, *said])
    append(index, 1, [50, 51])
    store = index._state.store
    assert store is not None
    tokens = store.tokens[: int(store.count[0])].tolist()
    assert tokens.count(10) == 1 and tokens.count(50) == 1 and tokens.count(30) == 1
    # What it said before and now is proposed to others.
    index.begin(np.zeros(1, np.int64), np.array([1]))
    append(index, 0, said[:6])
    assert proposed(index, slot=0, limit=100) == said[6:]
    append(index, 0, [*said[-3:], 50])
    assert proposed(index, slot=0) == [51]


@both_kinds
def test_the_source_that_goes_on_for_longer_proposes(kind: Kind) -> None:
    """Where another's text is as likely, but ends soon, a repetition of its own is worth more."""
    index = kind(num_slots=2, max_length=600, texts=RUNNING)
    index.begin(np.arange(2), np.array([4, 40]))
    append(index, 0, [9, 8, 7, 6, 1, 2, 3, 4, 1, 2])
    append(index, 1, [1, 2, 3, 4] * 10)
    assert len(proposed(index, slot=1, limit=30)) == 30
    # Of a text that the sequence does not have the other one alone knows more.
    append(index, 1, [9, 8, 7, 6])
    assert proposed(index, slot=1, limit=30)[:6] == [1, 2, 3, 4, 1, 2]
