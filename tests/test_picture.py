"""The picture shows what the plans say, pair for pair, and says it in colours that are there."""

import sys

import numpy as np
import pytest
import torch

from ringattn import (
    Causal,
    Chunked,
    Documents,
    Full,
    Network,
    PrefixLM,
    Rows,
    Sizes,
    Spans,
    Timeline,
    Window,
    build_plan,
    layouts,
)
from ringattn.picture import draw_schedule, draw_timeline, raster
from ringattn.testing import simulate

SEQLEN = 61  # no world size here divides it
MASKS = {
    "causal": (Causal(), lambda q, k: k <= q),
    "full": (Full(), lambda q, k: True),
    "window": (Window(9, 2), lambda q, k: q - 9 <= k <= q + 2),
    "documents": (Documents((0, 7, 40, SEQLEN)), lambda q, k: k <= q and (q < 7) == (k < 7) and (q < 40) == (k < 40)),
    "chunked": (Chunked(16), lambda q, k: k <= q and q // 16 == k // 16),
    "prefix": (PrefixLM(20), lambda q, k: k <= q or k < 20),
    "spans": (Spans(((3, 9), (30, 50))), lambda q, k: k <= q or (3 <= q < 9 and k < 9) or (30 <= q < 50 and k < 50)),
    "union": (Window(3) | Documents((0, 4, SEQLEN)) & Window(None, 0), None),
}


def plans_of(mask, layout, world_size, seqlen=SEQLEN):
    return [build_plan(mask, layout, seqlen, world_size, rank) for rank in range(world_size)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_matrix_is_the_mask_in_rank_order(name, layout, world_size):
    mask, sees = MASKS[name]
    plans = plans_of(mask, layout, world_size)
    image = raster(plans)
    assert (image >= 0).sum() == sum(plan.area for plan in plans)
    order = torch.cat([plan.positions for plan in plans]).tolist()
    if sees is not None:
        np.testing.assert_array_equal(image >= 0, [[sees(q, k) for k in order] for q in order])
    owner = np.concatenate([[plan.rank] * len(plan.positions) for plan in plans])
    offsets = (owner[:, None] - owner[None]) % world_size
    np.testing.assert_array_equal(image[image >= 0], offsets[image >= 0])


def test_a_long_sequence_is_sampled():
    image = raster(plans_of(Causal(), "zigzag", 4, seqlen=100_000), pixels=256)
    assert image.shape == (256, 256)
    assert (image >= 0).mean() == pytest.approx(0.5, abs=1 / 256)  # the diagonal is one pixel wide


@pytest.mark.parametrize(
    ("mask", "layout", "seqlen", "world_size"),
    [
        (Causal(), "zigzag", 4096, 4),
        (Window(5), "contiguous", 64, 9),
        (Full(), "striped", 3, 5),
        (Causal(), "zigzag", 1, 1),
    ],
)
def test_a_png_is_written(tmp_path, mask, layout, seqlen, world_size):
    pyplot = pytest.importorskip("matplotlib.image", reason="needs matplotlib")
    draw_schedule(mask, layout, seqlen, world_size, tmp_path / "schedule.png")
    pixels = pyplot.imread(tmp_path / "schedule.png")
    assert pixels.shape[1] > 2000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20


def test_a_mask_that_differs_between_batch_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mask is for a batch of 2; it must be the same for every batch row"):
        draw_schedule(Rows(Causal(), Full()), "zigzag", 64, 2, tmp_path / "schedule.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install ringattn\[bench\]"):
        draw_schedule(Causal(), "zigzag", 64, 2, tmp_path / "schedule.png")


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_a_timeline_is_drawn_in_the_colours_of_its_hops(tmp_path, world_size):
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")
    network = Network(flops_per_s=1e12, bandwidth_bytes_per_s=1e9)
    timeline = simulate(Causal(), "zigzag", 4096, world_size, network=network, sizes=Sizes(8, 2, 64))
    draw_timeline(timeline, tmp_path / "timeline.png", "Title")
    pixels = (image.imread(tmp_path / "timeline.png")[..., :3] * 255).round().astype(int)
    colours = set(np.unique(pixels @ [1 << 16, 1 << 8, 1]))
    assert 0x1E3A5F in colours  # a rank's own keys
    assert (0xE9B44C in colours) == (world_size > 1)
    assert (0xD1495B in colours) == (world_size == 16)  # the last hop of more than three


def test_an_empty_timeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"draw_timeline: the timeline is empty; make an attention call where it rec"):
        draw_timeline(Timeline(), tmp_path / "timeline.png")
