"""Tensors as they lie in files, through a window that is smaller than they are together."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdist.models.files.weight_stream import PAGE_BYTES, Reading, _Window, streamed, tensors_in

SHAPES = [(3, 700), (1,), (), (0, 4), (40, 40), (2000,), (9, 9, 9)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn]


@pytest.fixture
def stored(tmp_path: Path) -> dict[Path, dict[str, torch.Tensor]]:
    """Three files of tensors with numbers of all kinds."""
    torch.manual_seed(0)
    files = {}
    for number in range(3):
        tensors = {
            f"{number}.{index}.{kind}": (20 * torch.randn(shape)).to(DTYPES[(index + kind) % len(DTYPES)])
            for index, shape in enumerate(SHAPES)
            for kind in range(3)
        }
        path = tmp_path / f"{number}.safetensors"
        save_file(tensors, path)
        files[path] = tensors
    return files


def test_every_tensor_comes_as_it_was_stored_in_the_order_of_the_files(stored) -> None:
    files = [tensors_in(path) for path in stored]
    reading = Reading()
    expected = {name: tensor for tensors in stored.values() for name, tensor in tensors.items()}
    order = []
    for name, tensor in streamed(files, reading=reading, window_bytes=3 * PAGE_BYTES):
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        assert torch.equal(tensor.float(), expected[name].float())
        order.append(name)
    assert sorted(order) == sorted(expected)
    # Each file as a whole, whichever is the first.
    assert len([file for file, _ in itertools.groupby(order, key=lambda name: name[0])]) == len(stored)
    assert reading.num_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_nothing_is_overwritten_before_the_slowest_reader_has_used_it(stored) -> None:
    [path, *_] = stored
    tensors = tensors_in(path)
    with (
        _Window.opened(os.memfd_create("weights"), tensors, 2, PAGE_BYTES) as fast,
        _Window.opened(os.open(fast.place, os.O_RDWR), tensors, 2, PAGE_BYTES) as slow,
    ):
        writer = threading.Thread(target=fast.fill, args=(Reading(),))
        writer.start()

        def skim() -> None:
            for _ in tensors:
                fast.next()
                fast.done(0)

        skimming = threading.Thread(target=skim)
        skimming.start()
        for tensor in tensors:
            found = slow.next()
            writer.join(0.005)
            assert torch.equal(found.float(), stored[path][tensor.name].float())
            slow.done(1)
        skimming.join()
        writer.join()


def test_a_file_that_ends_early_is_an_error_and_one_that_is_left_early_none(stored) -> None:
    [path, *_] = stored
    files = [tensors_in(path)]
    before = threading.active_count()
    next(streamed(files, window_bytes=PAGE_BYTES))
    assert threading.active_count() == before
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(OSError, match=r"0\.safetensors cannot be read"):
        list(streamed(files, window_bytes=PAGE_BYTES))


def test_a_header_that_contradicts_itself_is_an_error(stored) -> None:
    [path, *_] = stored
    content = path.read_bytes()
    assert content.count(b'"shape":[3,700]') == 3
    path.write_bytes(content.replace(b'"shape":[3,700]', b'"shape":[3,800]', 1))
    with pytest.raises(ValueError, match="has not the size that its shape says"):
        tensors_in(path)
