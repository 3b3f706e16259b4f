"""What is worth keeping: policies, eviction, and what both learn from requests."""
