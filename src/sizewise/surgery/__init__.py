"""Taking a model apart by depth: its parts, blocks left out, step sizes, norms and scalers.

`anatomy` sees a model as stem, blocks and head that run in turn, `in_place` lets a model's own
forward run them, `taking_apart` decides which of both it is; `dropping` leaves blocks out, `norms`
are the policies for batch norm. Imports `exchange` for views.
"""
