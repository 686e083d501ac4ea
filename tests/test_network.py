"""The simulated clock, by hand: when a message may start, how long it takes, and who waits for it."""

import re

import pytest

from ringattn import Network
from ringattn.network import Clock


def clock_of(world_size, **kwargs):
    return Clock(Network(flops_per_s=10.0, bandwidth_bytes_per_s=100.0, **kwargs), world_size)


def send(clock, source, target, nbytes):
    transfer = clock.transfer(nbytes, source, target)
    clock.post(transfer, source, target, "send")
    clock.post(transfer, target, source, "recv")
    return transfer


def test_compute_takes_flops_over_the_rate():
    clock = clock_of(2)
    clock.compute(1, 25)
    assert clock.now == [0.0, 2.5]


def test_a_message_starts_when_both_ends_are_posted_and_arrives_a_latency_after_its_bytes():
    clock = clock_of(2, latency_s=0.5)
    transfer = clock.transfer(200, 0, 1)
    clock.post(transfer, 0, 1, "send")
    clock.compute(1, 30)
    assert transfer.end is None
    clock.post(transfer, 1, 0, "recv")
    assert (transfer.start, transfer.end, transfer.arrival) == (None, 5.0, 5.5)
    clock.wait(0, transfer)
    clock.compute(1, 40)
    clock.wait(1, transfer)
    assert clock.now == [5.5, 7.0]


def test_a_link_carries_one_message_after_the_other_and_both_directions_at_once():
    clock = clock_of(3)
    first, same_egress = send(clock, 0, 1, 100), send(clock, 0, 2, 100)
    same_ingress, other_way = send(clock, 2, 1, 100), send(clock, 1, 0, 100)
    assert [t.end for t in (first, same_egress, same_ingress, other_way)] == [1.0, 2.0, 2.0, 1.0]


def test_a_message_keeps_its_place_behind_one_that_cannot_start():
    clock = clock_of(3)
    blocked = clock.transfer(100, 0, 1)
    clock.post(blocked, 0, 1, "send")
    behind = send(clock, 0, 2, 100)
    assert behind.end is None
    clock.compute(1, 30)
    clock.post(blocked, 1, 0, "recv")
    assert behind.end == 5.0


def test_nodes_have_links_of_their_own():
    clock = clock_of(4, node_size=2, inter_bandwidth_bytes_per_s=10.0, latency_s=0.25, inter_latency_s=0.5)
    inside, between, again = send(clock, 0, 1, 100), send(clock, 0, 2, 100), send(clock, 0, 3, 100)
    assert [t.end for t in (inside, between, again)] == [1.0, 10.0, 20.0]
    assert [t.arrival for t in (inside, between)] == [1.25, 10.5]
    same = Network(flops_per_s=1.0, bandwidth_bytes_per_s=4.0, latency_s=3.0, node_size=1)
    assert (same.seconds(8, 0, 1), same.latency(0, 1)) == (2.0, 3.0)


def test_a_call_begins_on_all_ranks_at_once_on_idle_links():
    clock = clock_of(2)
    clock.post(clock.transfer(100, 0, 1), 0, 1, "send")
    clock.compute(1, 20)
    clock.align()
    assert clock.now == [2.0, 2.0]
    assert send(clock, 0, 1, 100).end == 3.0


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("flops_per_s", 0.0, "positive"),
        ("bandwidth_bytes_per_s", -1.0, "positive"),
        ("latency_s", -1e-6, "at least 0"),
        ("node_size", 0, "positive"),
        ("inter_bandwidth_bytes_per_s", 0.0, "positive"),
        ("inter_latency_s", -1.0, "at least 0"),
        ("flops_per_s", float("nan"), "positive"),
    ],
)
def test_refusals(name, value, rule):
    with pytest.raises(ValueError, match=re.escape(f"Network: {name} is {value}; it must be {rule}.")):
        Network(**{"flops_per_s": 1.0, "bandwidth_bytes_per_s": 1.0, name: value})
