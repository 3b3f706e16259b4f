"""Traffic between requests and stores: lookups, loads and dumps."""
