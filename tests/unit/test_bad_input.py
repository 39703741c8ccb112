"""Every row of the tables of docs/errors.md, but those that need ranks: the error, and no harm."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bad_input import (
    Bench,
    Cases,
    Row,
    error_of,
    named_in_tree,
    read_rows,
    tree_errors,
)
from tests.support.tiny import DIM, EXPERTS, Managers, dense, moe, run_steps
from torch import nn

import moc
from moc.cli.main import main
from moc.core.manifest import sign

ROWS = read_rows(ranks=False)
CASES = Cases()
refused = CASES.refused

VALUES = {"nan": float("nan"), "inf": float("inf"), "None": None, "True": True}
LISTED = re.compile(r"(.*?)(?:=| of) ((?:[\w.\"-]+, )+[\w.\"-]+)")
"""A row that lists values, such as ``buffers= 0, 3.5``."""


@pytest.fixture
def bench(managers: Managers, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(managers, dense(), monkeypatch)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_it_is_refused_and_nothing_is_touched(bench: Bench, row: Row) -> None:
    CASES[row.what](bench, row)


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    CASES.match(ROWS)


def test_the_tree_is_that_of_the_code() -> None:
    assert named_in_tree() == set(tree_errors())
    assert {row.error for row in ROWS if "exit" not in row.error} <= set(tree_errors())


def values_of(row: Row) -> list[Any]:
    """The values that a row lists."""
    match = LISTED.fullmatch(row.what)
    assert match, row.what
    return [VALUES[v] if v in VALUES else json.loads(v) for v in match[2].split(", ")]


# ---------------------------------------------------------------------------- where things are


@refused('directory=""')
def empty(bench: Bench) -> Any:
    return lambda: bench.make(directory="")


@refused("directory=None")
def no_directory(bench: Bench) -> Any:
    return lambda: bench.make(directory=None)


@refused("directory is a file")
def a_file(bench: Bench) -> Any:
    bench.run.write_text("mine")
    return bench.make


@refused("directory below a file")
def below_a_file(bench: Bench) -> Any:
    bench.run.write_text("mine")
    return lambda: bench.make(directory=bench.run / "sub" / "run")


def open_to_all(bench: Bench) -> None:
    """Move run and memory tier to where anybody may go."""
    bench.memory.chmod(0o755)
    bench.run = bench.managers.run = bench.memory / "open" / "run"
    bench.managers.memory_dir = bench.memory / "tier"
    bench.run.mkdir(parents=True)
    bench.managers.memory_dir.mkdir()
    bench.managers.memory_dir.chmod(0o777)


@CASES.of("directory that may not be read")
def unreadable(bench: Bench, row: Row) -> None:
    open_to_all(bench)
    bench.train(1)
    bench.run.chmod(0o700)
    bench.refuses_nobody(row, bench.make)


@CASES.of("directory that may not be written, at restore()")
def unwritable(bench: Bench, row: Row) -> None:
    open_to_all(bench)
    bench.train(1)
    bench.managers.memory_dir = bench.memory / "other"
    bench.managers.memory_dir.mkdir()
    bench.managers.memory_dir.chmod(0o777)
    for path in bench.run.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    bench.use(dense(1))
    bench.refuses_nobody(row, lambda: bench.make().restore())


@CASES.of("directory that may not be made")
def unmakeable(bench: Bench, row: Row) -> None:
    open_to_all(bench)
    bench.run.rmdir()
    bench.refuses_nobody(row, lambda: bench.make().save(1))


@refused("nope://bucket/run")
def no_scheme(bench: Bench) -> Any:
    return lambda: bench.make(directory="nope://bucket/run")


@refused("gs://bucket/run without gcsfs")
def no_package(bench: Bench) -> Any:
    bench.monkeypatch.setitem(sys.modules, "gcsfs", None)
    return lambda: bench.make(directory="gs://bucket/run")


@refused("file://run")
def relative(bench: Bench) -> Any:
    return lambda: bench.make(directory="file://run")


def restoring(bench: Bench, **options: Any) -> Callable[[], Any]:
    """A restore into another model of the same kind."""
    bench.use(dense(1))
    manager = bench.make(**options)
    return manager.restore


def change(path: Path, **facts: Any) -> None:
    """Put other facts into a record, under a digest that fits."""
    told = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "digest"} | facts
    path.write_bytes(sign(json.dumps(told).encode()))


@refused("damaged run.json")
def damaged(bench: Bench) -> Any:
    bench.train(1)
    path = bench.run / "run.json"
    path.write_bytes(path.read_bytes().replace(b'"model"', b'"modem"'))
    return restoring(bench)


@refused("no run.json beside steps")
def no_identity(bench: Bench) -> Any:
    bench.train(1)
    (bench.run / "run.json").unlink()
    return restoring(bench)


@refused("run.json of a newer MoC")
def newer_run(bench: Bench) -> Any:
    bench.train(1)
    change(bench.run / "run.json", format=2)
    return restoring(bench)


@refused("manifest of a newer MoC")
def newer_manifest(bench: Bench) -> Any:
    bench.train(1)
    change(*bench.run.glob("step-*/manifest.json"), format=2)
    return restoring(bench)


@refused("memory_dir is a file")
def memory_file(bench: Bench) -> Any:
    path = bench.memory / "file"
    path.write_text("mine")
    return lambda: bench.make(memory_dir=path)


@CASES.of("memory_dir that may not be written")
def memory_unwritable(bench: Bench, row: Row) -> None:
    open_to_all(bench)
    bench.managers.memory_dir.chmod(0o755)
    bench.refuses_nobody(row, bench.make)


@refused("MOC_MEMORY_DIR is a file")
def memory_variable(bench: Bench) -> Any:
    path = bench.memory / "file"
    path.write_text("mine")
    bench.monkeypatch.setenv("MOC_MEMORY_DIR", str(path))
    return lambda: bench.make(memory_dir=None)


@CASES.of('memory_bytes= 0, -1, True, "1G", 1.5')
def memory_nonsense(bench: Bench, row: Row) -> None:
    for value in values_of(row):
        bench.refuses(row, lambda value=value: bench.make(memory_bytes=value))


@refused("memory_bytes less than parameters need, at restore()")
def memory_small(bench: Bench) -> Any:
    bench.train(1)
    return restoring(bench, memory_bytes=1000)


@refused("memory_bytes less than parameters need, at the first save")
def memory_small_at_a_save(bench: Bench) -> Any:
    manager = bench.make(memory_bytes=1000)
    return lambda: manager.save(1)


# ------------------------------------------------------------------------------------- policy


@CASES.of(*(row.what for row in ROWS if LISTED.fullmatch(row.what) and "policy" in row.section))
def policy_field(bench: Bench, row: Row) -> None:
    name = row.what.partition("=")[0]
    for value in values_of(row):
        bench.refuses(row, lambda value=value: moc.Policy(**{name: value}))
        assert (
            f"Policy({name}={value!r})"
            in error_of(lambda value=value: moc.Policy(**{name: value}))[1]
        )


@refused("k_snapshot=2 without k_persist")
def no_k_persist(_: Bench) -> Any:
    return lambda: moc.Policy(k_snapshot=2)


@refused("k_persist above k_snapshot")
def k_above_k(_: Bench) -> Any:
    return lambda: moc.Policy(k_snapshot=1, k_persist=2)


@refused("k_snapshot above the number of experts")
def k_above_n(bench: Bench) -> Any:
    bench.use(moe())
    return lambda: bench.make(policy=moc.Policy(k_snapshot=EXPERTS + 1, k_persist=1))


# -------------------------------------------------------------- model, optimizer and the rest


@refused("model=[nn.Linear, ...]")
def no_module(bench: Bench) -> Any:
    return lambda: bench.make(model=list(bench.model))


@CASES.of('optimizer= None, 5, "adam"')
def no_optimizer(bench: Bench, row: Row) -> None:
    for value in values_of(row):
        bench.refuses(row, lambda value=value: bench.make(optimizer=value))


@refused("a scheduler among optimizers")
def scheduler(bench: Bench) -> Any:
    one = torch.optim.lr_scheduler.StepLR(bench.optimizer, 5)
    return lambda: bench.make(optimizer=[bench.optimizer, one])


@refused("optimizer of another model")
def stranger(bench: Bench) -> Any:
    return lambda: bench.make(model=dense())


@refused("extras=[scheduler]")
def extras_list(bench: Bench) -> Any:
    one = torch.optim.lr_scheduler.StepLR(bench.optimizer, 5)
    return lambda: bench.make(extras=[one])


@refused("extra without state_dict()")
def stateless(bench: Bench) -> Any:
    return lambda: bench.make(extras={"config": {"lr": 1}})


@refused('extra named ""')
def nameless(bench: Bench) -> Any:
    return lambda: bench.make(extras={"": bench.optimizer})


class Loader:
    """An extra whose state cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"collate": lambda batch: batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


