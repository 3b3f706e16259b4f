"""The arena: slabs, pools and pages, their allocation, and page moves."""
