"""Settings of the process: that the names of torch they rely on still do what they say."""

from __future__ import annotations

import torch

from hybridkv.engine.loading.host import plan_no_attention


def test_attention_that_plans_for_every_length_is_kept_out() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        plan_no_attention()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