@refused("extra that holds a lambda, at the first save")
def unsupported(bench: Bench) -> Any:
    manager = bench.make(extras={"loader": Loader()})
    manager.restore()
    return lambda: manager.save(1)


@refused('policy={"snapshot_every": 1}')
def policy_dict(bench: Bench) -> Any:
    return lambda: bench.make(policy={"snapshot_every": 1})


@refused("layout=4")
def layout_number(bench: Bench) -> Any:
    return lambda: bench.make(layout=4)


@refused('on_event="print"')
def event_text(bench: Bench) -> Any:
    return lambda: bench.make(on_event="print")


@refused('fresh="no"')
def fresh_text(bench: Bench) -> Any:
    return lambda: bench.make(fresh="no")


@refused('register("0.weight", ...), a parameter\'s name')
def name_taken(bench: Bench) -> Any:
    manager = bench.make()
    return lambda: manager.register("0.weight", torch.zeros(2))


@refused("register after restore()")
def registered_late(bench: Bench) -> Any:
    manager = bench.make()
    manager.restore()
    return lambda: manager.register("ema", torch.zeros(2))


# ------------------------------------------------------------------------------------- experts


def with_experts(bench: Bench, experts: Any) -> Callable[[], Any]:
    bench.use(moe(stacked=False))
    return lambda: bench.make(experts=experts)


