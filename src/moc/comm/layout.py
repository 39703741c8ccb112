"""From process groups or a mesh to plain numbers: which ranks share what."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moc.core.topology import Topology
from moc.errors import ConfigError, LayoutError

__all__ = ["Layout"]


class Layout:
    """How a job's ranks share parameters and experts, seen from this rank.

    Attributes:
        topology: the same as plain numbers.
    """

    def __init__(self, topology: Topology) -> None:
        _check(topology)
        self.topology = topology

    def __repr__(self) -> str:
        t = self.topology
        return f"Layout(rank={t.rank} of {t.world_size}, dp={t.dp}, ep={t.ep}, edp={t.edp})"

    @classmethod
    def single(cls) -> Layout:
        """One process."""
        return cls(Topology())

    @classmethod
    def of_job(cls) -> Layout:
        """Plain data parallelism over all ranks of the job; one process where there is no job."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            return cls.from_groups()
        return cls.single()

    @classmethod
    def from_groups(
        cls,
        *,
        dp: dist.ProcessGroup | None = None,
        ep: dist.ProcessGroup | None = None,
        edp: dist.ProcessGroup | None = None,
    ) -> Layout:
        """Layout from this rank's process groups.

        Args:
            dp: ranks that hold the same dense parameters; by default all ranks of the job.
            ep: ranks over which the experts are spread, in expert order; by default this rank
                alone, which then holds all experts.
            edp: ranks that hold the same experts as this rank. By default ``dp`` where there is
                no ``ep``, this rank alone where ``ep`` spans all of ``dp``; else it must be given.

        Raises:
            ConfigError: torch.distributed is not set up.
            LayoutError: the groups do not fit together; says what does not.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not set up: call moc.init_process_group() first, or, for "
                "one process, use Layout.single()"
            )
        ranks = [None if g is None else dist.get_process_group_ranks(g) for g in (dp, ep, edp)]
        return cls._from_ranks(*ranks)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        dp: str | Sequence[str] | None = None,
        ep: str | Sequence[str] | None = None,
        edp: str | Sequence[str] | None = None,
    ) -> Layout:
        """Layout from named axes of a device mesh, each one name or several in mesh order.

        Args:
            mesh: holds this rank.
            dp: axes along which dense parameters are the same or sharded.
            ep: axes over which the experts are spread.
            edp: axes along which experts are the same or sharded.

        Raises:
            LayoutError: no such axis, or the groups do not fit together.
        """
        return cls._from_ranks(*(_along(mesh, axes) for axes in (dp, ep, edp)))

    @classmethod
    def _from_ranks(
        cls, dp: Sequence[int] | None, ep: Sequence[int] | None, edp: Sequence[int] | None
    ) -> Layout:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dense = tuple(range(world_size)) if dp is None else tuple(dp)
        if edp is None:
            if ep is None:
                edp = dense
            elif set(ep) == set(dense):
                edp = (rank,)
            else:
                raise LayoutError(
                    f"ep has {len(ep)} ranks and dp {len(dense)}: pass edp=, the group of ranks "
                    "that hold the same experts as this one"
                )
        spread = (rank,) if ep is None else tuple(ep)
        return cls(Topology(rank=rank, world_size=world_size, dp=dense, ep=spread, edp=tuple(edp)))


def _along(mesh: DeviceMesh, axes: str | Sequence[str] | None) -> list[int] | None:
    """Global ranks that differ from this one in some of these axes only."""
    if axes is None:
        return None
    wanted = (axes,) if isinstance(axes, str) else tuple(axes)
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise LayoutError(f"the mesh has no axis {unknown[0]!r}; its axes are {list(names)}")
    here = mesh.get_coordinate()
    if here is None:
        raise LayoutError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; give one that spans all ranks"
        )
    index = tuple(
        slice(None) if name in wanted else place for name, place in zip(names, here, strict=True)
    )
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


def _check(topology: Topology) -> None:
    """Refuse expert groups that cannot belong to one another, or to this dp group."""
    dp, ep, edp = (len(ranks) for ranks in (topology.dp, topology.ep, topology.edp))
    both = sorted(set(topology.ep) & set(topology.edp) - {topology.rank})
    if both:
        raise LayoutError(
            f"rank {both[0]} is in ep {topology.ep} and in edp {topology.edp}: it cannot hold "
            f"other experts than rank {topology.rank} and the same ones; give groups that share "
            "this rank alone"
        )
    if ep * edp > topology.world_size:
        raise LayoutError(
            f"ep of {ep} x edp of {edp} ranks is more than the world of {topology.world_size}; "
            "give as edp= the ranks with the same experts, one of each ep group"
        )
    if dp % (ep * edp) and (ep * edp) % dp:
        raise LayoutError(
            f"ep of {ep} x edp of {edp} = {ep * edp} ranks neither divides dp of {dp} ranks nor "
            "is a multiple of it; give groups whose sizes divide"
        )
