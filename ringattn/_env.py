"""The environment variables of ringattn; no other module of the package reads them."""

import os

__all__ = ["cpu_library", "same_host"]


def cpu_library() -> str | None:
    """The path of the cpu backend's library, `RINGATTN_CPU_LIBRARY`; default None, the one that is installed."""
    return os.environ.get("RINGATTN_CPU_LIBRARY") or None


def same_host() -> bool:
    """Whether ranks of one host may read each other's memory, `RINGATTN_SAME_HOST`; default 1, 0 leaves all messages to gloo."""
    return os.environ.get("RINGATTN_SAME_HOST", "1") != "0"
