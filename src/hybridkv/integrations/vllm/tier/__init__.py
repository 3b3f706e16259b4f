"""A tier of vLLM's own offloading on hybridkv's stores.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [{"type": "HybridKVTier", "module_path": "hybridkv.integrations.vllm.tier",
                "store": "file:///var/cache/hybridkv?size=200GiB"}]}}'

vLLM copies chunks between GPUs and host memory; this tier copies them between host memory and a store. It runs in the
scheduler's process, and knows chunks as bytes only. docs/vllm.md says when to use it and when the connector.
"""

from hybridkv.integrations.vllm.tier.manager import HybridKVTier

__all__ = ["HybridKVTier"]
