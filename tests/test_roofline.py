"""The critical path bounds the simulated ring from below and is reached; the roofline foretells it."""

import itertools

import pytest
import torch

import ringattn as ra
from ringattn import Network, Sizes, build_plan, critical_path, roofline
from ringattn.testing import simulate

SIZES = Sizes(heads=32, kv_heads=8, head_dim=128)
TWO_LEVELS = {"node_size": 4, "inter_bandwidth_bytes_per_s": 25e9, "inter_latency_s": 10e-6}


def plans_of(mask, layout, seqlen, world_size):
    return [build_plan(mask, layout, seqlen, world_size, rank) for rank in range(world_size)]


def simulated(plans, network, is_backward, sizes=SIZES):
    plan, name = plans[0], "backward" if is_backward else "forward"
    ring = (plan.mask, plan.layout, plan.seqlen, plan.world_size)
    return simulate(*ring, network=network, sizes=sizes, passes=[name]).seconds


def at_ratio(plans, ratio, is_backward, sizes):
    """The network on which the longest messages of a hop take `ratio` times its compute."""
    chunk = len(plans[0].positions)
    nbytes = chunk * (sizes.key_bytes + is_backward * sizes.grad_bytes)
    flops = max(sizes.flops(plan, plan.hops[-1], is_backward) for plan in plans)
    return Network(flops_per_s=flops * ratio / (nbytes / 50e9), bandwidth_bytes_per_s=50e9)


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_causal_zigzag_takes_the_critical_path(world_size, dtype, is_backward):
    sizes = Sizes(heads=32, kv_heads=8, head_dim=128, dtype=dtype)
    plans = plans_of(ra.Causal(), "zigzag", 8192 * world_size, world_size)
    for ratio in (0.1, 0.25, 0.5, 0.75, 0.9, 1.0):
        network = at_ratio(plans, ratio, is_backward, sizes)
        shortest = critical_path(plans, network, sizes, is_backward)
        took = simulated(plans, network, is_backward, sizes)
        assert (1 - 1e-9) * shortest <= took <= 1.03 * shortest, ratio


def test_the_critical_path_by_hand():
    plans = plans_of(ra.Full(), "contiguous", 256, 2)
    flops = SIZES.flops(plans[0], plans[0].hops[1], False)
    keys, grads = 128 * SIZES.key_bytes, 128 * SIZES.grad_bytes

    def path(is_backward, seconds_of_keys, latency=0.0):
        rate = (2.5 if is_backward else 1) * flops  # a hop's compute takes a second
        network = Network(flops_per_s=rate, bandwidth_bytes_per_s=keys / seconds_of_keys, latency_s=latency)
        return critical_path(plans, network, SIZES, is_backward)

    assert grads == 2 * keys
    assert path(False, 0.5) == pytest.approx(2)  # own keys, then those that came meanwhile
    assert path(False, 1.5) == pytest.approx(2.5)  # the keys come late
    assert path(False, 0.75, 0.5) == pytest.approx(2.25)
    assert path(True, 0.25) == pytest.approx(2)  # the first keys and the last gradients behind a rank's own keys
    assert path(True, 0.5) == pytest.approx(2.5)  # which are too few: keys, the hop, gradients
    assert path(True, 0.5, 0.25) == pytest.approx(3)


def test_the_links_bound_the_critical_path():
    plans = plans_of(ra.Full(), "contiguous", 512, 4)
    network = Network(flops_per_s=1e30, bandwidth_bytes_per_s=3 * 128 * SIZES.key_bytes)
    assert critical_path(plans, network, SIZES) == pytest.approx(1)
    assert critical_path(plans, network, SIZES, backward=True) == pytest.approx(3)
    assert critical_path(plans_of(ra.Full(), "zigzag", 512, 1), network, SIZES) == pytest.approx(0)


MASKS = (ra.Causal(), ra.Full(), ra.Window(2047), ra.PrefixLM(10_000), ra.Documents((0, 2500, 15_000, 32_768)))


@pytest.mark.parametrize("kwargs", [{}, {"latency_s": 20e-6}, TWO_LEVELS], ids=["flat", "latency", "two levels"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_the_roofline_is_the_simulation_within_five_percent(mask, kwargs):
    hidden = set()
    for layout, world_size, is_backward in itertools.product(("zigzag", "contiguous"), (2, 8), (False, True)):
        plans = plans_of(mask, layout, 32_768, world_size)
        for flops_per_s in (25e12, 100e12, 400e12, 1000e12):
            network = Network(flops_per_s=flops_per_s, bandwidth_bytes_per_s=50e9, **kwargs)
            told, took = roofline(plans, network, SIZES, is_backward), simulated(plans, network, is_backward)
            # with more communication than that it is up to a sixth too long: gradients may leave before a step is over
            assert told.seconds == pytest.approx(took, rel=0.05 if told.ratio <= 2 else 0.17)
            assert (1 - 1e-9) * critical_path(plans, network, SIZES, is_backward) <= took
            if told.is_hidden and mask == ra.Causal() and layout == "zigzag":
                assert took <= 1.03 * critical_path(plans, network, SIZES, is_backward)
            hidden.add(told.is_hidden)
    assert hidden == {False, True}


def test_can_this_be_hidden():
    network = Network(flops_per_s=400e12, bandwidth_bytes_per_s=50e9)
    long, short = (roofline(plans_of(ra.Causal(), "zigzag", n, 8), network, SIZES) for n in (2**17, 2**13))
    assert (long.is_hidden, short.is_hidden) == (True, False)
    # the longest messages hold 1024 rows, of 4 KiB each, and the hops 512 * 1024 pairs, of 4 * 32 * 128 operations
    transfer, compute = 1024 * 4096 / 50e9, 512 * 1024 * 16384 / 400e12
    assert short.transfer_s == pytest.approx([transfer] * 7 + [0])
    assert short.compute_s[1:] == pytest.approx([compute] * 7)
    assert short.ratio == pytest.approx(transfer / compute)
    assert short.seconds == pytest.approx(7 * transfer + compute)
    assert short.exposed_s == pytest.approx(7 * transfer - 7 * compute, rel=0.01)
    assert roofline(plans_of(ra.Causal(), "zigzag", 2**13, 1), network, SIZES).ratio == 0


def test_backward_sends_in_each_step_the_next_keys_and_the_gradients_of_the_last():
    network = Network(flops_per_s=400e12, bandwidth_bytes_per_s=SIZES.key_bytes * 128)
    told = roofline(plans_of(ra.Full(), "contiguous", 512, 4), network, SIZES, backward=True)
    assert told.transfer_s == pytest.approx([1, 1, 3, 2, 2])
