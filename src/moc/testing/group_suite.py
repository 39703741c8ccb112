"""What every group must do. Inherit `GroupSuite` and give it a fixture called ``run``."""

# ruff: noqa: D102 - a test's name says what it shows

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from moc import knobs
from moc.comm.group import Group, agree, gather_values
from moc.errors import DeadlineError, LayoutError, MocError

__all__ = ["GroupSuite", "Run"]


class Run(Protocol):
    """Runs a function of a group on every rank; gives the results in rank order.

    With ``timeout_secs`` the groups have that timeout. An error of a rank is raised, or is the
    cause of what is raised.
    """

    def __call__(self, fn: Callable[[Group], Any], *, timeout_secs: float = 10) -> list[Any]:
        """Run."""
        ...


class Point(msgspec.Struct, frozen=True):
    """Something to send."""

    x: int
    name: str


class GroupSuite:
    """Conformance tests; groups may be of any size, also of one."""

    def test_ranks_are_numbered_from_zero(self, run: Run) -> None:
        got = run(lambda group: (group.rank, group.world_size))
        assert got == [(rank, len(got)) for rank in range(len(got))]

    def test_gather_gives_all_values_in_rank_order(self, run: Run) -> None:
        def values(rank: int) -> list[bytes]:
            # different lengths, none at all, nothing but zeros, more than one packet
            return [b"x" * rank, b"", bytes(rank), bytes([rank]) * (1 << 20), b"same"]

        def exchange(group: Group) -> list[list[bytes]]:
            return [group.gather(value) for value in values(group.rank)]

        got = run(exchange)
        columns = [list(column) for column in zip(*map(values, range(len(got))), strict=True)]
        assert got == [columns] * len(got)

    def test_broadcast_gives_the_source_s_value(self, run: Run) -> None:
        def exchange(group: Group) -> list[bytes]:
            last = group.world_size - 1
            return [
                group.broadcast(b"first" if group.rank == 0 else None),
                group.broadcast(b"last" if group.rank == last else b"ignored", src=last),
                group.broadcast(b"" if group.rank == 0 else None),
                group.broadcast(bytes(1 << 20) if group.rank == 0 else None),
            ]

        got = run(exchange)
        assert got == [[b"first", b"last", b"", bytes(1 << 20)]] * len(got)

    def test_posted_words_are_reduced(self, run: Run) -> None:
        big = (1 << 62) - 1

        def exchange(group: Group) -> tuple[list[int], list[int]]:
            lowest = group.post_min([group.rank, -group.rank, big, -big])
            total = group.post_sum([group.rank, 1, -1])
            return lowest.wait(10), total.wait(10)

        got = run(exchange)
        n = len(got)
        assert got == [([0, 1 - n, big, -big], [n * (n - 1) // 2, n, -n])] * n

    def test_a_post_does_not_change_what_it_was_given(self, run: Run) -> None:
        def exchange(group: Group) -> list[int]:
            words = [group.rank]
            pending = group.post_sum(words)
            words[0] = 1000
            pending.wait(10)
            return pending.wait(10)  # it may be read again

        got = run(exchange)
        assert got == [[len(got) * (len(got) - 1) // 2]] * len(got)

    def test_posts_may_be_read_late_and_in_any_order(self, run: Run) -> None:
        def exchange(group: Group) -> tuple[list[int], list[bool]]:
            pending = [group.post_min([number + group.rank]) for number in range(5)]
            group.gather(b"")  # what comes after them can be over before
            results = [p.wait(10)[0] for p in reversed(pending)]
            return results, [p.done() for p in pending]

        got = run(exchange)
        assert got == [([4, 3, 2, 1, 0], [True] * 5)] * len(got)

    def test_values_keep_their_types(self, run: Run) -> None:
        def exchange(group: Group) -> tuple[list[Point], list[dict[str, int]]]:
            mine = Point(x=group.rank, name="\u00e4")
            return gather_values(group, mine, Point), gather_values(group, {"a": 1}, dict[str, int])

        got = run(exchange)
        points = [Point(x=rank, name="\u00e4") for rank in range(len(got))]
        assert got == [(points, [{"a": 1}] * len(got))] * len(got)

    def test_agree_gives_each_rank_its_own_result(self, run: Run) -> None:
        got = run(lambda group: agree(group, lambda: group.rank * 10))
        assert got == [rank * 10 for rank in range(len(got))]

    def test_an_error_of_one_rank_is_every_rank_s(self, run: Run) -> None:
        def meet(group: Group) -> tuple[str, str, bool]:
            last = group.world_size - 1

            def fails() -> None:
                if group.rank == last:
                    raise LayoutError("no room")

            with pytest.raises(LayoutError) as caught:
                agree(group, fails)
            group.gather(b"the group is still of use")
            local = isinstance(caught.value.__cause__, LayoutError)
            return type(caught.value).__name__, str(caught.value), local == (group.rank == last)

        got = run(meet)
        text = f"rank {len(got) - 1}: LayoutError: no room"
        alone = [("LayoutError", "no room", False)]  # the error itself
        assert got == (alone if len(got) == 1 else [("LayoutError", text, True)] * len(got))

    def test_foreign_errors_of_all_ranks_become_one_of_ours(self, run: Run) -> None:
        def meet(group: Group) -> str:
            def fails() -> None:
                raise ZeroDivisionError("all alike")

            with pytest.raises(MocError) as caught:
                agree(group, fails)
            assert type(caught.value) is MocError
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            return str(caught.value)

        got = run(meet)
        names = "rank 0" if len(got) == 1 else f"ranks {', '.join(map(str, range(len(got))))}"
        assert got == [f"{names}: ZeroDivisionError: all alike"] * len(got)

    def test_a_wait_for_a_rank_that_does_not_come_runs_out_and_names_it(
        self, run: Run, tmp_path: Path
    ) -> None:
        def meet(group: Group) -> tuple[bool, str]:
            last = group.world_size - 1
            if group.rank == last:
                _wait_for([tmp_path / str(rank) for rank in range(last)])
                return False, ""
            with pytest.raises((DeadlineError, RuntimeError)) as caught:
                group.gather(b"")
            (tmp_path / str(group.rank)).touch()
            return isinstance(caught.value, DeadlineError), str(caught.value)

        got = run(meet, timeout_secs=0.5)
        # The first that runs out of time may break the others' connections with its own.
        assert any(ran_out for ran_out, _ in got) or len(got) == 1
        for ran_out, text in got[:-1]:
            assert "gather, call 1" in text
            assert f"missing: rank {len(got) - 1}" in text
            assert "0.5 s" in text or not ran_out

    def test_a_posted_wait_may_run_out_and_still_end_well(self, run: Run, tmp_path: Path) -> None:
        def meet(group: Group) -> list[int]:
            last = group.world_size - 1
            if group.rank == last:
                _wait_for([tmp_path / str(rank) for rank in range(last)])
            pending = group.post_sum([1])
            if group.rank != last:
                assert not pending.done()
                with pytest.raises(DeadlineError, match=rf"0.05 s.*missing: rank {last}\b"):
                    pending.wait(0.05)
                (tmp_path / str(group.rank)).touch()
            return pending.wait(10)

        got = run(meet)
        assert got == [[len(got)]] * len(got)

    def test_closing_twice_is_fine(self, run: Run) -> None:
        def leave(group: Group) -> None:
            group.gather(b"")
            group.close()
            group.close()

        run(leave)


def _wait_for(paths: list[Path]) -> None:
    """Wait for what other ranks, threads or processes, make; without using their group."""
    deadline = knobs.monotonic() + 20
    while not all(path.exists() for path in paths):
        assert knobs.monotonic() < deadline, paths
        knobs.sleep(0.01)
