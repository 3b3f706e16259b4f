"""Continuous batching for stock Hugging Face models: requests, scheduler, runner, sampler."""
