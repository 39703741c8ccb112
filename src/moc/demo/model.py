"""A small byte-level Mixture-of-Experts transformer with expert parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Experts", "MoE", "ModelConfig", "Router", "Transformer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes; the defaults give 1.7 million parameters."""

    vocab: int = 256
    seq_len: int = 128
    dim: int = 128
    layers: int = 4
    heads: int = 4
    experts: int = 8
    expert_dim: int = 256
    top_k: int = 2
    capacity_factor: float = 1.25
    gate_noise: float = 0.125
    balance_weight: float = 0.01


class Router(nn.Module):
    """The noisy top-k gate: G(x) = TopK(Softmax(f(x) + noise)), noise only in training."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.experts, bias=False)
        self.top_k, self.noise = config.top_k, config.gate_noise

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [tokens, experts], weights and global expert ids [tokens, k]."""
        logits = self.gate(tokens)
        if self.training:
            logits = logits + self.noise * torch.randn_like(logits)
        weights, indices = logits.softmax(-1).topk(self.top_k)
        return logits, weights, indices


class Experts(nn.Module):
    """The experts of this rank, stacked: feed-forward networks without biases."""

    def __init__(self, config: ModelConfig, ep_rank: int, ep_size: int) -> None:
        super().__init__()
        everyone = config.experts, config.dim, config.expert_dim
        mine = slice(ep_rank * config.experts // ep_size, (ep_rank + 1) * config.experts // ep_size)
        # Every rank draws all experts and keeps its own: one seed gives one model on any layout.
        w1 = torch.randn(everyone) * config.dim**-0.5
        w2 = torch.randn(everyone).transpose(1, 2) * config.expert_dim**-0.5
        self.w1 = nn.Parameter(w1[mine].contiguous())
        self.w2 = nn.Parameter(w2[mine].contiguous())

    def forward(self, seats: Tensor) -> Tensor:
        """[local experts, seats, dim] -> the same shape."""
        return torch.bmm(F.gelu(torch.bmm(seats, self.w1)), self.w2)


class MoE(nn.Module):
    """Experts behind a gate; each expert has a fixed number of seats per rank (its capacity)."""

    def __init__(self, config: ModelConfig, ep_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.config, self.ep_group = config, ep_group
        self.ep_size = dist.get_world_size(ep_group) if ep_group else 1
        self.router = Router(config)
        self.experts = Experts(config, dist.get_rank(ep_group) if ep_group else 0, self.ep_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the load-balancing loss (1 where the load is even)."""
        tokens = x.reshape(-1, x.shape[-1])
        logits, weights, indices = self.router(tokens)
        experts = self.config.experts
        choices = indices.t().reshape(-1)  # all first choices, then all second: these lose first
        one_hot = F.one_hot(choices, experts)
        capacity = math.ceil(self.config.capacity_factor * len(choices) / experts)
        place = (one_hot.cumsum(0) - 1).gather(1, choices[:, None]).squeeze(1)
        seated = place < capacity
        seat = torch.where(seated, choices * capacity + place, experts * capacity)

        filled = tokens.new_zeros(experts * capacity + 1, tokens.shape[1])  # last: the dropped
        filled = filled.index_copy(0, seat, tokens.repeat(self.config.top_k, 1))
        done = self._run_experts(filled[:-1].view(experts, capacity, -1)).reshape(-1, x.shape[-1])
        done = torch.cat([done, done.new_zeros(1, x.shape[-1])])[seat]
        kept = (weights.t().reshape(-1) * seated)[:, None]
        out = (done * kept).view(self.config.top_k, *tokens.shape).sum(0)

        share = one_hot.float().mean(0)
        balance = experts * (share * logits.softmax(-1).mean(0)).sum()
        return out.view_as(x), balance

    def _run_experts(self, seats: Tensor) -> Tensor:
        """[experts, capacity, dim]: every expert's seats to its rank, and back."""
        if self.ep_group is None:
            return self.experts(seats)  # type: ignore[no-any-return]
        experts, capacity, dim = seats.shape
        sent = _exchange(seats, self.ep_group)
        sent = sent.view(self.ep_size, experts // self.ep_size, capacity, dim).transpose(0, 1)
        done = self.experts(sent.reshape(experts // self.ep_size, -1, dim))
        done = done.view(experts // self.ep_size, self.ep_size, capacity, dim).transpose(0, 1)
        return _exchange(done.reshape(experts, capacity, dim), self.ep_group)


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Share r of dimension 0 goes to rank r of the group; gradients take the way back."""
    received: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received, None


class Block(nn.Module):
    """Attention, then a feed-forward network or a MoE layer."""

    def __init__(self, config: ModelConfig, moe: MoE | None) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        wide = 4 * config.dim
        self.moe = moe
        self.ffn = (
            None
            if moe
            else nn.Sequential(nn.Linear(config.dim, wide), nn.GELU(), nn.Linear(wide, config.dim))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output and its load-balancing loss, 0 without experts."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        if self.moe is None:
            assert self.ffn is not None
            return x + self.ffn(self.norm2(x)), x.new_zeros(())
        out, balance = self.moe(self.norm2(x))
        return x + out, balance


class Transformer(nn.Module):
    """Decoder-only; every second feed-forward network is a MoE layer."""

    def __init__(self, config: ModelConfig, ep_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.position = nn.Parameter(torch.randn(config.seq_len, config.dim) * 0.02)
        self.blocks = nn.ModuleList(
            Block(config, MoE(config, ep_group) if layer % 2 else None)
            for layer in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy in nats per byte, and what to add to it for balanced experts."""
        x = self.embed(inputs) + self.position[: inputs.shape[1]]
        balance = x.new_zeros(())
        for block in self.blocks:
            x, layer_balance = block(x)
            balance = balance + layer_balance
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, self.config.balance_weight * balance

    def parameters_by_kind(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Those that every rank has, and those of the experts of this rank."""
        dense: list[nn.Parameter] = []
        experts: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            (experts if ".experts." in name else dense).append(parameter)
        return dense, experts
