"""Running requests: leases, their places and pages, and their steps."""
