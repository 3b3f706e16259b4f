"""Snapshots of an engine's cache as plain data: what the topics of `Publishing` hold."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridkv.cache import MemoryMap, PrefixTree
from hybridkv.engine.inspection.publishing import Topic

if TYPE_CHECKING:
    from hybridkv.engine.core import EngineCore

MEMORY = "memory"
PREFIXES = "prefixes"
_MEMORY_EVERY_S = 0.5
_PREFIXES_EVERY_S = 2.0


def topics(core: EngineCore) -> dict[str, Topic]:
    """The topics of an engine."""
    inspector = core.cache.inspector

    def version() -> object:
        return inspector.version, core.steps, core.scheduler.num_waiting, len(core.scheduler.running)

    return {
        MEMORY: Topic(_MEMORY_EVERY_S, version, lambda: memory_view(core, inspector.memory_map())),
        PREFIXES: Topic(_PREFIXES_EVERY_S, lambda: inspector.version, lambda: prefix_view(inspector.prefix_tree())),
    }


def memory_view(core: EngineCore, found: MemoryMap) -> dict[str, Any]:
    layout, plan = core.cache.layout, core.runner.memory.plan
    planned = {group.name: group for group in plan.groups}
    slab_bytes = plan.slab_bytes
    pools = [
        {
            "name": pool.name,
            "kind": planned[pool.name].kind.replace("_", " "),
            "page_bytes": planned[pool.name].page_bytes,
            "pages_per_slab": pool.pages_per_slab,
            "slabs": pool.slabs,
            "used_pages": pool.used_pages,
            "padding_bytes": round(pool.slabs * slab_bytes * planned[pool.name].padding_ratio),
        }
        for pool in found.pools
    ]
    layouts = {name: group.layout for name, group in planned.items()}
    used = sum(one.used_pages * layouts[one.name].item_bytes // layouts[one.name].pages for one in found.pools)
    owned = sum(pool.slabs for pool in found.pools)
    padding = sum(round(pool.slabs * slab_bytes * planned[pool.name].padding_ratio) for pool in found.pools)
    return {
        "time": time.time(),
        "slab_bytes": slab_bytes,
        "num_slabs": layout.num_slabs,
        "slabs_per_cell": found.slabs_per_cell,
        "groups": pools,
        "owners": found.owners,
        "used": found.used,
        "pinned": found.pinned,
        "bytes": {
            "total": layout.num_slabs * slab_bytes,
            "used": used,
            "unused": owned * slab_bytes - used - padding,
            "padding": padding,
            "free": (layout.num_slabs - 1 - owned) * slab_bytes,
            "pinned": found.num_pinned_slabs * slab_bytes,
        },
        "next_evictions": [
            {
                "what": "checkpoint" if one.is_checkpoint else "blocks",
                "kind": one.kind,
                "position": one.position,
                "tokens": one.num_tokens,
                "bytes": one.num_bytes,
                "idle_s": one.idle_s,
                "hits": one.num_hits,
                "worth": one.worth,
            }
            for one in found.next_evictions
        ],
        "running": len(core.scheduler.running),
        "waiting": core.scheduler.num_waiting,
    }


def prefix_view(tree: PrefixTree) -> dict[str, Any]:
    return {
        "time": time.time(),
        "num_nodes": tree.num_runs,
        "is_cut": tree.is_cut,
        "nodes": [
            {
                "key": run.key.hex(),
                "parent": None if run.parent is None else run.parent.hex(),
                "start": run.start,
                "end": run.end,
                "leases": run.leases,
                "pinned": run.is_pinned,
                "children": run.num_children,
                "idle_s": run.idle_s,
                "head_ids": unpacked(run.head),
                "checkpoints": [
                    {
                        "position": one.position,
                        "kind": one.kind,
                        "hits": one.num_hits,
                        "idle_s": one.idle_s,
                        "worth": one.worth,
                    }
                    for one in run.checkpoints
                ],
            }
            for run in tree.runs
        ],
    }


def unpacked(tokens: bytes) -> list[int]:
    """Packed tokens as a list of ids."""
    ids: list[int] = np.frombuffer(tokens, dtype="<i4").tolist()
    return ids
