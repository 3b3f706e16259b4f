"""Stores on Valkey and Redis servers, single or in a cluster."""
