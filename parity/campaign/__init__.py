"""Campaigns: cases explored from a seed, what failed shrunk, remembered and diagnosed."""
