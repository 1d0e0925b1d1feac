"""The page table against a model of a cache: pages are shared by common prefixes only, and none is lost."""

import random

import pytest

from specdist.models.cache.pages import PageTable

PAGE_SIZE = 4


def table(num_pages: int, num_slots: int = 8) -> PageTable:
    return PageTable(num_pages=num_pages, page_size=PAGE_SIZE, num_slots=num_slots)


class Mirror:
    """A copy of the page table, maintained by updates only as the models do, and what each page holds."""

    def __init__(self, pages: PageTable) -> None:
        self.pages = pages
        self.entries: dict[tuple[int, int], int] = {}
        self.contents: dict[int, list[int | None]] = {}

    def sync(self) -> None:
        updates = self.pages.drain_updates()
        for slot, index, page in zip(
            updates.slots.tolist(), updates.indices.tolist(), updates.pages.tolist(), strict=True
        ):
            self.entries[slot, index] = page

    def write(self, slot: int, position: int, token: int) -> None:
        page = self.contents.setdefault(self.entries[slot, position // PAGE_SIZE], [None] * PAGE_SIZE)
        page[position % PAGE_SIZE] = token

    def read(self, slot: int, length: int) -> list[int | None]:
        return [
            self.contents[self.entries[slot, position // PAGE_SIZE]][position % PAGE_SIZE]
            for position in range(length)
        ]


@pytest.mark.parametrize("num_pages", [40, 16], ids=["some pressure", "much pressure"])
def test_random_allocation_never_mixes_rows_or_loses_pages(num_pages: int) -> None:
    """Rows open, grow and close at random, many with common prefixes; each must read what it wrote."""
    generator = random.Random(0)
    pages = table(num_pages=num_pages)
    mirror = Mirror(pages)
    roots = [[generator.randrange(9) for _ in range(20)] for _ in range(3)]
    rows: dict[int, list[int]] = {}
    num_shared = 0
    for _ in range(4000):
        free = [slot for slot in range(8) if slot not in rows]
        if free and generator.random() < 0.5:
            slot = generator.choice(free)
            context = generator.choice(roots)[: generator.randrange(1, 20)] + [
                generator.randrange(9) for _ in range(generator.randrange(6))
            ]
            shared = pages.open(slot, context)
            assert shared % PAGE_SIZE == 0 and shared < len(context)
            if not pages.extend(slot, len(context)):
                pages.close(slot)
                continue
            mirror.sync()
            for position in range(shared, len(context)):
                mirror.write(slot, position, context[position])
            pages.publish(slot, len(context))
            rows[slot] = context
            num_shared += shared
        elif rows:
            slot = generator.choice(list(rows))
            if generator.random() < 0.5:
                pages.close(slot)
                del rows[slot]
            else:
                new = [generator.randrange(9) for _ in range(generator.randrange(1, 4))]
                if pages.extend(slot, len(rows[slot]) + len(new)):
                    mirror.sync()
                    for offset, token in enumerate(new):
                        mirror.write(slot, len(rows[slot]) + offset, token)
                    rows[slot] = rows[slot] + new
        for slot, tokens in rows.items():
            assert mirror.read(slot, len(tokens)) == tokens
    assert num_shared > 500
    for slot in rows:
        pages.close(slot)
    assert pages.num_available == num_pages


def test_extend_fails_and_changes_nothing_when_pages_run_out() -> None:
    pages = table(num_pages=3)
    pages.open(0, [1] * 5)
    assert pages.extend(0, 8)
    pages.drain_updates()
    assert not pages.extend(0, 13)
    assert pages.num_available == 1 and len(pages.drain_updates().pages) == 0
    assert pages.extend(0, 12) and pages.num_available == 0


def test_a_page_is_identified_by_all_tokens_up_to_its_end() -> None:
    pages = table(num_pages=16)
    pages.open(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pages.extend(0, 9)
    pages.publish(0, 9)
    assert pages.open(1, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    # The second page has the tokens of the first row's second page, after another first page.
    assert pages.extend(1, 9)
    pages.publish(1, 9)
    pages.open(2, [9, 9, 9, 9, 1, 1, 1, 1, 1])
    assert pages.extend(2, 9)
    pages.publish(2, 9)
    assert pages.open(3, [9, 9, 9, 9, 5, 6, 7, 8, 9]) == 4
    assert pages.open(4, [5, 6, 7, 8, 9]) == 0


def test_unpublished_pages_are_not_shared() -> None:
    pages = table(num_pages=8)
    pages.open(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pages.extend(0, 9)
    pages.publish(0, 6)
    assert pages.open(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_a_finished_prompt_is_evicted_from_its_end_when_memory_is_needed() -> None:
    pages = table(num_pages=4)
    context = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    pages.open(0, context)
    assert pages.extend(0, 9)
    pages.publish(0, 9)
    pages.close(0)
    assert pages.num_available == 4
    # Two pages are free, two hold the prompt: another row of three pages takes the prompt's last one.
    pages.open(1, [9] * 12)
    assert pages.extend(1, 12)
    pages.close(1)
    assert pages.open(2, context) == 4
