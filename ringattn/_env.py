"""The environment variables of ringattn; no other module of the package reads them."""

import os

__all__ = ["cpu_library"]


def cpu_library() -> str | None:
    """The path of the cpu backend's library, `RINGATTN_CPU_LIBRARY`; default None, the one that is installed."""
    return os.environ.get("RINGATTN_CPU_LIBRARY") or None
