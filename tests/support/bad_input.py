"""The tables of docs/errors.md as tests: one case for each row, and nothing touched."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import moc.errors
from moc.errors import MocError
from moc.state.tensors import tensor_bytes
from moc.testing.ranks import run_ranks
from tests.support.tiny import Managers, run_steps, state_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
NOBODY = 65534


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        what: what goes in, without backticks; the id of the row.
        error: name of the error, or ``exit 2``.
        says: parts of the message, in order.
        section: the heading above, in small letters.
    """

    what: str
    error: str
    says: tuple[str, ...]
    section: str

    def __str__(self) -> str:
        return self.what

    def fits(self, name: str, text: str) -> None:
        """Fail unless it is this error with this message."""
        assert name == self.error, f"{name} instead of {self.error}: {text}"
        found, text = 0, text.replace("`", "")
        for part in self.says:
            at = text.find(part, found)
            assert at >= 0, f"{part!r} is not in (the rest of) {text!r}"
            found = at + len(part)


def read_rows(*, ranks: bool) -> list[Row]:
    """The rows under the headings of the page that name ranks, or under all others."""
    rows, section = [], ""
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("#"):
            section = line.lower()
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not section.startswith("###") or ("ranks" in section) is not ranks:
            continue
        if not line.startswith("|") or len(cells) != 3:
            continue
        what, error, says = (cell.replace("`", "") for cell in cells)
        if what != "what goes in" and set(what) != {"-"}:
            parts = tuple(part.strip() for part in says.split("…") if part.strip())
            rows.append(Row(what, error, parts, section))
    return rows


class Bench:
    """A run, a model and its optimizer, to which nothing may happen.

    Attributes:
        managers: makes managers that are ended after the test.
        run: the run directory.
        memory: directory of the memory tier.
        model: what is saved.
        optimizer: of the model.
        monkeypatch: for the environment.
    """

    def __init__(
        self, managers: Managers, model: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.managers, self.monkeypatch = managers, monkeypatch
        self.run, self.memory = managers.run, managers.memory_dir
        self.use(model)

    def use(self, model: nn.Module, optimizer: Any = None) -> None:
        """Take another model, with an AdamW unless told otherwise."""
        self.model = model
        params = list(model.parameters())
        self.optimizer = optimizer if optimizer is not None else torch.optim.AdamW(params, lr=0.01)

    def make(self, **options: Any) -> moc.CheckpointManager:
        """A manager of what this bench has, but for the options."""
        options = {"model": self.model, "optimizer": self.optimizer, **options}
        return self.managers(**options)

    def train(self, *steps: int) -> None:
        """Make a run that has these steps, with this model."""
        with self.make() as manager:
            run_steps(manager, self.model, self.optimizer, steps)

    def state(self) -> dict[str, Any]:
        """Everything that bad input must leave alone."""
        values = state_of(self.model, self.optimizer)
        groups = self.optimizer.param_groups
        modules = list(self.model.modules())
        return {
            "values": {name: bytes(tensor_bytes(value)) for name, value in values.items()},
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "hooks": [[*m._forward_hooks, *m._forward_pre_hooks] for m in modules],
            "gates": list(_global_optimizer_pre_hooks),
            "run": dict(_tree(self.run)),
            "memory": dict(_tree(self.memory)),
            "helpers": _children(),
            "locks": _locks(self.memory),
            "threads": sorted(thread.name for thread in threading.enumerate()),
        }

    def touched(self, before: dict[str, Any]) -> list[str]:
        """What is not as it was."""
        return [what for what, now in self.state().items() if now != before[what]]

    def refuses(self, row: Row, act: Callable[[], object]) -> None:
        """The act raises what the row says, and leaves everything as it was."""
        before = self.state()
        with pytest.raises(MocError) as caught:
            act()
        touched = self.touched(before)
        assert not touched, f"{touched} before {caught.value}"
        row.fits(type(caught.value).__name__, str(caught.value))

    def refuses_nobody(self, row: Row, act: Callable[[], object]) -> None:
        """The same for a user without rights, in a child process."""

        def child(_rank: int) -> tuple[str, str]:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            before = state_of(self.model, self.optimizer)
            told = error_of(act)
            after = state_of(self.model, self.optimizer)
            assert {n: bytes(tensor_bytes(v)) for n, v in before.items()} == {
                n: bytes(tensor_bytes(v)) for n, v in after.items()
            }
            return told

        before = self.state()
        (told,) = run_ranks(child, 1, init=False)
        assert not self.touched(before), f"touched before {told}"
        row.fits(*told)


def error_of(act: Callable[[], object]) -> tuple[str, str]:
    """Name and text of one of our errors that the act raises."""
    with pytest.raises(MocError) as caught:
        act()
    return type(caught.value).__name__, str(caught.value)


Case = Callable[[Bench, Row], None]


class Cases(dict[str, Case]):
    """Cases by row."""

    def of(self, *whats: str) -> Callable[[Case], Case]:
        """The decorated function tests these rows."""

        def add(case: Case) -> Case:
            for what in whats:
                assert what not in self, f"two cases for {what!r}"
                self[what] = case
            return case

        return add

    def refused(self, what: str) -> Callable[[Callable[[Bench], Any]], Callable[[Bench], Any]]:
        """The decorated function prepares, and returns the act that the row is about."""

        def add(prepare: Callable[[Bench], Any]) -> Callable[[Bench], Any]:
            self.of(what)(lambda bench, row: bench.refuses(row, prepare(bench)))
            return prepare

        return add

    def match(self, rows: list[Row]) -> None:
        """Fail where a row has no case, a case no row, or two rows are the same."""
        whats = [row.what for row in rows]
        assert len(set(whats)) == len(whats), "two rows have the same first cell"
        assert set(whats) == set(self), (
            f"rows without a case: {sorted(set(whats) - set(self))}; "
            f"cases without a row: {sorted(set(self) - set(whats))}"
        )


def tree_errors() -> dict[str, type[BaseException]]:
    """The errors by name."""
    found = {name: getattr(moc.errors, name) for name in moc.errors.__all__}
    return {name: kind for name, kind in found.items() if issubclass(kind, MocError)}


def named_in_tree() -> set[str]:
    """Names in the first block of code of the page."""
    block = PAGE.read_text("utf-8").split("```")[1]
    return set(re.findall(r"^[│├└─ ]*([A-Z]\w+)", block, re.MULTILINE))


def _children() -> list[int]:
    """Processes that this one started; a command line is not there yet at the start."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return sorted(found)


def _locks(folder: Path) -> list[list[str]]:
    """Locks on files below a folder, as the kernel lists them; to open one would drop ours."""
    inodes = {str(path.stat().st_ino) for path in folder.rglob("*") if path.is_file()}
    told = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sorted(words[1:] for words in told if words[5].rpartition(":")[2] in inodes)


def _tree(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted([folder, *folder.rglob("*")]):
        if path.is_symlink() or path.exists():
            held = path.read_bytes() if path.is_file() else b""
            yield str(path), (path.lstat().st_mode, held)
