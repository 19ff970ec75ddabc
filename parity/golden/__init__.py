"""Golden outputs: what each family's tiny model answers, kept as readable
files below ``golden/<family>/``.
"""
