"""hybridkv as a KV connector of vLLM."""
