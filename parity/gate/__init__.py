"""The merge gate: what a merge needs, run with bounded parallelism, judged three-valued."""
