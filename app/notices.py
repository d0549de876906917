"""What stood in the way of something that a page asked for."""

from __future__ import annotations

from collections.abc import Callable

from app import views
from engine.errors import QuorumError


def attempt(action: Callable[[], object]) -> str:
    """Do it; what stood in the way, to be shown, or nothing."""
    try:
        action()
    except QuorumError as error:
        return views.alert(str(error))
    return ""
