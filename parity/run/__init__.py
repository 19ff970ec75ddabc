"""One case becomes one outcome: opened, driven, compared with its solo answers, judged."""
