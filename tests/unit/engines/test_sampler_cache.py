"""The caches by themselves: rows move, grow and are cleared without touching each other."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch

from tinsmith.engines.sampler_cache import MIN_ROWS, PromptCache, RowCache, grouped_attention

CPU = torch.device("cpu")
HEADS, DIM = 2, 4


def prefilled(num_tokens: int, value: float) -> PromptCache:
    cache = PromptCache()
    keys = torch.full((1, HEADS, num_tokens, DIM), value)
    cache.update(keys, keys, 0)
    cache.end_chunk(num_tokens)
    return cache


def append(rows: RowCache, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step that writes `value` to every row; answers keys [N, H, T, D] and the mask [N, T]."""
    positions, mask = rows.begin_step()
    new = torch.full((len(positions), HEADS, 1, DIM), value)
    keys, _ = rows.update(new, new, 0)
    rows.end_step()
    return keys, mask[:, 0, 0]


def seen(rows: RowCache, row: int, value: float = 0.5) -> list[float]:
    keys, mask = append(rows, value)
    return keys[row, 0, :, 0][mask[row]].tolist()


def test_a_row_sees_its_prompt_and_what_was_appended() -> None:
    rows = RowCache(4, CPU)
    rows.place(prefilled(3, 1.0))
    rows.place(prefilled(5, 2.0))
    assert rows.get_seq_length() == 5
    assert seen(rows, 0) == [1.0] * 3 + [0.5]
    assert seen(rows, 1) == [2.0] * 5 + [0.5, 0.5]


def test_dummies_fill_a_small_batch_and_see_one_key() -> None:
    rows = RowCache(1, CPU)
    rows.place(prefilled(3, 1.0))
    keys, mask = append(rows, 0.5)
    assert keys.shape == (MIN_ROWS, HEADS, 16, DIM)
    assert mask.sum(1).tolist() == [4, 1, 1, 1]


def test_the_last_row_moves_into_a_freed_place() -> None:
    rows = RowCache(4, CPU)
    for length, value in ((3, 1.0), (4, 2.0), (6, 3.0)):
        rows.place(prefilled(length, value))
    rows.remove(0)
    assert rows.num_rows == 2
    assert seen(rows, 0) == [3.0] * 6 + [0.5]
    rows.remove(1)
    assert seen(rows, 0) == [3.0] * 6 + [0.5, 0.5]


def test_growing_keeps_what_is_there_and_idleness_gives_it_back() -> None:
    rows = RowCache(4, CPU)
    rows.place(prefilled(3, 1.0))
    rows.place(prefilled(700, 2.0))
    assert seen(rows, 0) == [1.0] * 3 + [0.5]
    rows.remove(0)
    rows.remove(0)
    rows.place(prefilled(2, 4.0))
    keys, _ = append(rows, 0.5)
    assert keys.untyped_storage().nbytes() < 700 * 4 * HEADS * DIM * 4


def test_a_wiped_row_leaves_no_poison_behind() -> None:
    rows = RowCache(4, CPU)
    rows.place(prefilled(3, 1.0))
    rows.place(prefilled(9, math.nan))
    rows.remove(1, wipe=True)
    rows.place(prefilled(2, 1.0))
    keys, mask = append(rows, 1.0)
    query = torch.ones(len(keys), HEADS, 1, DIM)
    out, _ = grouped_attention(torch.nn.Identity(), query, keys, keys, mask[:, None, None, :])
    assert torch.isfinite(out).all()


def test_prompt_chunks_see_everything_before_them() -> None:
    cache = PromptCache()
    assert cache.mask(3, CPU) is None
    cache.update(torch.ones(1, HEADS, 3, DIM), torch.ones(1, HEADS, 3, DIM), 0)
    chunk = cache.end_chunk(3)
    assert cache.get_seq_length() == 3
    assert (chunk.num_tokens, chunk.num_bytes) == (3, 2 * HEADS * 3 * DIM * 4)
    mask = cache.mask(2, CPU)
    assert mask is not None
    assert mask[0, 0].tolist() == [[True] * 4 + [False], [True] * 5]
    keys, values = cache.update(torch.zeros(1, HEADS, 2, DIM), torch.zeros(1, HEADS, 2, DIM), 0)
    assert keys[0, 0, :, 0].tolist() == values[0, 0, :, 0].tolist() == [1, 1, 1, 0, 0]


def test_a_shared_chunk_is_read_and_placed_like_a_computed_one() -> None:
    first = prefilled(3, 1.0)
    second = PromptCache()
    second.append(first.chunks[0])
    new = torch.full((1, HEADS, 2, DIM), 2.0)
    keys, _ = second.update(new, new, 0)
    assert keys[0, 1, :, 0].tolist() == [1, 1, 1, 2, 2]
    assert keys.is_contiguous()
    second.end_chunk(2)
    rows = RowCache(4, CPU)
    rows.place(second)
    assert seen(rows, 0) == [1.0] * 3 + [2.0] * 2 + [0.5]
    assert first.filled == 3, "the prompt that it was computed for has it too"


def test_grouped_attention_equals_repeated_heads() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, HEADS, 7, DIM), torch.randn(2, HEADS, 7, DIM)
    for queries in (1, 7):
        query = torch.randn(2, 3 * HEADS, queries, DIM)
        mask = None if queries > 1 else (torch.arange(7) < 5)[None, None, None, :]
        out, _ = grouped_attention(torch.nn.Identity(), query, keys, values, mask)
        repeated = [each.repeat_interleave(3, dim=1) for each in (keys, values)]
        expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask, is_causal=queries > 1)
        torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_long_row_does_not_make_the_others_cost_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    rows = RowCache(64, CPU)
    rows.place(prefilled(3, 1.0))
    before = resident_bytes()
    long = prefilled(32_000, 2.0)
    rows.place(long)
    all_rows = 64 * 2 * HEADS * 32_000 * DIM * 4
    assert resident_bytes() - before < all_rows / 4
    assert seen(rows, 1)[:1] == [2.0]
