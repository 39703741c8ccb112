"""Nodes and their disks: one directory that all share, or one of its own for each node.

With ``node_local`` the data files stay on the node whose ranks wrote them; the coordinator's node
has the other keys, and every node has copies. A restore first brings the nodes together again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from moc import knobs
from moc.comm.group import agree, gather_values, name_ranks
from moc.core.digest import digest_bytes
from moc.core.manifest import (
    Manifest,
    RunInfo,
    decode_json,
    is_control_key,
    is_data_key,
    manifest_key,
    parse_step_dir,
    writer_of,
)
from moc.core.versions import Timeline
from moc.engine.session import Session, host_name
from moc.errors import ConfigError, DamagedError, KeyExists, KeyMissing, StoreError
from moc.persist.endpoint import Address, ControlClient, listen, own_addresses
from moc.persist.mirror import manifests_in
from moc.persist.survey import RUN_KEY
from moc.recover.ladder import STORAGE
from moc.store.base import Store
from moc.store.local import LocalStore
from moc.store.node_local import NodeLocalStore
from moc.store.wrap import RetryingStore, Wrapper

__all__ = [
    "check_directory",
    "check_endpoint",
    "check_setting",
    "find_files",
    "gather_control",
    "is_folder",
    "keep_copy",
    "open_endpoint",
    "place_of",
]

_SEEN_SECS = 60.0  # NFS may believe for so long that a new folder is not there
_POLL_SECS = 0.05
_REMEDY = (
    "give all ranks one directory on a file system that the nodes share, or "
    "CheckpointManager(node_local=True) to keep each node's files on its own disk"
)

Struck = dict[tuple[int, str, int], str]


def is_folder(store: Store) -> bool:
    """Whether a store is a folder of this machine's file systems."""
    return isinstance(store.inner if isinstance(store, Wrapper) else store, LocalStore)


def place_of(store: Store) -> str:
    """Host and directory, for people."""
    return f"{host_name()}:{store.url}"


def check_setting(told: Sequence[tuple[str, str, bool]], *, folder: bool) -> None:
    """All ranks must mean the same.

    Args:
        told: of every rank: key of its node, its place, and whether disks are node-local.
        folder: whether this rank's store is a folder.

    Raises:
        ConfigError: they do not, or no folder is given.
    """
    is_local = told[0][2]
    other = [rank for rank, (_, _, local) in enumerate(told) if local != is_local]
    if other:
        raise ConfigError(
            f"node_local={is_local} on rank 0, {not is_local} on {name_ranks(other)}; give the "
            "same on every rank"
        )
    if not is_local:
        return
    if not folder:
        raise ConfigError("node_local=True takes a directory on the node's own disk, no URL")
    first: dict[str, tuple[int, str]] = {}
    for rank, (key, place, _) in enumerate(told):
        before = first.setdefault(key, (rank, place))
        if before[1] != place:
            raise ConfigError(
                f"ranks {before[0]} and {rank} are on one node and have directories {before[1]} "
                f"and {place}; with node_local=True the ranks of a node share one"
            )


def check_directory(session: Session, made: bool) -> None:
    """Without ``node_local``, see that every node sees the run that rank 0 sees. Collective.

    Args:
        session: knows the run.
        made: whether this start has made the run; then what is wrong is removed again.

    Raises:
        ConfigError: some node does not.
    """
    if session.node_local or len(set(session.nodes)) == 1 or not session.run_id:
        return
    seen, place = "", place_of(session.store)
    folder = is_folder(session.store)
    if folder and session.is_lister:
        patience = min(_SEEN_SECS, session.policy.timeout_secs / 4)
        end = knobs.monotonic() + patience
        while not (seen := _run_of(session.store)) and knobs.monotonic() < end:
            knobs.sleep(_POLL_SECS)
    mine = (place, seen, folder and session.is_lister)
    told = gather_values(session.group, mine, tuple[str, str, bool])
    for rank, (other, run_id, looked) in enumerate(told):
        if looked and run_id != session.run_id:
            if made and session.rank == 0:
                session.store.delete(RUN_KEY)
            holds = f"holds run {run_id}" if run_id else "does not have it"
            raise ConfigError(
                f"rank 0 has run {session.run_id} in {told[0][0]}, and rank {rank} on another node "
                f"{holds} in {other}: the nodes do not share this directory; {_REMEDY}"
            )


def gather_control(session: Session) -> None:
    """Give rank 0's node, and the others, the keys that only some nodes have. Collective.

    Raises:
        ConfigError: nodes hold different runs, or different histories of one.
    """
    if not session.node_local:
        return
    store, writes = session.store, not session.weights_only

    def look() -> dict[str, str]:
        if not session.is_lister:
            return {}
        keys = [key for key in store.list() if is_control_key(key) and key != "latest"]
        return {key: digest_bytes(store.get(key)) for key in keys}

    held = gather_values(session.group, agree(session.group, look), dict[str, str])
    listers = sorted(set(session.nodes))
    places = gather_values(session.group, place_of(store), str)
    _refuse_different(held, places)
    wanted = _worth_copying({rank: held[rank] for rank in listers})
    for key in wanted if writes else ():
        lacking = [rank for rank in listers if key not in held[rank]]
        source = next(rank for rank in listers if key in held[rank])
        if not lacking:
            continue
        data = session.group.broadcast(
            store.get(key) if session.rank == source else None, src=source
        )
        if session.rank in lacking and (session.rank == 0 or not key.endswith(".receipt")):
            with suppress(KeyExists):
                store.put_new(key, [data])


