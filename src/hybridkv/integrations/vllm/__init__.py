"""The vLLM connector: hybridkv's stores and streams inside vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HybridKVConnector",
        "kv_connector_module_path": "hybridkv.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": ["memory://?size=4GiB", "file:///var/cache/hybridkv?size=200GiB"]}}'

vLLM makes two connectors: one in the scheduler's process, which finds, and one in each worker's, which moves.
docs/vllm.md says how to use it.
"""

from hybridkv.integrations.vllm.connector import HybridKVConnector

__all__ = ["HybridKVConnector"]
