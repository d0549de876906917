"""Models in several files: llama.cpp names the parts `NAME-00001-of-00003.gguf` and is given the first of them."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)


def split_paths(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` names the first part of, in order; `path` alone when it is not split."""
    match = _NAME.match(path.name)
    if match is None:
        return (path,)
    count = match["count"]
    return tuple(
        path.with_name(f"{match['stem']}-{number:05d}-of-{count}{path.suffix}") for number in range(1, int(count) + 1)
    )


def part_number(path: Path) -> str:
    """The number in the name, in five digits from 1; empty when the model is not split."""
    match = _NAME.match(path.name)
    return "" if match is None else match["number"]


def is_later_part(path: Path) -> bool:
    """Whether the file is a second or later part of a split model, which is listed under its first."""
    return part_number(path) not in ("", "00001")
