"""The four ways in which tests make runs, one module each.

- `one_rank`: in this process, on one rank.
- `command`: forked command lines, with streams, signals and planted faults; real ones too.
- `ranks`: a function on several ranks over gloo.
- `written`: run directories as training leaves them, without training.
"""
