from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from specdist.utils.json_values import from_fields, parse_json, parse_object


@dataclass(frozen=True)
class Inner:
    sizes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    name: str | None = None
    pair: tuple[int, ...] | None = None
    is_late: bool = False
    inner: Inner = Inner([1])
    counts: dict[str, int] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", "{}".encode("utf-16-le")[:3], b"[" * 200_000, b'{"a":' * 200_000]
)
def test_invalid_json_of_every_kind_raises_one_error(content):
    with pytest.raises(ValueError):
        parse_json(content)


def test_an_object_is_asked_for():
    assert parse_object(b'{"a": [1]}') == {"a": [1]}
    for content in (b"[]", b"3", b"null", b'"text"'):
        with pytest.raises(ValueError, match="not an object"):
            parse_object(content)


def test_fields_come_back_with_their_types():
    values = {
        "count": 3, "share": 1, "kind": "b", "name": None, "pair": [2, 3], "is_late": True,
        "inner": {"sizes": [1, 2]}, "counts": {"8": 1},
        "free": {"x": [None]},
    }  # fmt: skip
    expected = Outer(
        count=3,
        share=1,
        kind="b",
        pair=(2, 3),
        is_late=True,
        inner=Inner([1, 2]),
        counts={"8": 1},
        free={"x": [None]},
    )
    assert from_fields(Outer, values) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": "3"}, "count is '3', but it should be a valid integer"),
        ({"count": True}, "count is True"),
        ({"count": 3.0}, "count is 3.0"),
        ({"count": None}, "count is None"),
        ({"share": "much"}, "share is 'much'"),
        ({"kind": "c"}, "kind is 'c', but it should be 'a' or 'b'"),
        ({"kind": ["a"]}, "kind is a list, but it should be 'a' or 'b'"),
        ({"name": 3}, "name is 3"),
        ({"inner": {"sizes": [1, "2"]}}, r"inner\.sizes\.1 is '2'"),
        ({"inner": {}}, r"inner\.sizes is missing"),
        ({"inner": 3}, "inner is 3, but it should be an object"),
        ({"counts": {"x": "1"}}, r"counts\.x is '1'"),
        ({"free": []}, "free is a list"),
        ({"free": {"x": "\ud800"}}, "Outer holds text that is not Unicode"),
        ({"share": True}, "share is True"),
        ({"is_late": 1}, "is_late is 1"),
        ({"pair": [1.0]}, r"pair\.0 is 1\.0"),
        ({"pair": 1}, "pair is 1, but it should be a valid list"),
        ({"more": 1}, "more is not a field"),
        ({"m" * 10**6: 1}, "mmm\\.\\.\\. is not a field"),
        ({"inner": {"sizes": [], "more": 1}}, r"inner\.more is not a field"),
        ({"name": "x" * 1000}, None),
    ],
)
def test_a_field_that_does_not_fit_is_named(changes, message):
    if message is None:
        assert from_fields(Outer, {"count": 1, **changes}).name == "x" * 1000
        return
    with pytest.raises(ValueError, match=message):
        from_fields(Outer, {"count": 1, **changes})


@pytest.mark.parametrize("values", [3, None, [], "text", [{"count": 1}]])
def test_only_an_object_has_fields(values):
    with pytest.raises(ValueError, match=r"Outer is .*, but it should be an object"):
        from_fields(Outer, values)


def test_fields_of_other_versions_may_be_left_out():
    values = {"count": 1, "more": 2, "inner": {"sizes": [3], "more": 4}}
    assert from_fields(Outer, values, drops_unknown=True) == Outer(count=1, inner=Inner([3]))
    with pytest.raises(ValueError, match=r"inner\.sizes is missing"):
        from_fields(Outer, {"count": 1, "inner": {"more": 4}}, drops_unknown=True)


def test_a_message_does_not_hold_a_file():
    with pytest.raises(ValueError) as raised:
        from_fields(Outer, {"count": "x" * 10**6})
    assert len(str(raised.value)) < 200
