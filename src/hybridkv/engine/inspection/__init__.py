"""What people see of an engine: a record of every request, the last steps, and snapshots of its memory."""
