"""Messages are unpacked as they were packed, by the declared types of their fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pytest

from specdist.engine.messages.packing import BoolArray, FloatArray, Packed, not_sent, pack, unpack


@dataclass(frozen=True)
class Inner:
    count: int
    ids_R: np.ndarray


@dataclass(frozen=True)
class Message:
    ids_R: np.ndarray
    keys_R: np.ndarray
    chances_R: FloatArray
    flags_R: BoolArray
    table_2R: Annotated[np.ndarray, Packed(np.float64, num_rows=2)]
    inner: Inner
    extra: Inner | None = None
    local: list[int] = not_sent(None)
    name: str = field(default="", metadata={"not_sent": True})


def message(extra: Inner | None) -> Message:
    return Message(
        ids_R=np.array([-1, 2**31 - 1]),
        keys_R=np.array([-(2**63), 2**63 - 1]),
        chances_R=np.array([0.25, 0.1]),
        flags_R=np.array([True, False]),
        table_2R=np.arange(6.0).reshape(2, 3),
        inner=Inner(2**40, np.zeros(0, np.int64)),
        extra=extra,
        local=[1],
        name="here",
    )


@pytest.mark.parametrize("extra", [None, Inner(7, np.array([1, 2, 3]))], ids=["without", "with"])
def test_a_message_survives_packing(extra: Inner | None) -> None:
    sent = message(extra)
    arrays = pack(sent)
    assert all(array.dtype == np.int64 and array.ndim == 1 for array in arrays)
    found = unpack(Message, arrays)
    for name in ("ids_R", "keys_R", "chances_R", "flags_R", "table_2R"):
        mine, theirs = getattr(sent, name), getattr(found, name)
        assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype, name
    assert found.inner.count == 2**40 and len(found.inner.ids_R) == 0
    assert (found.extra is None) == (extra is None)
    if extra is not None and found.extra is not None:
        assert found.extra.count == 7 and found.extra.ids_R.tolist() == [1, 2, 3]
    # A field that is not sent has its default at the receiver.
    assert found.local is None and found.name == ""


@dataclass(frozen=True)
class News:
    slots: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Outer:
    """Of its dataclasses some are always there, and some have nothing in most rounds."""

    total: int
    news: News
    inner: Inner
    batch: Holder


@dataclass(frozen=True)
class Holder:
    ids_T: np.ndarray
    news: News
    extra: Inner | None
    is_hit_R: BoolArray


@pytest.mark.parametrize("num_news", [0, 2])
@pytest.mark.parametrize("num_held", [0, 3])
@pytest.mark.parametrize("has_extra", [False, True])
def test_what_is_empty_or_missing_is_no_array(num_news: int, num_held: int, has_extra: bool) -> None:
    ids = np.arange(9)
    news = News(ids[:num_news], ids[:num_news].astype(np.int32) + 5)
    held = News(ids[:num_held], ids[:num_held] + 7)
    extra = Inner(11, ids[:4]) if has_extra else None
    arrays = pack(Outer(3, news, Inner(4, ids[:1]), Holder(ids, held, extra, ids > 4)))
    # The numbers, and three arrays that are always there.
    assert len(arrays) == 4 + 2 * (num_news > 0) + 2 * (num_held > 0) + 2 * has_extra
    found = unpack(Outer, [array.astype(np.int64) for array in arrays])
    assert (found.total, found.inner.count, found.inner.ids_R.tolist()) == (3, 4, [0])
    assert found.news.slots.tolist() == ids[:num_news].tolist()
    assert found.news.ids.tolist() == (ids[:num_news] + 5).tolist()
    assert found.batch.news.ids.tolist() == (ids[:num_held] + 7).tolist()
    assert found.batch.ids_T.tolist() == ids.tolist()
    assert found.batch.is_hit_R.tolist() == (ids > 4).tolist() and found.batch.is_hit_R.dtype == bool
    assert (found.batch.extra is None) == (not has_extra)
    if found.batch.extra is not None:
        assert found.batch.extra.count == 11 and found.batch.extra.ids_R.tolist() == [0, 1, 2, 3]


def test_parts_of_another_message_are_detected() -> None:
    with pytest.raises(ValueError, match="more parts than Inner"):
        unpack(Inner, [*pack(Inner(1, np.array([2]))), np.array([3])])
