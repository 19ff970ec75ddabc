"""The seams of a policy: what it sees, plans, promises, and keeps free."""
