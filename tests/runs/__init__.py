"""Four ways to create runs for tests, one module each.

- `one_rank`: train in this process, on one rank.
- `command`: forked command lines with streams, signals and planted faults, and real command lines.
- `ranks`: call a function on several ranks over gloo.
- `written`: write run directories without training.

`json_files` reads and writes JSON files; `models` builds small models.
"""
