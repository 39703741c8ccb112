"""What a run directory holds, for people: committed steps, and why other folders are none.

It reads one small part of every live manifest and lists folders; data files are not opened
(`moc.persist.verify` does that), and nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from moc.core.manifest import (
    FORMAT,
    CommitHead,
    FileInfo,
    RunInfo,
    decode_json,
    manifest_key,
    parse_step_dir,
    step_dir,
)
from moc.core.versions import Timeline, Version
from moc.errors import ConfigError, DamagedError, KeyMissing, NewerFormat, StoreError
from moc.persist.commit import load_timeline, missing_receipts, versions_in
from moc.store import LocalStore, Store

__all__ = [
    "RUN_KEY",
    "Aside",
    "StepSummary",
    "Survey",
    "find_run",
    "read_run",
    "runs_below",
    "survey",
]

RUN_KEY = "run.json"

_HINT_FOLDERS = 32  # looked into, at most, for a run that the user may have meant


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest without its pieces; see `moc.core.manifest.Manifest`.

    Attributes:
        version: of the step.
        world_size: ranks that wrote it.
        head: layers, tokens, K's.
        files: every file that it needs, also those of older steps.
        versions: the version of every expert, [layer][expert].
        format: version of the layout on disk.
        created: ISO-8601 UTC.
    """

    version: Version
    world_size: int
    head: CommitHead
    files: list[FileInfo]
    versions: list[list[Version]]
    format: int = FORMAT
    created: str = ""

    @property
    def own_bytes(self) -> int:
        """Bytes of the files that this step wrote itself."""
        return sum(f.nbytes for f in self.files if f.is_of(self.version))

    @property
    def experts_saved(self) -> int:
        """Experts that this step wrote itself, over all MoE layers."""
        return sum(map(len, self.head.saved))

    @property
    def oldest_expert_age(self) -> int:
        """Steps between the oldest expert and the step."""
        return max((self.version.step - v.step for row in self.versions for v in row), default=0)


