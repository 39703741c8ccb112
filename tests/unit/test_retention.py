"""What may be overwritten in memory and deleted from storage, and what never."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.choose.pick import ChooseState, choose
from moc.choose.policy import Policy
from moc.choose.retention import BufferFacts, ManifestFacts, Sweep, role, sweep, victim
from moc.core.manifest import manifest_key, parse_step_dir, receipt_key, step_dir
from moc.core.versions import AttemptRecord, Timeline, Version

# ------------------------------------------------------------------------------------- the memory


def buffer(index: int, step: int | None, *experts: int, locked: bool = False) -> BufferFacts:
    version = None if step is None else Version(step, 1)
    return BufferFacts(index, version, frozenset((0, e) for e in experts), locked)


def next_victim(
    buffers: Sequence[BufferFacts],
    dead: Sequence[int] = (),
    commit: int | None = None,
    persisting: int | None = None,
    sealed: int | None = None,
) -> int | None:
    """`victim` with steps of attempt 1 for versions."""
    steps = (commit, persisting, sealed)
    versions = [None if step is None else Version(step, 1) for step in steps]
    return victim(
        buffers,
        live=[b.index not in dead for b in buffers],
        commit=versions[0],
        persisting=versions[1],
        sealed_everywhere=versions[2],
    )


def test_unsealed_and_dead_go_first_by_index() -> None:
    assert next_victim([buffer(0, 10), buffer(2, None), buffer(1, None)]) == 1
    assert next_victim([buffer(0, 10), buffer(1, 20), buffer(2, None)], dead=[1]) == 1


def test_oldest_unprotected_goes() -> None:
    buffers = [buffer(0, 40), buffer(1, 20), buffer(2, 30), buffer(3, 10)]
    assert next_victim(buffers) == 3
    assert next_victim(buffers, commit=10) == 1
    assert next_victim(buffers, commit=10, persisting=20) == 2
    assert next_victim(buffers, commit=10, persisting=20, sealed=30) == 0
    assert next_victim(buffers[1:], commit=10, persisting=20, sealed=30) is None


def test_locked_is_never_taken() -> None:
    buffers = [buffer(0, None, locked=True), buffer(1, 10, locked=True), buffer(2, 20)]
    assert next_victim(buffers) == 2
    assert next_victim(buffers, commit=20) is None


def test_newest_version_of_an_expert_stays_while_memory_allows() -> None:
    held = buffer(0, 10, 7)
    assert next_victim([held, buffer(1, 20, 1), buffer(2, 30, 1)]) == 1
    assert next_victim([held, buffer(1, 20, 1), buffer(2, 30, 2)]) == 0  # all hold one: the oldest
    assert next_victim([held, buffer(1, 20, 7), buffer(2, 30, 1)]) == 0


def test_a_dead_version_is_no_newest_version() -> None:
    buffers = [buffer(0, 10, 1), buffer(1, 20, 2), buffer(2, 30, 1, locked=True)]
    assert next_victim([*buffers, buffer(3, 40, 2)]) == 0
    assert next_victim([*buffers, buffer(3, 40, 2, locked=True)], dead=[3], commit=10) == 1
    assert next_victim([*buffers, buffer(3, 40, 2)], dead=[3]) == 3


def test_no_buffers() -> None:
    assert next_victim([]) is None


def test_roles_of_the_triple_buffer() -> None:
    """Figure 9: the upload completes, PERSIST becomes RECOVERY, RECOVERY becomes SNAPSHOT."""
    buffers = [buffer(0, 10), buffer(1, 20), buffer(2, None)]

    def roles(commit: int | None, persisting: int | None) -> list[str]:
        versions = [None if step is None else Version(step, 1) for step in (commit, persisting)]
        return [role(b, commit=versions[0], persisting=versions[1]) for b in buffers]

    assert roles(None, None) == ["SNAPSHOT", "SNAPSHOT", "SNAPSHOT"]
    assert roles(None, 10) == ["PERSIST", "SNAPSHOT", "SNAPSHOT"]
    assert roles(10, 20) == ["RECOVERY", "PERSIST", "SNAPSHOT"]
    assert roles(20, None) == ["SNAPSHOT", "RECOVERY", "SNAPSHOT"]


@given(st.data())
def test_victim_is_never_protected(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(1, 9) | st.none(), max_size=6))
    experts = st.lists(st.integers(0, 3), max_size=3)
    buffers = [
        buffer(i, step, *data.draw(experts), locked=data.draw(st.booleans()))
        for i, step in enumerate(steps)
    ]
    dead = data.draw(st.sets(st.integers(0, 5)))
    which = st.integers(1, 9) | st.none()
    protected = commit, persisting, sealed = [data.draw(which) for _ in range(3)]
    chosen = next_victim(buffers, sorted(dead), commit, persisting, sealed)
    free = [
        b
        for b in buffers
        if not b.locked and (b.version is None or b.version.step not in protected)
    ]
    if chosen is None:
        assert not free
    else:
        assert buffers[chosen] in free


def test_default_buffers_keep_every_expert_in_memory() -> None:
    """ceil(N / K_snapshot) + 3 buffers: no expert's newest version is ever overwritten first."""
    experts, rule = 16, Policy(k_snapshot=4, k_persist=1)
    state = ChooseState.fresh([experts])
    buffers = [BufferFacts(i, None) for i in range(4 + 3)]
    commit = persisting = sealed = None
    for save in range(1, 80):
        choice = choose(state.last_snapshot, state.last_commit, [[0] * experts], rule)
        target = victim(
            buffers,
            live=[True] * len(buffers),
            commit=commit,
            persisting=persisting,
            sealed_everywhere=sealed,
        )
        assert target is not None
        buffers[target] = BufferFacts(target, None)
        version = Version(save, 1)
        held = frozenset((0, e) for e in choice.snapshot[0])
        buffers[target] = BufferFacts(target, version, held)
        state = state.snapshotted(save, choice.snapshot).committed(save, choice.persist)
        commit, persisting, sealed = persisting, version, version
        if save > 4:
            newest = {e: s for e, s in enumerate(state.last_snapshot[0])}
            for expert, step in newest.items():
                assert any(b.version == Version(step, 1) and (0, expert) in b.experts
                           for b in buffers)  # fmt: skip


