"""Slabs, pools and pages: who has which bytes of the arena, and moves."""
