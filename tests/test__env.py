"""The environment of ndwrap: torchrun's variables, their defaults, and what is said of a bad value."""

import pytest

from ndwrap import _env

VARIABLES = {"WORLD_SIZE": _env.world_size, "RANK": _env.rank, "LOCAL_RANK": _env.local_rank}


def test_defaults_are_one_process(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert (_env.world_size(), _env.rank(), _env.local_rank()) == (1, 0, 0)


def test_each_reads_its_own_variable(monkeypatch):
    for value, name in enumerate(VARIABLES, start=5):
        monkeypatch.setenv(name, str(value))
    assert (_env.world_size(), _env.rank(), _env.local_rank()) == (5, 6, 7)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_value_that_is_no_integer_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "two")
    with pytest.raises(
        RuntimeError,
        match=rf"{name} is 'two'; it must be an integer\. Launch with torchrun or accelerate, or unset it\.",
    ):
        VARIABLES[name]()