# ------------------------------------------------------------------------------------ the storage


def timeline(*resumed: int) -> Timeline:
    """Attempts 1, 2, ... that resumed at these steps."""
    return Timeline.of(
        [
            AttemptRecord(
                attempt=i + 1, parent=i, resumed_step=step, world_size=1, k_snapshot=1, k_persist=1
            )
            for i, step in enumerate(resumed)
        ]
    )


def data_files(version: Version) -> tuple[str, str]:
    folder = step_dir(version)
    return f"{folder}/dense-00000.safetensors", f"{folder}/experts-00000.safetensors"


def folder_keys(version: Version, *, committed: bool = True) -> set[str]:
    keys = {*data_files(version), receipt_key(version, 0)}
    return keys | {manifest_key(version)} if committed else keys


def step_facts(version: Version, *bases: Version) -> ManifestFacts:
    """A step that names its own files and the expert files of other steps."""
    return ManifestFacts(
        version, frozenset({*data_files(version), *(data_files(base)[1] for base in bases)})
    )


def versions(*steps: int, attempt: int = 1) -> list[Version]:
    return [Version(step, attempt) for step in steps]


def test_keeps_the_newest_and_multiples() -> None:
    steps = versions(10, 20, 30, 40, 50)
    keys = set().union(*(folder_keys(v) for v in steps))
    plan = sweep([step_facts(v) for v in steps], sorted(keys), timeline(0), 2, 20)
    assert plan.keep == tuple(versions(20, 40, 50))
    assert plan.retire == tuple(versions(10, 30))
    gone = folder_keys(steps[0], committed=False) | folder_keys(steps[2], committed=False)
    assert set(plan.delete) == gone


def test_none_keeps_all() -> None:
    steps = versions(10, 20, 30)
    keys = set().union(*(folder_keys(v) for v in steps))
    plan = sweep([step_facts(v) for v in steps], sorted(keys), timeline(0), None, None)
    assert plan == Sweep(keep=tuple(steps))


def test_a_file_that_a_kept_step_names_stays_alone() -> None:
    old, new = versions(10, 20)
    keys = folder_keys(old) | folder_keys(new)
    plan = sweep([step_facts(old), step_facts(new, old)], sorted(keys), timeline(0), 1, None)
    assert plan.retire == (old,)
    assert plan.delete == (receipt_key(old, 0), data_files(old)[0])  # the receipt first
    # once no kept step names it, a later sweep takes it: the folder has no manifest any more
    newer = Version(30, 1)
    left = {data_files(old)[1]} | folder_keys(new) | folder_keys(newer)
    plan = sweep([step_facts(new, old), step_facts(newer)], sorted(left), timeline(0), 1, None)
    assert data_files(old)[1] in plan.delete