class Aside(msgspec.Struct, frozen=True):
    """A folder that is no step to restore, and why."""

    folder: str
    why: str


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What is there.

    Attributes:
        run: identity of the run.
        timeline: its attempts.
        steps: committed live steps whose files are all there, oldest first.
        other: every other folder that is, or looks like, a step.
    """

    run: RunInfo
    timeline: Timeline
    steps: list[StepSummary]
    other: list[Aside]


class _Writer(msgspec.Struct):
    """The part of a receipt that says how many there must be."""

    world_size: int


def find_run(store: Store) -> RunInfo | None:
    """Identity of the run in a store, None where there is none.

    Raises:
        DamagedError: there is one, without a whole ``run.json``.
    """
    try:
        return decode_json(store.get(RUN_KEY), RunInfo, RUN_KEY)
    except NewerFormat as error:
        raise NewerFormat(f"{store.url}: {error}") from error
    except DamagedError as error:
        raise DamagedError(
            f"{store.url}: {error}; copy it back from a backup, or use another directory"
        ) from error
    except KeyMissing:
        names = store.children()
        if "attempts" in names or any(parse_step_dir(name) for name in names):
            raise DamagedError(
                f"{store.url}: {RUN_KEY} is missing beside steps or attempts; copy it back, or "
                "use an empty directory"
            ) from None
        return None


def read_run(store: Store) -> RunInfo:
    """Identity of the run in a store.

    Raises:
        ConfigError: there is no run.
        DamagedError: there is one, without a whole ``run.json``.
    """
    run = find_run(store)
    if run is None:
        raise ConfigError(f"no run at {store.url}: {_hint(store, store.children())}")
    return run


def survey(store: Store) -> Survey:
    """Look at a run.

    Raises:
        ConfigError: there is no run.
        DamagedError: ``run.json`` or an attempt's record is damaged, so that nothing can be said.
        StoreError: the store cannot be read.
    """
    run = read_run(store)
    timeline = load_timeline(store)
    names = store.children()
    versions = versions_in(store, timeline)
    inside = {step_dir(v): set(store.children(step_dir(v))) for v in versions}
    steps: list[StepSummary] = []
    other: list[Aside] = []
    pending: list[Version] = []
    needed: set[str] = set()
    for version in versions:
        folder = step_dir(version)
        if not timeline.is_live(version):
            other.append(Aside(folder, _why_dead(timeline, version)))
        else:
            try:
                step = _summary(store, version)
            except KeyMissing:
                pending.append(version)
                continue
            except (DamagedError, StoreError) as error:
                other.append(Aside(folder, f"damaged: {error}"))
                continue
            needed |= {f.key.partition("/")[0] for f in step.files}
            # Disks of the nodes' own: the others' files are not here to be seen.
            missing = [] if run.node_local else _missing_files(store, step, inside)
            if missing:
                told = f"damaged: it needs {missing[0]}, which is missing"
                more = f" (and {len(missing) - 1} more)" * (len(missing) > 1)
                other.append(Aside(folder, told + more))
            else:
                steps.append(step)
    for version in pending:
        folder = step_dir(version)
        retired = "retired, and kept for files that later steps need"
        why = retired if folder in needed else _why_uncommitted(store, version, inside[folder])
        other.append(Aside(folder, why))
    looks_alike = [n for n in names if parse_step_dir(n) is None and _looks_like_step(n)]
    other += [Aside(name, "not a name that MoC gives; left alone") for name in looks_alike]
    return Survey(
        run=run, timeline=timeline, steps=steps, other=sorted(other, key=lambda a: a.folder)
    )


def _summary(store: Store, version: Version) -> StepSummary:
    key = manifest_key(version)
    step = decode_json(store.get(key), StepSummary, key)
    if step.version != version:
        raise DamagedError(f"{key} is the manifest of step {step.version}")
    return step


def _missing_files(store: Store, step: StepSummary, inside: Mapping[str, set[str]]) -> list[str]:
    """Files that are neither listed nor, as a listing may lag, there by their key."""
    parts = [f.key.partition("/") for f in step.files]
    keys = [f"{folder}/{name}" for folder, _, name in parts if name not in inside.get(folder, ())]
    return [key for key in keys if not store.exists(key)]


def _why_dead(timeline: Timeline, version: Version) -> str:
    for attempt in timeline.attempts:
        if attempt.attempt > version.attempt and version.step > attempt.resumed_step:
            return (
                f"not live: attempt {attempt.attempt} went back to step {attempt.resumed_step} "
                "and on from there"
            )
    return f"not live: attempt {version.attempt} has no record"


def _why_uncommitted(store: Store, version: Version, names: set[str]) -> str:
    receipts = sorted(name for name in names if name.endswith(".receipt"))
    if not receipts:
        return "not committed: no receipts; being written, or ended by a fault"
    key = f"{step_dir(version)}/{receipts[0]}"
    try:
        world_size = decode_json(store.get(key), _Writer, key).world_size
    except (DamagedError, StoreError) as error:
        return f"not committed: {error}"
    missing = [*missing_receipts(store, version, world_size)]
    if missing:
        return f"not committed: of {world_size} receipts, those of ranks {missing} are missing"
    return "not committed, though all receipts are there: the next start can finish it"


def _looks_like_step(name: str) -> bool:
    return name.lstrip(".").lower().startswith("step")


def runs_below(store: Store, names: Sequence[str]) -> list[str]:
    """Runs in folders of a folder: one is easily looked for one or two folders too high.

    Args:
        store: where no run is.
        names: its children.
    """
    found = []
    if isinstance(getattr(store, "inner", store), LocalStore):  # elsewhere looking costs
        for name in names[:_HINT_FOLDERS]:
            with suppress(StoreError):
                inner = [name, *(f"{name}/{n}" for n in store.children(name)[:_HINT_FOLDERS])]
                found += [f"{store.url}/{key}" for key in inner if store.exists(f"{key}/{RUN_KEY}")]
    return found


def _hint(store: Store, names: Sequence[str]) -> str:
    found = runs_below(store, names)
    if found:
        return f"did you mean {' or '.join(found[:3])}?"
    if not names:
        return "it does not exist or is empty; give the directory of the CheckpointManager"
    return f"it holds no {RUN_KEY}; give the directory of the CheckpointManager"
