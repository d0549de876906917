"""Calls run one at a time: where the caller is, or in a thread that lasts as long as it is of use."""

from __future__ import annotations

import os
import threading

import pytest

from engine.errors import SettingError
from engine.runtime.lane import Lane


def test_a_call_runs_where_the_caller_is() -> None:
    lane = Lane("lane")
    assert lane.run(threading.get_ident).result() == threading.get_ident()
    assert lane.run(int, "12", base=8).result() == 10
    with pytest.raises(ValueError, match="invalid"):
        lane.run(int, "none").result()


def test_a_call_beside_others_begins_a_thread_that_the_next_ones_run_in() -> None:
    lane = Lane("lane")
    threads = threading.active_count()
    go_on = threading.Event()
    order: list[str] = []

    def wait() -> int:
        assert go_on.wait(30)
        order.append("first")
        return threading.get_ident()

    first = lane.run_beside(wait)
    second = lane.run(lambda: order.append("second"))
    assert not second.done()
    go_on.set()
    assert first.result() != threading.get_ident()
    second.result()
    assert order == ["first", "second"]
    assert lane.run(threading.get_ident).result() == first.result()
    lane.end_thread()
    lane.end_thread()
    assert threading.active_count() == threads
    assert lane.run(threading.get_ident).result() == threading.get_ident()


def test_a_lane_is_entered_by_its_calls_alone() -> None:
    lane = Lane("lane")
    assert not lane.is_entered
    assert lane.run(lambda: lane.is_entered).result()
    assert lane.run_beside(lambda: lane.is_entered).result()
    seen: list[bool] = []
    lane.run_beside(lambda: seen.append(lane.is_entered)).result()
    assert seen == [True]
    assert not lane.is_entered
    lane.end_thread()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not let a program choose its cores")
def test_a_thread_with_cores_of_its_own_stays() -> None:
    lane = Lane("lane")
    threads = threading.active_count()
    mine = os.sched_getaffinity(0)
    core = max(mine)
    lane.keep_to((core,))
    lane.end_thread()
    assert lane.run(lambda: os.sched_getaffinity(0)).result() == {core}
    assert os.sched_getaffinity(0) == mine
    lane.keep_to(())
    assert threading.active_count() == threads
    with pytest.raises(SettingError, match="cores 4095"):
        lane.keep_to((4095,))
    lane.end_thread()
    assert threading.active_count() == threads