def test_in_flight_is_never_touched() -> None:
    done, flying, abandoned = Version(20, 1), Version(30, 1), Version(10, 1)
    keys = folder_keys(done) | folder_keys(flying, committed=False)
    keys |= folder_keys(abandoned, committed=False)
    plan = sweep([step_facts(done)], sorted(keys), timeline(0), 1, None)
    assert set(plan.delete) == folder_keys(abandoned, committed=False)
    assert plan.retire == ()


def test_dead_steps_go_once_their_attempt_is_over() -> None:
    alive, dead, late = Version(10, 1), Version(20, 1), Version(30, 1)
    keys = folder_keys(alive) | folder_keys(dead) | folder_keys(late, committed=False)
    facts = [step_facts(alive), step_facts(dead, alive)]
    plan = sweep(facts, sorted(keys), timeline(0, 10), 3, None)
    assert (plan.keep, plan.retire) == ((alive,), (dead,))
    assert set(plan.delete) == folder_keys(dead, committed=False) | folder_keys(
        late, committed=False
    )


def test_a_late_process_touches_nothing_of_a_newer_attempt() -> None:
    mine, theirs = Version(20, 1), Version(15, 2)
    keys = folder_keys(mine) | folder_keys(theirs) | folder_keys(Version(25, 2), committed=False)
    plan = sweep([step_facts(mine), step_facts(theirs)], sorted(keys), timeline(0), 1, None)
    assert (plan.retire, plan.delete) == ((), ())
    assert plan.keep == (theirs, mine)


def test_what_could_be_rolled_forward_stays() -> None:
    """Receipts of attempt 1 at a live step, newer than the newest commit."""
    done, receipts = Version(10, 1), Version(20, 1)
    keys = folder_keys(done) | folder_keys(receipts, committed=False)
    plan = sweep([step_facts(done)], sorted(keys), timeline(0, 20), 1, None)
    assert plan.delete == ()


def test_nothing_goes_without_a_complete_live_step() -> None:
    old, new = versions(10, 20)
    keys = (folder_keys(old) | folder_keys(new)) - {data_files(old)[0], data_files(new)[0]}
    plan = sweep([step_facts(old), step_facts(new)], sorted(keys), timeline(0), 1, None)
    assert plan == Sweep(keep=(old, new))
    dead = sweep([step_facts(new)], sorted(folder_keys(new)), timeline(0, 10), 1, None)
    assert dead == Sweep(keep=(new,))
    assert sweep([step_facts(new)], sorted(folder_keys(new)), Timeline(), 1, None).retire == ()


def test_an_incomplete_newest_step_does_not_count() -> None:
    steps = versions(10, 20, 30)
    keys = set().union(*(folder_keys(v) for v in steps)) - {data_files(steps[2])[0]}
    plan = sweep([step_facts(v) for v in steps], sorted(keys), timeline(0), 1, None)
    assert plan.keep == (steps[1], steps[2])
    assert plan.retire == (steps[0],)


def test_protected_versions_stay() -> None:
    steps = versions(10, 20, 30)
    keys = set().union(*(folder_keys(v) for v in steps))
    facts = [step_facts(v) for v in steps]
    plan = sweep(facts, sorted(keys), timeline(0), 1, None, [steps[0]])
    assert plan.retire == (steps[1],)
    torn = folder_keys(Version(5, 1), committed=False)
    plan = sweep(facts, sorted(keys | torn), timeline(0), None, None, [Version(5, 1)])
    assert plan.delete == ()


