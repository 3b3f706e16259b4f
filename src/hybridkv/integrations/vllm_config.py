"""A plugin of vLLM: lets `VllmConfig` refuse what `HybridKVConnector` does not support, before weights are loaded.

vLLM 0.32 makes connectors after it has loaded the weights, and has no earlier hook that gets the whole configuration.
So `install` wraps the method in which `VllmConfig` refuses what does not go with connectors. vLLM calls `install` in
every process of every model: it imports the connector only if the configuration names it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

WRAPPED = "_verify_kv_transfer_compat"
"""Called once all of the configuration is settled."""


def install() -> None:
    """Wrap the method. If vLLM has none of that name, the connector itself refuses, after weights were loaded."""
    from vllm.config import VllmConfig

    verify = getattr(VllmConfig, WRAPPED, None)
    if verify is None or verify.__module__ == __name__:
        return

    def verify_and_check(config: VllmConfig) -> None:
        verify(config)
        check(config)

    setattr(VllmConfig, WRAPPED, verify_and_check)


def check(config: VllmConfig) -> None:
    """Raise InputError for settings, models and features of vLLM that the configured connector does not support."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None or config.model_config is None:
        return
    connectors = _connectors(transfer)
    ours = [one for one in connectors if _is_ours(one)]
    if not ours:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from hybridkv.integrations.vllm.model import describe_model
    from hybridkv.integrations.vllm.settings import read_settings

    supports = KVConnectorFactory.supports_hma_config
    beside = [str(one.kv_connector) for one in connectors if one not in ours and not supports(one)]
    for one in ours:
        alone = copy.copy(config)
        alone.kv_transfer_config = one
        read_settings(alone, beside)
    describe_model(config, rank=0)


def _connectors(transfer: KVTransferConfig) -> list[KVTransferConfig]:
    """Return the connectors of a MultiConnector, or the connector itself."""
    from vllm.config import KVTransferConfig

    if transfer.kv_connector != "MultiConnector":
        return [transfer]
    return [KVTransferConfig(**one) for one in transfer.kv_connector_extra_config.get("connectors", ())]


def _is_ours(transfer: KVTransferConfig) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if not transfer.kv_connector_module_path:
        return False
    classes = KVConnectorFactory.get_connector_class(transfer).__mro__
    return any(f"{one.__module__}.".startswith("hybridkv.integrations.vllm.") for one in classes)
