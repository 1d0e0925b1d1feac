"""The counter-based numbers are uniform, and unrelated across everything that they are keyed by."""

import torch

from specdist.sampling.keys import stream_key
from specdist.sampling.random import Purpose, uniforms
from tests.statistics import chi_square_p_value

NUM = 40_000


def numbers(keys: torch.Tensor | int, positions: torch.Tensor | int, attempts: torch.Tensor | int,
            purpose: Purpose = Purpose.DRAFT) -> torch.Tensor:  # fmt: skip
    columns = torch.broadcast_tensors(*(torch.as_tensor(item) for item in (keys, positions, attempts)))
    return uniforms(*columns, purpose)


def sweeps() -> dict[str, torch.Tensor]:
    """Neighbouring values of one key at a time, and of several."""
    many = torch.arange(NUM)
    key = stream_key(0, 0, 0)
    return {
        "position": numbers(key, many, 0),
        "attempt": numbers(key, 7, many),
        "row": numbers(torch.tensor([stream_key(0, row, 0) for row in range(NUM)]), 3, 0),
        "sample": numbers(torch.tensor([stream_key(0, 5, sample) for sample in range(NUM)]), 3, 0),
        "seed": numbers(torch.tensor([stream_key(seed, 5, 0) for seed in range(NUM)]), 3, 0),
        "accept": numbers(key, many, 0, Purpose.ACCEPT),
        "decide": numbers(key, many, 0, Purpose.NEXT_TOKEN),
    }


def test_uniform_along_every_key() -> None:
    for name, values in sweeps().items():
        assert float(values.min()) >= 0 and float(values.max()) < 1, name
        counts = torch.histc(values, bins=64, min=0, max=1)
        # Seven fixed sweeps: a sound generator stays far from 1e-4 in all of them.
        assert chi_square_p_value(counts, torch.full((64,), 1 / 64)) > 1e-4, name


def test_neighbours_and_purposes_are_unrelated() -> None:
    found = sweeps()
    pairs = {name: (values[:-1], values[1:]) for name, values in found.items()}
    pairs["draft-accept"] = (found["position"], found["accept"])
    pairs["draft-decide"] = (found["position"], found["decide"])
    pairs["accept-decide"] = (found["accept"], found["decide"])
    for name, (first, second) in pairs.items():
        cells = (first * 8).long() * 8 + (second * 8).long()
        counts = torch.bincount(cells, minlength=64)
        assert chi_square_p_value(counts, torch.full((64,), 1 / 64)) > 1e-4, name


def test_a_number_depends_on_its_key_alone() -> None:
    keys = torch.tensor([stream_key(1, row, 0) for row in range(10)])
    together = uniforms(keys, torch.arange(10), torch.arange(10), Purpose.ACCEPT)
    alone = [
        uniforms(keys[i : i + 1], torch.tensor([i]), torch.tensor([i]), Purpose.ACCEPT) for i in range(10)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_the_numbers_of_a_seed_never_change() -> None:
    """A restart by a later version must continue the same run: frozen values, computed once by hand in
    Python integers with the constants of SplitMix64."""
    values = numbers(torch.tensor([stream_key(42, 7, 1)]), torch.tensor([0, 1, 100]), 2, Purpose.NEXT_TOKEN)
    assert values.tolist() == FROZEN


def by_hand(key: int, position: int, attempt: int, purpose: int) -> float:
    word = 2**64

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % word
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % word
        return value ^ (value >> 31)

    counter = (position << 32) | (attempt << 2) | purpose
    key %= word
    return (mix(mix((counter * 0x9E3779B97F4A7C15 + key) % word) ^ key) >> 12) * 2.0**-52


FROZEN = [by_hand(stream_key(42, 7, 1), position, 2, 2) for position in (0, 1, 100)]
