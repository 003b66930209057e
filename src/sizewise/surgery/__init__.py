"""Taking a model apart by depth: its parts, blocks left out, step sizes, norms and scalers.

`anatomy` sees a model as stem, blocks and head; `dropping` leaves blocks out, `blockwise` runs some
of them, `norms` are the policies for batch norm. Imports `exchange` for views.
"""
