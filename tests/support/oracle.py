"""What a restore must give, worked out from the files alone, with ``json`` and a digest.

It shares no line with the library's ladder: it reads attempts, manifests, receipts and seals as
they lie on disk, checks every piece, and says which step is the newest whole one, and which version
each expert has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

Version = tuple[int, int]
"""(step, attempt)."""

Expert = tuple[int, int]
"""(MoE layer, expert)."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What can be restored at best.

    Attributes:
        version: newest whole version on the live history.
        committed: whether it is in storage.
        experts: newest whole version of every expert that is not newer.
    """

    version: Version
    committed: bool
    experts: dict[Expert, Version]


@dataclass(kw_only=True)
class Step:
    """A step that exists in storage, or that any start can finish.

    Attributes:
        dense: by piece, whether its bytes are right.
        experts: by expert, its version and by piece whether its bytes are right.
    """

    dense: dict[str, bool] = field(default_factory=dict)
    experts: dict[Expert, tuple[Version, dict[str, bool]]] = field(default_factory=dict)


class Files:
    """What lies in the run directory and in the memory tiers now."""

    def __init__(self, run_dir: Path, memory: Iterable[Path]) -> None:
        self._run_dir = run_dir
        self._bytes: dict[Path, bytes] = {}
        self.attempts = list(_read(sorted(run_dir.glob("attempts/*.json"))))
        self.manifests: dict[Version, dict[str, Any]] = {}
        self.receipts: dict[Version, dict[int, dict[str, Any]]] = {}
        self._damaged: set[Version] = set()
        for folder in run_dir.glob("step-*"):
            step, attempt = re.fullmatch(r"step-(\d{8,})-a(\d{4,})", folder.name).groups()
            version = (int(step), int(attempt))
            path = folder / "manifest.json"
            for manifest in _read([path]):
                self.manifests[version] = manifest
            if path.exists() and version not in self.manifests:
                self._damaged.add(version)
            self.receipts[version] = {r["rank"]: r for r in _read(folder.glob("rank-*.receipt"))}
        self.seals: dict[Version, dict[int, dict[str, Any]]] = {}
        for node in memory:
            for path in node.glob("moc-*/*.seal"):
                for seal in _read([path]):
                    seal["bad"] = self._bad_pieces(path, seal)
                    self.seals.setdefault(tuple(seal["version"]), {})[seal["rank"]] = seal

    def is_live(self, version: Version) -> bool:
        """Whether no attempt after the version's own went back to before it."""
        step, attempt = version
        numbers = [a["attempt"] for a in self.attempts]
        later = [a["resumed_step"] for a in self.attempts if a["attempt"] > attempt]
        return attempt in numbers and all(step <= resumed for resumed in later)

    def committed(self) -> dict[Version, Step]:
        """Live versions that are in storage, or that any start can finish."""
        found: dict[Version, Step] = {}
        for version, manifest in self.manifests.items():
            if self.is_live(version):
                step = found[version] = Step()
                self._judge(step, manifest["files"], [*manifest["dense"], *manifest["experts"]])
                for (layer, expert), (_, pieces) in step.experts.items():
                    made = tuple(manifest["versions"][layer][expert])
                    step.experts[layer, expert] = (made, pieces)
        for version, receipts in sorted(self.receipts.items()):
            known = version in found or version in self._damaged
            if known or not self.is_live(version) or 0 not in receipts:
                continue
            head = receipts[0]["head"]
            base = tuple(head["base"]) if head["base"] else None
            complete = sorted(receipts) == list(range(receipts[0]["world_size"]))
            if complete and (base is None or base in found):
                step = found[version] = Step(experts=dict(found[base].experts) if base else {})
                for layer, ids in enumerate(head["saved"]):
                    step.experts |= {(layer, expert): (version, {}) for expert in ids}
                for receipt in receipts.values():
                    self._judge(step, receipt["files"], receipt["pieces"])
        return found

    def sealed(self) -> list[Version]:
        """Live versions that every rank of their world has sealed."""
        return sorted(
            version
            for version, seals in self.seals.items()
            if self.is_live(version)
            and sorted(seals) == list(range(next(iter(seals.values()))["world_size"]))
        )

    def best(self, step: int | None = None) -> Expected | None:
        """The newest whole version (of a step, if given), and its experts; None for nothing."""
        committed, sealed = self.committed(), self.sealed()
        names = sorted({*committed, *sealed})
        for version in reversed([v for v in names if step in (None, v[0])]):
            if not self._is_dense_whole(version, committed.get(version), version in sealed):
                continue
            experts: dict[Expert, Version] = {}
            for older in {*committed, *filter(self.is_live, self.seals)}:
                if older <= version:
                    for key, made in self._whole_experts(older, committed.get(older)).items():
                        experts[key] = max(experts.get(key, made), made)
            if experts.keys() == self._layers(version):
                return Expected(version=version, committed=version in committed, experts=experts)
        return None

    def _is_dense_whole(self, version: Version, step: Step | None, is_sealed: bool) -> bool:
        held = self._in_memory(version, expert=None)
        if step is not None:
            return all(good or name in held for name, good in step.dense.items())
        bad = [n for s in self.seals[version].values() for n in s["bad"] if n[0] < 0]
        return is_sealed and not bad

    def _whole_experts(self, version: Version, step: Step | None) -> dict[Expert, Version]:
        """Experts that storage and the buffers of the versions they have hold whole."""
        found: dict[Expert, Version] = {}
        for seal in self.seals.get(version, {}).values():
            for layer, expert, count in seal["expert_pieces"]:
                if len(self._in_memory(version, (layer, expert))) == count:
                    found[layer, expert] = version
        for key, (made, pieces) in (step.experts if step else {}).items():
            held = self._in_memory(made, key) if self.is_live(made) else set()
            if all(good or name in held for name, good in pieces.items()):
                found[key] = max(found.get(key, made), made)
        return found

    def _in_memory(self, version: Version, expert: Expert | None) -> set[str]:
        """Good pieces of an expert, or dense ones, in the sealed buffers of a version."""
        wanted = expert or (-1, -1)
        return {
            _name(piece)
            for seal in self.seals.get(version, {}).values()
            for piece, *_ in seal["pieces"]
            if (piece[4], piece[5]) == wanted and (*wanted, _name(piece)) not in seal["bad"]
        }

    def _judge(self, step: Step, files: list[Any], records: list[Any]) -> None:
        for piece, file, offset, digest in records:
            path = self._run_dir / files[file]["key"]
            data = self._contents(path)[offset:]
            good = _digest(data[: _nbytes(piece)]) == digest
            if piece[4] < 0:
                step.dense[_name(piece)] = good
            else:
                made, pieces = step.experts.get((piece[4], piece[5]), ((0, 0), {}))
                step.experts[piece[4], piece[5]] = (made, {**pieces, _name(piece): good})

    def _bad_pieces(self, seal_path: Path, seal: dict[str, Any]) -> set[tuple[int, int, str]]:
        """Pieces of a buffer whose bytes are not those that were digested, where any were."""
        noted = next(_read([seal_path.with_suffix(".digests")]), None)
        if noted is None or noted["version"] != seal["version"]:
            return set()
        data = self._contents(seal_path.with_suffix(".safetensors"))
        return {
            (piece[4], piece[5], _name(piece))
            for (piece, _, offset, *_), digest in zip(seal["pieces"], noted["digests"], strict=True)
            if _digest(data[offset : offset + _nbytes(piece)]) != digest
        }

    def _contents(self, path: Path) -> bytes:
        if path not in self._bytes:
            try:
                self._bytes[path] = path.read_bytes()
            except FileNotFoundError:
                self._bytes[path] = b""
        return self._bytes[path]

    def _layers(self, version: Version) -> set[Expert]:
        if version in self.manifests:
            head = self.manifests[version]["head"]
        elif version in self.seals:
            head = next(iter(self.seals[version].values()))["head"]
        else:
            head = self.receipts[version][0]["head"]
        return {(layer, e) for layer, row in enumerate(head["routed"]) for e in range(len(row))}


_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "BOOL": 1}


def _nbytes(piece: list[Any]) -> int:
    numel = 1
    for size in piece[2][1]:
        numel *= size
    return numel * _ITEM_BYTES[piece[3]]


def _name(piece: list[Any]) -> str:
    return f"{piece[0]} {piece[1]} {piece[2]} {piece[6]}"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _read(paths: Iterable[Path]) -> Iterator[Any]:
    """What is in files; one that a helper at work has deleted is none, as is a damaged one."""
    for path in paths:
        with suppress(FileNotFoundError, ValueError):
            data = path.read_bytes()
            value = json.loads(data)
            body = b"{" + data.split(b",", 1)[1].removesuffix(b"\n")
            if value.pop("digest") == _digest(body):
                yield value
