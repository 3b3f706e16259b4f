"""What stays after a request: the radix tree, its checkpoints, and the rule that says where a request resumes."""
