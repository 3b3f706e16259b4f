"""Attention, convolutions and scans over pages: torch implementations, and a table that picks them. No requests, no
leases."""
