"""The part of a plan that the cache core uses: groups, their sight, and pages per slab. No layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hybridkv.errors import PlanError
from hybridkv.plan import GroupPlan, Plan
from hybridkv.sight import EVERYTHING, Sight
from hybridkv.spec import AttentionLayer, HiddenTap, LinearState


class Role(StrEnum):
    """What a group must have for a request to resume at position n."""

    FULL = "full"
    """Every block of [0, n)."""
    LOCAL = "local"
    """The blocks that a window or chunk still sees at n."""
    TAP = "tap"
    """Every block of [0, n), but only for requests that use the tap."""
    STATE = "state"
    """A state at exactly n."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One page table of every request."""

    name: str
    role: Role
    pages_per_slab: int
    page_bytes: int = 1
    pages_per_state: int = 1
    sight: Sight = EVERYTHING
    """The tokens that a token sees in this group. Only local groups see less than everything."""
    pool: str = ""
    """Name of the pool. Groups of one pool share its slabs, as tapped layers do. Default: a pool of its own."""

    @property
    def pool_name(self) -> str:
        return self.pool or self.name


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a cache: token groups in the order of all its tables (full, local), taps, and state groups."""

    block_tokens: int
    num_slabs: int
    token_groups: tuple[CacheGroup, ...]
    state_groups: tuple[CacheGroup, ...]
    tap_groups: tuple[CacheGroup, ...] = ()
    """Layers whose hidden states requests may use. The cache adds one to its tables with the first request for it."""
    kv_bytes_per_token: int = field(default=0)
    """Bytes of full-attention KV per token, with which the bytes of a checkpoint are compared."""

    @classmethod
    def of(
        cls, groups: Sequence[CacheGroup], *, block_tokens: int, num_slabs: int, kv_bytes_per_token: int = 0
    ) -> CacheLayout:
        if block_tokens < 1:
            raise PlanError(f"block of {block_tokens} tokens: pass the plan's block_tokens, at least 1")
        full, local, taps, states = (
            tuple(group for group in groups if group.role is role)
            for role in (Role.FULL, Role.LOCAL, Role.TAP, Role.STATE)
        )
        tokens = full + local
        if not tokens and not states:
            raise PlanError("a cache without groups has nothing to keep: pass the groups of a plan")
        if num_slabs < 2:
            raise PlanError(f"{num_slabs} slabs: slab 0 is the null slab, so there must be at least 2")
        if len({group.name for group in groups}) < len(groups):
            raise PlanError(f"two groups have the same name: {sorted(group.name for group in groups)}")
        if len({(g.pool_name, g.pages_per_slab) for g in groups}) > len({g.pool_name for g in groups}):
            raise PlanError("groups of one pool must have the same number of pages in a slab")
        for group in groups:
            if group.sight.is_local != (group.role is Role.LOCAL):
                raise PlanError(
                    f"group {group.name!r} of role {group.role} has {group.sight}: "
                    f"a local group has a window or a chunk, and no other group has"
                )
        return cls(block_tokens, num_slabs, tokens, states, taps, kv_bytes_per_token)

    @classmethod
    def from_plan(cls, plan: Plan) -> CacheLayout:
        """The layout of a plan, with the same slabs and page addresses."""
        return cls.of(
            [group for planned in plan.groups for group in _cache_groups(planned)],
            block_tokens=plan.options.block_tokens,
            num_slabs=plan.num_slabs,
            kv_bytes_per_token=plan.model.kv_bytes_per_token,
        )

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """All groups."""
        return self.token_groups + self.state_groups + self.tap_groups

    @property
    def needs_checkpoints(self) -> bool:
        """Whether full-attention blocks alone are not enough to resume: there are state groups or local groups."""
        return bool(self.state_groups) or any(group.role is Role.LOCAL for group in self.token_groups)

    @property
    def keeps_idle_windows(self) -> bool:
        """Whether blocks of local groups that no token sees any more stay until their room is needed.

        With state groups they do not: a request resumes only from a checkpoint, which keeps its own windows.
        """
        return not self.state_groups and any(group.role is Role.LOCAL for group in self.token_groups)

    @property
    def checkpoint_bytes(self) -> int:
        """Maximum bytes that a checkpoint on a block boundary keeps, besides full-attention KV."""
        states = sum(group.page_bytes * group.pages_per_state for group in self.state_groups)
        local = sum(group.page_bytes * group.sight.checkpoint_blocks(self.block_tokens) for group in self.token_groups)
        return states + local

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena, without the null slab."""
        return (self.num_slabs - 1) * max(group.pages_per_slab * group.page_bytes for group in self.groups)

    @property
    def checkpoint_slabs(self) -> float:
        """`checkpoint_bytes` as a number of slabs."""
        slabs = 0.0  # `sum` would begin with an integer, which compiled code does not add to
        for group in self.state_groups:
            slabs += group.pages_per_state / group.pages_per_slab
        for group in self.token_groups:
            slabs += group.sight.checkpoint_blocks(self.block_tokens) / group.pages_per_slab
        return slabs


def _cache_groups(planned: GroupPlan) -> list[CacheGroup]:
    """One cache group per group of the plan, but one per tapped layer: requests use tapped layers individually."""
    spec, per_slab, stride = planned.specs[0], planned.pages_per_slab, planned.stride_bytes
    if isinstance(spec, HiddenTap):
        return [CacheGroup(f"tap{layer}", Role.TAP, per_slab, stride, pool=planned.name) for layer in planned.layers]
    if isinstance(spec, LinearState):
        return [CacheGroup(planned.name, Role.STATE, per_slab, stride, pages_per_state=planned.layout.pages)]
    if isinstance(spec, AttentionLayer):
        role = Role.LOCAL if spec.sight.is_local else Role.FULL
        return [CacheGroup(planned.name, role, per_slab, stride, sight=spec.sight)]
    raise PlanError(
        f"group {planned.name!r} has layers of kind {type(spec).__name__}, and the cache does not know what they look "
        f"back on: use one of the kinds of hybridkv.spec"
    )
