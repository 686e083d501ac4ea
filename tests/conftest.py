"""Every test: one thread, a seed, and NaN in all memory that nothing has written yet."""

import pytest
import torch

from tests.processes import prepare

prepare()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
