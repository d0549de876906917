"""Keeping a thread to some of the processor's cores, so that target and drafters have cores of their own."""

from __future__ import annotations

import os
from collections.abc import Collection

from engine.errors import SettingError


def keep_to(cores: Collection[int]) -> frozenset[int]:
    """Let the calling thread, and those that it starts from now on, run on these cores only; where it ran before.

    Raises:
        SettingError: this system cannot, or has no such cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise SettingError("this system does not let a program choose its cores")
    before = frozenset(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        raise SettingError(
            f"cores {_listed(cores)} cannot be used ({error}); this process has {_listed(before)}"
        ) from None
    return before


def _listed(cores: Collection[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
