"""Requests whose prompt is computed by one engine and continued by another."""
