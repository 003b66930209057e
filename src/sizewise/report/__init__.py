"""What people look at: tables and lines in the terminal, figures, one HTML page, comparisons.

`records` reads run folders, `summary` and `comparison` put several beside each other, `page` writes
the report, `tables` and `progress` print. Everything is read from run folders, so a report can be
made anywhere. Imports `runs` and below.
"""