@refused('experts="mixtral"')
def preset(bench: Bench) -> Any:
    return with_experts(bench, "mixtral")


@refused("experts=[]")
def no_rules(bench: Bench) -> Any:
    return with_experts(bench, [])


@refused('experts=["experts"]')
def text_rule(bench: Bench) -> Any:
    return with_experts(bench, ["experts"])


@refused('ExpertRule("")')
def empty_rule(_: Bench) -> Any:
    return lambda: moc.ExpertRule("")


@refused('ExpertRule("(")')
def broken_rule(_: Bench) -> Any:
    return lambda: moc.ExpertRule("(")


@refused("rule that matches nothing")
def idle_rule(bench: Bench) -> Any:
    return with_experts(bench, [moc.ExpertRule(r"(?P<layer>.+)\.ffn\.(?P<expert>\d+)\..+")])


@refused("rule that matches shared experts")
def shared_rule(bench: Bench) -> Any:
    model = nn.ModuleDict({"shared_experts": nn.ModuleList([nn.Linear(2, 2)])})
    bench.use(model)
    rule = moc.ExpertRule(r"(?P<layer>shared_experts)\.(?P<expert>\d+)\..+")
    return lambda: bench.make(experts=[rule])


@refused("rule that matches the router too")
def greedy_rule(bench: Bench) -> Any:
    bench.use(moe())
    rule = moc.ExpertRule(r"(?P<layer>1)\.(?:experts\.w1|router\.gate\..+)|(?P<none>0)\..+")
    bench.model[1].router.gate = nn.Linear(DIM, EXPERTS + 1)
    bench.use(bench.model)
    return lambda: bench.make(experts=[rule])


@refused("experts 0 and 2 without 1")
def gap(bench: Bench) -> Any:
    experts = nn.ModuleDict({"0": nn.Linear(2, 2), "2": nn.Linear(2, 2)})
    bench.use(nn.ModuleDict({"experts": experts}))
    return bench.make


@refused('router="("')
def broken_router(bench: Bench) -> Any:
    bench.use(moe())
    return lambda: bench.make(router="(")


@refused('router={"nothing": "1.router"}')
def lost_router(bench: Bench) -> Any:
    bench.use(moe())
    return lambda: bench.make(router={"nothing": "1.router"})


# --------------------------------------------------------------------------- restore and steps


@refused("run of another model")
def other_model(bench: Bench) -> Any:
    bench.train(1)
    bench.use(nn.Sequential(nn.Linear(DIM, 2), nn.Tanh(), nn.Linear(2, DIM)))
    return bench.make().restore


@refused("run of another model, with fresh=True")
def other_model_fresh(bench: Bench) -> Any:
    bench.train(1)
    bench.use(nn.Sequential(nn.Linear(DIM, 2), nn.Tanh(), nn.Linear(2, DIM)))
    return bench.make(fresh=True).restore


