"""Requests and stores."""
