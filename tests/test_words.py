"""Tensors as 32-bit words: any item size, stride and address, and back."""

import numpy as np
import pytest
import torch

from railwave.exchange.words import as_words, from_words


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [1, 2, 7, 8])
def test_words_and_back(dtype, hidden):
    x = torch.arange(3 * hidden).reshape(3, hidden).to(dtype)
    words = as_words(x)
    assert words.shape == (3, -(-hidden * dtype.itemsize // 4))
    assert torch.equal(from_words(words.contiguous(), hidden, dtype), x)


@pytest.mark.parametrize("shape", [(0, 6), (3, 1), (1, 1), (0, 1)])
def test_odd_strides_that_torch_calls_contiguous(shape):
    x = torch.arange(36).reshape(6, 6).bfloat16().t()[: shape[0], : shape[1]]
    for strided in (x, torch.stack([x, x], dim=2).flatten(1)[:, ::2]):
        words = as_words(strided).contiguous()
        assert torch.equal(from_words(words, shape[1], torch.bfloat16), x)


def test_no_copy_where_the_memory_is_words_already():
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    assert as_words(x[:, :4]).data_ptr() == x.data_ptr()
    assert as_words(x[:1].expand(5, 8)).stride(0) == 0


def test_an_aligned_address_at_an_odd_storage_offset():
    halves = torch.from_numpy(np.zeros(1000, np.uint8)[2:202].view(np.float16))
    x = halves[1:33].view(4, 8)
    x += torch.arange(8, dtype=torch.float16)
    assert torch.equal(from_words(as_words(x).contiguous(), 8, torch.float16), x)


def test_padding_is_zero():
    assert as_words(torch.tensor([[1, 2, 3]], dtype=torch.int16)).tolist() == [[131073, 3]]
