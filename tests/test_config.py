"""Sizes of the mesh: what is refused, what -1 becomes, and the files they are read from."""

import argparse
import dataclasses
import re

import pytest

from ndwrap import NDConfig


def test_the_fields_are_those_of_accelerate_and_only_by_name():
    assert [field.name for field in dataclasses.fields(NDConfig)] == [
        "dp_replicate_size",
        "dp_shard_size",
        "cp_size",
        "tp_size",
    ]
    with pytest.raises(TypeError, match="positional"):
        NDConfig(1, 2, 1, 1)  # Accelerate's order is another: tp before cp


def test_derived_sizes():
    config = NDConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=5, tp_size=7)
    assert (config.data_parallel_size, config.non_data_parallel_size, config.total_size) == (6, 35, 210)
    assert str(config) == "dp_replicate 2 x dp_shard 3 x cp 5 x tp 7"


@pytest.mark.parametrize("size", [0, -2, 2.0, "2", True, None])
def test_a_size_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(ValueError, match=rf"NDConfig: cp_size is {size!r}; it must be an integer >= 1, or -1"):
        NDConfig(cp_size=size)


def test_only_one_size_may_be_what_is_left():
    with pytest.raises(ValueError, match=r"dp_shard_size and tp_size are -1; only one size can be .* Give the rest\."):
        NDConfig(dp_shard_size=-1, tp_size=-1)


def test_resolve_fills_in_what_is_left():
    assert NDConfig(dp_shard_size=-1, cp_size=2, tp_size=2).resolve(12) == NDConfig(
        dp_shard_size=3, cp_size=2, tp_size=2
    )
    assert NDConfig(cp_size=4).resolve(4) == NDConfig(cp_size=4)


def test_sizes_that_do_not_multiply_up_say_so_and_what_to_do():
    message = (
        "NDConfig: dp_replicate_size * dp_shard_size * cp_size * tp_size = 2*2*2*1 = 8 but the world size is 6; "
        "launch 8 processes or change a size."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NDConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2).resolve(6)
    with pytest.raises(
        ValueError, match=r"= 1\*-1\*4\*1, .* multiply to 4 and the world size is 6; launch a multiple of 4"
    ):
        NDConfig(dp_shard_size=-1, cp_size=4).resolve(6)


def test_a_derived_size_needs_resolved_sizes():
    config = NDConfig(dp_shard_size=-1, cp_size=2)
    assert config.non_data_parallel_size == 2
    with pytest.raises(ValueError, match=r"dp_shard_size is -1; call resolve\(world_size\) first"):
        _ = config.total_size


def test_from_yaml(tmp_path):
    path = tmp_path / "mesh.yaml"
    path.write_text("dp-shard-size: 2\ncp_size: 4\n")
    assert NDConfig.from_yaml(path) == NDConfig(dp_shard_size=2, cp_size=4)
    path.write_text("")
    assert NDConfig.from_yaml(path) == NDConfig()
    path.write_text("cp_siez: 4\n")
    with pytest.raises(
        ValueError, match="'cp_siez' is not a size of the mesh; the sizes are dp_replicate_size, dp_shard_size"
    ):
        NDConfig.from_yaml(path)
    path.write_text("- 4\n")
    with pytest.raises(ValueError, match=r"mesh\.yaml holds a list; it must be a mapping"):
        NDConfig.from_yaml(path)


SIZES = NDConfig(dp_replicate_size=2, dp_shard_size=-1, cp_size=4, tp_size=8)


def test_to_yaml_and_back(tmp_path):
    SIZES.to_yaml(tmp_path / "mesh.yaml")
    assert (tmp_path / "mesh.yaml").read_text() == "dp_replicate_size: 2\ndp_shard_size: -1\ncp_size: 4\ntp_size: 8\n"
    assert NDConfig.from_yaml(tmp_path / "mesh.yaml") == SIZES


def test_to_a_command_line_and_back():
    parser = argparse.ArgumentParser()
    NDConfig.add_arguments(parser)
    assert NDConfig.from_args(parser.parse_args([])) == NDConfig()
    assert NDConfig.from_args(parser.parse_args(SIZES.to_args())) == SIZES


def test_to_the_environment_and_back(monkeypatch):
    for name in ("DP_REPLICATE", "DP_SHARD", "CP", "TP", "SP"):
        monkeypatch.delenv(f"PARALLELISM_CONFIG_{name}_SIZE", raising=False)
    assert NDConfig.from_env() == NDConfig()
    for name, value in SIZES.to_env().items():
        monkeypatch.setenv(name, value)
    assert NDConfig.from_env() == SIZES
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    with pytest.raises(ValueError, match=r"sp_size is 2; .* not one of the axes here\. Use cp_size\."):
        NDConfig.from_env()
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "four")
    with pytest.raises(RuntimeError, match="PARALLELISM_CONFIG_CP_SIZE is 'four'; it must be an integer"):
        NDConfig.from_env()


def test_the_variables_are_those_that_accelerate_reads(monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    config = NDConfig(dp_replicate_size=1, dp_shard_size=2, cp_size=4, tp_size=3)
    for name, value in config.to_env().items():
        monkeypatch.setenv(name, value)
    assert NDConfig.from_accelerate(accelerate.ParallelismConfig()) == config


def test_to_accelerate_and_back():
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    config = NDConfig(dp_shard_size=2, cp_size=4)
    assert NDConfig.from_accelerate(accelerate.ParallelismConfig(**config.sizes)) == config
    with pytest.raises(ValueError, match=r"sp_size is 2; .* Use cp_size\."):
        NDConfig.from_accelerate(accelerate.ParallelismConfig(sp_size=2))


def test_to_axolotl_and_back():
    assert SIZES.to_axolotl() == {
        "dp_replicate_size": 2,
        "dp_shard_size": -1,
        "context_parallel_size": 4,
        "tensor_parallel_size": 8,
    }
    assert NDConfig.from_axolotl({**SIZES.to_axolotl(), "sequence_len": 4096}) == SIZES
    assert NDConfig.from_axolotl({"context_parallel_size": None}) == NDConfig()
    with pytest.raises(ValueError, match="cp_size is 0"):
        NDConfig.from_axolotl({"context_parallel_size": 0})
