"""Models in vLLM: what is exported here is served there, in an environment of its own; run by `make test-vllm`."""
