"""Many cases become one verdict."""
