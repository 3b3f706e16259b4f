"""Replay a trace through a cache without tensors: the cache core is the real one, only time is not."""

from __future__ import annotations

import math
from collections.abc import Callable

from hybridkv.cache import Cache, CacheLayout, named_policy
from hybridkv.errors import InputError
from hybridkv.replay.concurrent import Concurrent
from hybridkv.replay.meter import Meter
from hybridkv.replay.replies import Conversations
from hybridkv.replay.report import ReplayReport, Setting
from hybridkv.replay.serial import Requests, WithoutBreakpoints, replay_serial
from hybridkv.replay.service import ComputeModel, ServiceModel
from hybridkv.replay.tiers.tiers import Tiers
from hybridkv.replay.traces import Trace
from hybridkv.stream import Catalogue


def replay(
    trace: Trace,
    layout: CacheLayout,
    setting: Setting,
    *,
    service: ServiceModel | None = None,
    compute: ComputeModel | None = None,
    conversations: Conversations | None = None,
    catalogue: Catalogue | None = None,
    progress: Callable[[], None] = lambda: None,
    check: bool = False,
) -> ReplayReport:
    """Drive a cache with a trace, as `setting` says, and report what a deployment would see.

    `service` times requests that run side by side: needed unless the setting is serial. `compute` counts FLOPs.
    `conversations`: those of the trace, if they are known already. `catalogue`: what is stored of the model, needed if
    the setting has tiers. `progress` is called once a request. `check`: recount the cache's books at the end.
    """
    if not 0 < setting.speed < math.inf:
        raise InputError(f"speed {setting.speed}: give more than 0; 2 lets requests arrive twice as fast")
    policy = named_policy(setting.policy, None if compute is None else lambda: compute.flops)
    cache = Cache(layout, policy=policy, run_operations=lambda operations: None)
    tiers = None
    if setting.tiers:
        if catalogue is None:
            raise InputError("tiers without a catalogue: pass Catalogue(plan, layout, identity) of the same plan")
        tiers = Tiers(catalogue, layout, setting, service)
    meter = Meter(cache, len(trace), trace.num_pieces, compute, tiers)
    requests: Requests = trace
    continued_by: list[int | None] = [None] * len(trace)
    if not setting.prompts_only:
        conversations = conversations or Conversations(trace)
        requests, continued_by = conversations, conversations.continued_by
    if not setting.breakpoints:
        requests = WithoutBreakpoints(requests)
    simulated_s = None
    if setting.serial:
        replay_serial(cache, requests, meter, prompts_only=setting.prompts_only, progress=progress, tiers=tiers)
    else:
        if service is None:
            raise InputError("a concurrent replay needs a service model: pass one, or make it serial")
        simulated_s = Concurrent(
            cache,
            requests,
            meter,
            service,
            arrivals_s=[record.arrival_s / setting.speed for record in trace.records],
            continued_by=continued_by,
            prompts_only=setting.prompts_only,
            progress=progress,
            tiers=tiers,
        ).run()
    assert not cache.leases, "a request was not released"
    if check:
        cache.check_integrity()
    return meter.report(setting, continued=sum(turn is not None for turn in continued_by), simulated_s=simulated_s)