def test_unknown_names_and_unreadable_steps_stay() -> None:
    old, new = versions(10, 20)
    strange = {
        "latest", "run.json", "attempts/0001.json", "notes/rank-00000.receipt",
        "step-00000010-a0001.bak/dense-00000.safetensors", "step-10-a1/dense-00000.safetensors",
        "step-00000010/dense-00000.safetensors", f"{step_dir(old)}/notes.txt",
        f"{step_dir(old)}/deep/dense-00000.safetensors",
        f"{step_dir(old)}/dense-00000.safetensors~",
    }  # fmt: skip
    unreadable = folder_keys(Version(5, 1))
    keys = folder_keys(old) | folder_keys(new) | strange | unreadable
    plan = sweep([step_facts(old), step_facts(new)], sorted(keys), timeline(0), 1, None)
    assert set(plan.delete) == folder_keys(old, committed=False)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_sweep_never_hurts_what_is_kept(data: st.DataObject) -> None:
    """Any attempts, manifests, missing files: no kept file goes, one complete live step stays."""
    resumed = [0, *data.draw(st.lists(st.integers(0, 9), max_size=3))]
    history = timeline(*resumed)
    every = st.builds(Version, st.integers(1, 9), st.integers(1, len(resumed) + 1))
    present = sorted(data.draw(st.sets(every, max_size=10)))
    facts, keys = [], {"latest", "run.json"}
    for i, version in enumerate(present):
        bases = data.draw(st.lists(st.sampled_from(present[: i + 1]), max_size=4))
        committed = data.draw(st.booleans())
        keys |= folder_keys(version, committed=committed)
        if committed:
            facts.append(step_facts(version, *bases))
    if keys:
        keys -= data.draw(st.sets(st.sampled_from(sorted(keys)), max_size=2))
    keep_k = data.draw(st.none() | st.integers(1, 4))
    every_n = data.draw(st.none() | st.integers(1, 4))
    plan = sweep(facts, sorted(keys), history, keep_k, every_n)

    named = {m.version: m.files for m in facts}
    assert set(plan.keep) | set(plan.retire) == set(named)
    assert not set(plan.keep) & set(plan.retire)
    assert list(plan.retire) == sorted(plan.retire)
    assert set(plan.delete) <= keys
    for version in plan.keep:
        assert not named[version] & set(plan.delete)
    for key in plan.delete:
        owner = parse_step_dir(key.partition("/")[0])
        assert owner is not None
        assert owner.attempt <= history.head

    complete = [v for v in named if history.is_live(v) and named[v] <= keys]
    if not complete:
        assert not plan.retire
        assert not plan.delete
        return
    assert max(complete) in plan.keep
    left = keys - set(plan.delete) - {manifest_key(v) for v in plan.retire}
    kept_complete = [v for v in plan.keep if v in complete]
    assert len(kept_complete) >= min(len(complete), keep_k or len(complete))
    assert all(named[v] <= left for v in kept_complete)
    rest = [m for m in facts if m.version in plan.keep]
    again = sweep(rest, sorted(left), history, keep_k, every_n)
    if keep_k is None:
        assert again.delete == ()


@pytest.mark.parametrize("k_persist", [1, 2, 4])
def test_steady_state_of_three_kept_steps(k_persist: int) -> None:
    """GPT-350M-16E's proportions: experts are 86.3 % of the bytes.

    Once the first, full save is out of use there are three dense files, and the expert files of
    one rotation and of the two steps before it: for K_persist = 1 of 16 that is
    3 * 0.137 + 18/16 * 0.863 = 1.38 full states, where three full checkpoints take 3.
    """
    layers, experts, share = 12, 16, 0.863
    rule = Policy(k_snapshot=4, k_persist=k_persist)
    holders = [list(range(experts))] * layers
    state = ChooseState.fresh([experts] * layers)
    size: dict[str, float] = {}
    facts: dict[Version, ManifestFacts] = {}
    newest: dict[tuple[int, int], str] = {}
    held = []
    for step in range(80):
        version = Version(step, 1)
        choice = choose(state.last_snapshot, state.last_commit, holders, rule, full=not newest)
        state = state.snapshotted(step, choice.snapshot).committed(step, choice.persist)
        dense, routed = data_files(version)
        saved = [(layer, e) for layer, ids in enumerate(choice.persist) for e in ids]
        newest.update(dict.fromkeys(saved, routed))
        size[dense] = 1 - share
        size[routed] = share * len(saved) / (layers * experts)
        size[manifest_key(version)] = size[receipt_key(version, 0)] = 0.0
        facts[version] = ManifestFacts(version, frozenset({dense, *newest.values()}))
        plan = sweep(list(facts.values()), sorted(size), timeline(0), 3, None)
        for gone in plan.retire:
            del facts[gone], size[manifest_key(gone)]
        for key in plan.delete:
            del size[key]
        assert all(m.files <= set(size) for m in facts.values())
        held.append(sum(size.values()))
    assert len(facts) == 3
    expected = 3 * (1 - share) + (experts // k_persist + 2) * k_persist / experts * share
    assert held[20:] == pytest.approx([expected] * len(held[20:]))
    if k_persist == 1:
        assert max(held[20:]) < 1.5
