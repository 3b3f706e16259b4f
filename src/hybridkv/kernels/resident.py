"""Recurrent states of one-token spans, read once and written once. Knows nothing of what is done to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridkv.kernels.segments import Ones
from hybridkv.kernels.spans import PADDED

# Below this, the cost of one more call on a CPU outweighs that of copying states together.
MIN_BYTES_ONE_BY_ONE = 64 << 10


def resident(states: Tensor, ones: Ones) -> Iterator[tuple[slice, Tensor]]:
    """Runs of the one-token spans with their states, float32, to be updated in place. states: [pages, *shape]

    Padding may be left out. On a CPU one state at a time, in its page where the dtype allows: it stays in the core's
    cache while it is worked on, and gathering all states first would double the traffic to memory. Elsewhere all of
    them together.
    """
    state_bytes = states[0].numel() * states.element_size()
    if states.device.type != "cpu" or state_bytes < MIN_BYTES_ONE_BY_ONE:
        together = ones.src.read(states).float()
        yield slice(0, len(ones.src.on_host)), together
        ones.dst.write(together, states)
        return
    for i, (src, dst) in enumerate(zip(ones.src.on_host, ones.dst.on_host, strict=True)):
        if dst == PADDED:
            continue
        state = states[dst : dst + 1]
        if states.dtype == torch.float32:
            if src != dst:
                state.copy_(states[src : src + 1])
            yield slice(i, i + 1), state
        else:
            own = states[src : src + 1].float()
            yield slice(i, i + 1), own
            state.copy_(own)