@refused("run with another number of experts")
def other_experts(bench: Bench) -> Any:
    bench.use(moe(stacked=False))
    bench.train(1)
    model = moe(1, stacked=False)
    model[1].experts.append(nn.Linear(DIM, DIM))
    bench.use(model)
    return bench.make().restore


@refused("run of another optimizer")
def other_optimizer(bench: Bench) -> Any:
    bench.train(1)
    model = dense(1)
    bench.use(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return bench.make().restore


@refused("restore(7) where steps are 1 and 2")
def no_step(bench: Bench) -> Any:
    bench.train(1, 2)
    restore = restoring(bench)
    return lambda: restore(7)


@refused("restore(2) where step 2 has no manifest")
def no_manifest(bench: Bench) -> Any:
    bench.train(1, 2)
    (path,) = bench.run.glob("step-00000002-*/manifest.json")
    path.unlink()
    (path.parent / "rank-00000.receipt").unlink()
    restore = restoring(bench, memory_dir=bench.memory / "another")
    return lambda: restore(2)


@CASES.of('restore(step=) -1, 1.0, True, "3"')
def restore_nonsense(bench: Bench, row: Row) -> None:
    bench.train(1, 2)
    restore = restoring(bench)
    for value in (-1, 1.0, True, "3"):
        bench.refuses(row, lambda value=value: restore(value))


@refused("restore(1) with fresh=True")
def fresh_and_step(bench: Bench) -> Any:
    bench.train(1)
    restore = restoring(bench, fresh=True)
    return lambda: restore(1)


@refused("restore(weights_only=True) with fresh=True")
def fresh_and_weights(bench: Bench) -> Any:
    bench.train(1)
    restore = restoring(bench, fresh=True)
    return lambda: restore(weights_only=True)


@refused("restore() twice")
def twice(bench: Bench) -> Any:
    manager = bench.make()
    manager.restore()
    return manager.restore


@refused("restore() after the first step")
def late(bench: Bench) -> Any:
    return started(bench, 1).restore


@refused("save in a run that was not restored")
def unrestored(bench: Bench) -> Any:
    bench.train(1, 2)
    manager = bench.make()
    return lambda: manager.save(3)


@refused("save after restore(weights_only=True)")
def read_only(bench: Bench) -> Any:
    bench.train(1)
    manager = bench.make()
    manager.restore(weights_only=True)
    return lambda: manager.save(2)


def started(bench: Bench, *steps: int) -> moc.CheckpointManager:
    """A manager that has made these steps, and has nothing in flight."""
    manager = bench.make(policy=moc.Policy(snapshot_every=100, persist_every=100))
    run_steps(manager, bench.model, bench.optimizer, steps)
    return manager


@CASES.of('step and save of -1, 1.5, True, "3", None')
def step_nonsense(bench: Bench, row: Row) -> None:
    for value in values_of(row):
        for manager in (bench.make(), started(bench, 1) if value == -1 else bench.make()):
            bench.refuses(row, lambda m=manager, value=value: m.step(value))
            bench.refuses(row, lambda m=manager, value=value: m.save(value))


@refused("step 3 after step 5")
def backwards(bench: Bench) -> Any:
    manager = started(bench, 4, 5)
    return lambda: manager.step(3)


@refused("step 1 after restore() of step 2")
def below_the_restored(bench: Bench) -> Any:
    bench.train(1, 2)
    manager = bench.make()
    manager.restore()
    return lambda: manager.save(1)


@CASES.of("any call after close()")
def closed(bench: Bench, row: Row) -> None:
    manager = started(bench, 1)
    manager.close()
    calls = (manager.restore, manager.wait, lambda: manager.step(2), lambda: manager.save(2))
    for call in calls:
        bench.refuses(row, call)


# ------------------------------------------------------------------------------------- command


@CASES.of(*(row.what for row in ROWS if row.error.startswith("exit")))
def command(bench: Bench, row: Row) -> None:
    """The row is the command itself; RUN has steps 1 and 2."""
    words = row.what.partition(",")[0].removesuffix(" where nothing is").split()[1:]
    bench.train(1, 2)
    if "damaged" in row.what:
        path = bench.run / "run.json"
        path.write_bytes(path.read_bytes().replace(b'"model"', b'"modem"'))
    if "nothing is" in row.what:
        words.append(str(bench.run / "nothing"))
    before = bench.state()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = main([str(bench.run) if word == "RUN" else word for word in words])
        except SystemExit as left:
            code = left.code
    assert not bench.touched(before)
    assert not out.getvalue()
    row.fits(f"exit {code}", err.getvalue())
