"""From recorded runs to tables, figures and a page: load -> stats -> tables, figures -> report.

Everything is a pure function of recorded rows. Nothing here starts a run, and nothing imports what starts one:
``experiments`` may import this package, not the reverse.
"""