def keep_copy(session: Session, key: str, data: bytes) -> None:
    """On another node than the coordinator's, keep what rank 0 has just put."""
    if session.node_local and session.is_lister and session.rank > 0:
        with suppress(KeyExists):
            session.store.put_new(key, [data])


def find_files(
    session: Session, manifests: Sequence[Manifest], timeline: Timeline
) -> tuple[Struck, set[str]]:
    """Which node has which data file. Collective; fills ``session.holders``.

    Returns:
        Places that no node has, with a line about each; and the keys of those files.
    """
    if not session.node_local:
        return {}, set()

    def look() -> dict[str, int]:
        if not session.is_lister:
            return {}
        store = session.store
        return {key: store.size(key) for key in store.list() if is_data_key(key)}

    mine = (place_of(session.store), agree(session.group, look))
    told = gather_values(session.group, mine, tuple[str, dict[str, int]])
    sizes = {f.key: f.nbytes for m in manifests for f in m.files}
    session.holders = {
        key: [node for node in sorted(set(session.nodes)) if told[node][1].get(key) == nbytes]
        for key, nbytes in sizes.items()
    }
    here = ", ".join(told[node][0] for node in sorted(set(session.nodes)))
    struck: Struck = {}
    for manifest in manifests:
        for record in (*manifest.dense, *manifest.experts):
            key = manifest.files[record.file].key
            if not session.holders[key]:
                text = _tell_lost(key, timeline, here)
                struck[STORAGE, key, record.offset] = text
    return struck, {key for key, nodes in session.holders.items() if not nodes}


def open_endpoint(session: Session) -> None:
    """Rank 0 opens the endpoint that its helper will serve; all learn where. Collective."""
    if not session.node_local or len(set(session.nodes)) == 1:
        return

    def opened() -> bytes:
        if session.rank:
            return b""
        place = place_of(session.store)
        session.listener, address = listen(place, own_addresses(host_name()))
        return msgspec.msgpack.encode(address)

    told = session.group.broadcast(agree(session.group, opened))
    session.endpoint = msgspec.msgpack.decode(told, type=Address)
    if session.node == session.nodes[0]:
        return
    control = ControlClient(session.endpoint, session.rank)
    session.store = RetryingStore(NodeLocalStore(session.store, control))


def check_endpoint(session: Session) -> None:
    """After the helpers have started: every node must reach rank 0's. Collective.

    Raises:
        ConfigError: one does not; names it and the addresses.
    """
    if session.endpoint is None:
        return

    def reach() -> None:
        if not session.is_lister or session.rank == 0:
            return
        try:
            session.store.size(RUN_KEY)
        except StoreError as error:
            raise ConfigError(
                f"{place_of(session.store)} cannot reach the coordinator, as node_local=True "
                f"needs: {error}; see that its firewall lets the nodes of the job connect"
            ) from error

    agree(session.group, reach)


def _run_of(store: Store) -> str:
    try:
        return decode_json(store.get(RUN_KEY), RunInfo, RUN_KEY).run_id
    except (KeyMissing, DamagedError):
        return ""


def _refuse_different(held: Sequence[Mapping[str, str]], places: Sequence[str]) -> None:
    first: dict[str, int] = {}
    for rank, keys in enumerate(held):
        for key in sorted(keys, key=lambda k: (k != RUN_KEY, k)):
            digest = keys[key]
            other = first.setdefault(key, rank)
            if held[other][key] != digest:
                what = "another run" if key == RUN_KEY else f"another history ({key} differs)"
                raise ConfigError(
                    f"{places[rank]} (rank {rank}) holds {what} than {places[other]} (rank "
                    f"{other}); move one of the two directories away, or give another directory"
                )


def _worth_copying(held: Mapping[int, Mapping[str, str]]) -> list[str]:
    """What a node that lacks it should have, in the order in which to put it.

    A copy of a manifest may outlive the step, which rank 0 has retired since: so of those that
    rank 0 lacks, only newer ones than its own count. Receipts matter where they may still become
    a step.
    """
    keys = {key for found in held.values() for key in found}
    own = manifests_in([*held[0]])
    known = [v for v in manifests_in([*keys]) if not own or v >= own[-1] or v in own]
    newest = max(known, default=None)
    wanted = sorted(key for key in keys if "/" not in key or key.startswith("attempts/"))
    for key in sorted(keys):
        version = parse_step_dir(key.partition("/")[0])
        if key.endswith(".receipt") and version and (newest is None or version > newest):
            wanted.append(key)
    return [*wanted, *map(manifest_key, known)]


def _tell_lost(key: str, timeline: Timeline, here: str) -> str:
    rank = writer_of(key)
    version = parse_step_dir(key.partition("/")[0])
    places = next(
        (a.places for a in timeline.attempts if version and a.attempt == version.attempt), []
    )
    wrote = f" on {places[rank]}" if rank < len(places) else ""
    return f"{key}, which rank {rank} wrote{wrote}, is on none of the nodes here: {here}"
