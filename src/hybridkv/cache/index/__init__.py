"""The prefix index: the radix tree, its checkpoints, and the rule that decides where a request resumes."""
